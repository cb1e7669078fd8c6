"""How a kernel is laid out on a GPU: who computes what, and how much at a time.

A thread handles `width` neighbours at a time, as many as sixteen bytes hold of the smallest
elements, wherever memory allows it. A kernel without reductions gives them out one by one
(*points*). A row that is reduced is handled by a *group* of threads: a part of a warp or a whole
one up to 1,024 elements, a block up to 32,768, which hold what they have read in registers; longer
rows are read once for each pass. Rows that lie across memory are handled as *columns*, 32 times
`width` of them a block. Where there are too few rows to keep a GPU busy, several blocks share a
row: each pass is a launch of its own, which begins by folding what earlier passes have left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from fxkit.lower.codegen.cpp.columns import runs_down_columns
from fxkit.lower.loop_ir.loop_ir import Access, Kernel

# Longest rows that a warp, and that a block, holds in registers; half of that for eight bytes.
WARP_ROW, BLOCK_ROW = 1024, 32 * 1024

# Threads of a block, but for rows that ask for more.
THREADS = 128

# Threads of a block that walks a row without holding it.
WALKERS = 512

# Blocks that keep a GPU busy: two for each of its multiprocessors, of which large ones have 132.
# Where rows are shared there are four times as many, since some multiprocessors get one more.
BUSY, SHARING = 264, 1056

# Least elements that a block of several takes of a row: fewer cost more to fold than to read.
SHARE = 8192

# Columns side by side in a block, each a thread, and threads down each of them.
ACROSS, DOWN = 32, 8

# Blocks of a grid, in its first direction, are fewer than this.
MAX_GRID = 2**31

# Addresses up to here are computed in 32 bits; what lies above is room for the last step of a loop.
_SMALL = 2**31 - 2**25


class ThreadGroup(Enum):
    """What a block of threads is given."""

    POINTS = "points"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Layout:
    """How a kernel is laid out.

    Attributes:
        family: What a block of threads is given.
        width: Neighbours that a thread handles at a time.
        threads: Threads of a block.
        group: Threads of a row; in columns, threads down a column.
        items: Times `width` elements of a row that a thread holds; 0 where rows are walked.
        splits: Blocks that share a row.
        share: Elements of a row that each of them takes.
    """

    family: ThreadGroup
    width: int
    threads: int
    group: int = 1
    items: int = 0
    splits: int = 1
    share: int = 0


def objection(kernel: Kernel) -> str | None:
    """Return why no CUDA text is made of a kernel, or None."""
    if kernel.whole is not None:
        return "torch's library computes products on a GPU"
    if any(i.is_scan for i in kernel.body):
        return "it folds along rows, which CUDA kernels do not"
    if any(i.is_reduction and _monoid(i.op) not in FOLDS for i in kernel.body):
        return "it reduces in a way that CUDA kernels do not"
    if kernel.row_rank and math.prod(kernel.outer_sizes) >= MAX_GRID:
        return "it has more rows than a grid has blocks"
    return None


FOLDS = {"add": "FxAdd", "mul": "FxMul", "max": "FxMax", "min": "FxMin"}


def _monoid(op: str) -> str:
    return op.removeprefix("reduce_")


def lay_out(kernel: Kernel, width: int | None = None) -> Layout:
    """Return the layout of a kernel.

    Args:
        kernel: Its row has at least one axis.
        width: Neighbours that a thread handles at a time; as many as memory allows when left out.
    """
    if not any(i.is_reduction for i in kernel.body):
        wide = best_width(kernel, len(kernel.sizes) - 1) if width is None else width
        return Layout(ThreadGroup.POINTS, wide, THREADS)
    if runs_down_columns(kernel):
        wide = (
            best_width(kernel, lane_axis(kernel, ThreadGroup.COLUMNS)) if width is None else width
        )
        return _columns(kernel, wide)
    wide = best_width(kernel, lane_axis(kernel, ThreadGroup.ROWS)) if width is None else width
    return _rows(kernel, wide)


def lane_axis(kernel: Kernel, family: ThreadGroup) -> int:
    """Return the axis along which a thread's neighbours lie."""
    return len(kernel.outer_sizes if family is ThreadGroup.COLUMNS else kernel.sizes) - 1


def _columns(kernel: Kernel, width: int) -> Layout:
    length = math.prod(kernel.row_sizes)
    tiles = -(-kernel.outer_sizes[-1] // (ACROSS * width))
    blocks = math.prod(kernel.outer_sizes[:-1]) * tiles
    splits, share = _split(length, blocks, SHARE // ACROSS, DOWN)
    return Layout(ThreadGroup.COLUMNS, width, ACROSS * DOWN, DOWN, 0, splits, share)


def _rows(kernel: Kernel, width: int) -> Layout:
    length, rows = math.prod(kernel.row_sizes), math.prod(kernel.outer_sizes)
    tiles = -(-length // width)
    weight = _registers(kernel)
    if length * weight <= WARP_ROW:
        group = min(32, _power_above(tiles))
        return Layout(ThreadGroup.ROWS, width, THREADS, group, -(-tiles // group))
    if length * weight <= BLOCK_ROW:
        group = min(1024, max(64, _power_above(-(-length * weight // 16))))
        return Layout(ThreadGroup.ROWS, width, group, group, -(-tiles // group))
    splits, share = _split(length, rows, SHARE, WALKERS * width)
    return Layout(ThreadGroup.ROWS, width, WALKERS, WALKERS, 0, splits, share)


def _registers(kernel: Kernel) -> int:
    """Return how many registers an element takes."""
    wide = zip(kernel.body, kernel.row_wide, strict=True)
    return (
        2 if any(is_wide and i.dtype.itemsize > 4 and i.op != "index" for i, is_wide in wide) else 1
    )


def _split(length: int, blocks: int, least: int, step: int) -> tuple[int, int]:
    """Return how many blocks share a row, and its elements for each, a multiple of `step`."""
    wanted = min(-(-SHARING // max(1, blocks)), -(-length // least))
    if wanted <= 1 or blocks >= BUSY:
        return 1, length
    share = math.ceil(math.ceil(length / wanted) / step) * step
    return -(-length // share), share


def _power_above(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


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


def index_type(kernel: Kernel) -> str:
    """Return the type in which indices and addresses are computed."""
    accesses = [i.detail for i in kernel.body if i.op in ("load", "index")]
    accesses += [s.access for s in kernel.stores]
    spans = [
        abs(a.offset)
        + sum(abs(step) * size for step, size in zip(a.strides, kernel.sizes, strict=True))
        for a in accesses
    ]
    return "int" if max([kernel.points, *spans]) < _SMALL else "long"
