"""Matrix products in a graph, each with the pointwise operators that go on with its result.

A product and what follows it become one kernel: each block of the result is finished while it lies
in the cache, and the product itself never goes through memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute, resolve
from fxkit.ir.types import TensorType, short_dtype, type_of
from fxkit.lower.loops.axis_order import distinct_axes
from fxkit.lower.loops.emit import Emitted, Operand
from fxkit.lower.loops.group import Group
from fxkit.lower.loops.loop_ir import (
    Access,
    Buffer,
    Instruction,
    Kernel,
    Store,
    Unfusable,
)
from fxkit.lower.loops.placement import operand_type
from fxkit.lower.loops.product import Batch, Product


@dataclass(frozen=True)
class MatrixProduct:
    """A node that multiplies matrices.

    Attributes:
        node: The node.
        left: The left operand.
        right: The right operand.
        bias: What is added to each row, or None.
        bias_stride: Stride of the bias, in elements.
        product: Sizes and strides; its buffers are 0 and 1.
    """

    node: fx.Node
    left: Operand
    right: Operand
    bias: Operand | None
    bias_stride: int
    product: Product

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that it reads, in the order of a kernel's buffers."""
        return (self.left, self.right) if self.bias is None else (self.left, self.right, self.bias)


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


def is_product(node: fx.Node) -> bool:
    """Tell whether a node multiplies matrices."""
    call = resolve(node)
    return call is not None and call.name in _OPERATORS


def matrix_product(node: fx.Node, root: torch.nn.Module) -> MatrixProduct:
    """Return a node as a product that a kernel can compute.

    Raises:
        Unfusable: When no kernel can.
    """
    call = resolve(node)
    if call is None or call.name not in _OPERATORS:
        raise Unfusable("it multiplies no matrices")
    left, right, bias, is_transposed = _OPERATORS[call.name](call.arguments)
    result = _checked(type_of(node), "its result")
    x, y = (_operand(v, root, what) for v, what in ((left, "left"), (right, "right")))
    product = _geometry(x, y, result, is_transposed)
    stride = 0
    if bias is not None:
        row = _operand(bias, root, "added")
        if row.shape != (product.columns,):
            raise Unfusable("what it adds is no row")
        stride = (row.stride or (1,))[0]
    return MatrixProduct(node, left, right, bias, stride, product)


def _operand(operand: Any, root: torch.nn.Module, what: str) -> TensorType:
    if not isinstance(operand, (fx.Node, Attribute)):
        raise Unfusable(f"its {what} operand is no tensor")
    return _checked(operand_type(operand, root), f"its {what} operand")


def _checked(known: Any, what: str) -> TensorType:
    if not isinstance(known, TensorType):
        raise Unfusable(f"the type of {what} is not known")
    if known.device.type != "cpu" or known.stride is None:
        raise Unfusable(f"{what} is no strided tensor in the processor's memory")
    if known.dtype != torch.float32:
        raise Unfusable(
            f"{what} is {short_dtype(known.dtype)}, whose products the library computes"
        )
    if not all(isinstance(size, int) for size in known.shape):
        raise Unfusable(f"the shape of {what} is symbolic")
    if known.numel == 0:
        raise Unfusable(f"{what} has no elements")
    return known


def _geometry(x: TensorType, y: TensorType, result: TensorType, is_transposed: bool) -> Product:
    """Return sizes and strides of a product.

    Raises:
        Unfusable: When an operand is a vector, or the result is not laid out row by row.
    """
    if len(y.shape) < 2 or len(x.shape) < (1 if is_transposed else 2):
        raise Unfusable("it multiplies by a vector")
    if not is_contiguous(result):
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


def is_contiguous(known: TensorType) -> bool:
    """Tell whether a tensor lies in memory row by row, without gaps."""
    expected = _contiguous(known.shape)
    given = known.stride or ()
    return all(n == 1 or a == b for n, a, b in zip(known.shape, given, expected, strict=True))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def continues_product(group: Group, root: torch.nn.Module) -> bool:
    """Tell whether a region goes on with a product that nothing else reads, and reduces nothing."""
    return group.space.reduced is None and any(
        all(user in group.coordinates for user in read.users) and _is_possible(read, root)
        for read in group.reads
        if is_product(read)
    )


def _is_possible(node: fx.Node, root: torch.nn.Module) -> bool:
    try:
        matrix_product(node, root)
    except Unfusable:
        return False
    return True


