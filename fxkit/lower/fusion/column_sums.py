"""Column sums fused into row loops: the gradients of weights and biases.

A region that reduces rows can take in sums over all rows, as long as nothing in the region reads
them: each row is added to partial sums beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

from fxkit.lower.fusion.candidates import Candidate
from fxkit.lower.fusion.placement import row_coordinates, rows_lie_along_memory
from fxkit.lower.fusion.region_space import Coordinates, RegionSpace, kept
from fxkit.lower.loop_ir.loop_ir import Kernel, Unfusable
from fxkit.lower.operators.reduction_ops import ReductionOp

# Rows longer than this, whose sums would leave the second-level cache, are summed apart.
MAX_ROW = 16384


def place_sum(
    found: Candidate,
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
) -> Coordinates:
    """Return the coordinates of a sum over all rows of a region.

    Args:
        found: The candidate.
        space: The region's space.
        inside: Coordinates of the values that the region has already.

    Raises:
        Unfusable: When it is no such sum, or does not pay.
    """
    entry = found.entry
    if not isinstance(entry, ReductionOp) or entry.name != "aten.sum" or space.reduced is None:
        raise Unfusable("it is no sum over all rows")
    if not found.type.dtype.is_floating_point or not sum_dtype_of(found).is_floating_point:
        raise Unfusable("it sums integers")
    if rows_lie_along_memory(found):
        raise Unfusable("it sums neighbours in memory")
    coordinates = row_coordinates(found, space, inside)
    dims = entry.axes(found.call.arguments, len(coordinates))
    long = {axis for axis, size in enumerate(space.sizes) if size != 1}
    rows = {axis for d in dims for axis in space.axes(coordinates[d])} & long
    if space.joints or not space.is_wide(coordinates) or rows != long - space.reduced:
        raise Unfusable("it sums along other axes than those of all rows")
    if not rows or math.prod(space.sizes[axis] for axis in long - rows) > MAX_ROW:
        raise Unfusable("there is one row, or rows are too long")
    keepdim = bool(found.call.arguments.get("keepdim", entry.keeps_dims))
    lies = tuple(
        kept(c) if d in dims and c is not None and c >= 0 else c
        for d, c in enumerate(coordinates)
        if keepdim or d not in dims
    )
    if tuple(found.type.shape) != tuple(space.size(c) for c in lies):
        raise Unfusable("its result has another shape than a row")
    return lies


def sum_dtype_of(found: Candidate) -> torch.dtype:
    """Return the dtype in which a sum takes its operand."""
    if not isinstance(found.entry, ReductionOp):
        raise TypeError(f"expected a sum, got {found.entry.name}")
    dtypes = [found.operand_types[tensor].dtype for tensor in found.tensors]
    return found.entry.input_dtype(found.call.arguments, dtypes)


def sums_well(kernel: Kernel) -> bool:
    """Tell whether rows run along memory, one by one, as sums beside them take for granted."""
    if kernel.row_rank != 1 or not kernel.has_reductions:
        return False
    accesses = [i.detail for i in kernel.body if i.op == "load"]
    accesses += [store.access for store in kernel.stores]
    wide = [a for a in accesses if a.strides[-1] or a.scales]
    return 2 * sum(a.strides[-1] == 1 for a in wide) > len(wide)
