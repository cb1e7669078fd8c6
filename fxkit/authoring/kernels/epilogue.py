"""The hook of a kernel: what follows it in a graph, as a function that it calls for each element.

A function with a parameter `auto epilogue` stores `epilogue(value, index)` in the place of `value`,
where `index` is the position of the element in the result, row by row. By itself that is the value.
Where a graph goes on with pointwise operators that nothing else reads, it is what they make of it,
printed by the backend's own printer of C++.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxkit.ir.types import TensorType
from fxkit.lower.building import toolchain
from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp.kernel_printer import KernelPrinter, scaled
from fxkit.lower.codegen.cpp.preamble import preamble
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.scheduling.row_sweeps import RowSweep, plan_sweeps

HOOK = "epilogue"
"""The name of the parameter."""

AS_IT_IS = "fx_AsItIs"
FUNCTION = "fx_Epilogue"

_AS_IT_IS = f"""
struct {AS_IT_IS} {{
  template <class T> T operator()(T value, long) const {{ return value; }}
}};
"""

# Results whose elements are computed in the type that memory holds.
_DTYPES = (torch.float32, torch.float64)


def text_of(epilogue: Epilogue | None) -> str:
    """Return the text of a hook's function: that of an epilogue, or the value as it is."""
    return _AS_IT_IS if epilogue is None else epilogue.text


@dataclass(frozen=True)
class Epilogue:
    """What follows a kernel at a place of a graph.

    Attributes:
        text: A C++ struct that is called with a value and its position, and what it stands on.
        element_types: Of each tensor that it reads, the type of its elements in C++.
        operands: Types of the kernel's own operands, then of these tensors, at that place.
    """

    text: str
    element_types: tuple[str, ...]
    operands: tuple[TensorType, ...]

    def objection(self, types: Iterable[TensorType]) -> str | None:
        """Return why operands of some types are not those of the place, or None."""
        for known, wanted in zip(types, self.operands, strict=True):
            given = known.shape, known.dtype, known.stride
            if given != (wanted.shape, wanted.dtype, wanted.stride):
                return f"what follows it is made for {wanted}, not for {known}"
        return None


def epilogue_of(
    emitted: Emitted, node: fx.Node, operands: tuple[TensorType, ...]
) -> Epilogue | None:
    """Return what a region makes of a kernel's result, or None where that is no scalar function.

    Args:
        emitted: The region's kernel in the loop IR.
        node: The user's kernel in the graph.
        operands: Types of its operands, then of what else the region reads.
    """
    kernel, buffer = emitted.kernel, emitted.inputs.index(node)
    loads = [i for i in kernel.body if i.op == "load"]
    own = {i.detail for i in loads if i.detail.buffer == buffer}
    if kernel.row_rank or kernel.has_checks or len(emitted.outputs) != 1 or not kernel.sizes:
        return None
    if any(i.op in ("index", "check") or (i.op == "load" and i.indices) for i in kernel.body):
        return None
    accesses = [*(i.detail for i in loads), *(s.access for s in kernel.stores)]
    if any(i.guard is not None for i in loads) or any(a.scales for a in accesses):
        return None
    if any(a.otherwise for a in accesses) or len(own) != 1 or len(kernel.stores) != 1:
        return None
    in_order = tuple(row_major(kernel.sizes))
    whole = (own.pop(), kernel.stores[0].access)
    if any(a.offset or a.strides != in_order for a in whole):
        return None
    dtypes = {kernel.buffers[a.buffer].dtype for a in whole}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        return None
    printer = _EpiloguePrinter(replace(kernel, row_rank=1), buffer)
    function = printer.text()
    below = preamble([kernel], [function], (), toolchain.vector_library())
    types = tuple(cpp_text.MEMORY[kernel.buffers[place].dtype] for place in printer.others)
    return Epilogue(f"{below}\n{function}", types, operands)


class _EpiloguePrinter(KernelPrinter):
    """Writes what a kernel computes at one point as a function of one of the numbers it reads."""

    def __init__(self, kernel: Kernel, buffer: int) -> None:
        super().__init__(kernel, FUNCTION, plan_sweeps(kernel))
        self._buffer = buffer
        self._is_lone = True

    @property
    def others(self) -> list[int]:
        """The other buffers that are read."""
        buffers = enumerate(self._kernel.buffers)
        return [place for place, b in buffers if not b.is_output and place != self._buffer]

    def text(self) -> str:
        """Return the struct's text."""
        self._open(f"struct {FUNCTION} {{")
        for place in self.others:
            buffer = self._kernel.buffers[place]
            self._add(f"const {cpp_text.MEMORY[buffer.dtype]}* {buffer.name};")
        (store,) = self._kernel.stores
        dtype = self._kernel.buffers[store.access.buffer].dtype
        memory = cpp_text.MEMORY[dtype]
        self._open(f"{memory} operator()({memory} whole, long index) const {{")
        self._add("(void)index;")
        self._outer_index("index", self._kernel.sizes)
        for value, instruction in enumerate(self._kernel.body):
            if instruction.op != "const":
                self._add(f"const {self._type(value)} v{value} = {self._value(value)};")
        self._add(f"return {cpp_text.store_expression(self._ref(store.value), dtype)};")
        self._close()
        self._close()
        return self._taken() + ";\n"

    def _value(self, position: int) -> str:
        instruction = self._body(position)
        if instruction.op == "load" and instruction.detail.buffer == self._buffer:
            return "whole"
        return super()._value(position)

    def _address(self, access: Access, indices: Iterable[str] = ()) -> str:
        terms = [scaled(f"i{axis}", step) for axis, step in enumerate(access.strides) if step]
        terms += [str(access.offset)] if access.offset else []
        return f"{self._kernel.buffers[access.buffer].name}[{' + '.join(terms) or '0'}]"

    def _ref(self, position: int) -> str:
        return self._value(position) if self._body(position).op == "const" else f"v{position}"

    def _tile_count(self) -> int:
        return math.prod(self._kernel.outer_sizes)

    def _tile_index(self) -> None:
        """Write nothing, as all of the methods below: there are no tiles."""

    def _declare(self) -> None: ...

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None: ...

    def _sweep(self, one: RowSweep) -> None: ...

    def _lane_terms(self, access: Access) -> list[str]:
        return []
