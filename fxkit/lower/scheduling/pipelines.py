"""The passes that schedule a kernel for a GPU, in order."""

from __future__ import annotations

from collections.abc import Iterator

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.scheduling.axis_order import with_a_row, with_an_axis
from fxkit.lower.scheduling.cascade_sums import CascadeSums
from fxkit.lower.scheduling.choose_thread_mapping import ChooseThreadMapping
from fxkit.lower.scheduling.distribute_rows import DistributeRows
from fxkit.lower.scheduling.flatten_loops import FlattenLoops
from fxkit.lower.scheduling.hoist_reciprocals import HoistReciprocals
from fxkit.lower.scheduling.hold_in_registers import HoldInRegisters
from fxkit.lower.scheduling.map_points import MapPoints
from fxkit.lower.scheduling.map_rows import MapRows
from fxkit.lower.scheduling.nest_pass import NestPass
from fxkit.lower.scheduling.plain_nest import plain_nest
from fxkit.lower.scheduling.sink_lanes import SinkLanes
from fxkit.lower.scheduling.split_lanes import SplitLanes
from fxkit.lower.scheduling.split_rows_across_blocks import SplitRowsAcrossBlocks
from fxkit.lower.scheduling.vectorise_accesses import VectoriseAccesses

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
