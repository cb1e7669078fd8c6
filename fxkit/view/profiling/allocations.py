"""The memory that torch's allocator hands out while something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fxkit.torch_adapters import memory_profiler


class Meter(Protocol):
    """Tells the most bytes that were handed out at once since the first start."""

    def start(self) -> None:
        """Begin to look."""

    def stop(self) -> int:
        """Return the peak since the last start, over what there was at the first; 0 if stopped."""
        ...


class ProcessorMeter:
    """Adds up what torch's profiler notes of each allocation and release.

    It is the older of torch's two profilers: the newer one writes to stderr when it starts.
    """

    def __init__(self) -> None:
        self._now = 0
        self._is_on = False

    def start(self) -> None:
        """Begin to look."""
        self._is_on = memory_profiler.can_note_allocations()
        if self._is_on:
            memory_profiler.start()

    def stop(self) -> int:
        """Return the peak since the last start."""
        if not self._is_on:
            return 0
        self._is_on = False
        peak = None
        for change in memory_profiler.stop():
            self._now += change
            peak = self._now if peak is None else max(peak, self._now)
        return max(self._now, peak if peak is not None else self._now)


class CudaMeter:
    """Asks the caching allocator of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)

    def start(self) -> None:
        """Begin to look."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int:
        """Return the peak since the last start."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def meter_for(device: torch.device) -> Meter | None:
    """Return what tells of a device's allocator; None where nothing does."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu" and hasattr(torch.autograd, "_enable_profiler_legacy"):
        return ProcessorMeter()
    return None


def allocator_peak(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak of bytes that a call allocates, over what was there before.

    Args:
        call: Runs the program once.
        device: Where it runs.

    Returns:
        Bytes, memory inside of operators included; None where the device's allocator does not
        tell.
    """
    meter = meter_for(device)
    if meter is None:
        return None
    meter.start()
    try:
        result = call()
        del result
    finally:
        peak = meter.stop()
    return peak
