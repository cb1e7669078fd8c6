"""Multiply the integers of two activations, as in attention, where both were dequantised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeGuard

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.compiling.float_reasons import takes_dequantized
from fxkit.lower.compiling.lower_report import STAYS
from fxkit.lower.compiling.moved_integers import MovedIntegers, add_call
from fxkit.lower.compiling.quantized_attention import (
    PRODUCTS,
    QuantizedAttention,
    attention_at,
    operands_of,
)
from fxkit.lower.compiling.token_scales import aten
from fxkit.lower.families.integer_attention import autotune as attentions
from fxkit.lower.families.integer_attention.custom_op import operator as integer_attention
from fxkit.lower.families.integer_attention.nodes import emit_integer_attention
from fxkit.lower.families.integer_products.autotune import reason_to_stay_float
from fxkit.lower.families.integer_products.custom_op import operator as integer_product
from fxkit.lower.families.products.matrices import geometry
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.integer_product import IntegerProduct
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.passes.base import Pass, PassContext

# Sums of so many products of two bytes, each moved by a zero point, fit into 32 bits.
MOST_TERMS = (2**31 - 1) // (255 * 255)

_OTHER_PRODUCTS = frozenset(("aten.addmm", "aten.baddbmm", "aten.bilinear"))


@dataclass(frozen=True)
class MultiplyActivations(Pass):
    """Multiply integers where a matrix product takes two dequantised activations.

    Each has one scale and one zero point; views may lie between, which then move the integers.
    Sums are exact in 32 bits. Two products with a softmax between, whose result is rounded, are
    attention: one kernel; so are those with exp(scores - greatest) between, where the second one is
    divided by its sum. What floats compute as fast stays as it is.

    Rewrites:
        %x = quantized_decomposed.dequantize_per_tensor(%q, 0.1, 3, -128, 127, torch.int8)
        %y = quantized_decomposed.dequantize_per_tensor(%k, 0.2, 0, -128, 127, torch.int8)
        %m = aten.transpose(%y, -2, -1)
        return aten.matmul(%x, %m)
        →
        %t = aten.transpose(%k, -2, -1)
        %i = fxkit.integer_product(%q, %t, None, 3)
        return aten.mul(aten.to(%i, torch.float32), 0.02)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Rewrite each product that gains. Cost: linear, and trials of sizes not met before."""
        for node in list(edit.graph.nodes):
            self._attend(edit, node)
        for node in list(edit.graph.nodes):
            found = resolve(node)
            if found is None or found.name not in (*PRODUCTS, *_OTHER_PRODUCTS):
                continue
            if found.name in _OTHER_PRODUCTS:
                if takes_dequantized(node):
                    context.notes.append(f"%{node.name} {STAYS}: it is no linear layer")
                continue
            left, right = (MovedIntegers.of(one) for one in operands_of(found))
            if left is None and right is None:
                continue
            reason = _reason_to_stay(node, left, right)
            if reason is not None:
                context.notes.append(f"%{node.name} {STAYS}: {reason}")
                continue
            assert left is not None and right is not None
            with edit.on_behalf_of([node], "multiply_activations"):
                edit.replace(node, _multiplied(edit, node, left, right))

    def _attend(self, edit: EditSession, node: fx.Node) -> None:
        """Replace a node that ends attention, and what is between it and the first product."""
        found = attention_at(node)
        known = None if found is None else type_of(found.query.integers)
        if found is None or not _is_known(known) or known.device.type != "cpu":
            return
        with edit.on_behalf_of([node], "multiply_activations"):
            made = _attended(edit, node, found)
            try:
                kernel = emit_integer_attention(made, edit.gm).kernel
            except Unfusable:
                return
            if attentions.reason_to_stay_float(kernel) is None:
                edit.replace(node, made)
                for dead in found.between:
                    edit.erase(dead)


def _reason_to_stay(
    node: fx.Node, left: MovedIntegers | None, right: MovedIntegers | None
) -> str | None:
    """Return why floats multiply two operands, or None."""
    if left is None or right is None:
        return "one of its operands is not quantised with one scale"
    x, y, result = (type_of(one) for one in (left.value, right.value, node))
    if not (_is_known(x) and _is_known(y) and _is_known(result)):
        return "the types of its operands are not known"
    if x.device.type != "cpu":
        return f"it is on {x.device}"
    try:
        product = geometry(x, y, _in_order(result), is_transposed=False)
    except Unfusable as reason:
        return str(reason)
    if product.depth > MOST_TERMS:
        return f"sums of {product.depth} products may need more than 32 bits"
    detail = IntegerProduct(
        0, 1, product.batch, product.rows, product.columns, product.depth, (product.depth, 1),
        product.right_strides, has_tiles=matrix_unit.multiplies_bytes(),
    )  # fmt: skip
    return reason_to_stay_float(detail, pairs_fit=False, dtype=result.dtype)


def _is_known(known: Any) -> TypeGuard[TensorType]:
    return isinstance(known, TensorType) and not known.is_symbolic


def _in_order(known: TensorType) -> TensorType:
    """Return the type of a tensor that lies row by row."""
    return replace(known, stride=tuple(row_major(known.shape)))


def _multiplied(
    edit: EditSession, node: fx.Node, left: MovedIntegers, right: MovedIntegers
) -> fx.Node:
    """Return the node that computes what a product did."""

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(edit, node, target, *args, **kwargs)

    rows = left.rows(edit, node)
    columns, zero = right.signed(edit, node)
    value = add(integer_product(), rows, columns, None, left.zero)
    if zero:
        total = add(aten.sum.dim_IntList, rows, [-1], True, dtype=torch.int32)
        depth = int(type_of(rows).shape[-1])  # type: ignore[union-attr]
        total = add(aten.sub.Tensor, total, depth * left.zero)
        value = add(aten.sub.Tensor, value, add(aten.mul.Tensor, total, zero))
    value = add(aten.to.dtype, value, torch.float32)
    value = add(aten.mul.Tensor, value, left.scale * right.scale)
    dtype = type_of(node).dtype  # type: ignore[union-attr]
    return value if dtype == torch.float32 else add(aten.to.dtype, value, dtype)


def _attended(edit: EditSession, node: fx.Node, found: QuantizedAttention) -> fx.Node:
    """Return the node that computes what attention did."""
    query = found.query.rows(edit, node)
    key, key_zero = found.key.signed(edit, node)
    key = add_call(edit, node, aten.transpose.int, key, -2, -1)
    value, value_zero = found.value.signed(edit, node)
    given = found.rounding.arguments
    return add_call(
        edit, node, integer_attention(), query, key, value, found.mask,
        found.query.scale * found.key.scale * found.scale,
        [found.query.zero, key_zero, given["zero_point"], value_zero],
        given["scale"], [given["quant_min"], given["quant_max"]], given["dtype"],
        found.value.scale, found.divides_last,
    )  # fmt: skip
