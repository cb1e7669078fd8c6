"""bfloat16 rows as packed pairs: two elements in each 32-bit word.

The upper element is a float32 once the lower half is cleared, the lower one once it is shifted up:
one instruction each, where a vector of 16-bit elements has to be widened first, and narrowed again
before it is stored. So each operation of a loop is printed twice, for the lower and for the upper
elements.

Words are aligned to four bytes. A row that begins between them is copied to a staging buffer before
it is read, and its results after they are written; so is the odd element at the end of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fxkit.lower.codegen.cpp.lane_loops import MOST, gains_in_lanes, stands_in_lanes, unguarded
from fxkit.lower.codegen.cpp.non_temporal_stores import streamed_accesses
from fxkit.lower.codegen.cpp.row_invariants import common_values
from fxkit.lower.codegen.cpp.row_parts import clipped
from fxkit.lower.codegen.cpp.rows import TILE, RowPrinter
from fxkit.lower.codegen.cpp.runtime_parameters import is_runtime
from fxkit.lower.codegen.cpp.text import calls_function
from fxkit.lower.codegen.cpp.unroll_and_jam import is_ordered, step_type
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Lanes, Loop
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.scheduling.index_intervals import IndexInterval, computed, stretches
from fxkit.lower.scheduling.row_sweeps import MAX_BUFFER_BYTES, RowSweep

# Rows shorter than this are worth it where they fill whole vectors of words.
LONG = 256
LANES = 16

# Room on the stack for rows that lie between words.
MAX_SPARE_BYTES = 2 * MAX_BUFFER_BYTES

PAIRS = """\
typedef unsigned fx_pair __attribute__((may_alias));
FX_INLINE float fx_low_bf16(unsigned pair) { return fx_float((int)(pair << 16)); }
FX_INLINE float fx_high_bf16(unsigned pair) { return fx_float((int)(pair & 0xffff0000u)); }
FX_INLINE unsigned fx_upper_held_bf16(float x) { return (unsigned)fx_bits(x); }
FX_INLINE unsigned fx_upper_quiet_bf16(float x) {
  unsigned bits = (unsigned)fx_bits(x);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
FX_INLINE unsigned fx_upper_bf16(float x) {
  return x != x ? 0x7fc00000u : fx_upper_quiet_bf16(x);
}
FX_INLINE unsigned fx_paired(unsigned low, unsigned high) {
  return (high & 0xffff0000u) | (low >> 16);
}
static inline bool fx_is_between(const unsigned short* row, long count) {
  return ((((unsigned long)row >> 1) | (unsigned long)count) & 1ul) != 0;
}
static inline const fx_pair* fx_pairs(const unsigned short* row, unsigned short* room, long count) {
  if (!fx_is_between(row, count)) return (const fx_pair*)row;
  __builtin_memcpy(room, row, 2 * (unsigned long)count);
  if (count & 1) room[count] = 0;
  return (const fx_pair*)room;
}
"""

_HALVES = ("low", "high")
_REDUCTIONS = frozenset({"reduce_add", "reduce_max", "reduce_min"})


def is_packed_bfloat16(kernel: Kernel) -> bool:
    """Tell whether the rows of a kernel can be walked two elements at a time.

    Args:
        kernel: A kernel whose row is its innermost axis.
    """
    if kernel.row_rank != 1:
        return False
    length, wide = kernel.sizes[-1], kernel.row_wide
    is_tiled = not kernel.has_reductions and (is_runtime(length) or length > TILE)
    if not is_tiled and (is_runtime(length) or length % (2 if length >= LONG else 2 * LANES)):
        return False
    accesses = _paired_accesses(kernel)
    room = (TILE if is_tiled else length) * torch.bfloat16.itemsize
    parts = stretches(kernel)
    if len(parts) > 1 and (is_tiled or not _are_even(kernel, parts)):
        return False
    return (
        any(i.op == "load" and is_wide for i, is_wide in zip(kernel.body, wide, strict=True))
        and all(_all_stand(kernel, part, wide) for part in parts)
        and all(_is_along(kernel, access) for access in accesses)
        and all(
            not any(s.access.strides[-1:]) or kernel.body[s.value].dtype == torch.float32
            for s in kernel.stores
        )
        and room * len(set(accesses)) <= MAX_SPARE_BYTES
        and not common_values(kernel)
    )


def _are_even(kernel: Kernel, parts: Sequence[IndexInterval]) -> bool:
    """Tell whether stretches of a row, and what is read along them, consist of whole words."""
    spans = _spans(kernel, parts)
    return all(part.begin % 2 == 0 for part in parts) and all(
        type(access.offset) is int and (access.offset - spans[_row_of(access)][0]) % 2 == 0
        for access in _paired_accesses(kernel)
        if _row_of(access) in spans
    )


def _row_of(access: Access) -> tuple[int, tuple[int, ...]]:
    """Return what the accesses of the same row of memory have in common."""
    return access.buffer, access.strides


def _spans(
    kernel: Kernel, parts: Sequence[IndexInterval]
) -> dict[tuple[int, tuple[int, ...]], tuple[int, int]]:
    """Return, for each row of memory, where what is accessed of it begins and ends.

    Args:
        kernel: The kernel.
        parts: The stretches of its rows.
    """
    spans: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    def widen(access: Access, part: IndexInterval) -> None:
        first, last = access.offset + part.begin, access.offset + part.end
        low, high = spans.get(_row_of(access), (first, last))
        spans[_row_of(access)] = min(low, first), max(high, last)

    for part in parts:
        for position in computed(kernel, part):
            if kernel.body[position].op == "load":
                widen(kernel.body[position].detail, part)
        for store in kernel.stores:
            widen(store.access, part)
    return spans


def _all_stand(kernel: Kernel, part: IndexInterval, wide: Sequence[bool]) -> bool:
    """Tell whether all that is computed along a stretch is printed twice, or need not be."""
    found = computed(kernel, part)
    return not [p for p in found if not _can_stand(unguarded(kernel, part, p), wide[p])]


def _can_stand(instruction: Instruction, is_wide: bool) -> bool:
    """Tell whether an instruction is one of those that are printed twice, or need not be."""
    if instruction.is_scan or instruction.op in ("check", "index"):
        return False
    if instruction.is_reduction:
        return instruction.op in _REDUCTIONS and instruction.dtype == torch.float32
    if not is_wide:
        return True
    if instruction.op == "load":
        return not instruction.operands
    return instruction.dtype in (torch.float32, torch.bool)


def _paired_accesses(kernel: Kernel) -> list[Access]:
    """Return how memory is accessed that varies along the row."""
    loads = [i.detail for i in kernel.body if i.op == "load"]
    accesses = [*loads, *(store.access for store in kernel.stores)]
    return [access for access in accesses if any(access.strides[-1:])]


def _is_along(kernel: Kernel, access: Access) -> bool:
    """Tell whether an access walks elements of bfloat16 in the order in which they lie."""
    return access.strides[-1] == 1 and kernel.buffers[access.buffer].dtype == torch.bfloat16


class PackedBfloat16Printer(RowPrinter):
    """Writes a kernel whose rows are walked two elements at a time.

    In the text, `v3low` and `v3high` are the values of instruction 3 for the two, `w0` is what `p0`
    points to in words, `x0` room for it where it lies between them, and `j` counts words.

    Args:
        kernel: A kernel that `is_packed_bfloat16`.
        name: Name of the function.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self._half = ""
        self._block *= 2  # as many additions after each other as for single elements
        self._words: dict[str, str] = {}
        self._rows: dict[tuple[int, tuple[int, ...]], str] = {}  # in words, where they are shared
        self._results: list[str] = []
        self._choose_streams()

    def _choose_streams(self) -> None:
        """Choose which results leave past the caches: in lanes, and where no functions are called.

        Else two elements take longer to compute than to write.
        """
        self._streams, self._streams_in_lanes = frozenset(), True
        if self._even_lanes(2 * MOST).is_even:
            sweeps = filter(self._is_short_in_lanes, self._schedule.sweeps)
            written = {self._kernel.stores[p].access for one in sweeps for p in one.stores}
            self._streams = streamed_accesses(self._kernel, self._schedule) & written

    def _writes(self, one: RowSweep, accesses: Collection[Access]) -> bool:
        return any(self._kernel.stores[p].access in accesses for p in one.stores)

    def _is_short_in_lanes(self, one: RowSweep) -> bool:
        is_short = not any(calls_function(self._body(p)) for p in one.values)
        plan, kinds = self._schedule, (torch.bfloat16,)
        return is_short and all(
            stands_in_lanes(self._kernel, plan, one, kinds, along=stretch)
            for stretch in self._stretches_of(one)
        )

    def _streamed_loops(self, bounds: Bounds, loops: Sequence[Loop]) -> bool:
        return False  # lanes need no room for a part of a result

    def _attribute(self) -> str:
        if not self._is_stepped:
            return super()._attribute()
        return "FX_SCHEDULED " if is_ordered(self._kernel, in_pairs=True) else ""

    def _declare(self) -> None:
        super()._declare()
        for access in _paired_accesses(self._kernel):
            pointer = self._pointers[self._key(access)]
            if pointer in self._words:
                continue
            if len(self._stretches) > 1:
                self._point_into_row(access)
                continue
            self._words[pointer] = f"w{pointer[1:]}"
            row = f"{pointer} + begin" if self._is_tiled else pointer
            count = "end - begin" if self._is_tiled else str(self._length)
            is_output = self._kernel.buffers[access.buffer].is_output
            self._point_in_words(pointer, row, count, is_output)

    def _point_into_row(self, access: Access) -> None:
        """Declare where a row is walked in words of which different places are accessed at once."""
        pointer, row = self._pointers[self._key(access)], _row_of(access)
        spans = _spans(self._kernel, self._stretches)
        if row not in spans:  # nothing comes of what would be read
            return
        first, last = spans[row]
        if row not in self._rows:
            self._rows[row] = f"w{pointer[1:]}"
            is_output = self._kernel.buffers[access.buffer].is_output
            start = f"{pointer} + {first - access.offset}"
            self._point_in_words(pointer, start, str(last - first), is_output, last - first)
        self._words[pointer] = f"({self._rows[row]} + {(access.offset - first) // 2})"

    def _point_in_words(
        self, pointer: str, row: str, count: str, is_output: bool, room: int | None = None
    ) -> None:
        """Declare where a row, or a tile of it, is walked in words."""
        words, spare = f"w{pointer[1:]}", f"x{pointer[1:]}"
        self._add(f"alignas(64) unsigned short {spare}[{room or self._longest}];")
        if is_output:
            is_between = f"fx_is_between({row}, {count})"
            where = f"{is_between} ? {spare} : {row}"
            self._add(f"fx_pair* const {words} = (fx_pair*)({where});")
            if any(self._pointers[self._key(access)] == pointer for access in self._streams):
                is_past = f"is_past{pointer[1:]}"
                self._add(f"const bool {is_past} = is_streamed && fx_begins_line({row});")
            self._results.append(
                f"if ({is_between}) __builtin_memcpy({row}, {spare}, 2 * (unsigned long)({count}));"
            )
        else:
            self._add(f"const fx_pair* const {words} = fx_pairs({row}, {spare}, {count});")

    @property
    def _longest(self) -> int:
        """The most elements that are walked at once."""
        return self._tile_length if self._is_tiled else self._length

    def _tile(self) -> None:
        super()._tile()
        for text in self._results:
            self._add(text)

    def _sweep(self, one: RowSweep) -> None:
        if self._is_tiled:
            self._uncut_sweep(one, 0, "end - begin + 1")
        else:
            super()._sweep(one)

    def _open_steps(self) -> None:
        kind = step_type(self._kernel, in_pairs=True)
        self._add(f"FX_STEPS({kind}, {self._longest // 2});")

    def _loops(self, one: RowSweep, begin: str | int, end: str | int, clause: str = "") -> None:
        parts = self._stretches_of(one)
        for stretch in parts:
            first, last = clipped(stretch, begin, end, self._length)
            bounds = Bounds(_halved(first), _halved(last), self._longest // 2)
            self._enter(stretch)
            if len(parts) > 1:  # each has lanes of its own
                self._open("{")
            self._full_loops(one, bounds, 0, clause)
            if len(parts) > 1:
                self._close()
            self._leave()

    def _lanes_of(self, one: RowSweep) -> Lanes | None:
        gains = all(self._gain_along(one, stretch) for stretch in self._stretches_of(one))
        is_in_lanes = gains or self._writes(one, self._streams)
        return self._even_lanes(2 * MOST) if is_in_lanes else None

    def _gain_along(self, one: RowSweep, stretch: IndexInterval) -> bool:
        return gains_in_lanes(
            *(self._kernel, self._schedule, one, (torch.bfloat16,)),
            is_near=self._is_near,
            along=stretch,
        )

    def _lengths(self) -> tuple[int, ...]:
        return (*super()._lengths(), *(stretch.begin for stretch in self._stretches))

    def _stepped_body(self, one: RowSweep, begin: str | int) -> None:
        if self._is_stepped:
            self._add("FX_STEP(j);")
        self._loop_body(one)

    def _loop_body(self, one: RowSweep) -> None:
        for value in self._conditions.unless_idle({*one.values, *one.buffered}):
            for self._half in _HALVES:
                is_kept = value in one.buffered
                text = self._kept(value) if is_kept else self._value(value)
                self._add(f"const {self._type(value)} {self._ref(value)} = {text};")
        for value in self._conditions.unless_idle(one.keeps):
            for self._half in _HALVES:
                self._set_at(f"b{value}[{self._row_offset()}]", self._ref(value))
        for position in one.stores:
            self._store(position)
        for position in one.reductions:
            self._accumulate(position, f"v{position}")
        self._half = ""

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "load" and self._half and self._schedule.wide[position]:
            words = self._words[self._pointers[self._key(instruction.detail)]]
            return f"fx_{self._half}_bf16({self._value_at(f'{words}[j]')})"
        return super()._value(position)

    def _ref(self, position: int) -> str:
        text = super()._ref(position)
        is_twice = self._schedule.wide[position] and self._body(position).op != "const"
        is_twice = is_twice and self._conditions.outcome(position) is None
        return text + self._half if is_twice else text

    def _both(self, position: int) -> tuple[str, str]:
        """Return the texts that stand for a value of the two elements."""
        texts = []
        for self._half in _HALVES:
            texts.append(self._ref(position))
        return texts[0], texts[1]

    def _row_offset(self) -> str:
        return f"{self._length // 2} + j" if self._half == "high" else "j"

    def _store(self, position: int) -> None:
        store = self._kernel.stores[position]
        if not any(store.access.strides[-1:]):
            super()._store(position)
            return
        value = unrounded(self._kernel, position)
        kind = "quiet_" if self._facts.is_quiet else ""
        kind = "held_" if self._facts.is_bfloat16(value) else kind
        low, high = (f"fx_upper_{kind}bf16({text})" for text in self._both(value))
        pointer = self._pointers[self._key(store.access)]
        place, value = f"{self._words[pointer]}[j]", f"fx_paired({low}, {high})"
        if store.access in self._streams:
            self._add(f"fx_put(&{place}, {value}, is_past{pointer[1:]});")
        else:
            self._set_at(place, value)

    def _accumulate(self, position: int, into: str) -> None:
        """Fold what the two elements come to into an accumulator."""
        low, high = self._both(self._body(position).operands[0])
        if self._at_once:
            is_largest = self._drops_nans(position)
            both = f"fx_larger({low}, {high})" if is_largest else f"{low} + {high}"
            self._accumulate_lanes(position, both)
            return
        if not self._drops_nans(position):
            self._add(f"{into} += {low} + {high};")
            return
        compare = self._comparison(position)
        if self._notes_nans(position):
            self._add(f"nan{position} |= {low} != {low};")
            self._add(f"nan{position} |= {high} != {high};")
        self._add(f"const float m{position} = {high} {compare} {low} ? {high} : {low};")
        self._add(f"{into} = m{position} {compare} {into} ? m{position} : {into};")


def _halved(bound: str | int) -> str:
    """Return the text of half of a bound that is even."""
    return str(int(bound) // 2) if str(bound).isdecimal() else f"({bound}) / 2"
