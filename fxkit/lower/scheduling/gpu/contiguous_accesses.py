"""Which neighbours along an axis lie together in memory, so that vectors of them are accessed."""

from __future__ import annotations

from collections.abc import Iterator

from fxkit.lower.loop_ir.loop_ir import Access, Kernel


def best_width(kernel: Kernel, axis: int) -> int:
    """Return how many neighbours along an axis to handle at a time: as many as lie together."""
    accesses = [a for a in plain_accesses(kernel) if a.strides[axis]]
    sizes = [kernel.buffers[a.buffer].dtype.itemsize for a in accesses]
    if not sizes:
        return 1
    width = 8 if min(sizes) <= 2 else 4
    in_row = axis >= len(kernel.outer_sizes)
    if in_row and kernel.row_rank > 1 and kernel.sizes[axis] % width:
        return 1
    stores = [s.access for s in kernel.stores if s.access.strides[axis]]
    loads = [a for a in accesses if a not in stores]
    if not all(is_whole(kernel, a, axis, width) for a in stores):
        return 1
    if loads and not any(is_whole(kernel, a, axis, width) for a in loads):
        return 1
    return width


def plain_accesses(kernel: Kernel) -> Iterator[Access]:
    """Yield the stores, and the loads whose addresses are not computed or guarded."""
    for instruction in kernel.body:
        if instruction.op == "load" and not instruction.operands:
            yield instruction.detail
    for store in kernel.stores:
        yield store.access


def is_whole(kernel: Kernel, access: Access, axis: int, width: int) -> bool:
    """Tell whether neighbours along an axis are accessed in pieces of up to sixteen bytes.

    They are when they follow each other in memory, and each first one lies where a piece begins,
    given that the buffer does.
    """
    if width == 1 or access.strides[axis] != 1 or access.scales:
        return False
    piece = max(1, min(width, 16 // kernel.buffers[access.buffer].dtype.itemsize))
    others = [
        stride
        for position, stride in enumerate(access.strides)
        if position != axis and kernel.sizes[position] > 1
    ]
    return all(distance % piece == 0 for distance in (access.offset, *others))


def is_uniform(kernel: Kernel, position: int, axis: int, width: int) -> bool:
    """Tell whether a condition is the same for all neighbours along an axis that belong together.

    It is when it compares indices with numbers that are multiples of `width` away from where such
    neighbours begin, as that of a join or a slice in even places does.
    """
    instruction = kernel.body[position]
    if instruction.op in ("and", "or", "xor", "not"):
        return all(is_uniform(kernel, o, axis, width) for o in instruction.operands)
    if instruction.op == "const":
        return True
    if instruction.op not in ("lt", "ge"):
        return False
    index, bound = (kernel.body[o] for o in instruction.operands)
    if index.op != "index" or bound.op != "const":
        return False
    return is_boundary(kernel, index.detail, bound.detail.value, axis, width)


def is_boundary(kernel: Kernel, index: Access, bound: float, axis: int, width: int) -> bool:
    """Tell whether an index passes a bound only where neighbours that belong together begin."""
    if not index.strides[axis]:
        return True
    others = [s for d, s in enumerate(index.strides) if d != axis and kernel.sizes[d] > 1]
    distances = (index.offset - int(bound), *others)
    return index.strides[axis] == 1 and all(distance % width == 0 for distance in distances)
