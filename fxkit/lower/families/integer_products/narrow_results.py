"""Results of 8 bits behind sums of 32: a loop computes them in 32 bits, another one narrows them.

A compiler takes as many numbers at once as a vector has of the narrowest type in a loop: 64 bytes
at a time, and what is left one by one, which of few columns may be all. So bytes have a loop apart.
"""

from __future__ import annotations

import functools

import torch

from fxkit.lower.families.products.printer import ProductPrinter

_BYTES = {torch.int8: "signed char", torch.uint8: "unsigned char"}


class NarrowResultsPrinter(ProductPrinter):
    """Writes a kernel that begins with a product, and stores bytes in loops of their own."""

    @functools.cached_property
    def _narrow(self) -> dict[int, int]:
        """Stores of bytes → the casts that they store, which nothing else reads."""
        body, stores = self._kernel.body, self._kernel.stores
        read = {operand for instruction in body for operand in instruction.operands}
        return {
            position: store.value
            for position, store in enumerate(stores)
            if body[store.value].op == "cast"
            and body[store.value].dtype in _BYTES
            and body[body[store.value].operands[0]].dtype == torch.float32
            and self._kernel.buffers[store.access.buffer].dtype == body[store.value].dtype
            and store.value not in read
            and not (store.access.scales or store.access.otherwise)
        }

    def _epilogue(self) -> None:
        for value in sorted(set(self._narrow.values())):
            self._add(f"alignas(64) int narrow{value}[{self._width}];")
        super()._epilogue()

    def _row_epilogue(self) -> None:
        super()._row_epilogue()
        for position, value in self._narrow.items():
            store = self._kernel.stores[position]
            kind = _BYTES[self._body(value).dtype]
            self._open_columns()
            self._write_result(store.access, f"({kind})narrow{value}[j - from]")
            self._close()

    def _type(self, position: int) -> str:
        is_narrow = position in self._narrow.values() and not self._at_once
        return "int" if is_narrow else super()._type(position)

    def _value(self, position: int) -> str:
        text = super()._value(position)
        if position in self._narrow.values():
            text = text.removeprefix(f"({_BYTES[self._body(position).dtype]})")
        return text

    def _store(self, position: int) -> None:
        value = self._narrow.get(position)
        if value is None:
            super()._store(position)
        else:
            self._set_at(f"narrow{value}[j - from]", self._ref(value))
