"""Where in a region's space the values of a candidate lie.

`place` is asked for one candidate at a time, in graph order. It answers with the coordinates of
the candidate's results, or raises `Unfusable` with the reason, in words for the person who reads
the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.types import TensorType, broadcast_shape, type_of
from fxkit.lower.fusion.candidates import Candidate, tensors_in
from fxkit.lower.fusion.region_space import ONE, Coordinates, RegionSpace, is_axis
from fxkit.lower.fusion.view_map import alias_source
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.movement_table import MoveOp
from fxkit.lower.operators.reduction_ops import ReductionOp
from fxkit.lower.operators.reduction_table import IterationDomain, no_dim
from fxkit.lower.operators.scalar_table import ScalarOp
from fxkit.lower.scheduling.row_sweeps import MANY_ROWS


def place(
    found: Candidate,
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
) -> tuple[Coordinates, ...]:
    """Return the coordinates of each of a candidate's results in a region.

    Args:
        found: The candidate.
        space: The region's space; a first reduction fixes its reduced axes.
        inside: Coordinates of the values that the region has already.

    Raises:
        Unfusable: When it does not fit into the region.
    """
    if isinstance(found.entry, ReductionOp):
        return _place_reduction(found, found.entry, space, inside)
    if isinstance(found.entry, MoveOp):
        return (_place_beside(found.type.shape, space),)
    tensors = [t for name, t in found.operands.items() if not only_type_matters(found.entry, name)]
    shapes = [found.operand_types[t].shape for t in tensors_in(tensors)]
    if broadcast_shape(*shapes) != tuple(found.type.shape):
        raise Unfusable("its result has another shape than its operands")
    return (_place_points(found, found.type.shape, space, inside),) * len(found.types)


def only_type_matters(entry: ScalarOp | ReductionOp | MoveOp, operand: str) -> bool:
    """Tell whether only the type of an operand matters."""
    return entry.name == "aten.type_as" and operand == "other"


def _place_points(
    found: Candidate,
    shape: Sequence[int],
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
) -> Coordinates:
    """Return the coordinates of what a candidate's operands broadcast to."""
    tensors = [t for name, t in found.operands.items() if not only_type_matters(found.entry, name)]
    operands = [inside[t] for t in tensors if isinstance(t, fx.Node) and t in inside]
    return space.broadcast(operands, shape) if operands else _place_beside(shape, space)


def _place_beside(shape: Sequence[int], space: RegionSpace) -> Coordinates:
    if tuple(shape) != space.sizes:
        raise Unfusable("its shape is not that of its neighbours")
    return space.identity


def _place_reduction(
    found: Candidate,
    entry: ReductionOp,
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
) -> tuple[Coordinates, ...]:
    if entry.domain is not None:
        return _place_domain(domain_of(found), space)
    shape = row_shape(found)
    coordinates = row_coordinates(found, space, inside)
    dims = entry.axes(found.call.arguments, len(shape))
    if entry.axes is no_dim:
        return (coordinates,)
    keepdim = bool(found.call.arguments.get("keepdim", entry.keeps_dims))
    scalars = space.reduce(coordinates, dims, keepdim)
    count = len(found.types)
    placed = tuple(coordinates if n < entry.keeps_row else scalars for n in range(count))
    for known, lies in zip(found.types, placed, strict=True):
        if tuple(known.shape) != tuple(space.size(coordinate) for coordinate in lies):
            raise Unfusable("its result has another shape than its rows")
    return placed


def domain_of(found: Candidate) -> IterationDomain:
    """Return the iteration domain of an operator that has one of its own, such as pooling."""
    if not isinstance(found.entry, ReductionOp) or found.entry.domain is None:
        raise TypeError(
            f"expected an operator with an iteration domain of its own, got {found.entry.name}"
        )
    tensors = {n: v for n, v in found.operands.items() if isinstance(v, (fx.Node, Attribute))}
    shapes = {name: tuple(found.operand_types[value].shape) for name, value in tensors.items()}
    return found.entry.domain(found.call.arguments, shapes, [tuple(t.shape) for t in found.types])


def _place_domain(domain: IterationDomain, space: RegionSpace) -> tuple[Coordinates, ...]:
    if domain.sizes != space.sizes or domain.joints != space.joints:
        raise Unfusable("it does not run over the space of its neighbours")
    if domain.reduced:
        space.reduce_along(frozenset(domain.reduced))
    return domain.results


def row_coordinates(
    found: Candidate,
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
) -> Coordinates:
    """Return the coordinates of what a reduction's operands broadcast to."""
    shape = row_shape(found)
    given: list[Coordinates] = []
    for name, dims in row_dims(found).items():
        operand = found.operands[name]
        if isinstance(operand, fx.Node) and operand in inside:
            spread: list[int | None] = [ONE] * len(shape)
            for d, coordinate in zip(dims, inside[operand], strict=True):
                spread[d] = coordinate
            given.append(tuple(spread))
    return space.broadcast(given, shape) if given else _place_beside(shape, space)


def row_shape(found: Candidate) -> tuple[int, ...]:
    """Return the shape that a reduction's operands broadcast to, and whose rows it reduces."""
    shapes = []
    for name, dims in row_dims(found).items():
        shape = [1] * (max(dims, default=-1) + 1)
        for d, size in zip(dims, found.operand_types[found.operands[name]].shape, strict=True):
            shape[d] = size
        shapes.append((shape, dims))
    rank = max([len(shape) for shape, _ in shapes])
    padded = [shape + [1] * (rank - len(shape)) for shape, _ in shapes]
    return broadcast_shape(*padded)


