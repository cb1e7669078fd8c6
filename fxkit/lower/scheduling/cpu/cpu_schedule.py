"""How a kernel is computed on a CPU: what the passes of `CPU` decide, one after the other.

For a GPU a kernel becomes a loop nest that is transformed; here it stays a kernel beside a record
of decisions, which the printers of `codegen/cpp` read. As text, a large sum of two tensors:

    along rows, in tiles of 4096
      results past the caches: out0
      sweep 0: computes %0, %1, %2; store 0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.scheduling.cpu.float16_loop_fission import LoopPart, rounded_parts
from fxkit.lower.scheduling.cpu.row_sums import RowSums
from fxkit.lower.scheduling.index_intervals import IndexInterval, merged, whole_row
from fxkit.lower.scheduling.known_values import KnownValues
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan

# Long rows that threads share are cut into the same parts, whatever the number of threads, so that
# a sum is the same with one thread and with many.
PARTS = 32

_NO_SWEEPS = SweepPlan((), (), ())


@dataclass(frozen=True)
class AlongRows:
    """One row at a time, with vectors along it.

    Attributes:
        tile: A row is cut into tiles of so many elements, for the threads to share; 0 where not.
        is_split: Whether threads share each row, in `PARTS` parts.
    """

    tile: int = 0
    is_split: bool = False

    def __str__(self) -> str:
        words = ["along rows"]
        words += [f"in tiles of {self.tile}"] if self.tile else []
        words += [f"split into {PARTS} parts across threads"] if self.is_split else []
        return ", ".join(words)


@dataclass(frozen=True)
class AlongSummedRows(AlongRows):
    """The same for a kernel that also adds its rows up, into sums of columns."""

    def __str__(self) -> str:
        return f"{super().__str__()}, which are added up"


@dataclass(frozen=True)
class AlongPackedRows(AlongRows):
    """The same with two elements of bfloat16 at a time, which are a word."""

    def __str__(self) -> str:
        return f"{super().__str__()}, two elements of bfloat16 at a time"


@dataclass(frozen=True, kw_only=True)
class AlongFlattenedRows(AlongRows):
    """The same for a kernel whose short rows were joined to long ones.

    Attributes:
        whole: The kernel before.
        length: Length of a row before.
        strided: Loads that do not walk memory along the long row, by position → their accesses
            before. They are written out for each tile.
    """

    whole: Kernel
    length: int
    strided: Mapping[int, Access]

    def __str__(self) -> str:
        return f"{super().__str__()}, joined of rows of {self.length}"


@dataclass(frozen=True)
class AcrossRows:
    """Several neighbouring rows at a time, one a vector lane.

    Attributes:
        rows: How many.
        is_split: Whether threads share rows, in `PARTS` parts.
    """

    rows: int
    is_split: bool = False

    def __str__(self) -> str:
        split = f", split into {PARTS} parts across threads" if self.is_split else ""
        return f"across {self.rows} rows at a time{split}"


@dataclass(frozen=True)
class AcrossTransposedRows(AcrossRows):
    """The same for rows that lie along memory, which are transposed first, and results back.

    Attributes:
        columns: How many columns are transposed at a time; 0 where all are.
    """

    columns: int = 0

    def __str__(self) -> str:
        by_columns = f" {self.columns} columns at a time" if self.columns else ""
        return f"{super().__str__()}, transposed{by_columns}"


@dataclass(frozen=True)
class InCrossingTiles:
    """Tiles of two axes: the row, and one that crosses it, along which operands lie in memory.

    Attributes:
        axis: The axis that crosses the row.
        rows: Elements of a tile along it.
        columns: Elements of a tile along the row.
    """

    axis: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"in tiles of {self.rows} along axis {self.axis} by {self.columns} along rows"


Traversal = AlongRows | AcrossRows | InCrossingTiles
"""In which order the points of a kernel are computed."""


@dataclass(frozen=True)
class HoistedValues:
    """What is computed before the first row, by its positions in the body of a kernel.

    Attributes:
        computed: All that is, in order.
        kept: What the rows read.
        hidden: What was needed for nothing else, and is not computed in a row.
    """

    computed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    hidden: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self.kept)


@dataclass(frozen=True)
class SpeculativeSoftmax:
    """Two sweeps of a softmax, and the one that is tried before them.

    Attributes:
        maximum: The maximum of a row, by its position in the body of the kernel.
        scale: What it is multiplied with before it is subtracted, if it is.
        exponent: What there are exponentials of: the difference from the maximum.
        total: The sum of the exponentials.
        original: The two sweeps as they were.
        both: The sweep that is tried.
        first: The sweep that finds the maximum.
        second: The sweep that takes and sums the exponentials.
    """

    maximum: int
    scale: int | None
    exponent: int
    total: int
    original: tuple[RowSweep, RowSweep]
    both: RowSweep
    first: RowSweep
    second: RowSweep

    @property
    def dropped(self) -> set[int]:
        """Values that need no row buffer any more: the second sweep computes them again."""
        return {*self.original[0].keeps} - {*self.first.keeps}


@dataclass(frozen=True)
class JammedVectors:
    """How a loop handles several vectors an iteration; see `UnrollAndJam`.

    Attributes:
        vectors: How many, of float32.
        is_ordered: Whether its instructions are put in order before registers are given out.
    """

    vectors: int
    is_ordered: bool


@dataclass(frozen=True)
class CpuSchedule:
    """A kernel, and how it is computed on a CPU.

    Attributes:
        kernel: The kernel; from `GiveRow` on, its row has at least one axis.
        traversal: In which order its points are computed; None before that is chosen.
        plan: Its sweeps over a row; none before they are planned.
        cuts: The intervals that a row is cut into where guards change, if it is.
        hoisted: What is computed before the first row.
        jammed: How loops handle several vectors an iteration, if they do.
        streamed: How results are written that leave past the caches.
        streams_in_lanes: Whether that pays in explicit vectors only.
        speculative: Softmaxes whose exponentials are taken before their maximum is known.
        prefetched: One access for each pointer to short rows → how many elements ahead of a row
            memory is asked for.
        next_rows: One access for each pointer whose next row the last sweep asks for.
    """

    kernel: Kernel
    traversal: Traversal | None = None
    plan: SweepPlan = _NO_SWEEPS
    cuts: tuple[IndexInterval, ...] = ()
    hoisted: HoistedValues = HoistedValues()
    jammed: JammedVectors | None = None
    streamed: frozenset[Access] = frozenset()
    streams_in_lanes: bool = False
    speculative: tuple[SpeculativeSoftmax, ...] = ()
    prefetched: Mapping[Access, int] = field(default_factory=dict)
    next_rows: tuple[Access, ...] = ()

    @cached_property
    def facts(self) -> KnownValues:
        """What is known of the kernel's values."""
        return KnownValues(self.kernel)

    @cached_property
    def row_sums(self) -> RowSums:
        """What sums along rows ask for."""
        return RowSums(self.kernel, self.stretches)

    @cached_property
    def has_halves(self) -> bool:
        """Whether the kernel reads or writes float16."""
        return any(b.dtype == torch.float16 for b in self.kernel.buffers)

    @cached_property
    def stretches(self) -> tuple[IndexInterval, ...]:
        """The intervals of a row, of which there is one at least; see `index_intervals`."""
        return self.cuts or (whole_row(self.kernel),)

    def stretches_of(self, one: RowSweep) -> tuple[IndexInterval, ...]:
        """Return the stretches of a row that differ in what a sweep computes."""
        return merged(self.stretches, one.values)

    def parts_of(self, one: RowSweep) -> tuple[LoopPart, ...]:
        """Return the loops of a sweep that is divided where results are rounded to float16."""
        is_divided = self.has_halves and len(self.stretches) == 1
        return rounded_parts(self.kernel, one) if is_divided else ()

    def __str__(self) -> str:
        chosen = "in no order yet" if self.traversal is None else str(self.traversal)
        return "\n".join([chosen, *self._decisions(), *str(self.plan).splitlines()])

    def _decisions(self) -> Iterator[str]:
        def named(accesses: Mapping[Access, int] | frozenset[Access] | tuple[Access, ...]) -> str:
            return ", ".join(sorted({self.kernel.buffers[a.buffer].name for a in accesses}))

        if len(self.stretches) > 1:
            ends = ", ".join(str(stretch.end) for stretch in self.stretches)
            yield f"  rows cut where guards change, at {ends}"
        if self.hoisted:
            values = ", ".join(f"%{value}" for value in self.hoisted.kept)
            yield f"  before the first row: {values}"
        if self.jammed:
            ordered = ", instructions put in order" if self.jammed.is_ordered else ""
            yield f"  {self.jammed.vectors} vectors an iteration{ordered}"
        for softmax in self.speculative:
            yield f"  %{softmax.total} before %{softmax.maximum} is known, where that is near zero"
        if self.streamed:
            yield f"  results past the caches: {named(self.streamed)}"
        if self.prefetched:
            yield f"  rows asked for ahead: {named(self.prefetched)}"
        if self.next_rows:
            yield f"  next row asked for in the last sweep: {named(self.next_rows)}"


class CpuPass(ABC):
    """One decision on how a kernel is computed: `apply` returns a schedule that holds it.

    Implementations are frozen dataclasses; their docstrings show what they change.

    Attributes:
        is_required: Whether no kernel can be printed without it.
    """

    is_required: ClassVar[bool] = False

    @abstractmethod
    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with the decision, or as it is where there is nothing to decide."""

    @property
    def name(self) -> str:
        """Name of the pass: that of its class."""
        return type(self).__name__
