"""Vectorised inner loops, with the prologue and epilogue that staging float16 takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.float16_staging import BLOCK, StagedHalves
from fxkit.lower.codegen.cpp.lines import Lines
from fxkit.lower.codegen.cpp.non_temporal_stores import StagingBuffer
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.lanes import Lanes
from fxkit.lower.scheduling.cpu.stream_stores import LINE_BYTES, STAGED_ELEMENTS, element_bytes


@dataclass(frozen=True)
class Bounds:
    """Where a loop begins and ends.

    Attributes:
        begin: Its first index, as text.
        end: The index behind its last one, as text.
        most: The most elements that it can have; may be known only at run time.
        block: How many elements are handled at once, where halves are converted apart from them.
    """

    begin: str
    end: str
    most: int
    block: int = BLOCK

    @property
    def is_cut(self) -> bool:
        """Whether a loop over halves is divided into blocks."""
        return is_runtime(self.most) or self.most > self.block

    @property
    def base(self) -> str:
        """The name of the first index of a block, or of the loop where it is one."""
        return "base" if self.is_cut or not self.begin.isalnum() else self.begin


@dataclass(frozen=True)
class Loop:
    """One of the loops over the same elements.

    Attributes:
        pragma: What stands before it, or nothing.
        body: Prints what is done for an element.
        rounded: Values whose arrays are rounded to halves behind it.
        lanes: How it says how many elements it handles at once, if it does.
        folded: Reductions that fold in lanes.
    """

    pragma: str
    body: Callable[[], None]
    rounded: tuple[int, ...] = ()
    lanes: Lanes | None = None
    folded: tuple[int, ...] = ()


class VectorLoops(Lines, ABC):
    """Prints loops, each of which may become vector code.

    Args:
        kernel: The kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._has_halves = any(b.dtype == torch.float16 for b in kernel.buffers)
        self._halves: StagedHalves | None = None  # those of the loop whose body is printed
        self._place = self._variable  # what stands for the variable in an address
        self._is_lone = False  # whether what is printed will not become vector code
        self._at_once: Lanes | None = None  # those of the loop whose body is printed
        self._streams: frozenset[Access] = frozenset()  # what is written past the caches
        self._streams_in_lanes = False  # whether that pays in lanes only
        self._staging_numbers: dict[Access, int] | None = None  # in the loop that is printed

    @property
    def _variable(self) -> str:
        """The variable of the loops."""
        return "j"

    def _step(self, access: Access) -> int:
        """Return how far an access goes from one element of a loop to the next."""
        return access.strides[-1]

    @abstractmethod
    def _address(self, access: Access) -> str:
        """Return the text of an element in memory."""

    def _holds(self, guard: int) -> bool:
        """Tell whether a guard is known to hold all along the loop."""
        return False

    def _vector_loops(
        self, bounds: Bounds, loops: Sequence[Loop], kept: Mapping[int, str] | None = None
    ) -> None:
        """Print loops; halves that they walk in order are converted apart from them.

        Args:
            bounds: Where they begin and end.
            loops: One, or several that follow each other for each block.
            kept: Values that arrays hold from one loop to the next, each with its type.
        """
        if self._has_halves and self._staged_loops(bounds, loops, kept or {}):
            return
        if self._streams and self._streamed_loops(bounds, loops):
            return
        self._plain_loops(bounds.begin, bounds.end, loops)

    def _plain_loops(self, begin: str, end: str, loops: Sequence[Loop]) -> None:
        for loop in loops:
            if loop.lanes:
                self._lane_loop(begin, end, loop)
            else:
                self._element_loop(begin, end, loop)
            count = end if begin == "0" else f"{end} - {begin}"
            for position in loop.rounded:
                self._add(f"fx_round_halves(k{position}, {count});")

    def _element_loop(self, begin: str, end: str, loop: Loop) -> None:
        """Print a loop that handles one element at a time, as far as its text says."""
        name = self._variable
        if loop.pragma:
            self._add(loop.pragma)
        self._open(f"for (long {name} = {begin}; {name} < {end}; ++{name}) {{")
        self._is_lone = not loop.pragma
        loop.body()
        self._is_lone = False
        self._close()

    def _lane_loop(self, begin: str, end: str, loop: Loop) -> None:
        """Print a loop that handles many elements at once."""
        name, lanes = self._variable, loop.lanes
        assert lanes is not None
        self._add(f"FX_SIMD({loop.pragma.removeprefix('#pragma omp simd').strip()})")
        self._open(f"for (long {name} = {begin}; {name} < {end}; {name} += FX_WIDE) {{")
        if not lanes.is_even:
            self._add(f"const fx_mask on = fx_first({end} - {name});")
        self._at_once = lanes
        loop.body()
        self._at_once = None
        self._close()

    def _value_at(self, place: str) -> str:
        """Return the value of an element, or of as many from there on as the loop handles."""
        return f"fx_load(&{place}{self._at_once.which})" if self._at_once else place

    def _set_at(self, place: str, value: str) -> None:
        """Print that an element, or as many from there on as the loop handles, becomes a value."""
        if self._at_once:
            self._add(f"fx_store(&{place}, {value}{self._at_once.which});")
        else:
            self._add(f"{place} = {value};")

    def _apart(self, begin: str, end: str, loops: Sequence[Loop]) -> list[str]:
        """Return the lines of loops, for what is printed around them once they are known."""
        before, self._lines = self._lines, []
        self._depth += 1
        self._plain_loops(begin, end, loops)
        self._depth -= 1
        inner, self._lines = self._lines, before
        return inner

    def _streamed_loops(self, bounds: Bounds, loops: Sequence[Loop]) -> bool:
        """Print loops whose large results are staged, and tell whether there are any."""
        sizes = [element_bytes(self._kernel, access) for access in self._streams]
        begin = bounds.begin
        is_line = begin.isidentifier() or (
            begin.isdecimal() and not any(int(begin) * size % LINE_BYTES for size in sizes)
        )
        is_known = is_line or begin.isdecimal()  # else the first line is written in two parts
        is_long = bounds.most * min(sizes) >= (2 if is_line else 8) * LINE_BYTES
        if not (is_known and is_long and all(loop.pragma for loop in loops)):
            return False
        self._staging_numbers = {}
        inner = self._apart("base", "stop", loops)
        written, self._staging_numbers = self._staging_numbers, None
        if not written:
            return False
        buffers = [
            StagingBuffer(
                number,
                cpp_text.MEMORY[self._kernel.buffers[access.buffer].dtype],
                self._first(access, "base"),
                element_bytes(self._kernel, access),
                all(loop.lanes and loop.lanes.is_even for loop in loops),
                bounds.most < STAGED_ELEMENTS and begin.isdecimal() and bounds.end.isdecimal(),
            )
            for access, number in written.items()
        ]
        self._open_staging(bounds)
        for buffer in buffers:
            for line in buffer.declarations:
                self._add(line)
        self._lines += inner
        for buffer in buffers:
            self._add(buffer.copy)
        self._close()
        return True

    def _open_staging(self, bounds: Bounds) -> None:
        """Open a loop over what staging buffers hold, or the scope of one for all."""
        begin, end = bounds.begin, bounds.end
        if bounds.most > STAGED_ELEMENTS:
            self._open(f"for (long base = {begin}, stop; base < {end}; base = stop) {{")
            until = f"base + {STAGED_ELEMENTS}"
            line = LINE_BYTES // min(element_bytes(self._kernel, it) for it in self._streams)
            if begin.isdecimal() and int(begin) % line:
                until = f"({until}) / {line} * {line}"  # from where on they begin with lines
            self._add(f"stop = is_streamed && {until} < {end} ? {until} : {end};")
        else:
            self._open("{")
            self._add(f"const long base = {begin}, stop = {end};")

    def _write_result(self, access: Access, value: str) -> None:
        """Print that an element of a result, or as many as the loop handles, becomes a value."""
        if self._staging_numbers is None or access not in self._streams:
            self._set_at(self._address(access), value)
            return
        number = self._staging_numbers.setdefault(access, len(self._staging_numbers))
        place = f"z{number}[{self._variable} - base]"
        if self._at_once and self._at_once.is_even:
            self._add(f"fx_put(&{place}, {value}, is_past{number});")
        else:
            self._set_at(place, value)

    def _staged_loops(self, bounds: Bounds, loops: Sequence[Loop], kept: Mapping[int, str]) -> bool:
        """Print loops if they walk halves in order, and tell whether they do."""
        base, end = bounds.base, "stop" if bounds.is_cut else bounds.end
        self._halves = halves = StagedHalves(base, end, self._variable, kept)
        inner = self._apart(base, end, loops)
        self._halves = None
        if not halves:
            return False
        self._open_stage(bounds)
        count = end if base == "0" else f"{end} - {base}"
        room = bounds.block if bounds.is_cut else bounds.most
        for line in halves.before(count, room):
            self._add(line)
        self._lines += [*halves.loops, *inner]
        for line in halves.after(count):
            self._add(line)
        self._close()
        return True

    def _open_stage(self, bounds: Bounds) -> None:
        """Open the scope of a block of a loop, or of the loop."""
        begin, end = bounds.begin, bounds.end
        if bounds.is_cut:
            self._open(f"for (long base = {begin}; base < {end}; base += {bounds.block}) {{")
            until = f"base + {bounds.block}"
            self._add(f"const long stop = {until} < {end} ? {until} : {end};")
            return
        self._open("{")
        if bounds.base != begin:
            self._add(f"const long base = {begin};")

    def _staged_read(self, position: int) -> str | None:
        """Return the text of a loaded element that was converted before the loop, if it was."""
        load = self._kernel.body[position]
        if self._halves is None or not self._walks_halves(load.detail):
            return None
        first = self._first_read(position, self._halves.begin)
        if load.guard is None or self._holds(load.guard):
            return self._halves.read(first)
        condition = self._condition(load.guard)
        if condition is None:
            return None
        otherwise = cpp_text.literal(load.detail.otherwise.value, load.dtype)
        return f"{condition} ? {self._halves.read(first, condition)} : {otherwise}"

    def _condition(self, guard: int) -> str | None:
        """Return the text of a guard if it is the same for all elements of the loop, else None."""
        return None

    def _first_read(self, position: int, begin: str) -> str:
        """Return the address of what a load reads at the index `begin`."""
        return self._first(self._kernel.body[position].detail, begin)

    def _staged_write(self, access: Access) -> str | None:
        """Return the text of an element that is converted after the loop, if it is."""
        if self._halves is None or not self._walks_halves(access):
            return None
        return self._halves.write(self._first(access, self._halves.begin))

    def _walks_halves(self, access: Access) -> bool:
        """Tell whether an access walks elements of float16 in the order in which they lie."""
        step = self._step(access)
        is_half = self._kernel.buffers[access.buffer].dtype == torch.float16
        return is_half and not access.scales and not is_runtime(step) and step == 1

    def _first(self, access: Access, begin: str) -> str:
        """Return the address of the element at the index `begin`."""
        self._place = begin
        text = f"&{self._address(access)}"
        self._place = self._variable
        return text
