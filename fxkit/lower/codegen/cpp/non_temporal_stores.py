"""Non-temporal (streaming) stores as text: a staging buffer, and what copies it past the caches.

Whether that is faster depends on the machine and on the size. The text reads a variable, which
`lower.autotuning.non_temporal_threshold` sets when the library is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.lower.scheduling.cpu.stream_stores import LINE_BYTES, STAGED_ELEMENTS

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
    for (long base = 0; base < rooms * {STAGED_ELEMENTS}; base += {STAGED_ELEMENTS}) {{
      alignas(64) float y[{STAGED_ELEMENTS}];
      float* const z = is_streamed ? y : to + base;
      #pragma omp simd
      for (long j = 0; j < {STAGED_ELEMENTS}; ++j) z[j] = from[base + j] + 1.0f;
      if (is_streamed) fx_stream(to + base, y, sizeof y);
    }}
    fx_fence();
  }}
}}
"""


@dataclass(frozen=True)
class StagingBuffer:
    """A buffer for a part of a result on its way to memory.

    In the text, `y0` is the buffer, and `z0` where the loop writes: there, or to memory.

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
            f"alignas({LINE_BYTES}) {kind} y{n}[{STAGED_ELEMENTS}];",
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
