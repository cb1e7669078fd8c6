"""Nodes that multiply by 4-bit integers in groups, as products that a kernel can compute."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.families.int4_products.custom_op import NAME
from fxkit.lower.families.product_node import ProductNode, arguments_of
from fxkit.lower.families.products.matrices import checked_operand, checked_type
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.int4_product import Int4Product
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Product

# Types of zero points that a kernel reads.
ZERO_POINTS = (torch.int8, torch.int32, torch.int64, torch.float32)


def int4_product(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a node as a product that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    given = arguments_of(node, NAME)
    checked_type(type_of(node), "its result")
    kind = _dtype(given["left"], (torch.float32, torch.int8, torch.uint8))
    x = checked_operand(given["left"], root, "left", kind)
    packed = checked_operand(given["packed"], root, "right", torch.int8)
    scales = checked_operand(given["scales"], root, "scales", torch.float32)
    group, (columns, half) = given["group"], packed.shape
    if len(x.shape) != 2 or x.shape[1] != 2 * half or group % 2 or 2 * half % group:
        raise Unfusable("its groups do not divide its rows")
    operands, dtypes = [given["left"], given["packed"], given["scales"]], [kind, torch.int8]
    dtypes.append(torch.float32)
    wanted = [(packed, (columns, half)), (scales, (columns, 2 * half // group))]
    positions: dict[str, Any] = {}
    if given["zero_points"] is not None:
        dtypes.append(_dtype(given["zero_points"], ZERO_POINTS))
        points = checked_operand(given["zero_points"], root, "zero points", dtypes[-1])
        wanted.append((points, wanted[1][1]))
        positions["zero_points"] = len(operands)
        operands.append(given["zero_points"])
    if any(known.shape != shape or not _is_dense(known) for known, shape in wanted):
        raise Unfusable("its weight, scales or zero points do not lie in order")
    if given["zeros"] is not None:
        each = checked_operand(given["zeros"], root, "zeros", torch.int32)
        if each.shape != (x.shape[0], 1) or each.stride is None:
            raise Unfusable("it does not have a zero point for each row")
        positions |= {"zeros": len(operands), "zeros_stride": each.stride[0]}
        operands.append(given["zeros"])
        dtypes.append(torch.int32)
    row, term = x.stride or (2 * half, 1)
    if term != 1:
        raise Unfusable("terms of its left operand do not lie side by side")
    plain = Product(0, 1, (), x.shape[0], columns, 2 * half, (row, 1), (1, half))
    detail = Int4Product(
        **{field.name: getattr(plain, field.name) for field in fields(Product)},
        **positions,
        group=group,
        is_float=kind == torch.float32,
        zero=given["zero"],
        has_tiles=matrix_unit.multiplies_bytes(),
    )
    return ProductNode(node, detail, tuple(operands), dtypes=tuple(dtypes))


def _dtype(value: Any, serving: tuple[torch.dtype, ...]) -> torch.dtype:
    known = type_of(value) if isinstance(value, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype not in serving:
        raise Unfusable("an operand is of another type")
    return known.dtype


def _is_dense(known: TensorType) -> bool:
    return known.stride is None or tuple(known.stride) == tuple(row_major(known.shape))
