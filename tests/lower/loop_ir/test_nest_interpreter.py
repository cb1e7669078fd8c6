"""The interpreter of loop nests finds what is wrong with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import less, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_interpreter import interpret_nest
from fxkit.lower.loop_ir.nest_statements import (
    If,
    ReduceThreads,
    Statement,
    Write,
    rewritten,
)
from fxkit.lower.scheduling.pipelines import scheduled
from tests.lower.scheduling.nests import doubled, summed


def run(nest: LoopNest, inputs: int, outputs: int) -> torch.Tensor:
    found = torch.full((outputs,), torch.nan)
    interpret_nest(nest, [torch.arange(inputs).float()], [found])
    return found


def test_a_nest_computes_its_kernel() -> None:
    assert run(scheduled(doubled(41)), 41, 41).tolist() == [2.0 * n for n in range(41)]
    sums = torch.arange(180).float().view(9, 20).sum(1)
    assert torch.equal(run(scheduled(summed(9, 20)), 180, 9), sums)


def test_a_store_by_several_threads_is_found() -> None:
    nest = scheduled(summed(9, 20))

    def unguarded(statement: Statement) -> list[Statement]:
        if isinstance(statement, If) and str(statement.condition) == "t == 0":
            return list(statement.body)
        return [statement]

    with pytest.raises(InvalidGraphError, match="expected one store of each element"):
        run(replace(nest, body=rewritten(nest.body, unguarded)), 180, 9)


def test_a_fold_that_some_threads_miss_is_found() -> None:
    nest = scheduled(summed(9, 20))

    def inside(statement: Statement) -> list[Statement]:
        is_fold = isinstance(statement, ReduceThreads)
        return [If(variable("is_inside"), (statement,)) if is_fold else statement]

    with pytest.raises(InvalidGraphError, match="expected all threads at a fold over 't'"):
        run(replace(nest, body=rewritten(nest.body, inside)), 180, 9)


def test_a_fold_that_is_missing_gives_another_result() -> None:
    nest = scheduled(summed(9, 20))
    body = rewritten(nest.body, lambda s: [] if isinstance(s, ReduceThreads) else [s])
    sums = torch.arange(180).float().view(9, 20).sum(1)
    assert not torch.equal(run(replace(nest, body=body), 180, 9), sums)


def test_an_address_outside_of_memory_is_found() -> None:
    with pytest.raises(IndexError, match=r"expected addresses in \[0, 40\)"):
        run(scheduled(doubled(41)), 40, 41)


def test_what_a_condition_leaves_out_is_not_stored() -> None:
    nest = scheduled(doubled(6), is_aligned=False)

    def some(statement: Statement) -> list[Statement]:
        condition = less(variable("j"), 2)
        return [If(condition, (statement,)) if isinstance(statement, Write) else statement]

    found = run(replace(nest, body=rewritten(nest.body, some)), 6, 6)
    assert found[:2].tolist() == [0.0, 2.0]
    assert found[2:].isnan().all()
