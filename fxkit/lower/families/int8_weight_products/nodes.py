"""Nodes that multiply floats by 8-bit integers, as products that a kernel can compute."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import fx

from fxkit.ir.types import type_of
from fxkit.lower.families.int8_weight_products.custom_op import NAME
from fxkit.lower.families.int8_weight_products.printer import FEW_ROWS
from fxkit.lower.families.product_node import ProductNode, arguments_of
from fxkit.lower.families.products.matrices import checked_operand, checked_type, geometry
from fxkit.lower.loop_ir.int8_weight_product import Int8WeightProduct
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Product


def int8_weight_product(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a node as a product that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    given = arguments_of(node, NAME)
    left, weight = given["left"], given["weight"]
    result = checked_type(type_of(node), "its result")
    x = checked_operand(left, root, "left")
    y = checked_operand(weight, root, "right", torch.int8)
    product = geometry(x, y, result, is_transposed=True)
    if product.left_strides[1] != 1 or product.right_strides[0] != 1:
        raise Unfusable("terms of its operands do not lie side by side")
    if not isinstance(product.rows, int) or product.rows > FEW_ROWS:
        raise Unfusable(f"it has more than {FEW_ROWS} rows")
    detail = Int8WeightProduct(
        **{field.name: getattr(product, field.name) for field in fields(Product)}
    )
    return ProductNode(node, detail, (left, weight), dtypes=(torch.float32, torch.int8))
