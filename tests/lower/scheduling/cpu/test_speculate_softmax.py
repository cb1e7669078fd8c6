"""Powers of a softmax that are taken before the maximum is known: shares as eager's in any row."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fxkit.lower.building import toolchain
from fxkit.lower.scheduling.cpu.speculate_softmax import NEAR
from tests.lower.kernels import body, compiled_for, rand, spread_over, text_of
from tests.sampling import Sample


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, y: torch.softmax(x, -1),
    "a power of two in front": lambda x, y: torch.softmax(x * 0.125, -1),
    "a number in front": lambda x, y: torch.softmax(x * 0.3, -1),
    "mask": lambda x, y: torch.softmax((x * 0.5).masked_fill(y[0] < -0.8, -torch.inf), -1),
    "added mask": lambda x, y: torch.softmax(x + torch.where(y > 0, 0.0, -torch.inf), -1),
    "function in front": lambda x, y: torch.softmax(torch.tanh(x * 0.1) * 30 + y, -1),
    "mean in front": lambda x, y: torch.softmax(centred(x * 0.5 + y * 0.25) * 3, -1) + y,
    "behind": lambda x, y: torch.relu(torch.softmax(x, -1) - y) * y,
    "twice": lambda x, y: torch.softmax(torch.softmax(x, -1) * y, -1),
    "sum behind": lambda x, y: torch.softmax(x, -1).square().sum(-1),
}
LENGTHS = (1, 2, 15, 16, 33, 100, 1000, 1040, 2600, 20_000)

# By how much the numbers of a row are moved: maxima near zero, far from it, and about the bound.
MOVED = (0.0, 200.0, 1.0, -200.0, -60.0, 60.0, NEAR - 3, 3 - NEAR, -NEAR, NEAR, 0.0, -90.0, 3e4)


def rows(length: int, dtype: torch.dtype) -> Tensor:
    return (rand(len(MOVED), length) + torch.tensor(MOVED)[:, None]).to(dtype)


def assert_near(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Expect errors up to twice eager's, and a few roundings, beside the largest of the row."""
    info = torch.finfo(eager.dtype)
    largest = exact.abs().amax(-1, keepdim=True) + info.tiny
    allowed = 2 * ((eager.double() - exact).abs() / largest).amax() + 4 * info.eps
    assert ((found.double() - exact).abs() / largest).amax() <= allowed


@pytest.fixture(params=["this", "narrow"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "narrow":
        if platform.machine() != "x86_64":
            pytest.skip("says how the instruction sets of x86-64 are left out")
        tools = toolchain.current()
        narrow = dataclasses.replace(tools, flags=(*tools.flags, "-mno-avx512f"))
        monkeypatch.setattr(toolchain, "current", lambda: narrow)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("name", "dtype"), spread_over(PROGRAMS, DTYPES))
def test_rows_of_any_size_and_length(name: str, dtype: torch.dtype, some: Sample) -> None:
    program = PROGRAMS[name]
    for length in some(LENGTHS[name == "plain" :], 1):  # one number alone is all there is
        x, y = rows(length, dtype), rand(len(MOVED), length).to(dtype)
        if "mask" in name:
            y[:, 0] = 1  # a row without any number is none
        found = compiled_for(program, x, y)(x, y)
        assert_near(found, program(x, y), program(x.double(), y.double()))


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_and_what_is_none_at_all(dtype: torch.dtype) -> None:
    x = rows(64, dtype).repeat(3, 1)
    x[0, 3], x[2, 7], x[4], x[6, :20], x[8, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf, -130
    x[10], x[12, 5], x[14, 5], x[16] = 0, torch.finfo(dtype).max, torch.finfo(dtype).min, NEAR
    x[18], x[20, ::2], x[22] = 1e-40, -torch.inf, -NEAR
    for name in ("plain", "a power of two in front", "a number in front"):
        program = PROGRAMS[name]
        found, eager = compiled_for(program, x, x)(x, x), program(x, x)
        assert torch.equal(found.isnan(), eager.isnan())
        assert torch.equal(found == 0, eager == 0)
        is_number = ~eager.isnan()
        exact = torch.where(is_number, program(x.double(), x.double()), 0.0)
        assert_near(found.where(is_number, 0), eager.where(is_number, 0), exact)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("length", [50, 256, 512, 1000, 1024, 4096, 4100, 20_000])
def test_rows_of_one_number_add_up(length: int) -> None:
    x = torch.tensor([0.7, -1.3, 19.1, 30.0, -5.55]).repeat(9)[:, None].repeat(1, length)
    found = compiled_for(PROGRAMS["plain"], x, x)(x, x)
    assert (found.double() * length - 1).abs().max() <= 2.5 * torch.finfo(torch.float32).eps


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("processor", "threads")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_has_the_same_shares_wherever_it_stands(name: str) -> None:
    program, order = PROGRAMS[name], torch.randperm(600, generator=torch.manual_seed(3))
    x, y = rows(200, torch.float32).repeat(47, 1)[:600], rand(1, 200).expand(600, 200)
    compiled = compiled_for(program, x, y)
    torch.set_num_threads(1)
    alone = compiled(x, y)
    assert torch.equal(compiled(x[order], y), alone[order])
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(compiled(x, y), alone)


def test_where_powers_can_be_taken_early() -> None:
    def with_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.amax(-1, keepdim=True)
        powers = (x - top).exp()
        return powers / powers.sum(-1, keepdim=True), top

    def with_difference(x: Tensor) -> Tensor:
        difference = x - x.amax(-1, keepdim=True)
        powers = difference.exp()
        return powers / powers.sum(-1, keepdim=True) * difference

    x = rand(8, 64)
    for program in PROGRAMS.values():
        assert "if (is_near" in body(text_of(program, x, rand(8, 64)))
    for other in (
        lambda x: x.log_softmax(-1),
        lambda x: x.softmax(0),
        lambda x: x.double().softmax(-1),
        lambda x: x.softmax(-1) * x.amax(-1, keepdim=True),
        with_maximum,
        with_difference,
    ):
        assert "is_near" not in body(text_of(other, x))
        expected = other(x)
        torch.testing.assert_close(compiled_for(other, x)(x), expected)


def test_what_goes_before_is_computed_again_unless_it_takes_long() -> None:
    x, y = rand(8, 64), rand(8, 64)
    masked = body(text_of(PROGRAMS["mask"], x, y))
    assert masked.count("float b") == 1
    assert masked.count("? fx_all(-__builtin_inff()) :") == 2
    assert body(text_of(PROGRAMS["function in front"], x, y)).count("fx_tanh(") == 2


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("spread", [0.02, 0.1, 1.0])
def test_errors_of_near_numbers_are_not_of_one_sign(spread: float) -> None:
    """What is left of shares once their mean is taken away holds errors that go with the number."""

    def program(x: Tensor) -> Tensor:
        return torch.softmax(x, -1).std(-1)

    args = [(rand(3, 1000 + more)[:, :1000] * spread).contiguous() for more in range(17)]
    compiled = compiled_for(program, args[0])
    errors = torch.zeros(2, dtype=torch.float64)
    for x in args:
        exact = program(x.double())
        errors += torch.stack([(one.double() - exact).norm() for one in (compiled(x), program(x))])
    assert errors[0] <= 2 * errors[1]
