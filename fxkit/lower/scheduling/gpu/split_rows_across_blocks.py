"""Split reduction: several blocks share a row, and each sweep over it is a launch of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from fxkit.lower.loop_ir.index_expressions import IndexValue, binary, equal, smaller, variable
from fxkit.lower.loop_ir.loop_nest import LoopNest, PartialResult
from fxkit.lower.loop_ir.nest_statements import (
    LANE,
    PARTIAL,
    SPLIT,
    Accumulate,
    Allocate,
    Block,
    Define,
    For,
    If,
    LoopKind,
    ReduceThreads,
    Statement,
    StorePartial,
    Write,
    guarded,
    rewritten,
    walk,
)
from fxkit.lower.scheduling.gpu.nest_pass import NestPass, mapping_of, of_each_thread


@dataclass(frozen=True)
class SplitRowsAcrossBlocks(NestPass):
    """Let blocks that share a row leave partial results, which later launches begin by folding.

    Before, where five blocks share a row:

        block block < 1:
          thread t < 512:
            for j from t < 33333 step 512:
              a1 = max(a1, %0)
            a1 = max of a1 over t
            %1: f32 = a1
            if t == 0:
              store out0[0] %1

    After:

        block block < 1:
          split split < 5:
            thread t < 512:
              begin = split * 7168
              for j from begin + t < (begin + 7168 < 33333 ? begin + 7168 : 33333) step 512:
                a1 = max(a1, %0)
              a1 = max of a1 over t
              if t == 0:
                part1 = a1
        block block < 1:
          thread t < 512:
            for s from t < 5 step 512:
              a1 = max(a1, part1)
            a1 = max of a1 over t
            %1: f32 = a1
            if t == 0:
              store out0[0] %1
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with a launch for each sweep, where blocks share rows."""
        if mapping_of(nest).splits == 1:
            return nest
        (whole,) = nest.body
        stages = _Stages(nest)
        of_each_thread(nest, stages.read)
        launches = [
            of_each_thread(replace(nest, body=(whole,)), stages.stage(number)).body[0]
            for number in range(stages.count)
        ]
        shared = [
            _split(launch, mapping_of(nest).splits) if number < stages.sweeps else launch
            for number, launch in enumerate(launches)
        ]
        return replace(nest, body=tuple(shared), partials=stages.partials)


def _split(launch: Statement, splits: int) -> Statement:
    assert isinstance(launch, For)
    return replace(launch, body=(For(SPLIT, splits, LoopKind.SPLIT, launch.body),))


class _Stages:
    """Cuts what a thread runs into what it runs in each launch."""

    def __init__(self, nest: LoopNest) -> None:
        self._nest, self._mapping = nest, mapping_of(nest)
        self._body: Block = ()
        self._loops: list[int] = []
        self.partials: tuple[PartialResult, ...] = ()

    def read(self, body: Block) -> Block:
        """Find the sweeps, and what each leaves."""
        self._body = body
        self._loops = [
            n for n, s in enumerate(body) if isinstance(s, For) and s.kind is LoopKind.SERIAL
        ]
        rows = math.prod(self._nest.kernel.outer_sizes)
        offset, found = 0, []
        for name, dtype in self._left(range(self.sweeps)):
            size = -(-dtype.itemsize * self._mapping.splits * rows // 16) * 16
            part = f"part{name[1:]}"
            found.append(PartialResult(part, dtype, self._mapping.splits, offset, size))
            offset += size
        self.partials = tuple(found)
        return body

    @property
    def sweeps(self) -> int:
        """How many sweeps there are."""
        return len(self._loops)

    @property
    def count(self) -> int:
        """How many launches there are: one more where the last sweep reduces."""
        return self.sweeps + bool(self._left([self.sweeps - 1]))

    def stage(self, number: int) -> Callable[[Block], Block]:
        """Return what makes of a thread's statements those of one launch."""
        return lambda _: self._stage(number)

    def _left(self, sweeps: Iterable[int]) -> list[tuple[str, torch.dtype]]:
        """Return the accumulators of some sweeps and their dtypes."""
        dtypes = {s.name: s.dtype for s in self._body if isinstance(s, Allocate)}
        loops = [self._body[self._loops[n]] for n in sweeps]
        names = [s.array for s in walk(loops) if isinstance(s, Accumulate) and s.array in dtypes]
        return [(name, dtypes[name]) for name in dict.fromkeys(names)]

    def _stage(self, number: int) -> Block:
        is_last = number == self.count - 1
        own = self._loops[number] if number < self.sweeps else len(self._body)
        result: list[Statement] = []
        for position, statement in enumerate(self._body):
            if position > own and not is_last:
                break
            if position in self._loops and position < own:
                result += self._folded(statement)
            elif position == own:
                result += self._shared(statement)
            elif is_last:
                result += self._once((statement,)) if number < self.sweeps else [statement]
            else:
                result += rewritten((statement,), _without_stores)
        if not is_last:
            result += self._leave(number)
        return tuple(result)

    def _once(self, body: Block) -> Block:
        """Let one of the blocks that share a row store what there is one of a row."""
        return guarded(equal(variable(SPLIT), 0), body)

    def _shared(self, loop: Statement) -> Block:
        """Return a sweep over a block's share of the row."""
        assert isinstance(loop, For)
        share = self._mapping.share // (1 if self._mapping.is_across else self._mapping.width)
        begin: IndexValue = variable("begin")
        end = smaller(binary("+", begin, share), loop.end)
        return (
            Define("begin", binary("*", variable(SPLIT), share)),
            Define("end", end),
            replace(loop, begin=binary("+", begin, loop.begin), end=variable("end")),
        )

    def _folded(self, loop: Statement) -> Block:
        """Return what folds the partial results of a sweep, in place of the sweep."""
        result: list[Statement] = []
        for accumulate in walk((loop,)):
            if isinstance(accumulate, Accumulate) and accumulate.array.startswith("a"):
                name, reduction = accumulate.array, accumulate.reduction
                fold = Accumulate(reduction, name, f"part{reduction}")
                body = self._in_lanes(name, fold)
                thread, group = variable("t"), self._mapping.group
                result.append(
                    For(PARTIAL, self._mapping.splits, LoopKind.SERIAL, body, thread, group)
                )
        return tuple(result)

    def _leave(self, number: int) -> Block:
        names = [name for name, _ in self._left([number])]
        result: Block = ()
        for name in names:
            result += (
                *(s for s in self._body if isinstance(s, ReduceThreads) and s.array == name),
                *self._in_lanes(name, StorePartial(f"part{name[1:]}", name)),
            )
        if any(isinstance(s, Define) and s.name == "is_inside" for s in self._body):
            result = guarded("is_inside", result)
        return guarded(equal(variable("t"), 0), result)

    def _in_lanes(self, name: str, statement: Statement) -> Block:
        """Return a statement for each lane, if an accumulator has an element for each."""
        declared = next(s for s in self._body if isinstance(s, Allocate) and s.name == name)
        if LANE not in declared.axes:
            return (statement,)
        lanes = next(s for s in walk(self._body) if isinstance(s, For) and s.var == LANE)
        return (replace(lanes, body=(statement,)),)


def _without_stores(statement: Statement) -> Iterable[Statement]:
    is_empty = isinstance(statement, (For, If)) and not statement.body
    return [] if isinstance(statement, Write) or is_empty else [statement]
