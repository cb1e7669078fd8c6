"""Passes over rows that say how many elements they handle at once."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import build
from fxkit.lower.cpp_printer import print_unit
from tests.lower.kernels import compiled_for, kernel_of, rand, spread_over, text_of
from tests.sampling import Sample

PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exponentials": lambda x, y: torch.exp(x) + torch.expm1(y) * torch.sigmoid(x - y),
    "gelu": lambda x, y: F.gelu(x + y) * torch.tanh(y) - x.abs().sqrt(),
    "choice": lambda x, y: torch.where((x > y) & ~(y == 1.0), torch.exp(-x), y / 2),
    "bounds": lambda x, y: torch.maximum(torch.tanh(x), y).clamp(-0.5, 0.75) + torch.relu(x),
    "softplus": lambda x, y: F.softplus(x) + F.mish(y) - torch.log(x.abs() + torch.exp(y)),
    "one for all": lambda x, y: torch.exp(x * y[:1, :1]) + y[:1, :1],
    "waves": lambda x, y: torch.sin(x) * torch.cos(y) + torch.sin(x * 1e5) + torch.cos(y * 1e7),
    "softmax": lambda x, y: torch.softmax(x * 2 + y, dim=-1),
    "log softmax": lambda x, y: torch.log_softmax(x, dim=-1) + y,
    "norm": lambda x, y: F.gelu(F.layer_norm(x, x.shape[-1:]) + y),
    "sum": lambda x, y: torch.sigmoid(x * y).sum(-1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 100, 256, 1023, 1024, 1040, 4096, 5000)

# A processor without the wide vectors, as far as the compiler knows.
NARROW = ("-mno-avx512f",) if platform.machine() == "x86_64" else ()


def is_near(found: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Tell whether an error is within twice eager's, and a few roundings of the largest number."""
    is_finite = eager.isfinite()  # float16 overflows where float64 does not
    found, eager, exact = found[is_finite], eager[is_finite], exact[is_finite]
    if not eager.numel():
        return True
    roundings = 8 * torch.finfo(eager.dtype).eps * exact.abs().clamp(min=1)
    bound = 2 * (eager.double() - exact).abs().amax() + roundings
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "dtype"), spread_over(PROGRAMS, DTYPES))
def test_rows_of_any_length(name: str, dtype: torch.dtype, some: Sample) -> None:
    program = PROGRAMS[name]
    for length in some(LENGTHS, 2):
        x, y = rand(3, length).to(dtype), rand(length, 3).t().contiguous().to(dtype)
        compiled = compiled_for(program, x, y)
        assert is_near(compiled(x, y), program(x, y), program(x.double(), y.double()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_no_number_stays_where_it_is(name: str) -> None:
    program = PROGRAMS[name]
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1e38, -1e38, 88.8, -104]
    x = torch.tensor(special).repeat(11)[:113].repeat(2, 1)
    y = torch.tensor(special).repeat_interleave(11)[:113].repeat(2, 1)
    found, expected = compiled_for(program, x, y)(x, y), program(x, y)
    if name == "gelu":  # of large numbers it is not a number in float32's own vector code
        expected = program(x.double(), y.double()).float()
    torch.testing.assert_close(found, expected, equal_nan=True)


def called(text: str, *tensors: Tensor) -> None:
    """Build a kernel of buffers and call it with one thread."""
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    build(text).handle.k(*pointers, ctypes.c_long(1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", [1, 15, 16, 100, 4099])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_stands_behind_a_row_stays_as_it_is(length: int, dtype: torch.dtype) -> None:
    x, result = rand(length).to(dtype), torch.full((length + 64,), 7.0, dtype=dtype)
    kernel = kernel_of(lambda x: torch.exp(x) * 2, x)
    called(print_unit({"k": kernel}, None), x, result)
    torch.testing.assert_close(result[:length], torch.exp(x) * 2, rtol=2e-2, atol=1e-6)
    assert (result[length:] == 7).all()


@pytest.mark.skipif(not NARROW, reason="says how the instruction sets of x86-64 are left out")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_text_serves_a_processor_without_wide_vectors(
    name: str, monkeypatch: pytest.MonkeyPatch, some: Sample
) -> None:
    program, tools = PROGRAMS[name], toolchain.current()
    narrow = dataclasses.replace(tools, flags=(*tools.flags, *NARROW))
    monkeypatch.setattr(toolchain, "current", lambda: narrow)
    for dtype in some(DTYPES, 1):
        x, y = rand(3, 100).to(dtype), rand(5, 100)[:3].to(dtype)
        compiled = compiled_for(program, x, y)
        assert is_near(compiled(x, y), program(x, y), program(x.double(), y.double()))


def test_conditions_that_rows_have_in_common_are_read_one_by_one() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(y.exp() > 1.5, torch.tanh(x), x)

    for length in (64, 65):
        x, y = rand(40, length), rand(1, length).expand(40, length)
        compiled = compiled_for(program, x, y)
        assert "unsigned char c" in compiled.source
        assert is_near(compiled(x, y), program(x, y), program(x.double(), y.double()))


def is_in_lanes(program: Callable[..., Any], *args: Tensor) -> bool:
    return "j += FX_WIDE" in text_of(program, *args)


def test_which_passes_are_in_lanes() -> None:
    x = torch.empty(8, 512)
    assert is_in_lanes(lambda x: torch.exp(x) + 1, x)
    assert is_in_lanes(lambda x: torch.softmax(x, -1), x)
    assert is_in_lanes(lambda x: torch.tanh(x), x.bfloat16())
    assert not is_in_lanes(lambda x: x * 2 + 1, x)  # nothing to gain
    assert is_in_lanes(lambda x: torch.sin(x), x)  # but for large numbers
    assert not is_in_lanes(lambda x: torch.exp(x) + torch.sinh(x), x)
    assert is_in_lanes(lambda x: torch.exp(x), x.half())  # converted beside the loop
    assert not is_in_lanes(lambda x: torch.exp(x), x.double())
    assert not is_in_lanes(lambda x: torch.exp(x), torch.empty(8, 512)[:, ::2])


LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": lambda x: x + 1.5,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 16])
@pytest.mark.parametrize("name", LARGE)
def test_large_results_that_begin_between_lines_are_written_too(
    name: str, offset: int, dtype: torch.dtype
) -> None:
    x, room = rand(1024, 2048).to(dtype), torch.zeros(1024 * 2048 + 32, dtype=dtype)
    result = room[offset : offset + x.numel()].view(x.shape)
    text = print_unit({"k": kernel_of(LARGE[name], x)}, None)
    assert "fx_put(" in text or dtype == torch.bfloat16
    called(text.replace("least_streamed = 0x7fffffffffffffff", "least_streamed = 0"), x, result)
    torch.testing.assert_close(result, LARGE[name](x))
    assert (room[:offset] == 0).all() and (room[offset + x.numel() :] == 0).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 6, 40])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 15, 16, 17])
