"""Vector loads and stores: lanes that lie together in memory are read and written together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    Allocate,
    Block,
    Compute,
    For,
    If,
    LaneArray,
    LoopKind,
    Statement,
    VectorLoad,
    VectorStore,
    Write,
    rewritten,
)
from fxkit.lower.scheduling.gpu.contiguous_accesses import is_uniform, is_whole
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of


@dataclass(frozen=True)
class VectoriseAccesses(NestPass):
    """Access memory before and after lanes, sixteen bytes at a time where it is aligned.

    Before:

        lanes l < 4:
          %0: f32 = load in0[40, 1]
          store out0[40, 1] %0

    After:

        f32 m0[l]
        m0 = 4 lanes of %0
        f32 o0[l]
        lanes l < 4:
          %0: f32 = m0
          o0 = %0
        store out0[40, 1] %0 as 4 lanes of o0
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with vector accesses around its lanes."""

        def change(statement: Statement) -> Iterable[Statement]:
            if isinstance(statement, For) and statement.kind is LoopKind.LANES:
                return _Lanes(nest, statement).vectorised()
            return [statement]

        return replace(nest, body=rewritten(nest.body, change))


class _Lanes:
    def __init__(self, nest: LoopNest, loop: For) -> None:
        self._nest, self._kernel, self._loop = nest, nest.kernel, loop
        self._before: list[Statement] = []

    def vectorised(self) -> Block:
        body, after = self._split(self._loop.body)
        return (*self._before, replace(self._loop, body=body), *after)

    def _split(self, body: Block) -> tuple[Block, Block]:
        """Return what lanes do, and the stores that follow them."""
        inner: list[Statement] = []
        after: list[Statement] = []
        for statement in body:
            match statement:
                case Compute(value, None) if self._is_whole_load(value):
                    inner.append(self._load(value))
                case Write(store, None) if self._is_whole(self._kernel.stores[store].access):
                    inner.append(self._written(store))
                    after.append(VectorStore(store, self._lanes(f"o{store}")))
                case If(condition, guarded):
                    own, later = self._split(guarded)
                    kept = [s for s in own if isinstance(s, Write) and s.array is not None]
                    rest = tuple(s for s in own if s not in kept)
                    inner += [*kept, *([If(condition, rest)] if rest else [])]
                    after += [If(condition, later)] if later else []
                case _:
                    inner.append(statement)
        return tuple(inner), tuple(after)

    def _lanes(self, array: str) -> LaneArray:
        return LaneArray(array, self._loop.extent, self._axis, self._loop.count)

    @property
    def _axis(self) -> int:
        assert self._loop.axis is not None
        return self._loop.axis

    def _is_whole(self, access: Access) -> bool:
        width = mapping_of(self._nest).width
        return is_whole(self._kernel, access, self._axis, width)

    def _is_whole_load(self, value: int) -> bool:
        instruction = self._kernel.body[value]
        if instruction.op != "load" or not self._is_whole(instruction.detail):
            return False
        guard, width = instruction.guard, mapping_of(self._nest).width
        return guard is None or is_uniform(self._kernel, guard, self._axis, width)

    def _load(self, value: int) -> Compute:
        name = f"m{value}"
        dtype = self._kernel.buffers[self._kernel.body[value].detail.buffer].dtype
        self._before += [
            Allocate(name, dtype, (LANE,)),
            VectorLoad(value, self._lanes(name)),
        ]
        return Compute(value, name)

    def _written(self, store: int) -> Write:
        name = f"o{store}"
        dtype = self._kernel.buffers[self._kernel.stores[store].access.buffer].dtype
        self._before.append(Allocate(name, dtype, (LANE,)))
        return Write(store, name)
