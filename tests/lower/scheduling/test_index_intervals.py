"""Rows cut where guards change, and what is computed along them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel, Store
from fxkit.lower.scheduling.index_intervals import (
    MAX_STRETCHES,
    IndexInterval,
    computed,
    merged,
    outcome,
    stretches,
)
from fxkit.lower.scheduling.kernel_cost import cost_of


def kernel_of(guard: Callable[[Builder], Ref], length: int = 10) -> Kernel:
    """Return a kernel of one row that stores where a guard holds."""
    builder = Builder()
    value = guard(builder)
    buffers = (Buffer("out0", torch.bool, True),)
    store = Store(Access(0, (length, 1)), value.position)
    return Kernel((3, length), 1, buffers, tuple(builder.body), (store,))


def bounds(kernel: Kernel) -> list[tuple[int, int, list[bool]]]:
    return [(s.begin, s.end, list(s.known.values())) for s in stretches(kernel)]


COMPARISONS: dict[str, Callable[[Ref], Ref]] = {
    "lt": lambda j: j < 4,
    "le": lambda j: j <= 4,
    "gt": lambda j: j > 4,
    "ge": lambda j: j >= 4,
    "eq": lambda j: j.equals(4),
    "ne": lambda j: j.differs(4),
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize(("step", "offset"), [(1, 0), (-1, 7), (3, -2), (2, 1)])
def test_outcomes_are_those_of_each_index(name: str, step: int, offset: int) -> None:
    kernel = kernel_of(lambda b: COMPARISONS[name](b.index((0, step), offset)))
    wanted = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[name]
    for begin, end, (known,) in bounds(kernel):
        for place in range(begin, end):
            assert eval(f"{offset + step * place} {wanted} 4") is known


def test_a_row_is_cut_where_an_outcome_changes() -> None:
    kernel = kernel_of(lambda b: (b.index((0, 1)) < 4) & (b.index((0, 1), -1).differs(6)))
    assert bounds(kernel) == [
        (0, 4, [True, True]),
        (4, 7, [False, True]),
        (7, 8, [False, False]),
        (8, 10, [False, True]),
    ]


def test_an_index_that_varies_from_row_to_row_cuts_nothing() -> None:
    assert bounds(kernel_of(lambda b: b.index((10, 1)) < 4)) == [(0, 10, [])]


def test_a_row_of_too_many_stretches_is_left_whole() -> None:
    def guard(builder: Builder) -> Ref:
        index = builder.index((0, 1))
        value = index < 1
        for place in range(2, MAX_STRETCHES + 1):
            value = value ^ (index < place)
        return value

    assert bounds(kernel_of(guard)) == [(0, 10, [])]


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat((x * 2, y + 1, x[..., :3]), -1).relu()


def padded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (2, 1), value=3.0) * 0.5 + F.pad(y, (1, 2))


def joined_softmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.cat((x, y * 0.5), -1), -1)


def shifted_extremum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, -y), -1).amax(-1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("program", [joined, padded, joined_softmax, shifted_extremum])
@pytest.mark.parametrize("width", [1, 7, 64, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_stretches(
    program: Callable[..., torch.Tensor], width: int, dtype: torch.dtype
) -> None:
    x, y = (torch.randn(5, width).to(dtype) for _ in range(2))
    x[1, width // 2], y[2, 0], y[3, -1] = torch.nan, torch.inf, -torch.inf
    fast = fxkit.compile(program)
    for _ in range(2):
        torch.testing.assert_close(fast(x, y), program(x, y), equal_nan=True)


def chosen(builder: Builder) -> Ref:
    """Choose between two loads by two conditions of the index."""
    index = builder.index((0, 1))
    near, far = index < 4, index < 8
    first = builder.load(Access(1, (10, 1)), torch.float32, guard=near & far)
    other = builder.load(Access(1, (10, 1), 7), torch.float32, guard=~near)
    return builder.scalar("select", near, first, other, dtype=torch.float32)


def test_what_is_not_chosen_along_a_stretch_is_not_computed() -> None:
    kernel = kernel_of(chosen)
    offsets = [
        {kernel.body[p].detail.offset for p in computed(kernel, s) if kernel.body[p].op == "load"}
        for s in stretches(kernel)
    ]
    assert offsets == [{0}, {7}, {7}]
    (whole,) = merged(stretches(kernel), ())
    assert (whole.begin, whole.end) == (0, 10)
    assert {i.op for i in map(kernel.body.__getitem__, computed(kernel, whole))} >= {"lt", "and"}


def test_logic_of_known_conditions_is_known() -> None:
    kernel = kernel_of(chosen)
    first, middle, last = stretches(kernel)
    logic = [p for p, i in enumerate(kernel.body) if i.op in ("and", "not")]
    assert [outcome(kernel, first, p) for p in logic] == [True, False]
    assert [outcome(kernel, middle, p) for p in logic] == [False, True]
    assert [outcome(kernel, last, p) for p in logic] == [False, True]
    assert [outcome(kernel, IndexInterval(0, 10, {}), p) for p in logic] == [None, None]


def test_stretches_that_differ_in_nothing_of_interest_are_one() -> None:
    kernel = kernel_of(chosen)
    first, *others = stretches(kernel)
    near = min(first.known)
    found = merged(stretches(kernel), [near])
    assert [(s.begin, s.end, dict(s.known)) for s in found] == [
        (0, 4, {near: True}),
        (4, 10, {near: False}),
    ]
    assert len(others) == 2


def test_what_is_computed_along_a_part_of_the_row_costs_that_part() -> None:
    def half(builder: Builder) -> Ref:
        near = builder.index((0, 1)) < 5
        load = builder.load(Access(1, (10, 1)), torch.float32)
        return builder.scalar("select", near, load, load * 2 + 1, dtype=torch.float32)

    assert cost_of(kernel_of(half)) == 3 * (10 * 2 + 5 * 2)
