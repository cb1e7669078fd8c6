"""Pointwise kernels on a GPU: each thread computes neighbours in a grid-stride loop."""

from __future__ import annotations

import math

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cuda.kernel_printer import CudaPrinter, Launch, Tile

# Blocks of a launch, at most; with more tiles than that, threads compute several.
MAX_BLOCKS = 1 << 16


class PointPrinter(CudaPrinter):
    """Writes a kernel whose points are computed one by one."""

    def launches(self) -> list[Launch]:
        """Return the one function."""
        layout, sizes = self.layout, self._kernel.sizes
        across = -(-sizes[-1] // layout.width)
        tiles = math.prod(sizes[:-1]) * across
        self._open_function(self._name, layout.threads)
        first = f"({self._index})blockIdx.x * {layout.threads} + ({self._index})threadIdx.x"
        step = f"({self._index})gridDim.x * {layout.threads}"
        loop = f"{self._index} tile = {first}; tile < {tiles}; tile += {step}"
        self._open(f"for ({loop}) {{")
        self._outer_index("tile", (*sizes[:-1], across))
        last = len(sizes) - 1
        name = f"i{last} * {layout.width}" if layout.width > 1 else f"i{last}"
        self._add(f"const {self._index} j = {name};")
        if self._has_count:
            self._add(f"const {self._index} count = {sizes[-1]} - j;")
        body = self._kernel.body
        self._tile(Tile(range(len(body)), stores=range(len(self._kernel.stores))))
        self._close()
        self._close()
        blocks = min(MAX_BLOCKS, -(-tiles // layout.threads))
        return [Launch(self._name, blocks, 1, layout.threads, self._taken())]

    def _axis_names(self) -> list[str]:
        return [*(f"i{axis}" for axis in range(len(self._kernel.sizes) - 1)), "j"]

    def _ref(self, position: int) -> str:
        if self._body(position).op == "const":
            return cpp_text.literal(self._body(position).detail.value, self._body(position).dtype)
        return f"v{position}"

    def _accumulate(self, position: int) -> None:
        raise TypeError(f"expected a kernel without reductions, got %{position}")
