"""Loop flattening: short contiguous rows become one long row, so that all vector lanes are used.

Along a row of 7 elements most of a vector is idle, and of 31 elements the last 15 are left to the
scalar remainder loop. Where the results of neighbouring rows are contiguous, the rows become one;
an operand that is broadcast along or across rows is expanded first, for the rows of one tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import scaled
from fxkit.lower.codegen.cpp.rows import RowPrinter
from fxkit.lower.codegen.cpp.runtime_parameters import is_runtime, runtime_parameters
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store

# Longer rows leave little to a last vector that is not full.
LONG = 256

# Elements in a tile, at most.
TILE = 2048

# Lanes of the widest vectors: rows of a multiple of that length need no joining.
LANES = 16


@dataclass(frozen=True)
class JoinedRows:
    """A kernel whose two innermost axes are one.

    Attributes:
        whole: The kernel before.
        kernel: The kernel with one axis less.
        length: Length of a row before.
        strided: Loads that do not walk memory along the long row, by position → their accesses
            before.
    """

    whole: Kernel
    kernel: Kernel
    length: int
    strided: Mapping[int, Access]

    @property
    def tile(self) -> int:
        """Elements in a tile: whole rows, and whole vectors."""
        rows = TILE // self.length
        return rows // LANES * LANES * self.length or rows * self.length


def flattened_rows(kernel: Kernel) -> JoinedRows | None:
    """Return a kernel with its short rows joined, or None where that is not possible or pays not.

    Args:
        kernel: A kernel whose row has one axis.
    """
    if kernel.row_rank != 1 or len(kernel.sizes) < 2:
        return None
    length = kernel.sizes[-1]
    if is_runtime(length) or not 1 < length < LONG or length % LANES == 0:
        return None
    if any(i.is_reduction or i.is_scan or i.op == "index" or _depends(i) for i in kernel.body):
        return None
    if not all(_is_along(store.access, length) for store in kernel.stores):
        return None
    strided = {
        position: i.detail
        for position, i in enumerate(kernel.body)
        if i.op == "load" and not _is_along(i.detail, length) and any(i.detail.strides[-2:])
    }
    is_costly = any(cpp_text.calls_function(i) for i in kernel.body)
    if not strided or not (is_costly or all(_is_same_for_all(a) for a in strided.values())):
        return None

    body = tuple(replace(i, detail=_joined(i.detail)) if i.op == "load" else i for i in kernel.body)
    stores = tuple(Store(_joined(s.access), s.value) for s in kernel.stores)
    sizes = (*kernel.sizes[:-2], kernel.sizes[-2] * length)
    long = replace(kernel, sizes=sizes, body=body, stores=stores)
    return JoinedRows(kernel, long, length, strided)


def _depends(instruction: Instruction) -> bool:
    """Tell whether a load is guarded, or its address depends on a value."""
    return instruction.op == "load" and bool(instruction.operands)


def _is_along(access: Access, length: int) -> bool:
    """Tell whether memory is walked in order from each row to the next."""
    outer, inner = access.strides[-2:]
    return inner == 1 and not is_runtime(outer) and outer == length


def _is_same_for_all(access: Access) -> bool:
    """Tell whether each row reads the same elements."""
    return not any(access.strides[:-1])


def _joined(access: Access) -> Access:
    """Return an access along a long row; what is strided is walked in order there."""
    *outer, rows, inner = access.strides
    return replace(access, strides=(*outer, 1 if rows or inner else 0))


class FlattenedRowsPrinter(RowPrinter):
    """Writes a kernel whose short rows are joined."""

    def __init__(self, joined: JoinedRows, name: str) -> None:
        super().__init__(joined.kernel, name)
        self._joined = joined
        self._free = runtime_parameters(joined.whole)
        self._cut_into_tiles(joined.tile)
        self._common = self._common_values(joined.whole)

    def _before_tiles(self) -> None:
        for position, access in self._joined.strided.items():
            if _is_same_for_all(access):
                start = self._kernel.buffers[access.buffer].name
                start += f" + {access.offset}" if access.offset else ""
                self._spread(position, start, str(self._rows))
        super()._before_tiles()

    def _declare(self) -> None:
        super()._declare()
        length = self._joined.length
        for position, access in self._joined.strided.items():
            if not _is_same_for_all(access):
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
