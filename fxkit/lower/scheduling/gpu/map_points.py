"""Points of a kernel without reductions are given out to threads; grid-stride loop for many."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.index_expressions import binary, less, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import Block, Define, For, If, LoopKind
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of

# Blocks of a launch, at most; with more tiles than that, threads compute several.
MAX_BLOCKS = 1 << 16


@dataclass(frozen=True)
class MapPoints(NestPass):
    """Give each thread a point, or tile of them, or several where there are more than threads.

    Before:

        parallel tile < 90:
          ...

    After:

        block block < 1:
          thread thread < 128:
            tile = block * 128 + thread
            if tile < 90:
              ...

    For ten million of them:

        block block < 65536:
          thread thread < 128:
            for tile from block * 128 + thread < 10000000 step 8388608 unroll 1:
              ...
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest over a grid, if its kernel has no reductions."""
        if nest.kernel.folds_rows:
            return nest
        (points,) = nest.body
        assert isinstance(points, For)
        threads = mapping_of(nest).threads
        blocks = min(MAX_BLOCKS, -(-points.extent // threads))
        first = binary("+", binary("*", variable("block"), threads), variable("thread"))
        walk: Block = (
            Define(points.var, first),
            If(less(variable(points.var), points.end), points.body),
        )
        step = max(1, blocks) * threads
        if step < points.extent:
            serial = replace(points, kind=LoopKind.SERIAL, begin=first, step=step, unroll=1)
            walk = (serial,)
        inner = For("thread", threads, LoopKind.THREAD, walk)
        return replace(nest, body=(For("block", blocks, LoopKind.BLOCK, (inner,)),))
