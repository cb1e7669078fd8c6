"""Rows of a kernel that reduces are given out to blocks, one or several to each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.index_expressions import binary, less, smaller, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Block,
    Define,
    For,
    LoopKind,
    Statement,
    guarded,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of


@dataclass(frozen=True)
class MapRows(NestPass):
    """Give each block of threads some rows, or tiles of neighbouring rows.

    Where the last block has more places than rows are left, threads compute the last row once more
    and store nothing, so that all of them are there when they wait for each other.

    Before:

        parallel row < 9:
          i0 = row
          ...
          store out0[1, 0] %1

    After:

        block block < 2:
          thread slot < 8:
            asked = block * 8 + slot
            is_inside = asked < 9
            row = asked < 8 ? asked : 8
            i0 = row
            ...
            if is_inside:
              store out0[1, 0] %1
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with its rows over a grid, if its kernel has reductions."""
        if not nest.kernel.folds_rows:
            return nest
        mapping = mapping_of(nest)
        slots = mapping.threads // mapping.group
        rows, name, body = _rows(nest)
        number = binary("+", binary("*", variable("block"), slots), variable("slot"))
        if slots == 1:
            number = variable("block")
        located: list[Statement] = [Define(name, number)]
        if rows % slots:
            located = [
                Define("asked", number),
                Define("is_inside", less(variable("asked"), rows)),
                Define(name, smaller(variable("asked"), max(0, rows - 1))),
            ]
            body = guarded("is_inside", body)
        body = (*located, *body)
        if slots > 1:
            body = (For("slot", slots, LoopKind.THREAD, body),)
        return replace(nest, body=(For("block", -(-rows // slots), LoopKind.BLOCK, body),))


def _rows(nest: LoopNest) -> tuple[int, str, Block]:
    """Return the number of rows, or tiles of them, the name of theirs, and what each computes."""
    outermost = nest.body[0] if nest.body else None
    if isinstance(outermost, For) and outermost.kind is LoopKind.PARALLEL:
        return outermost.extent, outermost.var, outermost.body
    return 1, "row", nest.body
