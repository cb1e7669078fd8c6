"""What a device can do at most: operations and bytes a second, measured in no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.view.profiling.clocks import clock_for


@dataclass(frozen=True)
class Peaks:
    """The two roofs of a device.

    Attributes:
        flops_per_second: Of a large matrix product.
        bytes_per_second: Of a large copy, bytes read and bytes written both counted.
        how: Where the figures come from.
    """

    flops_per_second: float
    bytes_per_second: float
    how: str


def measure_peaks(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, size: int = 1024
) -> Peaks:
    """Measure a device with the threads that torch has now.

    Args:
        device: The device.
        dtype: Of the matrix product.
        size: Rows and columns of the matrices; the copy is of 16 such matrices.
    """
    where = torch.device(device)
    a = torch.ones(size, size, dtype=dtype, device=where)
    wide = torch.ones(16, size, size, device=where)
    target = torch.empty_like(wide)
    product = _best(lambda: a @ a, where)
    copy = _best(lambda: target.copy_(wide), where)
    moved = 2 * wide.numel() * wide.element_size()
    how = f"measured: a product of {size}×{size} matrices, a copy of {moved // 2_000_000} MB"
    return Peaks(2 * size**3 / product, moved / copy, how)


def _best(call: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    clock = clock_for(device)
    best = float("inf")
    for _ in range(runs):
        clock.wait()
        start = time.perf_counter()
        call()
        clock.wait()
        best = min(best, time.perf_counter() - start)
    return best
