"""Nodes that multiply matrices of 8-bit integers, as products that a kernel can compute."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.families.integer_products.custom_op import NAME
from fxkit.lower.families.product_node import ProductNode, arguments_of
from fxkit.lower.families.products.matrices import checked_operand, checked_type, geometry
from fxkit.lower.loop_ir.integer_product import IntegerProduct
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Product


def integer_product(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a node as a product that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    given = arguments_of(node, NAME)
    left, right, zeros = (given[name] for name in ("left", "right", "zeros"))
    known = type_of(left)
    is_unsigned = isinstance(known, TensorType) and known.dtype == torch.uint8
    dtypes = [torch.uint8 if is_unsigned else torch.int8, torch.int8, torch.int32]
    result = checked_type(type_of(node), "its result", torch.int32)
    x = checked_operand(left, root, "left", dtypes[0])
    y = checked_operand(right, root, "right", dtypes[1])
    product = geometry(x, y, result, is_transposed=False)
    if product.left_strides[1] != 1:
        raise Unfusable("terms of its left operand do not lie side by side")
    parts = {field.name: getattr(product, field.name) for field in fields(Product)}
    parts["has_tiles"] = matrix_unit.multiplies_bytes()
    if zeros is None:
        detail = IntegerProduct(**parts, zero=given["zero"])
        return ProductNode(node, detail, (left, right), dtypes=tuple(dtypes[:2]))
    each = checked_operand(zeros, root, "third", dtypes[2])
    if product.batch or each.shape != (product.rows, 1) or each.stride is None:
        raise Unfusable("it does not have a zero point for each row")
    detail = IntegerProduct(**parts, zeros=2, zeros_stride=each.stride[0])
    return ProductNode(node, detail, (left, right, zeros), dtypes=tuple(dtypes))
