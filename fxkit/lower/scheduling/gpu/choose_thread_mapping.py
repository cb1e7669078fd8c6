"""Thread mapping: which threads of a GPU compute what of a kernel, and how much at a time.

A thread handles `width` elements that lie together at a time, as many as sixteen bytes hold of the
smallest elements, wherever memory allows it. A kernel without reductions gives them out one by one
(*points*). A row that is reduced is handled by a *group* of threads: a part of a warp or a whole
one up to 1,024 elements, a block up to 32,768, which hold what they have read in registers; longer
rows are read once for each sweep. Rows that lie across memory are handled as *columns*, 32 times
`width` of them a block. Where there are too few rows to keep a GPU busy, several blocks share a
row: each sweep is a launch of its own, which begins by folding what earlier sweeps have left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest, ThreadMapping
from fxkit.lower.scheduling.axis_order import runs_down_columns
from fxkit.lower.scheduling.gpu.contiguous_accesses import best_width
from fxkit.lower.scheduling.gpu.nest_pass import NestPass
from fxkit.lower.scheduling.row_sweeps import plan_sweeps

# Longest rows that a warp, and that a block, holds in registers; half of that for eight bytes.
WARP_ROW, BLOCK_ROW = 1024, 32 * 1024

# Threads of a block, but for rows that ask for more.
THREADS = 128

# Threads of a block whose row is too long to hold in registers: each sweep reads the row again.
WALKERS = 512

# Blocks that keep a GPU busy: two for each of its multiprocessors, of which large ones have 132.
# Where rows are shared there are four times as many, since some multiprocessors get one more.
BUSY, SHARING = 264, 1056

# Least elements that a block of several takes of a row: fewer cost more to fold than to read.
SHARE = 8192

# Tiles of `width` columns side by side in a block, and threads down each of them.
ACROSS, DOWN = 32, 8

# Blocks of a grid, in its first direction, are fewer than this.
MAX_GRID = 2**31


@dataclass(frozen=True)
class ChooseThreadMapping(NestPass):
    """Choose how the work is divided among blocks and threads; loops stay as they are.

    Before and after:

        parallel i0 < 9:
          ...
    """

    def apply(self, nest: LoopNest) -> LoopNest:
        """Return the nest with a mapping, with vectors only where buffers are aligned."""
        return replace(nest, mapping=choose_mapping(nest.kernel, None if nest.is_aligned else 1))


def objection(kernel: Kernel) -> str | None:
    """Return why no CUDA text is made of a kernel, or None."""
    if kernel.tensor_op is not None:
        return "torch's library computes products on a GPU"
    if any((i.is_reduction or i.is_scan) and i.monoid not in MONOIDS for i in kernel.body):
        return "it reduces in a way that CUDA kernels do not"
    if kernel.has_scans:
        return _objection_to_scans(kernel)
    if kernel.row_rank and math.prod(kernel.outer_sizes) >= MAX_GRID:
        return "it has more rows than a grid has blocks"
    return None


# What threads fold.
MONOIDS = frozenset({"add", "mul", "max", "min"})


def _objection_to_scans(kernel: Kernel) -> str | None:
    sweeps = [p for one in plan_sweeps(kernel, 0).sweeps for p in one.values]
    if any(i.is_scan and sweeps.count(p) > 1 for p, i in enumerate(kernel.body)):
        return "it would scan a row more than once"
    rows, length = math.prod(kernel.outer_sizes), math.prod(kernel.row_sizes)
    if rows >= MAX_GRID:
        return "it has more rows than a grid has blocks"
    columns = BUSY * WALKERS if runs_down_columns(kernel) else BUSY
    if length > BLOCK_ROW and rows < columns:
        return "it scans few long rows, which CUDA kernels do not share among blocks"
    return None


def choose_mapping(kernel: Kernel, width: int | None = None) -> ThreadMapping:
    """Return how the work of a kernel is divided among blocks and threads.

    All that the passes after it read is the `ThreadMapping`: another choice of it is another
    schedule, and needs no change anywhere else.

    Args:
        kernel: Its row has at least one axis.
        width: Elements that a thread handles at a time; as many as memory allows when left out.
    """
    is_across = kernel.folds_rows and runs_down_columns(kernel)
    axis = (len(kernel.outer_sizes) if is_across else len(kernel.sizes)) - 1
    width = best_width(kernel, axis) if width is None else width
    if not kernel.folds_rows:
        return ThreadMapping(width, axis, THREADS)
    if is_across and kernel.has_scans:
        return ThreadMapping(1, axis, THREADS, is_across=True)
    return _columns(kernel, width, axis) if is_across else _rows(kernel, width, axis)


def _columns(kernel: Kernel, width: int, axis: int) -> ThreadMapping:
    length = math.prod(kernel.row_sizes)
    tiles = math.prod(kernel.outer_sizes[:-1]) * -(-kernel.outer_sizes[-1] // width)
    splits, share = _split(length, -(-tiles // ACROSS), SHARE // ACROSS, DOWN)
    return ThreadMapping(width, axis, ACROSS * DOWN, DOWN, 0, splits, share, is_across=True)


def _rows(kernel: Kernel, width: int, axis: int) -> ThreadMapping:
    length, rows = math.prod(kernel.row_sizes), math.prod(kernel.outer_sizes)
    tiles = -(-length // width)
    weight = _registers(kernel)
    if length * weight <= WARP_ROW:
        group = min(32, _power_above(tiles))
        return ThreadMapping(width, axis, THREADS, group, -(-tiles // group))
    if length * weight <= BLOCK_ROW:
        group = min(1024, max(64, _power_above(-(-length * weight // 16))))
        return ThreadMapping(width, axis, group, group, -(-tiles // group))
    splits, share = _split(length, rows, SHARE, WALKERS * width)
    if kernel.has_scans:
        splits, share = 1, length
    return ThreadMapping(width, axis, WALKERS, WALKERS, 0, splits, share)


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