def test_rows_of_several_axes_with_a_short_last_one(length: int, count: int) -> None:
    """The last vector of what is kept of such a row reaches beyond its array, but for a mask."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        value = F.silu(x)
        centred = value - value.mean((0, 2), keepdim=True)
        scale = torch.rsqrt((centred * centred).mean((0, 2), keepdim=True) + y)
        return centred * value * scale * F.gelu(x)

    x, y = rand(count, 4, length), torch.full((1,), 1e-3)
    compiled = compiled_for(program, x, y)
    assert is_near(compiled(x, y), program(x, y), program(x.double(), y.double()))


CHECKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one hot beside shares": lambda label, x: (
        F.one_hot(label, x.shape[-1]) * (x / torch.exp(x).sum((1, 2), keepdim=True))
    ),
    "one hot beside a function": lambda label, x: F.one_hot(label, x.shape[-1]) * torch.sigmoid(x),
    "one hot before a softmax": lambda label, x: torch.softmax(
        F.one_hot(label, x.shape[-1]) * 2.0 + x, -1
    ),
    "one hot summed": lambda label, x: (F.one_hot(label, x.shape[-1]) * torch.exp(x)).sum(-1),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(16, 200, 100), (3, 7, 100), (2, 3, 300)])
@pytest.mark.parametrize("name", CHECKED)
def test_checks_are_carried_out(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    program, x = CHECKED[name], torch.randn(*shape).to(dtype)
    label = torch.randint(0, shape[-1], shape[:2])
    compiled = to_cpp(fxkit.capture(program, (label, x)).graph_module, (label, x))
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(
        compiled(label, x), program(label, x), rtol=tolerance, atol=tolerance
    )
    label[-1, 1] = shape[-1]
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        compiled(label, x)
