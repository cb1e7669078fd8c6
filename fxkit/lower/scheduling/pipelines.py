"""The passes that schedule a kernel for a CPU or a GPU, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fxkit.errors import UnsupportedError
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.scheduling.axis_order import with_a_row, with_an_axis
from fxkit.lower.scheduling.cpu.add_up_rows import AddUpRows
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuPass, CpuSchedule
from fxkit.lower.scheduling.cpu.flatten_rows import FlattenRows
from fxkit.lower.scheduling.cpu.give_row import GiveRow
from fxkit.lower.scheduling.cpu.hoist_row_invariants import HoistRowInvariants
from fxkit.lower.scheduling.cpu.pack_bfloat16 import PackBfloat16
from fxkit.lower.scheduling.cpu.plan_sweeps import PlanSweeps
from fxkit.lower.scheduling.cpu.prefetch_rows import PrefetchRows
from fxkit.lower.scheduling.cpu.speculate_softmax import SpeculateSoftmax
from fxkit.lower.scheduling.cpu.split_index_sets import SplitIndexSets
from fxkit.lower.scheduling.cpu.split_rows_across_threads import SplitRowsAcrossThreads
from fxkit.lower.scheduling.cpu.stream_stores import StreamStores
from fxkit.lower.scheduling.cpu.tile_crossing_axes import TileCrossingAxes
from fxkit.lower.scheduling.cpu.tile_rows import TileRows
from fxkit.lower.scheduling.cpu.transpose_rows import TransposeRows
from fxkit.lower.scheduling.cpu.traverse_along_rows import TraverseAlongRows
from fxkit.lower.scheduling.cpu.unroll_and_jam import UnrollAndJam
from fxkit.lower.scheduling.cpu.unroll_short_rows import UnrollShortRows
from fxkit.lower.scheduling.cpu.vectorise_across_rows import VectoriseAcrossRows
from fxkit.lower.scheduling.gpu.cascade_sums import CascadeSums
from fxkit.lower.scheduling.gpu.choose_thread_mapping import ChooseThreadMapping
from fxkit.lower.scheduling.gpu.distribute_rows import DistributeRows
from fxkit.lower.scheduling.gpu.flatten_loops import FlattenLoops
from fxkit.lower.scheduling.gpu.hoist_reciprocals import HoistReciprocals
from fxkit.lower.scheduling.gpu.hold_in_registers import HoldInRegisters
from fxkit.lower.scheduling.gpu.map_points import MapPoints
from fxkit.lower.scheduling.gpu.map_rows import MapRows
from fxkit.lower.scheduling.gpu.nest_pass import NestPass
from fxkit.lower.scheduling.gpu.plain_nest import plain_nest
from fxkit.lower.scheduling.gpu.sink_lanes import SinkLanes
from fxkit.lower.scheduling.gpu.split_lanes import SplitLanes
from fxkit.lower.scheduling.gpu.split_rows_across_blocks import SplitRowsAcrossBlocks
from fxkit.lower.scheduling.gpu.vectorise_accesses import VectoriseAccesses

CPU: tuple[CpuPass, ...] = (
    GiveRow(),  # a kernel of points: its innermost axis becomes its row
    UnrollShortRows(),  # r < 3 across memory  ->  three points
    AddUpRows(),  # rows of which there are also sums: parts of them, with sums of their own
    TileCrossingAxes(),  # transposed operands  ->  tiles of 64 x 128, each transposed first
    FlattenRows(),  # i < 1000, j < 7  ->  j < 7000
    VectoriseAcrossRows(),  # rows that are neighbours in memory  ->  one a vector lane
    TransposeRows(),  # short rows, and scans  ->  one a vector lane, transposed first
    TraverseAlongRows(),  # all others: one row at a time
    SplitIndexSets(),  # j < 20 with a guard on j < 8  ->  j < 8, 8 <= j < 20
    TileRows(),  # j < 1000000  ->  245 tiles, which threads share
    PackBfloat16(),  # j < 1024 of bfloat16  ->  512 words
    PlanSweeps(),  # a row  ->  sweeps over it, between which its reductions are known
    SplitRowsAcrossThreads(),  # a sum over j  ->  32 sums of parts, and their sum
    HoistRowInvariants(),  # i { j { sqrt in1[j] } }  ->  j { sqrt in1[j] }, i { j }
    UnrollAndJam(),  # a vector an iteration  ->  2, 4 or 8 of them, interleaved
    StreamStores(),  # large results  ->  past the caches
    SpeculateSoftmax(),  # max x, sum exp(x - max)  ->  sum exp(x), if max is near zero
    PrefetchRows(),  # rows that the processor does not foresee are asked for ahead
)

GPU: tuple[NestPass, ...] = (
    ChooseThreadMapping(),  # blocks, threads and elements of each: from sizes and strides
    SplitLanes(),  # j < 64  ->  j_tile < 16, lanes l < 4
    SinkLanes(),  # lanes { for }  ->  for { lanes }
    FlattenLoops(),  # i0 { i1 }  ->  row
    MapPoints(),  # tile  ->  block, thread, grid-stride loop
    MapRows(),  # row  ->  block, and which of its rows (slot)
    DistributeRows(),  # j  ->  thread t, and a fold over t
    HoldInRegisters(),  # what several sweeps read is loaded once
    CascadeSums(),  # float32 within lanes, float64 between
    SplitRowsAcrossBlocks(),  # one launch for each sweep, where blocks share a row
    VectoriseAccesses(),  # lanes' loads and stores  ->  16 bytes at a time
    HoistReciprocals(),  # x / d along a row  ->  x * (1 / d), put right
)


def cpu_schedule(kernel: Kernel, passes: tuple[CpuPass, ...] = CPU) -> CpuSchedule:
    """Return how a kernel is computed on a CPU.

    Args:
        kernel: The kernel.
        passes: What decides, in order: those of `CPU` but for some that are not required.

    Raises:
        UnsupportedError: When one is left out that is required, or two are not in their order.
    """
    if passes is not CPU:
        _check(passes)
    schedule = CpuSchedule(kernel)
    for one in passes:
        schedule = one.apply(schedule)
    return schedule


def _check(passes: tuple[CpuPass, ...]) -> None:
    """Check that no required pass is missing, and that those of `CPU` are in its order."""
    missing = [one.name for one in CPU if one.is_required and one not in passes]
    if missing:
        raise UnsupportedError(
            f"expected all passes that are required, got none of {', '.join(missing)}",
            hint="`cpu_steps` shows what the first of them decide",
        )
    names = [one.name for one in CPU]
    known = [one.name for one in passes if one.name in names]
    for before, after in itertools.pairwise(known):
        if names.index(before) >= names.index(after):
            raise UnsupportedError(
                f"expected passes in the order of `CPU`, got {before} before {after}",
                hint="a pass reads what those before it have decided",
            )


def cpu_steps(
    kernel: Kernel, passes: tuple[CpuPass, ...] = CPU
) -> Iterator[tuple[str, CpuSchedule]]:
    """Yield a kernel of which nothing is decided, then its schedule after each pass, with a name.

    Args:
        kernel: The kernel.
        passes: What decides, in order.
    """
    schedule = CpuSchedule(kernel)
    yield "nothing decided", schedule
    for one in passes:
        schedule = one.apply(schedule)
        yield one.name, schedule


def scheduled(
    kernel: Kernel, passes: tuple[NestPass, ...] = GPU, *, is_aligned: bool = True
) -> LoopNest:
    """Return the loops of a kernel after some passes.

    Args:
        kernel: The kernel.
        passes: What is done to its plain loops, in order.
        is_aligned: Whether each buffer begins at a multiple of sixteen bytes.
    """
    *_, (_, nest) = steps(kernel, passes, is_aligned=is_aligned)
    return nest


def steps(
    kernel: Kernel, passes: tuple[NestPass, ...] = GPU, *, is_aligned: bool = True
) -> Iterator[tuple[str, LoopNest]]:
    """Yield the plain loops of a kernel, then those after each pass, with the pass's name."""
    nest = plain_nest(with_an_axis(with_a_row(kernel)), is_aligned=is_aligned)
    yield "plain_nest", nest
    for one in passes:
        nest = one.apply(nest)
        yield one.name, nest


def show_steps(kernel: Kernel, passes: tuple[NestPass, ...] = GPU) -> str:
    """Return the plain loops of a kernel as text, and those after each pass that changes them."""
    parts: list[str] = []
    last = ""
    for name, nest in steps(kernel, passes):
        text = str(nest)
        if text != last:
            parts.append(f"{name}:\n{text}")
        last = text
    return "\n\n".join(parts)
