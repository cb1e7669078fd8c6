"""Conditions that hold, or do not, all along the loop that is printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.index_intervals import IndexInterval, computed, outcome


class LoopConditions:
    """What is known of the conditions of a kernel in the loop whose body is printed.

    Args:
        kernel: The kernel.

    Attributes:
        settled: Conditions of the row, in loops that they divide.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.settled: dict[int, bool] = {}
        self._kernel = kernel
        self._along: IndexInterval | None = None

    def enter(self, stretch: IndexInterval) -> dict[int, bool]:
        """Begin a loop along a stretch; return the conditions that are known there."""
        known = {**stretch.known, **self.settled}
        self._along = replace(stretch, known=known) if known else None
        return known

    def leave(self) -> None:
        """End the loop."""
        self._along = None

    def unless_idle(self, values: Iterable[int]) -> list[int]:
        """Return those of some values, in order, that something comes of in the loop."""
        if self._along is None:
            return sorted(values)
        return sorted(computed(self._kernel, self._along).intersection(values))

    def outcome(self, condition: int) -> bool | None:
        """Return what a condition is all along the loop, or None where that is not known."""
        if condition in self.settled:
            return self.settled[condition]
        return None if self._along is None else outcome(self._kernel, self._along, condition)
