"""What follows a product is computed row by row of a tile, while its sums lie in the cache."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from fxkit.lower.codegen.cpp.vector_loops import Lanes, Loop
from fxkit.lower.families.family import WholePrinter
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.lane_loops import MOST, epilogue_gains_in_lanes, is_shorter_alone


class RowEpiloguePrinter(WholePrinter):
    """Writes what follows a product for a row of a tile, and for its columns before.

    Attributes:
        _width: How many columns a tile has, at most.
    """

    _width: int

    @property
    @abstractmethod
    def _columns(self) -> int:
        """How many columns the product has."""

    def _row_epilogue(self) -> None:
        kept = self._kept_columns
        needed = sorted(set(range(len(self._kernel.body))) - self._column_values | kept)
        is_even = not is_runtime(self._columns) and self._columns % MOST == 0
        gains = epilogue_gains_in_lanes(self._kernel, needed, kept)

        ahead = [] if gains else self._ahead(needed)
        if ahead:
            self._add("#if FX_WIDE > 1")
            self._row_epilogue_in_parts(needed, ahead)
            self._add("#else")
        lanes = Lanes(is_even) if gains else None
        body = functools.partial(self._epilogue_of_elements, needed, {})
        self._plain_loops("from", "to", [Loop("#pragma omp simd", body, lanes=lanes)])
        if ahead:
            self._add("#endif")

    def _epilogue_of_elements(self, needed: Sequence[int], held: Mapping[int, str]) -> None:
        """Compute what follows, and store it; some values are held in arrays."""
        self._name_values(needed, held)
        for position in range(len(self._kernel.stores)):
            self._store(position)

    def _name_values(self, values: Iterable[int], held: Mapping[int, str]) -> None:
        for value in values:
            text = f"c{value}[j - from]" if value in self._kept_columns else held.get(value)
            self._name_value(value, None if text is None else self._value_at(text))

    def _ahead(self, needed: Iterable[int]) -> list[int]:
        """Return functions that are shorter in lanes, and not made of each other."""
        found: list[int] = []
        above: set[int] = set()
        for value in needed:
            instruction = self._body(value)
            is_first = above.isdisjoint(instruction.operands)
            if is_first and is_shorter_alone(self._kernel, instruction):
                found.append(value)
            if not is_first or value in found:
                above.add(value)
        return found

    def _row_epilogue_in_parts(self, needed: Sequence[int], ahead: Sequence[int]) -> None:
        """Write the epilogue of a row as three loops: the middle one computes functions, in lanes.

        What else is computed, such as bytes, has no lanes.
        """
        operands = sorted({self._body(value).operands[0] for value in ahead})
        for value in (*operands, *ahead):
            self._add(f"alignas(64) float held{value}[{self._width}];")
        self._open_columns()
        self._name_values(sorted(self._made_of(operands).intersection(needed)), {})
        for value in operands:
            self._add(f"held{value}[j - from] = v{value};")
        self._close()
        self._open(f"for (long j = 0; j < {self._width}; j += FX_WIDE) {{")
        self._at_once = Lanes(is_even=True)
        for value in operands:
            self._name_value(value, self._value_at(f"held{value}[j]"))
        for value in ahead:
            self._name_value(value)
            self._set_at(f"held{value}[j]", f"v{value}")
        self._at_once = None
        self._close()
        held = {value: f"held{value}[j - from]" for value in (*operands, *ahead)}
        body = functools.partial(self._epilogue_of_elements, needed, held)
        self._plain_loops("from", "to", [Loop("#pragma omp simd", body)])

    def _made_of(self, values: Iterable[int]) -> set[int]:
        """Return values and all that they are made of, up to what arrays hold."""
        found, waiting = set[int](), list(values)
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                if value not in self._kept_columns:
                    waiting += self._body(value).operands
        return found

    def _compute_columns(self) -> None:
        """Compute what depends on the column alone, for the columns of a tile."""
        if not self._kept_columns:
            return
        body = self._kernel.body
        loads = [body[value].detail for value in self._column_values if body[value].op == "load"]
        self._point_into_buffers(loads)
        for value in sorted(self._kept_columns):
            self._add(f"alignas(64) {self._type(value)} c{value}[{self._width}];")
        self._open_columns()
        for value in sorted(self._column_values):
            self._name_value(value)
        for value in sorted(self._kept_columns):
            self._add(f"c{value}[j - from] = v{value};")
        self._close()

    def _open_columns(self) -> None:
        self._add("#pragma omp simd")
        self._open("for (long j = from; j < to; ++j) {")

    def _name_value(self, value: int, text: str | None = None) -> None:
        if self._body(value).op != "const":
            self._add(f"const {self._type(value)} v{value} = {text or self._value(value)};")

    @functools.cached_property
    def _column_values(self) -> set[int]:
        """Values that are worked out from numbers of one column, and all that they are made of."""
        free_of_rows: set[int] = set()
        for value, instruction in enumerate(self._kernel.body):
            if instruction.is_tensor_op or instruction.op in ("index", "check"):
                continue
            is_load = instruction.op == "load"
            if is_load and any(instruction.detail.strides[: len(self._kernel.outer_sizes)]):
                continue
            if free_of_rows.issuperset(instruction.operands):
                free_of_rows.add(value)
        found: set[int] = set()
        for value in sorted(free_of_rows, reverse=True):
            if value in found or self._body(value).operands:
                found |= {value, *self._body(value).operands}
        return found

    @functools.cached_property
    def _kept_columns(self) -> set[int]:
        """Those of them that are needed at each row, but for constants."""
        body, found = self._kernel.body, self._column_values
        read = {o for v, i in enumerate(body) if v not in found for o in i.operands}
        read |= {store.value for store in self._kernel.stores}
        return {value for value in found & read if body[value].op != "const"}
