"""The row of an operator on rows in the table that the fuser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.evaluation import Dtypes, KernelComputer, ScalarEvaluation
from fxkit.authoring.operators.row_values import LENGTH
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.reduction_table import Arguments, ReductionOp


def row_op_of_definition(definition: Definition, name: str, tolerance: float) -> ReductionOp | None:
    """Return what the fuser knows of an operator on rows; None where it has no place for it.

    Args:
        definition: What the operator computes.
        name: Its name in graphs.
        tolerance: See `ReductionOp`.
    """
    if list(definition.wide) != sorted(definition.wide, reverse=True):
        return None  # results that are rows come first there
    names, defaults = definition.tensors, definition.numbers
    rows = definition.rows or frozenset()

    def build(*operands: Any, count: int, **given: Any) -> Any:
        first = next(operand for operand in operands if isinstance(operand, Ref))
        numbers = {n: given.get(n, default) for n, default in defaults.items()} | {LENGTH: count}
        values = dict(zip(names, operands, strict=True))
        dtypes = Dtypes(first.dtype, torch.int64)
        computer = KernelComputer(first.builder)
        evaluation = ScalarEvaluation(computer, dtypes, values, numbers)
        found = tuple(map(evaluation.result, definition.results))
        return found if definition.is_tuple else found[0]

    def alignment(ranks: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        last = max(rank - (name in rows) for name, rank in ranks.items())
        single = {n: rank for n, rank in ranks.items() if n not in rows}
        return {n: range(last - rank, last) for n, rank in single.items()}

    return ReductionOp(
        name=name,
        build=build,
        axes=_last,
        dtype=_float,
        alignment=alignment,
        keeps_row=sum(definition.wide),
        keeps_dims=False,
        tolerance=tolerance,
        operands=names,
        attributes=(*defaults, "count"),
    )


def _last(arguments: Arguments, rank: int) -> tuple[int, ...]:
    return (rank - 1,)


def _float(arguments: Arguments, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise Unfusable("rows of integers are computed by a kernel of their own")
    return dtype