def alone(found: MatrixProduct) -> Emitted:
    """Return the kernel of a product that nothing follows."""
    product = found.product
    sizes = (product.count * product.rows, product.columns)
    buffers = (Buffer("in0", torch.float32, False), Buffer("out0", torch.float32, True))
    load = Instruction("load", (), torch.float32, Access(0, _contiguous(sizes)))
    store = Store(Access(1, _contiguous(sizes)), 0)
    copy = Kernel(sizes, 1, buffers, (load,), (store,))
    return _joined(found, copy, 0, (), ((found.node, 0),))


def followed_by(found: MatrixProduct, region: Emitted) -> Emitted | None:
    """Return the kernel of a product and the region that reads it, or None when they don't fit.

    They fit when the region goes through the product's result in the order in which it would lie
    in memory, each element once, and reduces nothing.
    """
    buffer = region.inputs.index(found.node)
    kernel = region.kernel
    loads = {i.detail for i in kernel.body if i.op == "load" and i.detail.buffer == buffer}
    if kernel.row_rank or kernel.has_checks or any(i.op == "index" for i in kernel.body):
        return None
    if kernel.points != found.product.count * found.product.rows * found.product.columns:
        return None
    if len(loads) != 1 or not _is_in_order(loads.pop(), kernel):
        return None
    split = _with_rows_of(kernel, found.product.columns)
    others = tuple(o for o in region.inputs if o is not found.node)
    return split and _joined(found, split, buffer, others, region.outputs)


def _is_in_order(access: Access, kernel: Kernel) -> bool:
    is_plain = not (access.offset or access.scales or access.otherwise)
    return is_plain and access.strides == _contiguous(kernel.sizes)


def _with_rows_of(kernel: Kernel, columns: int) -> Kernel | None:
    """Return a kernel whose last axis, cut where rows end, is a row of so many columns."""
    if not kernel.sizes or kernel.sizes[-1] % columns:
        return None
    *outer, last = kernel.sizes
    if last == columns:
        return replace(kernel, row_rank=1)

    def cut(access: Access) -> Access:
        *others, stride = access.strides
        return replace(access, strides=(*others, stride * columns, stride))

    body = tuple(replace(i, detail=cut(i.detail)) if i.op == "load" else i for i in kernel.body)
    stores = tuple(replace(s, access=cut(s.access)) for s in kernel.stores)
    return replace(
        kernel, sizes=(*outer, last // columns, columns), row_rank=1, body=body, stores=stores
    )


def _joined(
    found: MatrixProduct,
    kernel: Kernel,
    buffer: int,
    others: tuple[Operand, ...],
    outputs: tuple[tuple[fx.Node, int], ...],
) -> Emitted:
    """Put a product in the place of the loads of one buffer."""
    operands = found.operands
    kept = [p for p in range(len(kernel.buffers)) if p != buffer]
    place = {old: new for new, old in enumerate(kept, len(operands))}
    inputs = len(operands) + len(others)
    buffers = [Buffer(f"in{p}", torch.float32, False) for p in range(len(operands))]
    for old in kept:
        is_output = kernel.buffers[old].is_output
        position = len(buffers) - inputs if is_output else len(buffers)
        name = f"{'out' if is_output else 'in'}{position}"
        buffers.append(replace(kernel.buffers[old], name=name))

    def moved(access: Access) -> Access:
        return replace(access, buffer=place[access.buffer])

    body = _product_body(found, len(kernel.sizes))
    result = len(body) - 1
    values: dict[int, int] = {}
    for position, old in enumerate(kernel.body):
        if old.op == "load" and old.detail.buffer == buffer:
            values[position] = result
            continue
        detail = moved(old.detail) if old.op == "load" else old.detail
        operands_now = tuple(values[o] for o in old.operands)
        values[position] = len(body)
        body.append(replace(old, operands=operands_now, detail=detail))
    stores = tuple(Store(moved(s.access), values[s.value]) for s in kernel.stores)
    joined = replace(kernel, buffers=tuple(buffers), body=tuple(body), stores=stores)
    return Emitted(joined, (*operands, *others), outputs)


def _product_body(found: MatrixProduct, rank: int) -> list[Instruction]:
    """Return the instructions of a product and its bias; the last one is their result."""
    body = [Instruction("product", (), torch.float32, found.product)]
    if found.bias is not None:
        along = Access(2, (*[0] * (rank - 1), found.bias_stride))
        body.append(Instruction("load", (), torch.float32, along))
        body.append(Instruction("add", (0, 1), torch.float32))
    return body
