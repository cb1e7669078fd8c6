"""Loop order: in which order a kernel walks its axes, and which are merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store, Unfusable

# With fewer rows side by side, their elements are not neighbours enough.
FEW_ROWS = 8


def ordered(kernel: Kernel, reduced: Sequence[int]) -> Kernel:
    """Order the axes as memory runs, the reduced ones last, and merge those that run as one."""
    accesses = _accesses(kernel)
    guide = max((s.access for s in kernel.stores), key=lambda a: sum(map(bool, a.strides)))
    in_memory = [a for a in accesses if a.buffer >= 0]
    loads = [a for a in in_memory if all(a.strides[axis] for axis in reduced)] or [guide]

    def by_stride(axes: Iterable[int], access: Access) -> list[int]:
        return sorted(axes, key=lambda axis: -abs(access.strides[axis]))

    outer = by_stride((a for a in range(len(kernel.sizes)) if a not in reduced), guide)
    groups = _merged(kernel, outer, accesses)
    rows = _merged(kernel, by_stride(reduced, loads[0]), accesses)
    if len(rows) > 1 and kernel.has_scans:
        raise Unfusable("it folds along an axis that its neighbours walk as two")
    return _regrouped(kernel, groups, rows)


def _accesses(kernel: Kernel) -> list[Access]:
    loads = [i.detail for i in kernel.body if i.op in ("load", "index")]
    return loads + [s.access for s in kernel.stores]


def _merged(kernel: Kernel, axes: Sequence[int], accesses: Sequence[Access]) -> list[list[int]]:
    strides = [[a.strides[axis] for axis in axes] for a in accesses]
    found = distinct_axes(strides, [kernel.sizes[axis] for axis in axes])
    return [[axes[position] for position in group] for group in found]


def _regrouped(kernel: Kernel, outer: list[list[int]], rows: list[list[int]]) -> Kernel:
    groups = outer + rows
    if groups == [[axis] for axis in range(len(kernel.sizes))] and len(rows) == kernel.row_rank:
        return kernel

    def access(old: Access) -> Access:
        strides = tuple([old.strides[group[-1]] for group in groups])
        return Access(old.buffer, strides, old.offset, old.scales, old.otherwise)

    def instruction(old: Instruction) -> Instruction:
        if old.op not in ("load", "index"):
            return old
        return Instruction(old.op, old.operands, old.dtype, access(old.detail))

    sizes = []
    for group in groups:
        size = 1
        for axis in group:
            size *= kernel.sizes[axis]
        sizes.append(size)
    return Kernel(
        tuple(sizes),
        len(rows),
        kernel.buffers,
        tuple(map(instruction, kernel.body)),
        tuple([Store(access(s.access), s.value, s.is_sum) for s in kernel.stores]),
    )


def distinct_axes(strides: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Group neighbouring axes that every access walks as one; axes of size 1 are dropped.

    Returns:
        Groups of axis positions, outermost first. Merging `i` and `j = i + 1` is right when each
        access has `stride[i] == stride[j] * size[j]`.
    """
    groups: list[list[int]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        previous = groups[-1][-1] if groups else None
        if previous is not None and all(s[previous] == s[axis] * size for s in strides):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def with_an_axis(kernel: Kernel) -> Kernel:
    """Give a kernel of one point an axis."""
    return kernel if kernel.sizes else _with_one_more(kernel)


def with_a_row(kernel: Kernel) -> Kernel:
    """Give a kernel that reduces over no axis one of size one, over which it does."""
    if kernel.row_rank or not kernel.has_reductions:
        return kernel
    return replace(_with_one_more(kernel), row_rank=1)


def _with_one_more(kernel: Kernel) -> Kernel:
    def widened(access: Access) -> Access:
        return replace(access, strides=(*access.strides, 0))

    body = tuple(
        replace(i, detail=widened(i.detail)) if i.op in ("load", "index") else i
        for i in kernel.body
    )
    stores = tuple(replace(s, access=widened(s.access)) for s in kernel.stores)
    return replace(kernel, sizes=(*kernel.sizes, 1), body=body, stores=stores)


def runs_down_columns(kernel: Kernel) -> bool:
    """Tell whether neighbouring rows, rather than neighbours in a row, are neighbours in memory."""
    outer = len(kernel.outer_sizes)
    last = kernel.outer_sizes[-1] if outer else 0
    if not outer or (type(last) is int and last < FEW_ROWS):
        return False
    if not any(i.is_reduction or i.is_scan for i in kernel.body):
        return False
    accesses = [i.detail for i in kernel.body if i.op == "load"]
    wide = [a for a in accesses if a.strides[-1] or a.scales]
    down = sum(a.strides[outer - 1] == 1 for a in wide)
    along = sum(a.strides[-1] == 1 for a in wide)
    return down > along
