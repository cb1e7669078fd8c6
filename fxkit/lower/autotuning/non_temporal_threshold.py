"""From which size on non-temporal stores pay on this machine: measured once, kept on disk.

See `codegen.cpp.non_temporal_stores`.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable

import torch

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.kept_times import times_path
from fxkit.lower.codegen.cpp.non_temporal_stores import STREAMS
from fxkit.lower.scheduling.cpu.stream_stores import LEAST_BYTES, LINE_BYTES, STAGED_ELEMENTS

# Larger results are taken for such as these.
_MOST_BYTES = 1 << 25

# So much faster it has to be, as what reads the results next is not known.
_MARGIN = 1.05

_ASKED = re.compile(r"(\d+) >= fx_least_streamed")


def allow_streams(library: ctypes.CDLL, text: str) -> None:
    """Let the kernels of a library write past the caches what is faster written so.

    Args:
        library: What was built.
        text: From which it was built.
    """
    sizes = sorted({int(size) for size in _ASKED.findall(text)})
    paying = [size for size in sizes if _pays(library, _kind(size))]
    if paying:
        ctypes.c_long.in_dll(library, "fx_least_streamed").value = min(paying)


def _kind(size: int) -> int:
    """Return the size that stands for others like it: the nearest power of two."""
    return min(max(LEAST_BYTES, 1 << round(math.log2(size))), _MOST_BYTES)


def _pays(library: ctypes.CDLL, size: int) -> bool:
    path, what = times_path("streams", (STREAMS,)), f"results of {size} bytes"
    try:
        streamed, plain = times.known_times(path, what, lambda: _measured(library, size))
    except MemoryError:
        return False
    return streamed * _MARGIN <= plain


def _measured(library: ctypes.CDLL, size: int) -> tuple[float, float]:
    """Time what is written past the caches, once read at once and once left alone, and what is not.

    No memory is written that was just read: results in use are several.
    """
    trial, threads = library.fx_stream_trial, torch.get_num_threads()
    trial.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3
    trial.restype = None
    # Tensors would be what modes and defaults make of them.
    memory = [ctypes.create_string_buffer(size + LINE_BYTES) for _ in range(4)]
    first, read, third, left = (
        ctypes.addressof(it) + -ctypes.addressof(it) % LINE_BYTES for it in memory
    )
    rooms = size // (STAGED_ELEMENTS * torch.float32.itemsize)

    def call(is_streamed: bool) -> Callable[[], None]:
        def run() -> None:
            trial(first, read, rooms, threads, is_streamed)
            trial(read, third, rooms, threads, False)
            trial(third, left, rooms, threads, is_streamed)

        return run

    return times.fastest(call(True), call(False))
