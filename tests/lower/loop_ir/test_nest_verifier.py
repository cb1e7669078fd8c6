"""A loop nest that is not sound is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import binary, less, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Allocate,
    Block,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    LoopKind,
    ReduceThreads,
    Statement,
    VectorLoad,
    VectorStore,
    Write,
    rewritten,
)
from fxkit.lower.loop_ir.nest_verifier import verify_nest
from fxkit.lower.scheduling.gpu.plain_nest import plain_nest
from fxkit.lower.scheduling.pipelines import scheduled
from tests.lower.scheduling.nests import doubled, summed


def nest_of(*body: Statement) -> LoopNest:
    """Return a nest over one axis of ten, with a body of its own."""
    return LoopNest(doubled(10), (For("j", 10, LoopKind.PARALLEL, body),))


DOUBLED: Block = (Compute(0), Compute(2), Write(0))


@pytest.mark.parametrize(
    ("nest", "reason"),
    [
        (nest_of(Compute(2), Compute(0), Write(0)), "%0 to be computed before it is read"),
        (nest_of(Compute(0), Write(0)), "%2 to be computed before it is read"),
        (nest_of(If(less(variable("j"), 4), (Compute(0),)), *DOUBLED[1:]), "%0 to be comp"),
        (nest_of(*DOUBLED, Write(0)), "expected one statement that carries out 'store .*', got 2"),
        (nest_of(Compute(0)), "expected one statement that carries out 'store .*', got 0"),
        (nest_of(Define("k", variable("m")), *DOUBLED), "expected variables that are defined"),
        (nest_of(Define("j", 3), *DOUBLED), "a name for 'j = 3' that is not taken"),
        (nest_of(For("j", 2, LoopKind.SERIAL, DOUBLED)), "a variable of 'for j < 2:' that is not"),
        (nest_of(Compute(0, "m0"), *DOUBLED[1:]), "a local array 'm0' that is declared"),
        (
            nest_of(Allocate("m0", doubled(1).body[0].dtype), Compute(0, "m0"), *DOUBLED[1:]),
            "'m0' to be written before it is read",
        ),
    ],
)
def test_what_is_not_defined_or_not_stored_once_is_refused(nest: LoopNest, reason: str) -> None:
    with pytest.raises(InvalidGraphError, match=reason):
        verify_nest(nest)


@pytest.mark.parametrize(
    ("begin", "end", "index", "reason"),
    [
        (0, 11, variable("k"), r"an index 'j' in \[0, 10\), got one in \[0, 11\)"),
        (0, 10, binary("-", variable("k"), 1), r"got one in \[-1, 9\)"),
        (0, 5, binary("*", variable("k"), 3), r"got one in \[0, 13\)"),
    ],
)
def test_an_index_that_may_leave_its_axis_is_refused(begin, end, index, reason) -> None:
    loop = For("k", end, LoopKind.SERIAL, (Define("j", index), *DOUBLED), begin)
    with pytest.raises(InvalidGraphError, match=reason):
        verify_nest(LoopNest(doubled(10), (loop,)))


def test_a_condition_keeps_an_index_on_its_axis() -> None:
    inside = If(less(variable("j"), 10), DOUBLED)
    loop = For("k", 4, LoopKind.SERIAL, (Define("j", binary("*", variable("k"), 4)), inside))
    verify_nest(LoopNest(doubled(10), (loop,)))


def changed(nest: LoopNest, change: Callable[[Statement], list[Statement]]) -> LoopNest:
    return replace(nest, body=rewritten(nest.body, change))


def _uncounted(statement: Statement) -> Statement:
    if isinstance(statement, VectorLoad | VectorStore):
        return replace(statement, lanes=replace(statement.lanes, count=None))
    return replace(statement, count=None) if isinstance(statement, For) else statement


def test_lanes_that_may_not_be_there_are_counted() -> None:
    nest = scheduled(doubled(41))
    verify_nest(nest)
    uncounted = changed(nest, lambda s: [_uncounted(s)])
    with pytest.raises(InvalidGraphError, match=r"an index 'j' in \[0, 41\)"):
        verify_nest(uncounted)
    wrong = changed(
        nest,
        lambda s: (
            [Define("count", binary("-", 42, variable("j")))]
            if isinstance(s, Define) and s.name == "count"
            else [s]
        ),
    )
    with pytest.raises(InvalidGraphError, match="lanes that are counted as 41 - j"):
        verify_nest(wrong)


def test_threads_that_may_be_elsewhere_do_not_fold() -> None:
    nest = scheduled(summed(9, 20))
    inside = changed(
        nest, lambda s: [If(variable("is_inside"), (s,)) if isinstance(s, ReduceThreads) else s]
    )
    with pytest.raises(InvalidGraphError, match="a loop of threads 't', all of them here"):
        verify_nest(inside)


def test_a_reduction_begins_somewhere_and_is_read_from_an_array() -> None:
    nest = plain_nest(summed(9, 20))
    with pytest.raises(InvalidGraphError, match="'a1' to be written before it is read"):
        verify_nest(changed(nest, lambda s: [] if isinstance(s, InitAccumulator) else [s]))
    direct = changed(nest, lambda s: [replace(s, source=None) if isinstance(s, Compute) else s])
    with pytest.raises(InvalidGraphError, match=r"an array that '%1.*' is read from"):
        verify_nest(direct)
