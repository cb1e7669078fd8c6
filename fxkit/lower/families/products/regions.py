"""Matrix products in a graph, each with the pointwise epilogue that is fused with it.

A product and what follows it become one kernel: each block of the result is finished while it lies
in the cache, and the product itself is never written to memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxkit.lower.families.family import Joined, kernels_of
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.columns import with_rows_of
from fxkit.lower.fusion.emit import Emitted, Operand
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.loop_ir.builder import Builder
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Instruction, Kernel, Store, Unfusable


def continues_product(group: FusionGroup, root: torch.nn.Module) -> bool:
    """Tell whether a region goes on with a product that nothing else reads, and reduces nothing."""
    return group.space.reduced is None and any(
        all(user in group.coordinates for user in read.users) and _is_possible(read, root)
        for read in group.reads
    )


def _is_possible(node: fx.Node, root: torch.nn.Module) -> bool:
    kernels = kernels_of(node)
    if not isinstance(kernels, Joined):
        return False
    try:
        kernels.find(node, root)
    except Unfusable:
        return False
    return True


def alone(found: ProductNode) -> Emitted:
    """Return the kernel of a product that nothing follows."""
    product = found.product
    sizes = (product.count * product.rows, product.columns)
    in_order = tuple(row_major(sizes))
    dtype = product.dtype
    buffers = (Buffer("in0", dtype, False), Buffer("out0", dtype, True))
    load = Instruction("load", (), dtype, Access(0, in_order))
    store = Store(Access(1, in_order), 0)
    copy = Kernel(sizes, 1, buffers, (load,), (store,))
    return _joined(found, copy, 0, (), ((found.node, 0),))


def followed_by(found: ProductNode, region: Emitted) -> Emitted | None:
    """Return the kernel of a product and the region that reads it, or None when they don't fit.

    They fit when the region goes through the product's result in the order in which it would lie
    in memory, each element once, and reduces nothing.
    """
    if found.node not in region.inputs:  # of what is joined, a part is taken where it is not
        return None
    buffer = region.inputs.index(found.node)
    kernel = region.kernel
    loads = {i.detail for i in kernel.body if i.op == "load" and i.detail.buffer == buffer}
    if kernel.row_rank or kernel.has_checks or any(i.op == "index" for i in kernel.body):
        return None
    if kernel.points != found.product.count * found.product.rows * found.product.columns:
        return None
    if len(loads) != 1 or not _is_in_order(loads.pop(), kernel):
        return None
    split = with_rows_of(kernel, found.product.columns)
    others = tuple(o for o in region.inputs if o is not found.node)
    return split and _joined(found, replace(split, row_rank=1), buffer, others, region.outputs)


def _is_in_order(access: Access, kernel: Kernel) -> bool:
    is_plain = not (access.offset or access.scales or access.otherwise)
    return is_plain and access.strides == tuple(row_major(kernel.sizes))


def _joined(
    found: ProductNode,
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
    buffers = [Buffer(f"in{p}", found.dtype_of(p), False) for p in range(len(operands))]
    for old in kept:
        is_output = kernel.buffers[old].is_output
        position = len(buffers) - inputs if is_output else len(buffers)
        name = f"{'out' if is_output else 'in'}{position}"
        buffers.append(replace(kernel.buffers[old], name=name))

    def moved(access: Access) -> Access:
        return replace(access, buffer=place[access.buffer])

    body, result = _product_body(found, len(kernel.sizes))
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


def _product_body(found: ProductNode, rank: int) -> tuple[list[Instruction], int]:
    """Return the instructions of a product, and the position of its node's value."""
    builder = Builder()
    product = found.product
    total = builder.append(Instruction(product.op, (), product.dtype, product))
    first = len(found.operands) - len(found.strides)
    columns = [
        builder.load(Access(buffer, (*[0] * (rank - 1), stride)), found.dtype_of(buffer))
        for buffer, stride in enumerate(found.strides, first)
    ]
    value = found.epilogue(builder, total, columns)
    return builder.body, value.position
