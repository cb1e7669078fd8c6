"""Long rows are cut into parts that threads share, with one result for any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.scheduling.cpu.split_rows_across_threads import LONG_ROW
from tests.lower.kernels import ALWAYS, text_of
from tests.sampling import one_in

PROGRAMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: (x * x).sum(),
    lambda x: (x.amax() - x.amin()) * x.mean(),
    lambda x: torch.softmax(x * 2, -1),
    lambda x: (x > 0).sum(-1),
    lambda x: x.double().sum(),
    lambda x: x.bfloat16().float().logsumexp(-1),
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("length", [LONG_ROW, 5 * LONG_ROW + 333])
def test_the_number_of_threads_changes_nothing(
    program: Callable[[torch.Tensor], torch.Tensor], length: int
) -> None:
    x = torch.randn(2, length)[1]
    compiled = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    assert "_of[" in compiled.source
    torch.set_num_threads(1)
    alone, expected = compiled(x), program(x.double())
    torch.set_num_threads(3)
    assert torch.equal(alone, compiled(x))
    assert torch.allclose(alone.double(), expected.double(), rtol=1e-6, atol=1e-9)


def test_a_nan_in_any_part_is_found() -> None:
    x = torch.randn(LONG_ROW + 5)
    compiled = to_cpp(fx.symbolic_trace(lambda x: (x * 2).amax()), (x,), policy=ALWAYS)
    for position in (0, 3000, LONG_ROW // 2, LONG_ROW + 4):
        y = x.clone()
        y[position] = torch.nan
        assert compiled(y).isnan()


def test_rows_are_cut_where_they_are_few_and_long() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(-1)

    assert "part" in text_of(total, torch.randn(7, LONG_ROW)).split("void k(")[1]
    assert "part" not in text_of(total, torch.randn(8, LONG_ROW)).split("void k(")[1]
    assert "part" not in text_of(total, torch.randn(1, LONG_ROW - 1)).split("void k(")[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 64, 3001])
def test_an_extremum_of_a_row_with_a_nan_is_one(dtype: torch.dtype, width: int) -> None:
    def extrema(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y.amax(-1), y.amin(-1)

    x = torch.randn(9, width).to(dtype)
    for row, place in enumerate((0, width // 2, width - 1)):
        x[row, place] = torch.nan
    x[3], x[4], x[5, 0], x[6, -1] = -torch.inf, torch.inf, -torch.inf, torch.inf
    fast = fxkit.compile(extrema)
    for _ in range(2):
        torch.testing.assert_close(fast(x), extrema(x), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("width", [3, 100, 9000])
def test_waves_of_numbers_near_and_far(width: int) -> None:
    def waves(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * 1.0) + torch.cos(x)

    x = torch.randn(6, width) * 100
    x[1, 0], x[2, 1], x[3, 2], x[4, 0] = 1e30, torch.inf, torch.nan, -262144.0
    fast = fxkit.compile(waves)
    exact = waves(x.double()).float()
    for _ in range(2):
        torch.testing.assert_close(fast(x), exact, equal_nan=True, rtol=2e-6, atol=3e-7)


HEAVY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: torch.sin(x) * torch.exp(x),
    lambda x: torch.sigmoid(x.bfloat16()) * 2,
    lambda x: torch.cat((torch.tanh(x), x.expm1()), -1),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", HEAVY)
@pytest.mark.parametrize("length", [257, 320, 4096 + 33])
def test_several_vectors_in_step_leave_nothing_out(
    program: Callable[[torch.Tensor], torch.Tensor], length: int
) -> None:
    x = torch.randn(3, length)
    x[1, -1] = 1e9
    compiled = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    found, expected = compiled(x), program(x)
    assert torch.allclose(found.float(), expected.float(), rtol=1e-5, atol=1e-6)


def test_vectors_go_in_step_where_that_pays() -> None:
    x = torch.randn(4, 1000)
    assert "FX_STEP(j);" in text_of(lambda x: torch.exp(x[:, :-1]), x)
    assert "FX_STEP(j - begin);" in text_of(lambda x: torch.exp(x), torch.randn(8, 1000))
    half = x.bfloat16()
    assert "FX_STEP(" in text_of(lambda x: torch.nn.functional.gelu(x * x) / x, half)
    for program in (
        lambda x: x * 2 + 1,
        lambda x: torch.exp(x[:, :256]),
        lambda x: torch.exp(x.double()),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.nn.functional.gelu(x),
    ):
        assert "FX_STEP" not in text_of(program, x)


def test_two_vectors_go_in_step_where_four_take_too_many_registers() -> None:
    x = torch.randn(4, 1000)
    wave, tanh = text_of(lambda x: torch.sin(x), x), text_of(lambda x: torch.tanh(x), x)
    assert "FX_STEPS(unsigned short, " in wave
    assert "FX_STEPS(unsigned char, " in text_of(lambda x: torch.sin(x), x.half())
    assert "FX_STEPS(unsigned char, " in tanh
    assert " FX_SCHEDULED void" in wave and " FX_SCHEDULED void" in tanh
    assert " FX_SCHEDULED void" not in text_of(lambda x: torch.exp(x), x)


def test_a_bound_keeps_the_zero_and_the_nan_that_eager_keeps() -> None:
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1.0]).repeat(9)
    for program in (
        lambda x: torch.relu(x),
        lambda x: x.clamp(max=0.0),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: torch.relu(x.bfloat16()),
    ):
        found = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)(x)
        expected = program(x)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(found.isnan(), expected.isnan())
        is_zero = expected == 0
        assert torch.equal(found.signbit()[is_zero], expected.signbit()[is_zero])


def test_rows_that_follow_short_ones_are_asked_for() -> None:
    x, scale = torch.randn(64, 256, 64), torch.randn(256, 64)
    text = text_of(lambda x, y: torch.cat((x[..., 32:], x[..., :32]), -1) * y, x, scale)
    assert text.count("__builtin_prefetch(") == 3  # two parts of x and the result, not the scale
    small = x[:2].clone()
    for args in ((small, scale), (torch.randn(64, 64, 512), torch.randn(64, 512))):
        assert "__builtin_prefetch(" not in text_of(lambda x, y: x * y, *args)


@pytest.mark.parametrize(
    ("shape", "ahead"),
    [
        ((40, 512, 12, 64), 16 * 768),  # sixteen rows along the axis of 512
        ((512, 40, 12, 64), 64),  # forty rows later: one along the axis of twelve
        ((512, 6, 5, 64), 30 * 64),  # thirty rows later: one along the first axis
        ((512, 9, 9, 64), None),  # neither axis within reach is long
        ((40, 512, 2, 300), None),  # no short rows
        ((4, 512, 12, 16), None),  # all of it fits into a cache
    ],
)
def test_rows_that_lie_apart_are_asked_for(shape: tuple[int, ...], ahead: int | None) -> None:
    x, y = torch.empty(shape), torch.empty([shape[i] for i in (0, 2, 1, 3)])
    text = text_of(lambda y, x: y + x.transpose(1, 2), y, x)
    assert ("FX_ASK(p1" in text) == (ahead is not None)
    assert ahead is None or f"FX_ASK(p1 + k + {ahead})" in text


@pytest.mark.parametrize(
    ("dtype", "length"),
    one_in(2, [torch.float32, torch.bfloat16], [256, 300, 511, 1000, 2048]),
)
def test_the_last_pass_asks_for_the_next_row(dtype: torch.dtype, length: int) -> None:
    x = torch.randn((1 << 20) // length * 3, length).to(dtype)
    scale = torch.randn(length).to(dtype)

    def softmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * y, -1)

    def norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (length,), y)

    for program in (softmax, norm):
        compiled = to_cpp(fx.symbolic_trace(program), (x, scale), policy=ALWAYS)
        source = compiled.source
        assert source.count("FX_ASK(p") == source.count("FX_ASK_TO_WRITE(p") == 1
        exact = program(x.double(), scale.double())
        error = (compiled(x, scale).double() - exact).abs().max()
        assert error <= 2 * (program(x, scale).double() - exact).abs().max() + 1e-7
    few, long = x[:9].clone(), torch.randn(128, 1 << 14).to(dtype)
    assert "FX_ASK(" not in text_of(softmax, few, scale)
    assert "FX_ASK(" not in text_of(lambda x: torch.softmax(x, -1), long)
    assert "FX_ASK(" not in text_of(lambda x: x.sum(-1), x)
    assert "FX_ASK(" not in text_of(lambda x: x - x.erf().sum(-1, keepdim=True), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_functions_fit_into_loops_that_round(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.sin(x) * torch.cos(x) + torch.expm1(x) + torch.log1p(x.abs())
        z = torch.tan(x) + torch.exp(-x) * torch.sigmoid(x) + torch.nn.functional.mish(x)
        return y, z, torch.erf(x) * torch.tanh(x) + torch.nn.functional.gelu(torch.sqrt(x.abs()))

    x = torch.randn(300).repeat(3).to(dtype)
    compiled = to_cpp(fx.symbolic_trace(program), (x,), policy=ALWAYS)
    assert "FX_SCHEDULED void" in compiled.source
    for found, expected in zip(compiled(x), program(x), strict=True):
        assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [64, 100, 1000, 5000])
@pytest.mark.parametrize("scale", [1, 30])
def test_a_share_is_what_a_division_gives(width: int, scale: int) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        powers = torch.exp(x - torch.amax(x, -1, keepdim=True))
        total = powers.sum(-1, keepdim=True)
        return powers, total, powers / total

    x = torch.randn(40, width, generator=torch.Generator().manual_seed(width)) * scale
    compiled = to_cpp(fx.symbolic_trace(program), (x,))
    powers, total, shares = compiled(x)
    assert "fx_quotient(v" in compiled.source
    assert compiled.report().calls == 1
    normal = powers > 2.0**-100
    assert torch.equal(shares[normal], (powers / total)[normal])
    torch.testing.assert_close(shares, powers / total, rtol=2.0**-23, atol=2.0**-149)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", [100, 128, 300, 1000])
@pytest.mark.parametrize("narrow", [torch.bool, torch.int8, torch.int16])
def test_sums_beside_narrow_elements_are_as_near_as_others(
    narrow: torch.dtype, length: int
) -> None:
    """A vector of bytes would make too many sums of floats, to be put together one by one."""

    def program(x: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) / on.sum(-1, keepdim=True) + x * on

    x = torch.rand(400, length, generator=torch.Generator().manual_seed(length))
    on = torch.arange(length).expand(400, length) == 3
    args = (x, on.to(narrow))
    compiled = to_cpp(fx.symbolic_trace(program), args, policy=ALWAYS)
    exact = program(x.double(), args[1])
    ours, eager = ((y.double() - exact).norm() for y in (compiled(*args), program(*args)))
    assert ours <= 2 * eager
