"""Short rows that are joined: what is broadcast is expanded first, for the rows of a tile."""

from __future__ import annotations

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import scaled
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.loop_ir.runtime_parameters import runtime_parameters
from fxkit.lower.scheduling.cpu.cpu_schedule import AlongFlattenedRows, CpuSchedule
from fxkit.lower.scheduling.cpu.flatten_rows import is_same_for_all


class FlattenedRowsPrinter(RowPrinter):
    """Writes a kernel whose short rows are joined.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        assert isinstance(schedule.traversal, AlongFlattenedRows)
        self._joined = schedule.traversal
        self._free = runtime_parameters(schedule.traversal.whole)

    def _before_tiles(self) -> None:
        for position, access in self._joined.strided.items():
            if is_same_for_all(access):
                start = self._kernel.buffers[access.buffer].name
                start += f" + {access.offset}" if access.offset else ""
                self._spread(position, start, str(self._rows))
        super()._before_tiles()

    def _declare(self) -> None:
        super()._declare()
        length = self._joined.length
        for position, access in self._joined.strided.items():
            if not is_same_for_all(access):
                step = access.strides[-2]
                start = self._pointers[self._key(self._body(position).detail)]
                start += f" + {scaled(f'(begin / {length})', step)}" if step else ""
                self._spread(position, start, f"(end - begin) / {length}")

    @property
    def _rows(self) -> int:
        return self._joined.tile // self._joined.length

    def _spread(self, position: int, start: str, rows: str) -> None:
        """Write out what an operand is along the rows of a tile."""
        access, length = self._joined.strided[position], self._joined.length
        element = cpp_text.MEMORY[self._kernel.buffers[access.buffer].dtype]
        terms = [scaled("l", access.strides[-2])] if access.strides[-2] else []
        terms += [scaled("k", access.strides[-1])] if access.strides[-1] else []
        self._add(f"alignas(64) {element} x{position}[{self._joined.tile}];")
        self._open(f"for (long l = 0; l < {rows}; ++l) {{")
        self._open(f"for (long k = 0; k < {length}; ++k) {{")
        self._add(f"x{position}[l * {length} + k] = ({start})[{' + '.join(terms)}];")
        self._close()
        self._close()

    def _value(self, position: int) -> str:
        access = self._joined.strided.get(position)
        if access is None:
            return super()._value(position)
        staged = self._staged_read(position)
        if staged is not None:
            return self._value_at(staged)
        dtype = self._kernel.buffers[access.buffer].dtype
        return cpp_text.load_expression(self._value_at(self._element(position)), dtype)

    def _element(self, position: int) -> str:
        if position in self._joined.strided:
            return f"x{position}[j - begin]"
        return super()._element(position)

    def _first_read(self, position: int, begin: str) -> str:
        if position in self._joined.strided:
            return f"&x{position}[{begin} - begin]"
        return super()._first_read(position, begin)
