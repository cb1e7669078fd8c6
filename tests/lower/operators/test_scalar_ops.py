"""Every row of the table of pointwise operators, against eager, for every dtype that it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.lower.kernels import compile_all, difference, fused_names
from tests.lower.operators.scalar_cases import (
    FLOATS,
    INTEGERS,
    LEFT_TO_EAGER,
    cases,
    eager,
    exact,
    function_of,
    named,
)
from tests.sampling import one_in


def _nearer(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return, of eager's element and the exact one, that which a result is nearer to."""
    to_exact, to_eager = ((found.double() - one.double()).abs() for one in (exact, expected))
    return torch.where((to_exact < to_eager) | (found == exact), exact, expected)


@pytest.mark.parametrize("dtype", [*one_in(2, FLOATS), *one_in(2, INTEGERS)])
def test_rows_equal_eager(dtype: torch.dtype) -> None:
    rows = cases(dtype, (601,))
    calls = [(function_of(r), (a[0],), named(r, a, k)) for r, a, k in rows]
    compiled, inputs, nodes = compile_all(calls)
    fused = fused_names(compiled)
    results = compiled(*inputs)
    wrong = []
    for (row, args, attributes), node, found in zip(rows, nodes, results, strict=True):
        if node.name not in fused:
            if dtype in FLOATS and dtype not in LEFT_TO_EAGER.get(row.name, ()):
                wrong.append(f"{row.name}{attributes} is not fused")
            continue
        expected = eager(row, args, attributes)
        error = difference(found, _nearer(found, expected, exact(row, args, attributes)))
        if error > row.tolerance:
            bad = (found != expected) & ~(found.isnan() & expected.isnan())
            gaps = (found.double() - expected.double()).abs().nan_to_num(torch.inf)
            i = int(torch.where(bad, gaps, -1.0).argmax())
            at = [a[i].item() if isinstance(a, torch.Tensor) and a.dim() else a for a in args]
            wrong.append(
                f"{row.name}{attributes} {error:.3g} eps at {at}: {found[i].item()} for "
                f"{expected[i].item()}"
            )
    assert not wrong, "\n".join(wrong)
    assert len(fused) >= (110 if dtype in FLOATS else 25)


# What integers meet in division and shifts: the ends of the type, and shifts that are too far.
INTEGERS_AT_THE_EDGE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", INTEGERS_AT_THE_EDGE, ids=str)
def test_integers_divide_and_shift_as_in_eager(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2, 3, 7, 8, 15, 16, 63]
    if dtype != torch.uint8:
        edges += [-1, -2, -3, -7, -8]
    x = torch.tensor([e for e in edges if limits.min <= e <= limits.max], dtype=dtype)
    shifts = torch.arange(-2 if dtype != torch.uint8 else 0, 70).clamp(max=limits.max).to(dtype)
    calls: list[Any] = [
        (shift, (x[:, None], shifts), {})
        for shift in (torch.bitwise_left_shift, torch.bitwise_right_shift)
    ]
    divisors = [1, 2, 3, 7, 8, 100, limits.max]
    divisors += [] if dtype == torch.uint8 else [-1, -2, -3, -7, limits.min]
    for divisor in divisors:
        divided = x if divisor != -1 else x.clamp(min=limits.min + 1)  # the quotient is too large
        calls += [
            (torch.remainder, (divided, divisor), {}),
            (torch.fmod, (divided, divisor), {}),
            (torch.floor_divide, (divided, divisor), {}),
            (torch.div, (divided, divisor), {"rounding_mode": "trunc"}),
            (torch.div, (divided, divisor), {"rounding_mode": "floor"}),
        ]
    compiled, inputs, nodes = compile_all(calls)
    assert {node.name for node in nodes} <= fused_names(compiled)
    for (function, args, kwargs), found in zip(calls, compiled(*inputs), strict=True):
        expected = function(*args, **kwargs)
        assert torch.equal(found, expected), (function, args[1], found, expected)


def test_division_of_integers_by_a_tensor_raises_for_zero_as_in_eager() -> None:
    x = torch.arange(8)
    compiled, inputs, _ = compile_all([(torch.floor_divide, (x, x), {})])
    assert not fused_names(compiled)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(*inputs)


