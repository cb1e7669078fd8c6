"""Nodes that multiply matrices, as products that a kernel can compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute, resolve
from fxkit.ir.types import TensorType, short_dtype, type_of
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.fusion.candidates import operand_type
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Batch, Product
from fxkit.lower.scheduling.axis_order import distinct_axes

_Parts = tuple[Any, Any, Any, bool]


def _linear(arguments: Mapping[str, Any]) -> _Parts:
    return arguments["input"], arguments["weight"], arguments.get("bias"), True


def _plain(arguments: Mapping[str, Any]) -> _Parts:
    return arguments["self"], arguments.get("mat2", arguments.get("other")), None, False


def _added(arguments: Mapping[str, Any]) -> _Parts:
    if arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
        raise Unfusable("its sum has factors")
    return arguments["mat1"], arguments["mat2"], arguments["self"], False


# Operator → left operand, right operand, bias, whether the right operand is given transposed.
_OPERATORS: dict[str, Callable[[Mapping[str, Any]], _Parts]] = {
    "aten.linear": _linear,
    "aten.mm": _plain,
    "aten.bmm": _plain,
    "aten.matmul": _plain,
    "aten.addmm": _added,
}


def is_matrix_product(node: fx.Node) -> bool:
    """Tell whether a node multiplies matrices."""
    call = resolve(node)
    return call is not None and call.name in _OPERATORS


def matrix_product(node: fx.Node, root: torch.nn.Module) -> ProductNode:
    """Return a node as a product that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    call = resolve(node)
    if call is None or call.name not in _OPERATORS:
        raise Unfusable("it multiplies no matrices")
    left, right, bias, is_transposed = _OPERATORS[call.name](call.arguments)
    result = checked_type(type_of(node), "its result")
    x, y = (checked_operand(v, root, what) for v, what in ((left, "left"), (right, "right")))
    product = geometry(x, y, result, is_transposed)
    if bias is None:
        return ProductNode(node, product, (left, right))
    row = checked_operand(bias, root, "added")
    if row.shape != (product.columns,):
        raise Unfusable("what it adds is no row")
    return ProductNode(
        node, product, (left, right, bias), (row.stride or (1,)), epilogue=_with_bias
    )


def _with_bias(_: Builder, total: Ref, columns: Sequence[Ref]) -> Ref:
    return total + columns[0]


def checked_operand(
    operand: Any, root: torch.nn.Module, what: str, dtype: torch.dtype = torch.float32
) -> TensorType:
    """Return the type of an operand that a product can read.

    Raises:
        Unfusable: When it can't.
    """
    if not isinstance(operand, (fx.Node, Attribute)):
        raise Unfusable(f"its {what} operand is no tensor")
    known = type_of(operand) if isinstance(operand, fx.Node) else operand_type(operand, root)
    return checked_type(known, f"its {what} operand", dtype)


def checked_type(known: Any, what: str, dtype: torch.dtype = torch.float32) -> TensorType:
    """Return a type if it is one that a product reads or writes; see `checked_operand`."""
    if not isinstance(known, TensorType):
        raise Unfusable(f"the type of {what} is not known")
    if known.device.type != "cpu":
        raise Unfusable(f"{what} is on {known.device}, whose library computes products")
    if known.stride is None:
        raise Unfusable(f"{what} is no strided tensor")
    if known.dtype != dtype:
        raise Unfusable(
            f"{what} is {short_dtype(known.dtype)}, whose products the library computes"
        )
    if not all(isinstance(size, int) for size in known.shape):
        raise Unfusable(f"the shape of {what} is symbolic")
    if known.numel == 0:
        raise Unfusable(f"{what} has no elements")
    return known


def geometry(x: TensorType, y: TensorType, result: TensorType, is_transposed: bool) -> Product:
    """Return sizes and strides of a product.

    Raises:
        Unfusable: When an operand is a vector, or the result is not laid out row by row.
    """
    if len(y.shape) < 2 or len(x.shape) < (1 if is_transposed else 2):
        raise Unfusable("it multiplies by a vector")
    if not _is_contiguous(result):
        raise Unfusable("its result is not laid out row by row")
    term, column = (-1, -2) if is_transposed else (-2, -1)
    strides_x, strides_y = list(x.stride or ()), list(y.stride or ())
    outer = tuple(result.shape[:-1])
    left = _aligned(x.shape[:-1], strides_x[:-1], len(outer))
    right = [*_aligned(y.shape[:-2], strides_y[:-2], len(outer) - 1), 0]
    groups = distinct_axes([left, right], outer)
    repeated = [
        Batch(math.prod(outer[axis] for axis in group), left[group[-1]], right[group[-1]])
        for group in groups
    ]
    rows = repeated.pop() if repeated and not repeated[-1].right else Batch(1, 0, 0)
    return Product(
        0,
        1,
        tuple(repeated),
        rows.size,
        y.shape[column],
        y.shape[term],
        (rows.left, strides_x[-1]),
        (strides_y[term], strides_y[column]),
    )


def _aligned(shape: Sequence[int], strides: Sequence[int], rank: int) -> list[int]:
    """Return the strides along the result's outer dimensions, 0 where the operand is repeated."""
    missing = [0] * (rank - len(shape))
    return missing + [0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]


def _is_contiguous(known: TensorType) -> bool:
    """Tell whether a tensor lies in memory row by row, without gaps."""
    expected = row_major(known.shape)
    given = known.stride or ()
    return all(n == 1 or a == b for n, a, b in zip(known.shape, given, expected, strict=True))
