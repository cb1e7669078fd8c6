"""Multiply the integers of a quantised graph, where it multiplies what it dequantised from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit import cpu_info
from fxkit.errors import PassError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.compiling.float_reasons import reason_in_float
from fxkit.lower.compiling.lower_report import FLOAT_LAYERS, STAYS
from fxkit.lower.compiling.quantized_operands import (
    MOST_TERMS,
    dequantizes,
    floats_of,
    integers_of,
    is_read_as,
    weight_of,
)
from fxkit.lower.compiling.stored_nibbles import GroupedWeight, grouped_weight_of
from fxkit.lower.compiling.tensor_scales import spell_out_tensor_scales
from fxkit.lower.compiling.token_scales import FLOATS, Factor, aten, spell_out_tokens
from fxkit.lower.families.int4_products import autotune as groups
from fxkit.lower.families.int4_products.custom_op import operator as int4_product
from fxkit.lower.families.int8_weight_products import autotune as weights
from fxkit.lower.families.int8_weight_products.custom_op import operator as int8_weight_product
from fxkit.lower.families.int8_weight_products.printer import FEW_ROWS
from fxkit.lower.families.integer_products.autotune import (
    pairs_fit_into_16_bits,
    reason_to_stay_float,
)
from fxkit.lower.families.integer_products.custom_op import operator as integer_product
from fxkit.lower.loop_ir.int4_product import Int4Product
from fxkit.lower.loop_ir.int8_weight_product import Int8WeightProduct
from fxkit.lower.loop_ir.integer_product import IntegerProduct
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.canonicalise_copies import CanonicaliseCopies
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.manager import PassManager

# Says of a layer why floats multiply its activations by its weight as fast, or None.
Objection = Callable[[fx.Node, Factor, Factor | GroupedWeight], str | None]


def multiply_integers(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    passes: tuple[Pass, ...],
    on_failure: Callable[[Pass, PassError], bool] | None = None,
    instruments: Iterable[Instrument] = (),
) -> bool:
    """Run passes such as `MultiplyIntegers` on a graph, if it dequantises anything.

    Args:
        gm: The graph; its types are known.
        args: Its inputs.
        passes: What makes products of integers of it.
        on_failure: As `PassManager` takes it.
        instruments: What is told of the pass.

    Returns:
        Whether the graph was changed: new nodes have no types yet. Its `meta` says which layers
        stay in float32, and why.
    """
    if not any((call := resolve(n)) and dequantizes(call) for n in gm.graph.nodes):
        return False
    manager = PassManager(
        (*passes, CanonicaliseCopies(), DeadCodeElimination()),
        verify="structure",
        args=args,
        on_failure=on_failure,
        instruments=instruments,
    )
    result = manager.run(gm)
    notes = (note for record in result.records for note in record.notes)
    gm.meta[FLOAT_LAYERS] = tuple(note for note in notes if STAYS in note)
    return result.modified


def _slower_than_floats(layer: fx.Node, left: Factor, right: Factor | GroupedWeight) -> str | None:
    """Return why a layer of these sizes does not gain by integers on this processor, or None."""
    dtype = _dtype_of(layer)
    if isinstance(right, GroupedWeight):
        return _reason_of_groups(left, right, dtype)
    x, y = type_of(left.node), type_of(right.node)
    assert isinstance(x, TensorType) and isinstance(y, TensorType)
    columns, depth = y.shape
    if x.shape[-1] != depth:
        return "its operands do not fit"
    if left.is_float and isinstance(right.zero, fx.Node):
        return "its activations are floats, and its weight has zero points"
    if depth > MOST_TERMS and not left.is_float:
        return f"sums of {depth} products may need more than 32 bits"
    rows = _rows_of(left)
    if left.is_float:
        if rows > FEW_ROWS:
            return f"its activations are floats, {rows} rows of them"
        sizes = (0, 1, (), rows, int(columns), int(depth), (int(depth), 1), (1, int(depth)))
        return weights.reason_to_stay_float(Int8WeightProduct(*sizes))
    detail = IntegerProduct(
        0, 1, (), rows, int(columns), int(depth), (int(depth), 1), (1, int(depth)),
        has_tiles=matrix_unit.multiplies_bytes(),
    )  # fmt: skip
    return reason_to_stay_float(detail, pairs_fit=_pairs_fit(right.node), dtype=dtype)


@dataclass(frozen=True)
class MultiplyIntegers(Pass):
    """Multiply integers where a linear layer takes dequantised activations and weights.

    Sums are exact in 32 bits; scales, bias and what follows are applied to them in float32. Scales
    and zero points of tokens are computed in float32, where the operators of torch take float64.
    Where activations are floats, a few rows of them read the integers of the weight: memory is what
    such a layer waits for. A layer that float32 multiplies as fast stays as it is.

    Rewrites:
        %x = quantized_decomposed.dequantize_per_tensor(%q, 0.1, 3, 0, 255, torch.uint8)
        %w = quantized_decomposed.dequantize_per_channel(%r, %s, None, 0, -127, 127, torch.int8)
        %y = aten.linear(%x, %w, %b)
        →
        %t = aten.t(%r)
        %i = fxkit.integer_product(%q, %t, None, 3)
        %y = aten.add(aten.mul(aten.to(%i, torch.float32), aten.mul(%s, 0.1)), %b)

    Attributes:
        device: The type of the device whose layers are rewritten.
        objection: Says why floats multiply as fast there, or None.
    """

    device: str = "cpu"
    objection: Objection = _slower_than_floats

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each layer that gains. Cost: linear, and trials of sizes not met before."""
        spelled = spell_out_tokens(edit) | spell_out_tensor_scales(edit)
        for node in list(edit.graph.nodes):
            call = resolve(node)
            if call is None or call.name != "aten.linear":
                continue
            weight = call.arguments["weight"]
            right: Factor | GroupedWeight | None = weight_of(weight, dtypes=FLOATS)
            right = right or grouped_weight_of(weight)
            left = _integers_of(call.arguments["input"], spelled)
            if left is None:
                left = floats_of(call.arguments["input"])
            if left is None or right is None:
                why = reason_in_float(call.arguments["input"], weight, rank=2, dtypes=FLOATS)
                context.notes.append(f"%{node.name} {STAYS}: {why}")
                continue
            reason = self._reason_to_stay(node, left, right)
            if reason is not None:
                context.notes.append(f"%{node.name} {STAYS}: {reason}")
                continue
            with edit.on_behalf_of([node], "multiply_integers"):
                edit.replace(node, _Layer(edit, node).of(left, right, call.arguments["bias"]))

    def _reason_to_stay(
        self, layer: fx.Node, left: Factor, right: Factor | GroupedWeight
    ) -> str | None:
        device = type_of(left.node).device  # type: ignore[union-attr]
        if device.type != self.device:
            return f"it is on {device}"
        return self.objection(layer, left, right)


