"""bfloat16 rows as packed pairs: each operation is printed twice, for both elements of a word.

Words are aligned to four bytes. A row that begins between them is copied to a staging buffer before
it is read, and its results after they are written; so is the odd element at the end of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxkit.lower.codegen.cpp.row_parts import clipped
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.codegen.cpp.vector_loops import Bounds, Loop
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.rounded_values import unrounded
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule
from fxkit.lower.scheduling.cpu.pack_bfloat16 import paired_accesses, row_of, spans_of
from fxkit.lower.scheduling.row_sweeps import RowSweep

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


class PackedBfloat16Printer(RowPrinter):
    """Writes a kernel whose rows are walked two elements at a time.

    In the text, `v3low` and `v3high` are the values of instruction 3 for the two, `w0` is what `p0`
    points to in words, `x0` room for it where it lies between them, and `j` counts words.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        self._half = ""
        self._block *= 2  # as many additions after each other as for single elements
        self._words: dict[str, str] = {}
        self._rows: dict[tuple[int, tuple[int, ...]], str] = {}  # in words, where they are shared
        self._results: list[str] = []

    def _streamed_loops(self, bounds: Bounds, loops: Sequence[Loop]) -> bool:
        return False  # lanes need no staging buffer

    def _declare(self) -> None:
        super()._declare()
        for access in paired_accesses(self._kernel):
            pointer = self._pointers[self._key(access)]
            if pointer in self._words:
                continue
            if len(self._schedule.stretches) > 1:
                self._point_into_row(access)
                continue
            self._words[pointer] = f"w{pointer[1:]}"
            row = f"{pointer} + begin" if self._tile_length else pointer
            count = "end - begin" if self._tile_length else str(self._length)
            is_output = self._kernel.buffers[access.buffer].is_output
            self._point_in_words(pointer, row, count, is_output)

    def _point_into_row(self, access: Access) -> None:
        """Declare where a row is walked in words of which different places are accessed at once."""
        pointer, row = self._pointers[self._key(access)], row_of(access)
        spans = spans_of(self._kernel, self._schedule.stretches)
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
        return self._tile_length or self._length

    def _tile(self) -> None:
        super()._tile()
        for text in self._results:
            self._add(text)

    def _sweep(self, one: RowSweep) -> None:
        if self._tile_length:
            self._whole_sweep(one, 0, "end - begin + 1")
        else:
            super()._sweep(one)

    @property
    def _elements(self) -> int:
        return 2

    @property
    def _marker_count(self) -> int:
        return self._longest // 2

    def _loops(self, one: RowSweep, begin: str | int, end: str | int, clause: str = "") -> None:
        parts = self._schedule.stretches_of(one)
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

    def _stepped_body(self, one: RowSweep, begin: str | int) -> None:
        if self._jammed:
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
        if instruction.op == "load" and self._half and self._plan.wide[position]:
            words = self._words[self._pointers[self._key(instruction.detail)]]
            return f"fx_{self._half}_bf16({self._value_at(f'{words}[j]')})"
        return super()._value(position)

    def _ref(self, position: int) -> str:
        text = super()._ref(position)
        is_twice = self._plan.wide[position] and self._body(position).op != "const"
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
