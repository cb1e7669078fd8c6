"""Attention kernels of integers, a block of queries at a time; the C++ is `integer_attention.h`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.families.attention.printer import QUERIES, AttentionPrinter
from fxkit.lower.families.integer_attention.nodes import IntegerAttention
from fxkit.lower.families.integer_products.printer import IntegerProductPrinter
from fxkit.lower.families.products.printer import boolean


class IntegerAttentionPrinter(AttentionPrinter):
    """Writes a kernel that attends with integers.

    A block brings keys and values into the order of the processor's instructions, and tiles take 16
    queries: so it has more of them than one of floats.
    """

    score_bytes: ClassVar[int] = 256 * 1024
    rows_at_once: ClassVar[int] = 16

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of attention of integers, behind those of attention and of products."""
        own = Path(__file__).with_name("integer_attention.h").read_text()
        return (*AttentionPrinter.texts(), *IntegerProductPrinter.texts(), own)

    def _attend(self) -> None:
        """Attend to any number of keys."""
        one = self._detail
        assert isinstance(one, IntegerAttention)
        kind, tiles = cpp_text.MEMORY[one.weights], boolean(one.has_tiles)
        self._add(f"alignas(64) float scores[{self._room}];")
        self._add(f"alignas(64) {kind} weights[{self._room}];")
        self._add(f"float factors[{QUERIES}];")
        self._add(f"fx_integer_scores<{tiles}>(block, scores);")
        self._hide()
        self._open("for (long r = 0; r < block.rows; ++r) {")
        self._add("float* const row = scores + r * block.stride;")
        self._add("const float share = fx_weights(row, block.keys);")
        scale = f"{one.step * one.value_scale!r}f"
        if one.divides_last:
            self._add(f'factors[r] = {scale} * (share == 0 ? __builtin_nanf("") : share);')
        else:
            self._add(f"factors[r] = {scale};")
        share = "1.0f" if one.divides_last else "share"
        self._add(f"fx_rounded_weights(block, row, {share}, weights + r * block.stride);")
        self._close()
        batch, head, row, step = self._kernel.stores[0].access.strides
        self._add(
            f"fx_integer_values<{tiles}>(block, weights, factors, "
            f"out0 + b * {batch} + h * {head} + first * {row}, {row}, {step});"
        )

    def _block_type(self) -> str:
        one = self._detail
        assert isinstance(one, IntegerAttention)
        query = cpp_text.MEMORY[self._kernel.buffers[0].dtype]
        return f"fx_integer_block<{query}, {cpp_text.MEMORY[one.weights]}>"

    def _declare(self) -> None:
        super()._declare()
        one = self._detail
        assert isinstance(one, IntegerAttention)
        query, key, weight, value = one.zeros
        self._add(f"block.query_zero = {query}, block.key_zero = {key};")
        self._add(f"block.weight_zero = {weight}, block.value_zero = {value};")
        self._add(f"block.steps = {1.0 / one.step!r}f;")
        self._add(f"block.low = {one.bounds[0]}, block.high = {one.bounds[1]};")
