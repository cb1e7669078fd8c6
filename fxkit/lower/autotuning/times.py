"""Autotuning: kernel against torch's library, timed once for each shape and kept on disk.

Libraries differ by processor vendor: the one that torch uses may reach only half of the peak. So
whether a kernel is faster is measured on this machine and at these sizes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fxkit.errors import BuildError
from fxkit.lower.autotuning.kept_times import read_times, times_path, write_times
from fxkit.lower.building import deadline
from fxkit.lower.building.build import build

# Multiplications below which the time of a call decides, not that of the product.
MIN_TERMS = 1 << 18

# Times that each candidate is called; more where the kernel's is within `_CLOSE` of another's.
_ROUNDS, _MOST_ROUNDS, _CLOSE = 4, 12, 1.2

# So much faster a kernel has to be: on a machine that others use, times are off by about as much,
# and torch's library is what nobody has to justify.
_MARGIN = 1.05


Measure = Callable[[], tuple[float, float]]


def slower(what: str, key: str, measure: Measure, texts: Sequence[str]) -> str | None:
    """Return in words that a kernel is not clearly faster than torch, or None.

    Args:
        what: What they do, as a phrase.
        key: Under which the times are kept.
        measure: Returns the seconds of the kernel and of torch.
        texts: What the kernel's text stands on, without which the times say nothing.
    """
    try:
        kernel, library = kept_times(key, measure, texts)
    except BuildError as error:
        return error.message
    if kernel * _MARGIN <= library:
        return None
    times = f"in {library * 1e6:.0f} us, a kernel in {kernel * 1e6:.0f} us"
    hardly = ", not a twentieth less" if kernel < library else ""
    return f"torch's library {what} {times}{hardly}"


def kept_times(key: str, measure: Measure, texts: Sequence[str] = ()) -> tuple[float, float]:
    """Return the times of a trial, which are kept beside the kernels; see `known_times`."""
    return known_times(times_path("trials", texts), key, measure)


def known_times(path: Path, key: str, measure: Measure) -> tuple[float, float]:
    """Return times that are kept in a file, measured now where they are not.

    Args:
        path: The file.
        key: Under which they are kept, beside the number of threads.
        measure: Returns them in seconds.
    """
    key = f"{torch.get_num_threads()} threads: {key}"
    known = _known_in(path)
    if key not in known:
        deadline.remaining()
        known[key] = measure()
        write_times(path, known)
    return known[key]


@torch.no_grad()
def fastest(
    kernel: Callable[[], object],
    *others: Callable[[], object],
    before: Callable[[], object] = bool,
) -> tuple[float, float]:
    """Return the least time of a kernel and that of all others, which are called in turn.

    Args:
        kernel: Calls the kernel.
        others: Call what else computes the same.
        before: Is called before each of them, and not timed.
    """
    candidates = (kernel, *others)
    best = [float("inf")] * len(candidates)
    for turn in range(_MOST_ROUNDS + 1):
        if turn > _ROUNDS and not 1 / _CLOSE < best[0] / min(best[1:]) < _CLOSE:
            break
        for position, candidate in enumerate(candidates):
            before()
            start = time.perf_counter()
            candidate()
            if turn:
                best[position] = min(best[position], time.perf_counter() - start)
    return best[0], min(best[1:])


def trial_function(source: str) -> Any:
    """Return what a trial's text calls `fx_trial`."""
    function = build(source).handle.fx_trial
    function.restype = None
    return function


def beside(dtype: torch.dtype) -> str:
    """Return what the key of a measurement says of the floats that integers are timed against."""
    return "" if dtype == torch.float32 else f" beside {dtype}"


def near(size: int) -> int:
    """Round a size up to one whose binary digits after the second are noughts."""
    unit = 1 << max(0, size.bit_length() - 2)
    return -(-size // unit) * unit


def all_near(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Round each size up; see `near`."""
    return tuple(map(near, sizes))


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return ones of a shape, in memory as its strides say."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.ones(span, dtype=dtype).as_strided(shape, strides)


_Times = dict[str, tuple[float, float]]


@functools.cache
def _known_in(path: Path) -> _Times:
    try:
        return {str(key): (float(a), float(b)) for key, (a, b) in read_times(path).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