def row_dims(found: Candidate) -> dict[str, tuple[int, ...]]:
    """Return, for each tensor that a reduction takes, where its dimensions lie."""
    if not isinstance(found.entry, ReductionOp):
        raise TypeError(f"expected a candidate that reduces, got {found.entry.name}")
    tensors = {n: v for n, v in found.operands.items() if isinstance(v, (fx.Node, Attribute))}
    ranks = {name: len(found.operand_types[value].shape) for name, value in tensors.items()}
    return found.entry.dims(ranks)


def rows_lie_along_memory(found: Candidate, are_few: bool = False) -> bool:
    """Tell whether neighbours in a row of a reduction's operand are neighbours in memory.

    Args:
        found: A call of a reduction, or of another, of which it does not hold.
        are_few: Whether to ask for those alone of which a kernel can't handle several at a time.
    """
    if not isinstance(found.entry, ReductionOp):
        return False
    known = [type_of(t) for t in found.tensors if isinstance(t, fx.Node)]
    tensors = [t for t in known if isinstance(t, TensorType) and t.stride]
    return any(
        t.stride is not None
        and t.stride[d] == 1
        and t.shape[d] != 1
        and not (are_few and _has_many_rows(t, d))
        for t in tensors
        for d in found.entry.axes(found.call.arguments, len(t.shape))
    )


def _has_many_rows(known: TensorType, dim: int) -> bool:
    is_whole = known.stride == tuple(row_major(known.shape))
    rows = math.prod(known.shape) // max(1, known.shape[dim])
    return is_whole and isinstance(rows, int) and rows >= MANY_ROWS


def first_space(found: Candidate) -> RegionSpace:
    """Return the space of a region that begins with this candidate."""
    if isinstance(found.entry, ReductionOp) and found.entry.domain is not None:
        domain = domain_of(found)
        return RegionSpace(domain.sizes, joints=domain.joints)
    if isinstance(found.entry, ReductionOp):
        return RegionSpace(row_shape(found))
    return RegionSpace(tuple(found.type.shape))


# Views whose dimensions run along the axes of what they show.
_FOLLOWED = frozenset(
    "aten.alias aten.detach aten.positive aten.contiguous aten.expand aten.expand_as "
    "aten.unsqueeze aten.squeeze aten.transpose aten.t aten.permute aten.view aten.reshape "
    "aten.view_as aten.mT aten.dropout python.identity python.getitem aten.to aten.type_as".split()
)


def place_alias(
    node: fx.Node,
    space: RegionSpace,
    inside: Mapping[fx.Node, Coordinates],
    results: Mapping[fx.Node, tuple[Coordinates, ...]],
) -> Coordinates:
    """Return the coordinates of a view of a value inside a region.

    Raises:
        Unfusable: When the view changes more than the order, number or extent of dimensions.
    """
    call = resolve(node)
    source = alias_source(call) if call else None
    if call is None or source is None or source not in inside:
        raise Unfusable("it is no view of a value in the region")
    if call.name not in _FOLLOWED:
        raise Unfusable("it changes more than the order, number or extent of dimensions")
    before, after = type_of(source), type_of(node)
    coordinates = inside[source]
    if isinstance(before, tuple):
        if source not in results:
            raise Unfusable("it is one of several views")
        return results[source][call.arguments["1"]]
    if call.name == "python.getitem":
        raise Unfusable("it shows a part of a value")
    if call.name in ("aten.transpose", "aten.t", "aten.permute", "aten.mT"):
        order = _order(call, len(coordinates))
        return tuple(coordinates[d] for d in order)
    return space.fit(_reshaped(coordinates, before.shape, after.shape), after.shape)


def _order(call: Call, rank: int) -> list[int]:
    """Return, for each dimension of a transposed view, the operand's dimension."""
    arguments = call.arguments
    if "dims" in arguments:
        return [d % rank for d in arguments["dims"]]
    order = list(range(rank))
    if rank >= 2:
        a, b = arguments.get("dim0", -2) % rank, arguments.get("dim1", -1) % rank
        order[a], order[b] = order[b], order[a]
    return order


def _reshaped(
    coordinates: Coordinates, before: Sequence[int], after: Sequence[int]
) -> list[int | None]:
    """Follow dimensions through a view that adds, drops or expands dimensions of size 1."""
    if _long(before) != _long(after):
        return _expanded(coordinates, before, after)
    axes = iter(c for c, size in zip(coordinates, before, strict=True) if size != 1)
    ones = {d: c for d, c in enumerate(coordinates) if c is not None and not is_axis(c)}
    same_rank = len(before) == len(after)
    return [
        next(axes) if size != 1 else (ones.get(d, ONE) if same_rank else ONE)
        for d, size in enumerate(after)
    ]


def _expanded(
    coordinates: Coordinates, before: Sequence[int], after: Sequence[int]
) -> list[int | None]:
    lead = len(after) - len(before)
    fits = lead >= 0 and all(a == b or b == 1 for a, b in zip(after[lead:], before, strict=True))
    if not fits:
        raise Unfusable("it regroups the dimensions of a value in the region")
    return [ONE] * lead + list(coordinates)


def _long(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
