"""The elementary functions over the whole range of float32, against float64."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit import cpu_info
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import build
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.codegen.cpp.lane_text import LANES
from tests.sampling import runs_every_case

pytestmark = pytest.mark.sampled

FUNCTIONS = {
    "fx_exp": torch.exp,
    "fx_log": torch.log,
    "fx_tanh": torch.tanh,
    "fx_erf": torch.erf,
    "fx_sigmoid": torch.sigmoid,
    "fx_sin": torch.sin,
    "fx_cos": torch.cos,
    "fx_expm1": torch.expm1,
    "fx_log1p": torch.log1p,
    "fx_exp_plus_one": lambda x: x.exp() + 1,
    "fx_tanh_log1p": lambda x: torch.where(x < 1, x.log1p().tanh(), 1 - 2 / ((1 + x) ** 2 + 1)),
}
PARTS = {"fx_exp_plus_one", "fx_tanh_log1p"}  # in the texts of the exponential and of tanh
NAMES = {*FUNCTIONS, "fx_normal_cdf", "fx_near", "fx_bf16", "fx_f16"} - PARTS
BODIES = {
    "exp_down": "fx_exp_down(x[i])",
    "exp_raised": "fx_exp_raised(x[i])",
    "coarse_exp_raised": "fx_coarse_exp_raised(x[i])",
    "coarse_sigmoid": "fx_coarse_sigmoid(x[i])",
    "coarse_gated": "fx_coarse_gated(x[i], x[i])",
    "tanh_softplus": "fx_tanh_softplus(x[i])",
    "tanh_log1p_exp": "fx_tanh_log1p(fx_exp(x[i]))",
    "sin_near": "fx_sin_near(x[i])",
    "cos_near": "fx_cos_near(x[i])",
    "is_far": "fx_is_far(x[i])",
    **{name: f"{name}(x[i])" for name in FUNCTIONS},
    "normal_cdf": "fx_normal_cdf(x[i])",
    "round_bf16": "fx_round_bf16(x[i])",
    "round_quiet_bf16": "fx_round_quiet_bf16(x[i])",
    "round_f16": "fx_round_f16(x[i])",
}


IN_LANES = {
    *("exp_down", "exp_raised", "tanh_softplus", "fx_exp", "fx_tanh", "fx_sigmoid", "fx_expm1"),
    *(
        "coarse_exp_raised",
        "coarse_sigmoid",
        "coarse_gated",
        "tanh_log1p_exp",
        "fx_log",
        "fx_log1p",
        "sin_near",
        "cos_near",
    ),
    *("fx_exp_plus_one", "fx_tanh_log1p", "normal_cdf", "round_bf16", "round_quiet_bf16"),
}


def in_loop(name: str, body: str) -> str:
    """Return the text of a loop over numbers."""
    head = f'extern "C" void map_{name}(float* y, const float* x, long n) '
    return head + f"{{ for (long i = 0; i < n; ++i) y[i] = {body}; }}"


def in_lanes(name: str, body: str) -> str:
    """Return the text of a loop over as many numbers at once as the processor handles."""
    return f"""extern "C" void map_{name}(float* y, const float* x, long n) {{
      for (long i = 0; i < n; i += FX_WIDE) {{
        const fx_mask on = fx_first(n - i);
        fx_store(y + i, {body.replace("x[i]", "fx_load(x + i, on)")}, on);
      }}
    }}"""


@pytest.fixture(scope="module", params=["loops", "lanes"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    loops = [
        in_lanes(name, body)
        if request.param == "lanes" and name in IN_LANES
        else in_loop(name, body)
        for name, body in BODIES.items()
    ]
    text = [vector_math.BASICS, vector_math.definitions(NAMES), LANES, *loops]
    return build("\n".join(text)).handle


def every_range() -> torch.Tensor:
    """Return floats spread evenly over all bit patterns, and densely near zero."""
    step = 1009 if runs_every_case() else 4049
    bits = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45])
    return torch.cat([bits.view(torch.float32), special, torch.linspace(-12, 12, 200_001)])


def mapped(library: ctypes.CDLL, name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    pointers = ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr())
    getattr(library, f"map_{name}")(*pointers, ctypes.c_long(x.numel()))
    return y


def without_fma() -> float:
    """Return by how many units in the last place errors may be larger on this processor."""
    return 0.0 if "fma" in cpu_info.features() else 1.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_in_units_of_the_last_place(library: ctypes.CDLL, name: str) -> None:
    x = every_range()
    found, exact = mapped(library, name, x), FUNCTIONS[name](x.double())
    rounded = exact.float()
    special = exact.isnan() | rounded.isinf() | (rounded == 0)
    if name == "fx_sigmoid":  # 1 / (1 + inf) is 0, as in torch, where the result is subnormal
        special |= rounded.abs() < 2.0**-126
    regular = ~special
    unit = torch.from_numpy(np.spacing(rounded[regular].abs().numpy())).double()
    error = ((found[regular].double() - exact[regular]).abs() / unit).max()
    assert error <= vector_math.MAX_ULP[name] + without_fma()
    exceptional = exact.isnan() | rounded.isinf()
    assert torch.equal(found[exceptional].isnan(), exact[exceptional].isnan())
    infinite = rounded.isinf()
    assert torch.equal(found[infinite], rounded[infinite])
    assert (found[rounded == 0].abs() < 2.0**-149 * 1.5).all()


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_error_near_zero_in_units_of_the_last_place(library: ctypes.CDLL, name: str) -> None:
    spread, many = every_range(), torch.arange(-(2**16), 2**16) * (torch.pi / 2)
    x = torch.cat([spread[spread.abs() < 2.0**18], many, many.nextafter(torch.tensor(torch.inf))])
    found, exact = mapped(library, f"{name}_near", x), getattr(torch, name)(x.double())
    unit = torch.from_numpy(np.spacing(exact.float().abs().numpy())).double()
    error = ((found.double() - exact).abs() / unit).max()
    assert error <= vector_math.MAX_ULP[f"fx_{name}"] + without_fma()
    assert torch.equal(found[x == 0].signbit(), getattr(torch, name)(x[x == 0]).signbit())


def test_the_exponential_of_what_is_not_positive(library: ctypes.CDLL) -> None:
    x = torch.cat([every_range(), torch.linspace(-105, 0, 200_001)])
    x = x[~(x > 0)]
    found, general = mapped(library, "exp_down", x), mapped(library, "fx_exp", x)
    is_number = ~x.isnan()
    if not without_fma():
        assert torch.equal(found[is_number], general[is_number])
    exact = x.double().exp()
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    error = ((found.double() - exact).abs() / unit)[is_number].max()
    assert error <= vector_math.MAX_ULP["fx_exp"] + without_fma()
    assert found[x.isnan()].isnan().all()


def test_the_exponential_where_a_factor_does_not_matter(library: ctypes.CDLL) -> None:
    x = torch.cat([every_range(), torch.linspace(-140, 20, 200_001)])
    x = x[~(x > 20)]
    found, exact = mapped(library, "exp_raised", x).double(), x.double().exp() * 2.0**64
    is_low = x < -131
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    error = ((found - exact).abs() / unit)[~is_low & ~x.isnan()]
    assert error.max() <= vector_math.MAX_ULP["fx_exp_raised"]
    assert mapped(library, "exp_raised", torch.zeros(1)) == 2.0**64
    assert (found[is_low] == 0).all()
    assert found[x.isnan()].isnan().all()


def test_the_exponential_where_it_is_rounded_to_bfloat16(library: ctypes.CDLL) -> None:
    x = torch.cat([every_range(), torch.linspace(-140, 20, 200_001)])
    x = x[~(x > 20)]
    found, exact = mapped(library, "coarse_exp_raised", x).double(), x.double().exp() * 2.0**64
    is_low = x < -131
    error = (found / exact - 1).abs()[~is_low & ~x.isnan()]
    assert error.max() <= vector_math.COARSE
    assert (found[is_low] == 0).all()
    assert found[x.isnan()].isnan().all()


@pytest.mark.parametrize(
    ("name", "function"),
    [("sigmoid", torch.sigmoid), ("gated", lambda x: x * torch.sigmoid(x))],
)
def test_sigmoids_where_they_are_rounded_to_bfloat16(
    library: ctypes.CDLL, name: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = every_range()
    found, exact = mapped(library, f"coarse_{name}", x).double(), function(x.double())
    is_zero = x < -88.722831  # as in torch, where 1 / (1 + inf) is 0
    assert (found[is_zero] == 0)[x[is_zero].isfinite()].all()
    regular = ~is_zero & ~x.isnan() & (x.abs() > 0)
    bound = exact.abs() * vector_math.COARSE + 2.0**-149
    assert ((found - exact).abs() <= bound)[regular & x.isfinite()].all()
    assert found[x.isnan()].isnan().all()
    ends = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    limits = {"sigmoid": [1.0, 0.0, 0.5, 0.5], "gated": [torch.inf, torch.nan, 0.0, 0.0]}
    at_ends, expected = mapped(library, f"coarse_{name}", ends), torch.tensor(limits[name])
    assert torch.allclose(at_ends, expected, rtol=vector_math.COARSE, equal_nan=True)


def test_the_tanh_of_a_softplus_is_that_of_its_exponential(library: ctypes.CDLL) -> None:
    x = torch.cat([every_range(), torch.linspace(-110, 110, 200_001)])
    found, general = mapped(library, "tanh_softplus", x), mapped(library, "tanh_log1p_exp", x)
    is_number = ~x.isnan()
    assert torch.equal(found[is_number], general[is_number])
    assert found[x.isnan()].isnan().all()


def test_the_probability_below_a_number(library: ctypes.CDLL) -> None:
    x = torch.cat([every_range(), torch.linspace(-15, 15, 200_001)])
    found, exact = mapped(library, "normal_cdf", x), torch.special.log_ndtr(x.double()).exp()
    is_number = ~x.isnan()
    error = (found.double() - exact)[is_number].abs()
    unit = without_fma() * 2.0**-24  # in the last place of numbers from a half to one
    assert error.max() < 9e-8 + unit
    assert error[x[is_number] < 0].max() < 6e-8 + unit
    assert found[x.isnan()].isnan().all()
    low = (x < 0) & (exact > 2.0**-120)  # where it is small, not lost, or lost in eager too
    is_lost = low & (found == 0)
    assert (x[is_lost] < -6).all()
    assert (0.5 * (1 + torch.erf(x[is_lost] * 0.5**0.5)) == 0).all()
    assert ((found.double() / exact - 1)[low & ~is_lost].abs() < 0.05).all()
    assert (found[x < -15] == 0).all() and (found[x > 15] == 1).all()


def test_what_is_far_from_zero(library: ctypes.CDLL) -> None:
    x = torch.tensor([0.0, -262143.97, 262143.97, 262144.0, -262144.0, torch.inf, torch.nan])
    assert mapped(library, "is_far", x).tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "dtype"), [("round_bf16", torch.bfloat16), ("round_f16", torch.float16)]
)
def test_roundings_have_torchs_bits(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    x = every_range()
    found, expected = mapped(library, name, x), x.to(dtype).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(1.0), expected.nan_to_num(1.0))


@pytest.mark.parametrize("sign", [1, -1])
def test_bfloat16s_own_nans_survive_the_short_rounding(library: ctypes.CDLL, sign: int) -> None:
    halves = torch.arange(0x7FC0, 0x8000, dtype=torch.int32) << 16
    x = (halves if sign == 1 else halves | -(2**31)).view(torch.float32)
    assert mapped(library, "round_quiet_bf16", x).isnan().all()
    x = every_range()
    x = x[~x.isnan()]
    assert torch.equal(mapped(library, "round_quiet_bf16", x), x.bfloat16().float())


def test_definitions_hold_what_they_call() -> None:
    assert vector_math.definitions(set()) == ""
    text = vector_math.definitions({"fx_erf"})
    assert text.index("float fx_exp") < text.index("float fx_erf")
    assert "#include" not in text


def test_what_is_called_often_is_no_call_in_a_loop(tmp_path: Path) -> None:
    loops = [
        f"void map_{name}(float* y, const float* x, long n) {{ for (long i = 0; i < n; ++i) y[i] = "
        + " + ".join(body.replace("x[i]", operand) for operand in ("x[i]", "-x[i]", "x[i + n]"))
        + "; }"
        for name, body in BODIES.items()
    ]
    source, assembly = tmp_path / "calls.cpp", tmp_path / "calls.s"
    source.write_text("\n".join([vector_math.BASICS, vector_math.definitions(NAMES), *loops]))
    tools = toolchain.current()
    command = [tools.compiler, *tools.flags, "-S", str(source), "-o", str(assembly)]
    subprocess.run(command, check=True)
    assert not re.search(r"^\s*(call|jmp|bl?)\s.*fx_", assembly.read_text(), re.MULTILINE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["asin", "acos", "acosh", "atanh", "log", "log1p", "log2", "log10"]
)
def test_functions_where_they_have_no_value(name: str, dtype: torch.dtype) -> None:
    fn = getattr(torch, name)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 2.0, -2.0])
    ones = torch.ones(2, dtype=dtype)
    near = torch.nextafter(torch.stack([ones, -ones]), torch.tensor([0.0, 3.0], dtype=dtype))
    x = torch.cat([special.to(dtype), near.flatten(), torch.linspace(-3, 3, 1001, dtype=dtype)])
    found, expected = fxkit.compile(lambda x: fn(x))(x), fn(x)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.equal(found[found == 0].signbit(), expected[expected == 0].signbit())


@pytest.mark.parametrize(
    ("function", "scale", "offset"),
    [
        (F.hardswish, 1, 10), (F.hardswish, 1, 1e4), (F.hardsigmoid, 1, 0),
        (torch.tanh, 1, 10), (torch.tanh, 0.2, 7.5), (torch.tanh, 1, 0),
        (torch.log10, 20, 0), (torch.log10, 0.01, 1), (torch.log2, 20, 0), (torch.log1p, 20, 0),
        (torch.atan2, 1, 10), (torch.atan2, 1, 0), (torch.atan2, 1, -10),
        (torch.tan, 1, 10), (torch.tan, 1, 0),
    ],
)  # fmt: skip
def test_functions_err_at_most_twice_as_much_as_eagers(
    function: Callable[..., torch.Tensor], scale: float, offset: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    count = 2 if function is torch.atan2 else 1
    is_log = function in (torch.log10, torch.log2, torch.log1p)
    compiled, errors = fxkit.compile(lambda *args: function(*args)), [0.0, 0.0]
    for _ in range(17):
        args = [torch.randn(4096, generator=draw) * scale + offset for _ in range(count)]
        args = [x.abs() for x in args] if is_log else args
        exact = function(*(x.double() for x in args))
        for place, fn in enumerate((compiled, function)):
            errors[place] += float((fn(*args) - exact).norm() / exact.norm())
    assert errors[0] <= 2 * errors[1], errors
