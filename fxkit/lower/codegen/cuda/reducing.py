"""Row reductions on a GPU: by a thread group each, or split over several blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cuda.kernel_printer import CudaPrinter, Launch, Tile
from fxkit.lower.codegen.cuda.layout import FOLDS, Layout
from fxkit.lower.codegen.cuda.registers import Held, held_in_registers
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.row_sweeps import RowSweep, schedule


class ReducingPrinter(CudaPrinter):
    """Writes a kernel whose rows are reduced.

    In the text, `t` counts the threads of a row. Where several blocks share a row, a pass writes
    what each block's reductions have come to into scratch memory, and later passes fold that.
    """

    def __init__(self, kernel: Kernel, name: str, layout: Layout) -> None:
        super().__init__(kernel, name, layout)
        self._held: Held = held_in_registers(kernel, layout)
        self._schedule = schedule(kernel, self._held.room)
        self._wide = self._schedule.wide
        self._length = math.prod(kernel.row_sizes)
        self._rows = math.prod(kernel.outer_sizes)
        self._scratch = self._lay_out_scratch()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory."""
        return max((offset + size for offset, size in self._scratch.values()), default=0)

    def launches(self) -> list[Launch]:
        """Return one function, or one for each pass where blocks share rows."""
        if self.layout.splits == 1:
            return [self._whole()]
        passes = [p for p, one in enumerate(self._schedule.passes) if _has_loop(one)]
        stages = [self._stage(p, p == passes[-1]) for p in passes]
        if self._schedule.passes[passes[-1]].reductions:
            stages.append(self._last_stage())
        return stages

    def _whole(self) -> Launch:
        self._open_function(self._name, self.layout.threads)
        self._locate()
        for position in self._held.values:
            lanes = f"[{self._width}]" if self._width > 1 else ""
            self._add(f"{self._type(position)} k{position}[{self.layout.items}]{lanes};")
        for number, one in enumerate(self._schedule.passes):
            self._row_scalars(one.scalars)
            if _has_loop(one):
                self._pass(number, one)
            for p in one.reductions:
                self._finish(p)
        self._row_scalars(self._schedule.scalars)
        self._store_rows()
        self._close()
        return Launch(self._name, self._blocks(), 1, self.layout.threads, self._taken())

    def _stage(self, number: int, is_last: bool) -> Launch:
        name = f"{self._name}_pass{number}"
        one = self._schedule.passes[number]
        self._open_function(name, self.layout.threads, has_scratch=True)
        self._locate()
        self._recall(number)
        self._pass(number, one)
        for p in one.reductions:
            self._leave(p)
        if is_last and not one.reductions:
            self._row_scalars(self._schedule.scalars)
            self._store_rows()
        self._close()
        splits = self.layout.splits
        return Launch(name, self._blocks(), splits, self.layout.threads, self._taken())

    def _last_stage(self) -> Launch:
        """Fold what the last pass has left, and store what there is one of a row."""
        name = f"{self._name}_end"
        self._open_function(name, self.layout.threads, has_scratch=True)
        self._locate()
        self._recall(len(self._schedule.passes))
        self._row_scalars(self._schedule.scalars)
        self._store_rows()
        self._close()
        return Launch(name, self._blocks(), 1, self.layout.threads, self._taken())

    def _recall(self, number: int) -> None:
        """Compute the row scalars that are known before a pass, from what earlier ones left."""
        for before, one in enumerate(self._schedule.passes):
            if before > number:
                return
            self._row_scalars(one.scalars)
            if before == number:
                return
            for p in one.reductions:
                self._begin(p)
                self._open(f"for (int s = t; s < {self.layout.splits}; s += {self._group}) {{")
                self._fold_left(p)
                self._close()
                self._finish(p)

    def _lay_out_scratch(self) -> dict[int, tuple[int, int]]:
        """Return, for each reduction, where its parts begin and the bytes that they take."""
        if self.layout.splits == 1:
            return {}
        result: dict[int, tuple[int, int]] = {}
        offset = 0
        for p, instruction in enumerate(self._kernel.body):
            if instruction.is_reduction:
                item = 8 if self._is_float_sum(p) else instruction.dtype.itemsize
                size = -(-item * self.layout.splits * self._rows // 16) * 16
                result[p] = (offset, size)
                offset += size
        return result

    def _part(self, position: int, split: str) -> str:
        """Return the text of what a block's reduction has come to."""
        offset, _ = self._scratch[position]
        row = f"(long){split} * {self._rows} + {self._row_number()}"
        return f"(({self._sum_type(position)}*)(scratch + {offset}L))[{row}]"

    @property
    def _group(self) -> int:
        return self.layout.group

    @property
    def _is_walked(self) -> bool:
        return self.layout.items == 0

    def _sum_type(self, position: int) -> str:
        is_wider = self._is_float_sum(position) and self._is_walked
        return "double" if is_wider else self._type(position)

    def _identity(self, position: int) -> str:
        if self._sum_type(position) == "double" and self._is_float_sum(position):
            return "0.0"
        return cpp_text.identity_of(self._monoid(position), self._body(position).dtype)

    def _folded(self, position: int) -> str:
        return FOLDS[self._monoid(position)]

    def _pass(self, number: int, one: RowSweep) -> None:
        for p in one.reductions:
            self._begin(p)
        values = sorted({*one.values, *one.buffered})
        tile = Tile(
            values,
            [v for v in values if self._held.is_known(v, number)],
            [v for v in values if self._held.is_kept(v, number)],
            one.stores,
            one.reductions,
        )
        depth = self._depth
        self._open_loop()
        self._tile(tile)
        while self._depth > depth:
            self._close()

    def _ref(self, position: int) -> str:
        if self._body(position).op == "const":
            return cpp_text.literal(self._body(position).detail.value, self._body(position).dtype)
        return f"v{position}{'' if self._wide[position] else self._scalar_lane}"

    def _row_stores(self) -> list[int]:
        carried = {p for one in self._schedule.passes for p in one.stores}
        return [p for p in range(len(self._kernel.stores)) if p not in carried]

    def _row_axes(self, position: str) -> None:
        """Compute the index along each axis of the row from a position in it, `j` of the last."""
        sizes = self._kernel.row_sizes
        if len(sizes) == 1:
            return
        below = self._length
        for axis, size in enumerate(sizes[:-1]):
            below //= max(1, size)
            index = f"{position} / {below}" + (f" % {size}" if axis else "")
            self._add(f"const {self._index} r{axis} = {index};")
        self._add(f"const {self._index} j = {position} % {sizes[-1]};")

    def _axis_names(self) -> list[str]:
        outer = [f"i{axis}" for axis in range(len(self._kernel.outer_sizes))]
        return [*outer, *(f"r{axis}" for axis in range(self._kernel.row_rank - 1)), "j"]

    @property
    def _position(self) -> str:
        """The name of a position in the row."""
        return "j" if self._kernel.row_rank == 1 else "p"

    @property
    @abstractmethod
    def _scalar_lane(self) -> str:
        """What follows the name of a row scalar."""

    @abstractmethod
    def _blocks(self) -> int:
        """Return the number of blocks, but for those that share rows."""

    @abstractmethod
    def _locate(self) -> None:
        """Compute from the number of a thread where its row lies."""

    @abstractmethod
    def _open_loop(self) -> None:
        """Open the loop over what a thread computes of its row."""

    @abstractmethod
    def _row_scalars(self, values: Iterable[int]) -> None:
        """Compute row scalars."""

    @abstractmethod
    def _store_rows(self) -> None:
        """Store the row scalars that are results."""

    @abstractmethod
    def _begin(self, position: int) -> None:
        """Declare what a reduction has come to."""

    @abstractmethod
    def _finish(self, position: int) -> None:
        """Fold what a reduction has come to over the threads of a row."""

    @abstractmethod
    def _leave(self, position: int) -> None:
        """Fold over the threads of a block, and leave the result in scratch memory."""

    @abstractmethod
    def _fold_left(self, position: int) -> None:
        """Fold what block `s` has left."""

    @abstractmethod
    def _row_number(self) -> str:
        """Return the text of a row's number."""


def _has_loop(one: RowSweep) -> bool:
    return bool(one.reductions or one.stores or one.keeps)
