"""Attention kernels, a block of queries at a time; the C++ is `attention.h`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.families.attention.attention import Attention
from fxkit.lower.families.family import WholePrinter
from fxkit.lower.families.products.printer import (
    COLUMNS,
    FEW_ROWS,
    ProductPrinter,
    boolean,
    may_have_few,
)
from fxkit.lower.loop_ir.loop_ir import Access, Kernel
from fxkit.lower.loop_ir.runtime_parameters import RuntimeInt, ceil_div, is_runtime
from fxkit.lower.scheduling.row_sweeps import RowSweep

# Queries that share what is brought into the cache.
QUERIES = 64

# At most so many keys, of at most so many numbers, are attended to without what long ones need:
# FX_FEW_KEYS and FX_DEPTH in the text.
FEW_KEYS, SHORT_DEPTH = 64, 96

# So many where vectors are shorter than those of AVX-512, and registers fewer.
FEW_KEYS_IN_SHORT_VECTORS = 32


def is_short(one: Attention) -> bool:
    """Tell whether attention of known sizes is over few keys, for which there is a text apart."""
    return one.keys <= FEW_KEYS and one.depth <= SHORT_DEPTH and one.queries > FEW_ROWS


class AttentionPrinter(WholePrinter):
    """Writes a kernel that computes attention.

    Attributes:
        score_bytes: The bytes that scores of a block may take.
        rows_at_once: Blocks of more queries have a multiple of so many.
    """

    score_bytes: ClassVar[int] = 128 * 1024
    rows_at_once: ClassVar[int] = 1

    @classmethod
    @functools.cache
    def texts(cls) -> tuple[str, ...]:
        """Return the text of attention, behind that of products."""
        names = ("attention.h", "short_attention.h")
        long, short = (Path(__file__).with_name(name).read_text() for name in names)
        return (*ProductPrinter.texts(), f"constexpr long FX_QUERIES = {QUERIES};\n{long}", short)

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        detail: Attention = kernel.body[0].detail
        self._detail = detail
        self._stride = ceil_div(detail.keys, COLUMNS) * COLUMNS
        fitting = max(1, self.score_bytes // (4 * int(self._stride)))
        if fitting > self.rows_at_once:
            fitting -= fitting % self.rows_at_once
        self._rows = min(QUERIES, fitting, detail.queries)
        self._room = self._rows * self._stride
        self._is_open = is_runtime(detail.keys + detail.queries)
        if self._is_open:
            self._rows = RuntimeInt(self._rows, "height")
            self._room = max(self.score_bytes // 4, int(self._stride))

    def text(self) -> str:
        """Return the function's text."""
        self._open(f'extern "C" void {self._name}({self._parameters()}) {{')
        self._read_numbers()
        if self._is_open:
            self._choose_height()
        self._workshare_tiles()
        self._open(f"for (long tile = 0; tile < {self._tile_count()}; ++tile) {{")
        self._tile_index()
        self._declare()
        self._attend()
        self._close()
        self._close()
        return self._taken()

    def _attend(self) -> None:
        if self._is_open:
            self._open(f"if ({self._few_keys()}) {{")
            self._attend_at_once()
            self._close()
            self._open("else {")
            self._attend_in_steps()
            self._close()
        elif not is_short(self._detail):
            self._attend_in_steps()
        elif self._detail.keys <= FEW_KEYS_IN_SHORT_VECTORS:
            self._attend_at_once()
        else:
            self._add("#if FX_WIDE > 1")
            self._attend_at_once()
            self._add("#else")
            self._attend_in_steps()
            self._add("#endif")

    def _few_keys(self) -> str:
        """Return what tells at run time that all keys fit into one panel."""
        one = self._detail
        few = f"{one.keys} <= (FX_WIDE > 1 ? {FEW_KEYS} : {FEW_KEYS_IN_SHORT_VECTORS})"
        return f"{few} && {one.depth} <= {SHORT_DEPTH} && {one.queries} > {FEW_ROWS}"

    def _attend_at_once(self) -> None:
        """Attend to few keys, all of which are in one panel."""
        one = self._detail
        seen, kind = "nullptr, 0, 0", "float"
        if one.mask is not None:
            batch, head, row, step = one.mask
            kind = cpp_text.MEMORY[self._kernel.buffers[3].dtype]
            seen = f"in3 + b * {batch} + h * {head} + first * {row}, {row}, {step}"
        self._add(f"const fx_seen<{kind}> seen = {{{seen}, {boolean(one.is_causal)}, first}};")
        self._next_block()
        batch, head, row, step = self._kernel.stores[0].access.strides
        self._add(
            f"fx_short_attention(block, seen, next, out0 + b * {batch} + h * {head} "
            f"+ first * {row}, {row}, {step});"
        )

    def _next_block(self) -> None:
        """Say where the operands of the next head begin, of all blocks of its queries."""
        one = self._detail
        self._add(f"const long further = h + 1 < {one.heads} ? h + 1 : 0;")
        self._add(f"const long after = h + 1 < {one.heads} || b + 1 == {one.batch} ? b : b + 1;")
        places = []
        for position, ((batch, head, row, _), shared) in enumerate(
            ((one.query, 1), (one.key, one.shared), (one.value, one.shared))
        ):
            first = f" + first * {row}" if position == 0 else ""
            index = "further" if shared == 1 else f"further / {shared}"
            places.append(f"in{position} + after * {batch} + {index} * {head}{first}")
        self._add(f"const fx_next next = {{{', '.join(places)}}};")

    def _attend_in_steps(self) -> None:
        """Attend to any number of keys."""
        self._add(f"alignas(64) float scores[{self._room}];")
        self._add(f"float factors[{QUERIES if self._is_open else self._rows}];")
        is_row_major, may_be_few = self._detail.query[3] == 1, may_have_few(self._detail.queries)
        kinds = f"{boolean(is_row_major)}, {boolean(may_be_few)}"
        self._add(f"fx_scores<{kinds}>(block, scores);")
        self._hide()
        self._open("for (long r = 0; r < block.rows; ++r) {")
        self._add("factors[r] = fx_weights(scores + r * block.stride, block.keys);")
        self._close()
        batch, head, row, step = self._kernel.stores[0].access.strides
        self._add(
            f"fx_weighted<{boolean(may_be_few)}>(block, scores, factors, "
            f"out0 + b * {batch} + h * {head} + first * {row}, {row}, {step});"
        )

    def _tile_count(self) -> int:
        blocks = ceil_div(self._detail.queries, self._rows)
        return self._detail.batch * self._detail.heads * blocks

    def _choose_height(self) -> None:
        """Choose the queries of a block at run time."""
        queries = self._detail.queries
        several = self.rows_at_once
        self._add(f"const long room = {self.score_bytes // 4} / {self._stride};")
        self._add(f"const long fitting = room > {several} ? room / {several} * {several} : room;")
        self._add(f"const long most = fitting < {QUERIES} ? fitting : {QUERIES};")
        self._add(f"const long fewest = {queries} < most ? {queries} : most;")
        self._add("const long height = fewest < 1 ? 1 : fewest;")

    def _tile_index(self) -> None:
        blocks = ceil_div(self._detail.queries, self._rows)
        self._add(f"const long first = tile % {blocks} * {self._rows};")
        self._add(f"const long h = tile / {blocks} % {self._detail.heads};")
        self._add(f"const long b = tile / {blocks * self._detail.heads};")

    def _declare(self) -> None:
        one = self._detail
        left = f"{one.queries} - first"
        self._add(f"{self._block_type()} block;")
        self._add(f"block.rows = {left} < {self._rows} ? {left} : {self._rows};")
        seen = "first + block.rows"
        keys = f"{seen} < {one.keys} ? {seen} : {one.keys}" if one.is_causal else str(one.keys)
        self._add(f"block.keys = {keys};")
        self._add(f"block.depth = {one.depth}, block.width = {one.width};")
        self._add(f"block.stride = {self._stride};")
        self._add(f"block.scale = {one.scale!r};")
        operands = (("query", one.query, "h", f" + first * {one.query[2]}"),
                    ("key", one.key, f"h / {one.shared}", ""),
                    ("value", one.value, f"h / {one.shared}", ""))  # fmt: skip
        for position, (name, (batch, head, row, step), index, offset) in enumerate(operands):
            self._add(f"block.{name} = in{position} + b * {batch} + {index} * {head}{offset};")
            self._add(f"block.{name}_row = {row}, block.{name}_step = {step};")

    def _block_type(self) -> str:
        return "fx_attention_block"

    def _hide(self) -> None:
        """Apply the mask, then hide what comes after a query."""
        one = self._detail
        if one.mask is not None:
            batch, head, row, step = one.mask
            self._open("for (long r = 0; r < block.rows; ++r) {")
            where = f"in3 + b * {batch} + h * {head} + (first + r) * {row}"
            kind = cpp_text.MEMORY[self._kernel.buffers[3].dtype]
            self._add(f"const {kind}* const mask = {where};")
            self._add("float* const row = scores + r * block.stride;")
            self._open("for (long j = 0; j < block.keys; ++j) {")
            at = f"mask[j * {step}]"
            hidden = f"{at} ? row[j] : -__builtin_inff()"
            self._add(f"row[j] = {hidden if one.is_choice else f'row[j] + {at}'};")
            self._close()
            self._close()
        if one.is_causal:
            self._open("for (long r = 0; r < block.rows; ++r) {")
            self._open("for (long j = first + r + 1; j < block.keys; ++j) {")
            self._add("scores[r * block.stride + j] = -__builtin_inff();")
            self._close()
            self._close()

    def _sweep(self, one: RowSweep) -> None:
        """Write nothing: attention has no body but its own."""

    def _row_scalars(self, values: Iterable[int], stores: Iterable[int]) -> None:
        """Write nothing."""

    def _ref(self, position: int) -> str:
        return f"v{position}"

    def _lane_terms(self, access: Access) -> list[str]:
        return []
