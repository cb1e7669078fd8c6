"""Staging buffers for float16: operands that a loop reads in order are converted block by block.

Processors convert vectors of float16 in an instruction or two, but compilers do not generate them
from a plain loop. So a block of a row is converted before the loop, into float32 that stays in the
L1 cache, and results are converted after it. An element that is read out of order, or under a
guard, is converted inside the loop by integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")

# Elements that are converted at once: some blocks fit into the first cache beside each other.
BLOCK = 256

# Vectors at the end of an array are written whole.
LANES = 16

# The tail of a block is read and written under a mask where the processor has masks for 16 bits,
# else one by one.
HALVES = """\
#if defined(__clang__)
#define FX_CONVERTS
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
typedef short fx_halves __attribute__((vector_size(32), may_alias));
typedef short fx_loose_halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float fx_singles __attribute__((vector_size(64), may_alias));
FX_INLINE fx_singles fx_widened(fx_halves h) {
  return (fx_singles)__builtin_ia32_vcvtph2ps512_mask(h, fx_singles{}, (short)-1, 4);
}
FX_INLINE fx_halves fx_narrowed(fx_singles x) {
  return (fx_halves)__builtin_ia32_vcvtps2ph512_mask(x, 0, fx_halves{}, (short)-1);
}
FX_INLINE void fx_widen(const unsigned short* from, float* to, long count) {
  long j = 0;
  for (; j + 16 <= count; j += 16)
    *(fx_singles*)(to + j) = fx_widened(*(const fx_loose_halves*)(from + j));
  if (j < count) {
    const unsigned short lanes = (unsigned short)((1u << (count - j)) - 1u);
    *(fx_singles*)(to + j) = fx_widened(
        (fx_halves)__builtin_ia32_loaddquhi256_mask((const short*)(from + j), fx_halves{}, lanes));
  }
}
FX_INLINE void fx_narrow(const float* from, unsigned short* to, long count) {
  long j = 0;
  for (; j + 16 <= count; j += 16)
    *(fx_loose_halves*)(to + j) = fx_narrowed(*(const fx_singles*)(from + j));
  if (j < count) {
    const unsigned short lanes = (unsigned short)((1u << (count - j)) - 1u);
    __builtin_ia32_storedquhi256_mask(
        (short*)(to + j), fx_narrowed(*(const fx_singles*)(from + j)), lanes);
  }
}
FX_INLINE void fx_round_halves(float* x, long count) {
  for (long j = 0; j < count; j += 16)
    *(fx_singles*)(x + j) = fx_widened(fx_narrowed(*(const fx_singles*)(x + j)));
}
FX_INLINE float fx_sum_halves(const unsigned short* from, long count) {
  fx_singles sums[4] = {};
  long j = 0;
  for (; j + 64 <= count; j += 64)
    for (int k = 0; k < 4; ++k)
      sums[k] += fx_widened(*(const fx_loose_halves*)(from + j + 16 * k));
  for (; j < count; j += 16) {
    alignas(64) float rest[16];
    fx_widen(from + j, rest, count - j < 16 ? count - j : 16);
    sums[0] += *(const fx_singles*)rest;
  }
  sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (int k = 0; k < 16; ++k) sum += sums[0][k];
  return sum;
}
#elif defined(__F16C__)
typedef short fx_loose_halves __attribute__((vector_size(16), aligned(2), may_alias));
typedef float fx_singles __attribute__((vector_size(32), may_alias));
FX_INLINE void fx_widen(const unsigned short* from, float* to, long count) {
  long j = 0;
  for (; j + 8 <= count; j += 8)
    *(fx_singles*)(to + j) =
        (fx_singles)__builtin_ia32_vcvtph2ps256(*(const fx_loose_halves*)(from + j));
  for (; j < count; ++j) to[j] = fx_from_lone_f16(from[j]);
}
FX_INLINE void fx_narrow(const float* from, unsigned short* to, long count) {
  long j = 0;
  for (; j + 8 <= count; j += 8)
    *(fx_loose_halves*)(to + j) =
        (fx_loose_halves)__builtin_ia32_vcvtps2ph256(*(const fx_singles*)(from + j), 0);
  for (; j < count; ++j) to[j] = fx_to_lone_f16(from[j]);
}
FX_INLINE void fx_round_halves(float* x, long count) {
  for (long j = 0; j < count; j += 8)
    *(fx_singles*)(x + j) = (fx_singles)__builtin_ia32_vcvtph2ps256(
        __builtin_ia32_vcvtps2ph256(*(const fx_singles*)(x + j), 0));
}
FX_INLINE float fx_sum_halves(const unsigned short* from, long count) {
  fx_singles sums[4] = {};
  long j = 0;
  for (; j + 32 <= count; j += 32)
    for (int k = 0; k < 4; ++k)
      sums[k] += (fx_singles)__builtin_ia32_vcvtph2ps256(
          *(const fx_loose_halves*)(from + j + 8 * k));
  sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (int k = 0; k < 8; ++k) sum += sums[0][k];
  for (; j < count; ++j) sum += fx_from_lone_f16(from[j]);
  return sum;
}
#else
#define FX_CONVERTS
#endif
#ifdef FX_CONVERTS
FX_INLINE void fx_widen(const unsigned short* from, float* to, long count) {
#pragma omp simd
  for (long j = 0; j < count; ++j) to[j] = fx_from_lone_f16(from[j]);
}
FX_INLINE void fx_narrow(const float* from, unsigned short* to, long count) {
#pragma omp simd
  for (long j = 0; j < count; ++j) to[j] = fx_to_lone_f16(from[j]);
}
FX_INLINE void fx_round_halves(float* x, long count) {
#pragma omp simd
  for (long j = 0; j < count; ++j) x[j] = fx_round_lone_f16(x[j]);
}
FX_INLINE float fx_sum_halves(const unsigned short* from, long count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long j = 0; j < count; ++j) sum += fx_from_lone_f16(from[j]);
  return sum;
}
#endif
"""


class StagedHalves:
    """What one loop reads and writes of float16 by way of arrays of float32.

    In the text, `h0` is such an array, whose first element belongs to the first of the loop, and
    `k3` an array that holds value 3 from one part of the loop to the next.

    Attributes:
        reads: Condition under which memory is touched, if any, and address of a first element →
            the array that it is read into.
        writes: Address of a first element → the array that is written to it.
        gathers: Load → the array into which its elements are read one by one.
        loops: The lines that do so.

    Args:
        begin: Where the loop begins.
        end: Where it ends.
        place: The variable of the loop.
        kept: The values that such arrays hold, each with its type.
    """

    def __init__(self, begin: str, end: str, place: str, kept: Mapping[int, str]) -> None:
        self.begin, self.end = begin, end
        self._element = place if begin == "0" else f"{place} - {begin}"
        self._kept = kept
        self.reads: dict[tuple[str, str], str] = {}
        self.writes: dict[str, str] = {}
        self.gathers: dict[int, str] = {}
        self.loops: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes or self.gathers or self._kept)

    def kept(self, position: int) -> str:
        """Return the text of an element of a value that is held for later parts."""
        return f"k{position}[{self._element}]"

    def read(self, start: str, condition: str = "") -> str:
        """Return the text of an element that is read.

        Args:
            start: The address of the first one.
            condition: What must hold where memory is to be touched.
        """
        return self._of(self.reads, (condition, start))

    def write(self, start: str) -> str:
        """Return the text of an element that is written; `start` is as for `read`."""
        return self._of(self.writes, start)

    def gather(self, load: int) -> str:
        """Return the text of an element that a loop of its own reads."""
        return self._of(self.gathers, load)

    def _of(self, arrays: dict[Key, str], key: Key) -> str:
        count = len(self.reads) + len(self.writes) + len(self.gathers)
        name = arrays.setdefault(key, f"h{count}")
        return f"{name}[{self._element}]"

    def before(self, count: str, room: int) -> list[str]:
        """Return the lines that stand before the loop, whose arrays have room for `room`."""
        room = -(-room // LANES) * LANES
        names = [*self.reads.values(), *self.writes.values(), *self.gathers.values()]
        lines = [f"alignas(64) float {name}[{room}];" for name in names]
        lines += [f"alignas(64) {kind} k{p}[{room}];" for p, kind in self._kept.items()]
        for (condition, start), name in self.reads.items():
            guard = f"if ({condition}) " if condition else ""
            lines.append(f"{guard}fx_widen({start}, {name}, {count});")
        return lines

    def after(self, count: str) -> list[str]:
        """Return the lines that stand after the loop."""
        return [f"fx_narrow({name}, {start}, {count});" for start, name in self.writes.items()]