def _integers_of(value: Any, spelled: Mapping[fx.Node, Factor]) -> Factor | None:
    """Return what an activation was dequantised from, with a scale for all or for each row."""
    factor = spelled.get(value)
    if factor is not None:
        return factor if is_read_as(factor.node, (torch.int8, torch.uint8)) else None
    return integers_of(value, FLOATS)


def _pairs_fit(weight: fx.Node) -> bool:
    """Tell whether pairs of products by a weight fit into 16 bits, where that matters."""
    if not cpu_info.adds_pairs_in_16_bits():
        return True
    if weight.op != "get_attr":
        return False
    return pairs_fit_into_16_bits(find_attribute(weight.graph.owning_module, str(weight.target)))


def _reason_of_groups(left: Factor, right: GroupedWeight, dtype: torch.dtype) -> str | None:
    """Return why a layer does not gain by 4-bit integers in groups, or None."""
    x, packed = type_of(left.node), type_of(right.packed)
    assert isinstance(x, TensorType) and isinstance(packed, TensorType)
    columns, depth = int(packed.shape[0]), 2 * int(packed.shape[1])
    if x.shape[-1] != depth:
        return "its operands do not fit"
    sizes = (0, 1, (), _rows_of(left), columns, depth, (depth, 1), (1, depth // 2))
    tiles = matrix_unit.multiplies_bytes()
    detail = Int4Product(*sizes, group=right.group, is_float=left.is_float, has_tiles=tiles)
    return groups.reason_to_stay_float(detail, dtype)


def _dtype_of(layer: fx.Node) -> torch.dtype:
    known = type_of(layer)
    assert isinstance(known, TensorType)
    return known.dtype


def _rows_of(left: Factor) -> int:
    """Return how many rows an activation has."""
    return math.prod(int(size) for size in type_of(left.node).shape[:-1])  # type: ignore[union-attr]


class _Layer:
    """Builds what stands for a linear layer, right before it."""

    def __init__(self, edit: EditSession, node: fx.Node) -> None:
        self._edit = edit
        self._node = node

    def of(self, left: Factor, right: Factor | GroupedWeight, bias: fx.Node | None) -> fx.Node:
        """Return the node that computes what the layer did."""
        if isinstance(right, GroupedWeight):
            return self._by_groups(left, right, bias)
        shape = [int(size) for size in type_of(left.node).shape]  # type: ignore[union-attr]
        columns, depth = (int(size) for size in type_of(right.node).shape)  # type: ignore[union-attr]
        is_flat = len(shape) == 2
        rows = left.node if is_flat else self._call(aten.reshape.default, left.node, [-1, depth])
        if left.is_float:
            value = self._call(int8_weight_product(), rows, right.node)
            return self._with_epilogue(
                self._call(aten.mul.Tensor, value, right.scale), bias, shape, columns
            )
        zeros, zero = (None, left.zero) if isinstance(left.zero, int) else (left.zero, 0)
        if zeros is not None and not is_flat:
            zeros = self._call(aten.reshape.default, zeros, [-1, 1])
        factors = self._call(aten.t.default, right.node)
        sums = self._call(integer_product(), rows, factors, zeros, zero)
        if isinstance(right.zero, fx.Node):
            sums = self._less_zeros(sums, rows, right.zero, depth, zero if zeros is None else zeros)
        value = self._call(aten.to.dtype, sums, torch.float32)
        return self._with_epilogue(self._scaled(value, left, right, is_flat), bias, shape, columns)

    def _by_groups(self, left: Factor, right: GroupedWeight, bias: fx.Node | None) -> fx.Node:
        """Return the node for a weight of 4 bits, whose scales its groups have applied to them."""
        shape = [int(size) for size in type_of(left.node).shape]  # type: ignore[union-attr]
        columns, is_flat = int(type_of(right.packed).shape[0]), len(shape) == 2  # type: ignore[union-attr]
        rows = left.node
        if not is_flat:
            rows = self._call(aten.reshape.default, rows, [-1, shape[-1]])
        zeros, zero = (None, left.zero) if isinstance(left.zero, int) else (left.zero, 0)
        if zeros is not None and not is_flat:
            zeros = self._call(aten.reshape.default, zeros, [-1, 1])
        operands = (rows, right.packed, right.scales, right.zeros, right.group, zeros, zero)
        value = self._call(int4_product(), *operands)
        by_row = left.scale
        if isinstance(by_row, fx.Node) and not is_flat:
            by_row = self._call(aten.reshape.default, by_row, [-1, 1])
        if not left.is_float:
            value = self._call(aten.mul.Tensor, value, by_row)
        return self._with_epilogue(value, bias, shape, columns)

    def _less_zeros(
        self, sums: fx.Node, rows: fx.Node, by_column: fx.Node, depth: int, zero: fx.Node | int
    ) -> fx.Node:
        """Subtract what a weight's zero points add: each times the sum of a row, in 64 bits."""
        total = self._edit.call(
            aten.sum.dim_IntList, rows, [-1], True, dtype=torch.int32, before=self._node
        )
        moved = zero * depth if isinstance(zero, int) else self._call(aten.mul.Tensor, zero, depth)
        total = self._call(aten.sub.Tensor, total, moved)
        total, column, sums = (
            self._call(aten.to.dtype, one, torch.int64) for one in (total, by_column, sums)
        )
        return self._call(aten.sub.Tensor, sums, self._call(aten.mul.Tensor, total, column))

    def _with_epilogue(
        self, value: fx.Node, bias: fx.Node | None, shape: list[int], columns: int
    ) -> fx.Node:
        if bias is not None:
            value = self._call(aten.add.Tensor, value, bias)
        if _dtype_of(self._node) != torch.float32:
            value = self._call(aten.to.dtype, value, _dtype_of(self._node))
        if len(shape) == 2:
            return value
        return self._call(aten.reshape.default, value, [*shape[:-1], columns])

    def _scaled(self, value: fx.Node, left: Factor, right: Factor, is_flat: bool) -> fx.Node:
        by_row, by_column = left.scale, right.scale
        if isinstance(by_row, fx.Node):
            flat = by_row if is_flat else self._call(aten.reshape.default, by_row, [-1, 1])
            # The weight's first: of large activations the other order makes infinity.
            value = self._call(aten.mul.Tensor, value, by_column)
            return self._call(aten.mul.Tensor, value, flat)
        if isinstance(by_column, fx.Node):
            by_column = self._call(aten.mul.Tensor, by_column, by_row)
            return self._call(aten.mul.Tensor, value, by_column)
        return self._call(aten.mul.Tensor, value, by_column * by_row)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._edit.call(target, *args, before=self._node)
