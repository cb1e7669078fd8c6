"""Strip-mining: one iteration handles a few neighbours, which lie together in memory, as lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.index_expressions import IndexValue, binary, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    Define,
    For,
    LoopKind,
    Statement,
    rewritten,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of


@dataclass(frozen=True)
class SplitLanes(NestPass):
    """Split each loop over the axis of the lanes into one over tiles and one over lanes.

    Before, where the mapping says four neighbours:

        parallel j < 41:
          %0: f32 = load in0[1]
          store out0[1] %0

    After:

        parallel j_tile < 11:
          j = j_tile * 4
          count = 41 - j
          lanes l < 4 if l < count:
            %0: f32 = load in0[1]
            store out0[1] %0
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with lanes, if threads handle several neighbours."""
        mapping = mapping_of(nest)
        if mapping.width == 1:
            return nest
        axis, width = mapping.lane_axis, mapping.width
        name, size = nest.axes[axis], nest.kernel.sizes[axis]

        def change(statement: Statement) -> Iterable[Statement]:
            if not isinstance(statement, For) or statement.var != name:
                return [statement]
            tile = f"{name}_tile"
            body: list[Statement] = [Define(name, binary("*", variable(tile), width))]
            count: IndexValue | None = None
            if size % width:
                body.append(Define("count", binary("-", size, variable(name))))
                count = variable("count")
            lanes = For(LANE, width, LoopKind.LANES, statement.body, axis=axis, count=count)
            return [replace(statement, var=tile, end=-(-size // width), body=(*body, lanes))]

        return replace(nest, body=rewritten(nest.body, change))
