"""The bias of a library's matrix product, added by the kernel that reads the product.

The library writes a bias into its result before it multiplies: a pass over memory that is saved.
"""

from __future__ import annotations

from dataclasses import replace

from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.columns import with_rows_of
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Kernel, Store
from fxkit.lower.loop_ir.product import Product


def has_bias(found: ProductNode) -> bool:
    """Tell whether a node is a product of matrices with a bias."""
    return isinstance(found.product, Product) and not found.is_convolution and bool(found.strides)


def with_bias(region: Emitted, found: ProductNode) -> Emitted | None:
    """Return the kernel of a region that adds the bias to a product that it reads without.

    Returns:
        The kernel, the bias being its last input; None where it can't be told of which column an
        element is that it reads.
    """
    kernel, place = region.kernel, len(region.inputs)
    if found.node not in region.inputs or any(i.op == "index" for i in kernel.body):
        return None
    if not kernel.row_rank:
        kernel = with_rows_of(kernel, found.product.columns) or kernel
    product = region.inputs.index(found.node)
    body: list[Instruction] = []
    values: dict[int, int] = {}
    for position, old in enumerate(kernel.body):
        operands = tuple(values[o] for o in old.operands)
        detail = _moved(old.detail, place) if old.op == "load" else old.detail
        values[position] = len(body)
        body.append(replace(old, operands=operands, detail=detail))
        if old.op != "load" or old.detail.buffer != product:
            continue
        access = _of_column(old.detail, kernel, place, found)
        if access is None:
            return None
        body.append(Instruction("load", (), old.dtype, access))
        body.append(Instruction("add", (values[position], len(body) - 1), old.dtype))
        values[position] = len(body) - 1
    inputs, outputs = kernel.buffers[:place], kernel.buffers[place:]
    bias = Buffer(f"in{place}", kernel.buffers[product].dtype, False)
    stores = tuple(Store(_moved(s.access, place), values[s.value], s.is_sum) for s in kernel.stores)
    added = replace(kernel, buffers=(*inputs, bias, *outputs), body=tuple(body), stores=stores)
    return Emitted(added, (*region.inputs, found.operands[-1]), region.outputs)


def _moved(access: Access, place: int) -> Access:
    """Return an access to a buffer before which, at a place, there is one more."""
    return replace(access, buffer=access.buffer + (access.buffer >= place))


def _of_column(access: Access, kernel: Kernel, place: int, found: ProductNode) -> Access | None:
    """Return where the bias of the element lies that an access reads of a product."""
    columns, (stride,) = found.product.columns, found.strides
    if access.scales or access.otherwise is not None:
        return None
    column = access.offset % columns
    steps = [step % columns and step for step in access.strides]
    last = column + sum((n - 1) * step for n, step in zip(kernel.sizes, steps, strict=True))
    if min(steps, default=0) < 0 or last >= columns:
        return None
    return Access(place, tuple(step * stride for step in steps), column * stride)