def test_filling_follows_the_layout_of_its_operand() -> None:
    x = torch.randn(5, 1, 7).transpose(0, 2)
    wide = torch.randn(3, 1).expand(3, 9)
    calls: list[Any] = [
        (function, (value, *args), {})
        for value in (x, wide, torch.tensor(2.0))
        for function, *args in (
            (torch.zeros_like,), (torch.ones_like,), (torch.full_like, 2.5), (torch.fill, -1.0),
            (torch.fill, torch.tensor(3.0)), (torch.pow, 0),
        )
    ]  # fmt: skip
    calls.append((torch.zeros_like, (x,), {"dtype": torch.int64}))
    compiled, inputs, nodes = compile_all(calls)
    assert {node.name for node in nodes} <= fused_names(compiled)
    for (function, args, kwargs), found in zip(calls, compiled(*inputs), strict=True):
        assert difference(found, function(*args, **kwargs)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_near", [True, False])
def test_what_a_division_leaves_over_is_exact(dtype: torch.dtype, is_near: bool) -> None:
    whole = torch.int32 if dtype == torch.float32 else torch.int64
    limits = torch.iinfo(whole)
    a, b = torch.randint(limits.min, limits.max, (2, 3000), dtype=torch.int64).to(whole).view(dtype)
    b[:1000] = a[:1000] / torch.randint(1, 9, (1000,))  # quotients next to whole numbers
    a[1000:2000] = b[1000:2000] * torch.randint(-1000, 1000, (1000,))
    a[1500:2000] = a[1500:2000].nextafter(torch.zeros(500, dtype=dtype))
    if is_near:
        kept = (a.abs() < 2.0**21 * b.abs()) & (b.abs() < 1e30)
        a, b = a[kept], b[kept]
    else:
        a[:6] = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -0.0, 0.0])
        b[3:6] = torch.tensor([math.inf, 3.0, 0.0])

    def exact(a: float, b: float) -> float:
        is_number = math.isfinite(a) and not math.isnan(b) and b != 0
        return math.fmod(a, b) if is_number else math.nan

    compiled, inputs, _ = compile_all([(torch.fmod, (a, b), {})])
    (found,) = compiled(*inputs)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    expected = torch.tensor([exact(*pair) for pair in pairs], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number].signbit(), expected[is_number].signbit())


def test_the_next_float_is_that_of_eager_over_all_of_their_range() -> None:
    bits = torch.randint(-(2**31), 2**31, (2, 5000)).to(torch.int32)
    a, b = bits.view(torch.float32)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, math.inf, -math.inf, math.nan])
    a = torch.cat([a, a, special.repeat(8)])
    b = torch.cat([b, a[:5000], special.repeat_interleave(8)])
    compiled, inputs, nodes = compile_all([(torch.nextafter, (a, b), {})])
    assert {node.name for node in nodes} <= fused_names(compiled)
    (found,), expected = compiled(*inputs), torch.nextafter(a, b)
    is_number = ~expected.isnan()
    assert torch.equal(found.isnan(), ~is_number)
    assert torch.equal(found[is_number].view(torch.int32), expected[is_number].view(torch.int32))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second", [
    0.7, torch.tensor(0.7), torch.tensor(7e4).double(), torch.tensor(1e-9), torch.tensor([70001]),
], ids=repr)  # fmt: skip
def test_a_single_number_is_not_rounded_before_the_result_is(
    dtype: torch.dtype, second: Any
) -> None:
    a = torch.cat([torch.randn(500) * 3, torch.arange(-20, 20) * 0.7, torch.ones(1) * 6e4])
    operators = (torch.mul, torch.div, torch.floor_divide)
    calls: list[Any] = [(function, (a.to(dtype), second), {}) for function in operators]
    calls.append((torch.div, (a.to(dtype), second), {"rounding_mode": "trunc"}))
    compiled, inputs, nodes = compile_all(calls)
    assert {node.name for node in nodes} <= fused_names(compiled)
    for (function, operands, kwargs), found in zip(calls, compiled(*inputs), strict=True):
        expected = function(*operands, **kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_losses_that_have_the_first_operands_dtype(reduction: str) -> None:
    a, b = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    losses = (torch.nn.functional.huber_loss, torch.nn.functional.soft_margin_loss)
    pairs = ((a.bfloat16(), b), (a, b.double()), (a.half(), b.bfloat16()))
    calls: list[Any] = [(f, pair, {"reduction": reduction}) for f in losses for pair in pairs]
    compiled, inputs, _ = compile_all(calls)
    for (function, operands, kwargs), found in zip(calls, compiled(*inputs), strict=True):
        torch.testing.assert_close(found, function(*operands, **kwargs), rtol=1e-2, atol=1e-2)


def test_digamma_between_and_near_its_poles() -> None:
    x = torch.cat(
        [torch.linspace(-12, 14, 20001), torch.logspace(-30, 30, 601), -torch.arange(9.0) + 1e-4]
    )
    compiled, inputs, nodes = compile_all([(torch.digamma, (x,), {})])
    assert nodes[0].name in fused_names(compiled)
    (found,) = compiled(*inputs)
    exact = torch.digamma(x.double())
    ours, eagers = (
        ((y.double() - exact).abs() / exact.abs().clamp(min=1))[exact.isfinite()]
        for y in (found, torch.digamma(x))
    )
    assert ours.max() <= 2 * eagers.max() and ours.mean() <= 2 * eagers.mean()
    assert torch.equal(found.isnan(), exact.isnan())
