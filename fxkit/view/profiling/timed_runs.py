"""Run timed code and the module in turn, and what both say of the time that a call takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxkit.view.profiling.clocks import Clock, ClockReading
from fxkit.view.profiling.instrument import Instrumented
from fxkit.view.profiling.profile_numbers import AGREED


@dataclass(frozen=True)
class TimedRuns:
    """What the runs said: readings of the timed code, seconds of the module, and of a reading."""

    readings: list[ClockReading]
    whole: list[float]
    clock_cost: float = 0.0

    @property
    def timers(self) -> int:
        """How many spans there are between the readings of a run."""
        return len(self.readings[0].host) - 1 if self.readings else 0

    def instrumented(self) -> float | None:
        """Return the typical seconds of a run with timers."""
        return self._mean([_whole(reading) for reading in self.readings])

    def end_to_end(self) -> float | None:
        """Return the typical seconds of a call of the module."""
        return self._mean(self.whole)

    def noise(self) -> float:
        """Return the spread of what a call takes more than the timed run beside it, in seconds."""
        more = [w - _whole(r) for w, r in zip(self.whole, self.readings, strict=True)]
        low, high = quartiles(more) if more else (0.0, 0.0)
        return high - low

    def agree(self) -> bool:
        """Tell whether runs and calls take equally long, or surely differ by what they do."""
        timed, whole = self.instrumented(), self.end_to_end()
        if timed is None or whole is None:
            return True
        differ = abs(timed - self.clock_cost * self.timers - whole)
        return min(differ, self.noise()) <= AGREED * whole

    def _mean(self, spent: list[float]) -> float | None:
        return statistics.fmean(spent[i] for i in self._calm) if self.readings else None

    @property
    def _calm(self) -> list[int]:
        """The half of the runs that took least, together with the call beside each: what else ran
        on the machine then took little from either.
        """
        both = [w + _whole(r) for w, r in zip(self.whole, self.readings, strict=True)]
        order = sorted(range(len(both)), key=both.__getitem__)
        return order[: (len(order) + 1) // 2]

    def seconds(self, span: tuple[int, int]) -> list[float]:
        first, last = span
        return [
            max(0.0, (r.device[last] - r.device[first]) / 1e9 - self.clock_cost)
            for r in self.readings
        ]

    def typical(self, span: tuple[int, int]) -> float:
        """Return the mean over the same runs for every node, so that nodes add up to the whole."""
        return self._mean(self.seconds(span)) or 0.0

    def is_launch_bound(self, span: tuple[int, int]) -> bool:
        """Tell whether the processor took longer to queue the work than the device to do it."""
        if not self.readings or self.readings[0].device is self.readings[0].host:
            return False
        first, last = span
        waits = [
            (r.host[last] - r.host[first]) - (r.device[last] - r.device[first])
            for r in self.readings
        ]
        return statistics.median(waits) >= 0


def _whole(reading: ClockReading) -> float:
    return (reading.device[-1] - reading.device[0]) / 1e9


def measure(
    code: Instrumented,
    inputs: list[Any],
    clock: Clock,
    call: Callable[[], Any],
    warmup: int,
    iters: int,
) -> TimedRuns:
    """Call the timed code and the module in turn, and again where the two do not agree."""
    runs = TimedRuns([], [], clock.cost() / 1e9)
    for _ in range(warmup):
        _run_both(code, inputs, clock, call)
    deadline = None
    for _ in range(_ROUNDS):
        for _ in range(iters):
            reading, spent = _run_both(code, inputs, clock, call)
            runs.readings.append(reading)
            runs.whole.append(spent)
            if deadline is not None and time.monotonic() > deadline:
                return runs
        if runs.agree():
            return runs
        deadline = deadline or time.monotonic() + _MORE_SECONDS
    return runs


_ROUNDS = 4
_MORE_SECONDS = 0.8


def _run_both(
    code: Instrumented, inputs: list[Any], clock: Clock, call: Callable[[], Any]
) -> tuple[ClockReading, float]:
    """Run the timed code, then call the module; return the readings, and the call's seconds."""
    clock.wait()
    result, ticks = code.timed(*inputs)
    reading = clock.read(ticks)
    del result
    clock.wait()
    start = time.perf_counter_ns()
    result = call()
    clock.wait()
    spent = time.perf_counter_ns() - start
    del result
    return reading, spent / 1e9


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no run pay for the garbage of others, as `timeit` does.

    What is old stays: to look through all objects of a notebook takes longer than most profiles.
    """
    was_on = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
