"""Loop coalescing: the loops of a perfect nest become one loop over all their iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.index_expressions import IndexValue, binary, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Block,
    Define,
    For,
    LoopKind,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass


@dataclass(frozen=True)
class FlattenLoops(NestPass):
    """Make one loop of loops that hold nothing but each other.

    Before:

        parallel i0 < 9:
          parallel j_tile < 10:
            j = j_tile * 4

    After:

        parallel tile < 90:
          i0 = tile / 10
          j_tile = tile % 10
          j = j_tile * 4
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with one loop over rows, or points, and one over each row."""
        names = {
            LoopKind.PARALLEL: "row" if nest.kernel.folds_rows else "tile",
            LoopKind.SERIAL: "p",
        }

        def flat(body: Block) -> Block:
            return tuple(
                _flat(s, names[s.kind], flat) if isinstance(s, For) and s.kind in names else s
                for s in body
            )

        return replace(nest, body=flat(nest.body))


def _flat(outermost: For, name: str, flat: Callable[[Block], Block]) -> For:
    chain = [outermost]
    while len(chain[-1].body) == 1:
        (only,) = chain[-1].body
        if not isinstance(only, For) or only.kind is not outermost.kind:
            break
        chain.append(only)
    body = flat(chain[-1].body)
    if len(chain) == 1:
        return replace(outermost, body=body)
    sizes = [loop.extent for loop in chain]
    defined = []
    for position, loop in enumerate(chain):
        below = max(1, math.prod(sizes[position + 1 :]))
        index: IndexValue = binary("/", variable(name), below)
        index = index if position == 0 else binary("%", index, sizes[position])
        defined.append(Define(loop.var, index))
    return replace(outermost, var=name, end=math.prod(sizes), body=(*defined, *body))
