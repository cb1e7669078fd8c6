"""Python numbers beside tensors of 16 bits: where eager rounds them first, and where not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lower.kernels import compile_all, fused_names
from tests.sampling import Sample, one_in

HALVES = [torch.float16, torch.bfloat16]
aten = torch.ops.aten

# What the types have, what they round, what is too large or too small for one of them.
NUMBERS = [
    0.1,
    -1 / 3,
    1e-4,
    1e-9,
    6e-8,
    70001,
    -70001.0,
    65519,
    65520.0,
    2049,
    3e38,
    0,
    -0.0,
    math.inf,
]


def around(number: float, dtype: torch.dtype) -> Tensor:
    """Return what is next to a number in a dtype, and numbers of all sizes."""
    centre = number if 0 < abs(number) < 1e38 else 1.0
    near = torch.tensor([centre, -centre, 1 - centre], dtype=torch.float64).to(dtype)
    steps = [(near.view(torch.int16) + step).view(dtype) for step in (-2, -1, 0, 1, 2)]
    sizes = [0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 1e-40, 65504.0, -65504.0, math.inf, math.nan]
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(40, generator=generator)
    return torch.cat(
        [*steps, torch.tensor(sizes).to(dtype), drawn.to(dtype), (drawn * 1e4).to(dtype)]
    )


def calls_with(number: float, dtype: torch.dtype) -> list[Any]:
    """Return calls of operators that take a number beside a tensor."""
    x = around(number, dtype)
    y = x.flip(0)
    calls: list[Any] = [(f, (x, number), {}) for f in (
        torch.add, torch.sub, torch.rsub, torch.mul, torch.div, Tensor.__rtruediv__,
        torch.floor_divide, Tensor.__rfloordiv__, torch.eq, torch.lt, torch.ge, aten.hardshrink,
        aten.softshrink, F.leaky_relu,
    )]  # fmt: skip
    calls += [(f, (x, y), {"alpha": number}) for f in (torch.add, torch.sub, torch.rsub)]
    calls += [(torch.add, (x, 1.1), {"alpha": number})]
    calls += [(f, (y, x, number), {}) for f in (aten.hardshrink_backward, aten.softshrink_backward)]
    calls += [(f, (x, torch.tensor(number)), {}) for f in (torch.add, torch.mul, torch.logical_and)]
    calls += [(torch.where, (x > 0, x, number), {})]
    return calls


def raises(call: Any) -> bool:
    function, args, kwargs = call
    try:
        function(*args, **kwargs)
    except RuntimeError:
        return True
    return False


def differing(found: Tensor, expected: Tensor, steps: int = 0) -> Tensor:
    """Return where two tensors are neither equal nor next to each other."""
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    if not expected.is_floating_point():
        return ~is_equal
    apart = (found.double() - expected.double()).abs()
    finfo = torch.finfo(expected.dtype)
    unit = expected.double().abs().clamp(min=finfo.smallest_normal) * finfo.eps
    return ~(is_equal | (apart <= steps * unit))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_are_rounded_where_eager_rounds_them(dtype: torch.dtype, some: Sample) -> None:
    numbers = some(NUMBERS, -(-len(NUMBERS) // 3))
    calls = [call for number in numbers for call in calls_with(number, dtype) if not raises(call)]
    compiled, inputs, nodes = compile_all(calls)
    assert {node.name for node in nodes} <= fused_names(compiled)
    for (function, args, kwargs), found in zip(calls, compiled(*inputs), strict=True):
        expected = function(*args, **kwargs)
        assert found.dtype == expected.dtype
        # What some of eager's loops round once, others round at each step.
        is_open = bool(kwargs) or function is Tensor.__rfloordiv__
        wrong = differing(found, expected, steps=1 if is_open else 0)
        if is_open:  # and without vectors eager's round what they add to a number that is near it
            wide = [a.double() if isinstance(a, Tensor) else a for a in args]
            factors = {k: torch.tensor(v, dtype=dtype).item() for k, v in kwargs.items()}
            exact = function(*wide, **factors).to(expected.dtype)
            wrong &= expected.isfinite() & differing(found, exact, steps=1)
        assert not wrong.any(), (function, args[1:], kwargs, args[0][wrong], found[wrong])


@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_number_that_eager_divides_in_two_steps(size: int) -> None:
    small = [6e-8, -6e-8, 1e-5, 0.0, -0.0, 3e-39, 1e-310, math.inf, math.nan]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.tensor(small, dtype=torch.float64).to(dtype).repeat(23)[:size]
        compiled, inputs, _ = compile_all(
            [(Tensor.__rtruediv__, (x, n), {}) for n in (1e-4, 70001)]
        )
        for n, found in zip((1e-4, 70001), compiled(*inputs), strict=True):
            torch.testing.assert_close(found, n / x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("eps", "dtype"),
    one_in(
        4,
        [0.1, 1 / 3, 0.5, 0.7, 1.0, 3.0, -0.1, 1e-9, None],
        [*HALVES, torch.float32, torch.float64],
    ),
    ids=str,
)
def test_probabilities_are_held_within_bounds_as_in_eager(
    eps: float | None, dtype: torch.dtype
) -> None:
    x = torch.cat([torch.linspace(-0.5, 1.5, 81), torch.tensor([0.1, 0.9, 1 / 3, 0.7, math.inf])])
    x = x.to(dtype)
    calls: list[Any] = [(torch.logit, (x, eps), {}), (aten.logit_backward, (x * 0 + 2, x, eps), {})]
    compiled, inputs, _ = compile_all(calls)
    found, slope = compiled(*inputs)
    tolerance = 4 * torch.finfo(dtype).eps  # eager rounds to 16 bits at each step
    torch.testing.assert_close(
        found, torch.logit(x, eps), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    expected = aten.logit_backward(x * 0 + 2, x, eps)
    torch.testing.assert_close(slope, expected, rtol=tolerance, atol=0, equal_nan=True)


def test_roots_of_halves_are_powers() -> None:
    x = torch.tensor([-0.0, 0.0, -math.inf, math.inf, 2.0, -2.0, math.nan]).half()
    compiled, inputs, _ = compile_all([(torch.pow, (x, power), {}) for power in (0.5, -0.5)])
    for power, found in zip((0.5, -0.5), compiled(*inputs), strict=True):
        expected = x**power
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0, equal_nan=True)
        is_number = ~expected.isnan()
        assert torch.equal(found[is_number].signbit(), expected[is_number].signbit())


def test_zero_times_an_infinite_slope_is_not_taken_for_a_value() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan])
    calls: list[Any] = [(f, (x, math.inf), {}) for f in (F.elu, F.celu)]
    compiled, inputs, _ = compile_all(calls)
    for (function, args, _), found in zip(calls, compiled(*inputs), strict=True):
        torch.testing.assert_close(found, function(*args), equal_nan=True)
