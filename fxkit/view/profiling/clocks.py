"""Clocks for timed code: the processor's, and events in the stream of an accelerator.

Work on an accelerator is only queued when a call returns. An event in the stream says when the
device got there; the processor's clock, read beside it, says how long the queueing took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CALIBRATIONS = 200


@dataclass(frozen=True)
class ClockReading:
    """What one run of timed code said.

    Attributes:
        device: Nanoseconds on the device that does the work, at each reading.
        host: Nanoseconds on the processor, at each reading.
    """

    device: Sequence[int]
    host: Sequence[int]


class HostClock:
    """The processor's clock: work is done when a call returns."""

    tick: Callable[[], Any] = staticmethod(time.perf_counter_ns)

    def read(self, ticks: Sequence[Any]) -> ClockReading:
        """Return the readings of a run."""
        return ClockReading(ticks, ticks)

    def wait(self) -> None:
        """Wait until all work is done: it is."""

    def cost(self) -> float:
        """Return the nanoseconds that a reading adds to the time between it and the next one."""
        tick = self.tick
        spent = []
        for _ in range(_CALIBRATIONS):
            first, _, _, _, last = tick(), tick(), tick(), tick(), tick()
            spent.append((last - first) / 4)
        return statistics.median(spent)


class EventClock:
    """Events in the current stream of a CUDA device."""

    def __init__(self, device: torch.device, events: Any = None) -> None:
        self._device = device
        self._events = events if events is not None else torch.cuda

    def tick(self) -> tuple[Any, int]:
        """Put an event into the stream, and read the processor's clock."""
        event = self._events.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter_ns()

    def read(self, ticks: Sequence[tuple[Any, int]]) -> ClockReading:
        """Wait for the events of a run, and return when they were reached."""
        self.wait()
        first = ticks[0][0]
        reached = [round(first.elapsed_time(event) * 1e6) for event, _ in ticks]
        return ClockReading(reached, [host for _, host in ticks])

    def wait(self) -> None:
        """Wait until the device has done all work."""
        self._events.synchronize(self._device)

    def cost(self) -> float:
        """Return what a reading adds on the device: an event is a time stamp between kernels."""
        return 0.0


Clock = HostClock | EventClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock that tells the time of work on a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()
