"""Row loops that may use explicit vectors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule
from fxkit.lower.scheduling.cpu.lanes import Lanes, lanes_of
from fxkit.lower.scheduling.row_sweeps import RowSweep


class LaneRows(KernelPrinter, ABC):
    """Prints the loops of sweeps over rows, in lanes where they gain by it.

    In the text, `lanes3` has a sum or a maximum for each lane, and becomes value 3; `on` says which
    lanes there are at the end of a row.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule.kernel, name, schedule.plan)
        self._schedule = schedule
        self._streams, self._streams_in_lanes = schedule.streamed, schedule.streams_in_lanes
        self._is_near = False  # whether the loops are for operands near zero
        self._folds_apart = False  # whether lanes are put together elsewhere than behind loops
        self._scanned_before: set[int] = set()
        self._is_in_double = False  # whether their sums are in float64 from the first

    @abstractmethod
    def _pragma(self, values: Iterable[int], reductions: Iterable[int], clause: str) -> str:
        """Return what stands before a loop."""

    @abstractmethod
    def _loops(self, one: RowSweep, begin: str | int, end: str | int, clause: str = "") -> None:
        """Print the loops of a sweep over a block of the row."""

    def _loop_of(
        self, one: RowSweep, values: Iterable[int], body: Callable[[], None], clause: str
    ) -> Loop:
        """Return the loop of a sweep, or of a part of one.

        Args:
            one: What it does.
            values: Those of its values that may need a clause.
            body: Prints what is done for an element.
            clause: Another clause.
        """
        lanes = self._lanes_of(one)
        pragma = self._pragma(values, () if lanes else one.reductions, clause)
        folded = one.reductions if lanes else ()
        folds = {p: "max" if self._drops_nans(p) else "+" for p in folded}
        pragma += "".join(f" reduction({fold} : lanes{p})" for p, fold in folds.items())
        return Loop(pragma, body, lanes=lanes, folded=folded)

    def _lanes_of(self, one: RowSweep) -> Lanes | None:
        """Return how the loop of a sweep handles many elements at once, if it does."""
        return lanes_of(self._schedule, one, is_near=self._is_near)

    def _folding_loops(
        self, bounds: Bounds, loops: Sequence[Loop], kept: Mapping[int, str] | None = None
    ) -> None:
        """Print loops, and put together what lanes come to; see `_vector_loops`."""
        folded = [] if self._folds_apart else [p for loop in loops for p in loop.folded]
        for p in folded:
            self._open_fold(p)
        self._vector_loops(bounds, loops, kept)
        for p in folded:
            self._close_fold(p)

    def _has_near_version(self, one: RowSweep) -> bool:
        """Tell whether a sweep calls what is faster near zero, and may be repeated."""
        is_repeatable = not one.reductions and not any(
            self._body(p).is_scan or self._body(p).op == "check" for p in one.values
        )
        return is_repeatable and any(map(cpp_text.is_near_function, map(self._body, one.values)))

    def _near_loops(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print the loops twice: for operands near zero, and for any where one was not near."""
        self._open("{")
        self._add("int far = 0;")
        self._is_near = True
        self._loops(one, begin, end, " reduction(| : far)")
        self._is_near = False
        self._open("if (far) {")
        self._loops(one, begin, end)
        self._close()
        self._close()

    def _declare_accumulators(self, one: RowSweep) -> None:
        for p in one.reductions:
            start = cpp_text.identity_of(self._monoid(p), self._body(p).dtype)
            is_sum = self._is_float_sum(p)
            self._add(f"double t{p} = 0;" if is_sum else f"{self._type(p)} v{p} = {start};")
            if self._notes_nans(p):
                self._add(f"{self._flag(p)} nan{p} = 0;")
        for p in (p for p in one.values if self._body(p).is_scan):
            start = cpp_text.identity_of(self._monoid(p), self._body(p).dtype)
            is_again = p in self._scanned_before  # for a later sweep, as it was not kept
            self._add(f"{'' if is_again else self._type(p) + ' '}a{p} = {start};")
            self._scanned_before.add(p)

    def _settle_nans(self, one: RowSweep) -> None:
        """Make the results of reductions that met a NaN one."""
        for p in filter(self._notes_nans, one.reductions):
            nan = cpp_text.literal(math.nan, self._body(p).dtype)
            self._add(f"v{p} = nan{p} ? {nan} : v{p};")

    def _clauses(self, reductions: Iterable[int]) -> str:
        names = {"add": "+", "mul": "*", "max": "fx_max", "min": "fx_min"}
        text = ""
        for p in reductions:
            name = self._monoid(p) if self._drops_nans(p) else names[self._monoid(p)]
            text += f" reduction({name} : v{p})"
            text += f" reduction(| : nan{p})" if self._notes_nans(p) else ""
        return text

    def _total_type(self, position: int) -> str:
        return "double" if self._is_float_sum(position) else self._type(position)

    def _open_fold(self, position: int) -> None:
        """Declare what each lane of a reduction begins with."""
        is_largest = self._drops_nans(position)
        kind = "fx_lane_sums" if self._is_in_double and not is_largest else "fx_floats"
        start = f"v{position}" if is_largest else "0.0f"
        self._add(f"{kind} lanes{position} = fx_all({start});")

    def _close_fold(self, position: int) -> None:
        """Print that what the lanes of a reduction have come to is put together."""
        if self._drops_nans(position):
            self._add(f"v{position} = fx_largest(lanes{position});")
        else:
            self._add(f"v{position} += fx_sum(lanes{position});")

    def _accumulate_lanes(self, position: int, value: str) -> None:
        """Fold as many elements into what as many lanes come to."""
        assert self._at_once is not None
        lanes, which = f"lanes{position}", self._at_once.which
        if self._drops_nans(position):
            self._add(f"{lanes} = fx_larger({value}, {lanes}{which});")
        else:
            value = f"fx_present({value}{which})" if which else value
            self._add(f"{lanes} += {value};")
