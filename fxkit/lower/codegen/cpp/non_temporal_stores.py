"""Non-temporal (streaming) stores: large results bypass the caches.

A cache line that is written in part is read from memory first. Where a loop fills whole lines,
that read is a third of the traffic, for nothing; and what is larger than the caches is evicted
before anyone reads it. So the loop writes to a staging buffer of a few lines, which stays in the L1
cache, and non-temporal stores copy whole lines from there to memory.

Whether that is faster depends on the machine and on the size. The text reads a variable, which
`lower.autotuning.non_temporal_threshold` sets when the library is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fxkit.lower.codegen.cpp.lane_loops import gains_in_lanes
from fxkit.lower.codegen.cpp.prefetching import CACHED_BYTES, short_rows
from fxkit.lower.codegen.cpp.runtime_parameters import runtime_parameters
from fxkit.lower.codegen.cpp.text import calls_function
from fxkit.lower.loop_ir.loop_ir import Access, Kernel, Store
from fxkit.lower.loop_ir.scalar_functions import named
from fxkit.lower.scheduling.row_sweeps import RowSweep, Schedule

# Results of fewer bytes stay in a cache for those who read them next.
LEAST_BYTES = 1 << 22

# One of these for an element is done while memory is waited for.
_BRIEF = named(lambda f: f.is_brief)

# Elements that a room holds.
ROOM = 256

LINE_BYTES = 64

STREAMS = f"""\
__attribute__((weak)) long fx_least_streamed = 0x7fffffffffffffff;
#if defined(__AVX512F__)
#define FX_WORDS 64
#elif defined(__AVX__)
#define FX_WORDS 32
#else
#define FX_WORDS 16
#endif
typedef float fx_words __attribute__((vector_size(FX_WORDS), may_alias));
typedef fx_words fx_loose_words __attribute__((aligned(1)));
#if defined(__clang__)
#define FX_REPLACE(to, words) __builtin_nontemporal_store(words, (fx_words*)(to))
#elif defined(__AVX512F__)
#define FX_REPLACE(to, words) __builtin_ia32_movntps512((float*)(to), words)
#elif defined(__AVX__)
#define FX_REPLACE(to, words) __builtin_ia32_movntps256((float*)(to), words)
#elif defined(__SSE__)
#define FX_REPLACE(to, words) __builtin_ia32_movntps((float*)(to), words)
#else
#define FX_REPLACE(to, words) *(fx_words*)(to) = words
#endif
static __attribute__((noinline)) void fx_stream(void* result, const void* room, long bytes) {{
  char* const to = (char*)result;
  const char* const from = (const char*)room;
  long done = -(long)to & 63;
  done = done < bytes ? done : bytes;
  if (done) __builtin_memcpy(to, from, (unsigned long)done);
  for (; done + 64 <= bytes; done += 64)
    for (long k = done; k < done + 64; k += FX_WORDS)
      FX_REPLACE(to + k, (fx_words)*(const fx_loose_words*)(from + k));
  if (done < bytes) __builtin_memcpy(to + done, from + done, (unsigned long)(bytes - done));
}}
FX_INLINE void fx_stream_few(void* result, const void* room, long bytes) {{  // whole lines, if so
  if (((long)result | bytes) & 63) return fx_stream(result, room, bytes);
  for (long k = 0; k < bytes; k += FX_WORDS)
    FX_REPLACE((char*)result + k, *(const fx_words*)((const char*)room + k));
}}
static inline void fx_fence() {{
#ifdef __SSE__
  __builtin_ia32_sfence();
#endif
}}
extern "C" __attribute__((weak)) void fx_stream_trial(
    const float* from, float* to, long rooms, long threads, long is_streamed) {{
  #pragma omp parallel num_threads(threads) if (threads > 1)
  {{
    #pragma omp for schedule(static) nowait
    for (long base = 0; base < rooms * {ROOM}; base += {ROOM}) {{
      alignas(64) float y[{ROOM}];
      float* const z = is_streamed ? y : to + base;
      #pragma omp simd
      for (long j = 0; j < {ROOM}; ++j) z[j] = from[base + j] + 1.0f;
      if (is_streamed) fx_stream(to + base, y, sizeof y);
    }}
    fx_fence();
  }}
}}
"""


@dataclass(frozen=True)
class Room:
    """Room for a part of a result on its way to memory.

    In the text, `y0` is the room, and `z0` where the loop writes: there, or to memory.

    Attributes:
        number: Its number in the loop.
        kind: What it holds, as the text of a type.
        first: The address in memory of its first element, as text.
        size: Bytes of an element.
        is_in_lanes: Whether the loop can replace whole lines itself, where they begin with it.
        is_short: Whether a few lines are written, of known number.
    """

    number: int
    kind: str
    first: str
    size: int
    is_in_lanes: bool = False
    is_short: bool = False

    @property
    def declarations(self) -> list[str]:
        """The lines that declare it, and say where the loop writes."""
        n, kind, first = self.number, self.kind, self.first
        lines = [
            f"alignas({LINE_BYTES}) {kind} y{n}[{ROOM}];",
            f"{kind}* const z{n} = {self._is_needed} ? y{n} : {first};",
        ]
        if self.is_in_lanes:
            lines.insert(0, f"const bool is_past{n} = is_streamed && fx_begins_line({first});")
        return lines

    @property
    def copy(self) -> str:
        """The line that writes it to memory."""
        size = f"(stop - base) * {self.size}"
        function = "fx_stream_few" if self.is_short else "fx_stream"
        return f"if ({self._is_needed}) {function}({self.first}, y{self.number}, {size});"

    @property
    def _is_needed(self) -> str:
        return f"is_streamed && !is_past{self.number}" if self.is_in_lanes else "is_streamed"


def streamed_accesses(
    kernel: Kernel, plan: Schedule, *, in_lanes: bool = False
) -> frozenset[Access]:
    """Return how large results of a kernel are written that leave past the caches.

    Their rows are whole lines, and the sweep that writes them waits for memory.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        in_lanes: Whether a sweep may wait that is printed in lanes, and computes less then.
    """
    if runtime_parameters(kernel) or not kernel.points:
        return frozenset()
    waiting = [
        one
        for one in plan.sweeps
        if not _is_busy(kernel, one) or (in_lanes and gains_in_lanes(kernel, plan, one))
    ]
    stores = [kernel.stores[p] for one in waiting for p in one.stores]
    found = frozenset(store.access for store in stores if _fills_lines(kernel, store))
    return found if streamed_bytes(kernel, found) >= LEAST_BYTES else frozenset()


def streamed_bytes(kernel: Kernel, accesses: Iterable[Access]) -> int:
    """Return the bytes of all that is written."""
    return kernel.points * sum(element_bytes(kernel, access) for access in accesses)


def copied_bytes(kernel: Kernel, accesses: Iterable[Access]) -> int:
    """Return how large a copy leaves as much in the caches as a kernel does, or writes as much.

    Args:
        kernel: The kernel.
        accesses: What is written past the caches.
    """
    loads = [i.detail for i in kernel.body if i.op == "load"]
    moved = {
        (it.buffer, it.strides, it.scales): it
        for it in [*loads, *(store.access for store in kernel.stores)]
    }
    both = sum(_touched(kernel, it) * element_bytes(kernel, it) for it in moved.values())
    return max(streamed_bytes(kernel, accesses), both // 2)


def _touched(kernel: Kernel, access: Access) -> int:
    sizes = zip(kernel.sizes, access.strides, strict=True)
    return kernel.points if access.scales else math.prod(size for size, stride in sizes if stride)


def _is_busy(kernel: Kernel, one: RowSweep) -> bool:
    """Tell whether a sweep computes so much for an element that plain stores are done meanwhile."""
    called = [kernel.body[p] for p in one.values if calls_function(kernel.body[p])]
    long = [i for i in called if i.op not in _BRIEF or i.dtype != torch.float32]
    return bool(long) or len(called) > 1


def _fills_lines(kernel: Kernel, store: Store) -> bool:
    """Tell whether each row of a result lies along memory, and begins with a line."""
    access = store.access
    *outer, step = access.strides
    line = LINE_BYTES // element_bytes(kernel, access)
    steps = [stride for stride, size in zip(outer, kernel.sizes, strict=False) if size > 1]
    return (
        step == 1
        and not store.is_sum
        and not access.scales
        and access.offset % line == 0
        and all(stride and stride % line == 0 for stride in steps)
        and (kernel.sizes[-1] >= ROOM or _is_foreseen(kernel, tuple(outer)))
    )


def _is_foreseen(kernel: Kernel, outer: tuple[int, ...]) -> bool:
    """Tell whether rows are read in the order in which they are written, are asked for, or few.

    Short rows that lie apart are not foreseen: many of them have to be on their way at once, and
    stores that wait for whole lines leave room for few.
    """
    asked = short_rows(kernel)
    loads = [i.detail for i in kernel.body if i.op == "load"]
    return all(
        it.strides[:-1] == outer
        or it in asked
        or _touched(kernel, it) * element_bytes(kernel, it) < CACHED_BYTES
        for it in loads
    )


def element_bytes(kernel: Kernel, access: Access) -> int:
    """Return the bytes of what is read or written at a time."""
    return kernel.buffers[access.buffer].dtype.itemsize
