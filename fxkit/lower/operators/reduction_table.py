"""The table of operators that reduce along axes, and the words that its rows are written in."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.scalar_table import select

Arguments = Mapping[str, Any]
Axes = Callable[[Arguments, int], tuple[int, ...]]
Dtype = Callable[[Arguments, torch.dtype], torch.dtype]
Alignment = Callable[[Mapping[str, int]], Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class IterationDomain:
    """The iteration domain of an operator that does not run over its operands' shape.

    Attributes:
        sizes: Size of each axis.
        reduced: The axes that it reduces.
        results: Coordinates of each result: an axis, or a joint, for each dimension.
        joints: Axes that are one dimension together; numbered from the number of axes on.
    """

    sizes: tuple[int, ...]
    reduced: tuple[int, ...]
    results: tuple[tuple[int | None, ...], ...]
    joints: tuple[tuple[int, ...], ...] = ()


Shape = tuple[int, ...]
DomainOf = Callable[[Arguments, Mapping[str, Shape], Sequence[Shape]], IterationDomain]


@dataclass(frozen=True)
class ReductionOp:
    """A row of the table.

    Its operands are broadcast to one shape, some dimensions of which are reduced.

    Attributes:
        name: Operator identity.
        build: Makes the body of the reduction; returns one value, or a tuple for several results.
        axes: Returns the dimensions that are reduced, from the arguments and the number of
            dimensions. None at all for an operator that reduces nothing.
        dtype: Returns the dtype that the operands are cast to, from the arguments and the dtype
            that they promote to.
        alignment: Returns, from the operands' numbers of dimensions, where the dimensions lie of
            those operands that are not aligned from the right.
        keeps_row: How many of the first results have the operands' shape, as that of softmax has.
        keeps_dims: Whether row scalars keep their reduced dimensions where nothing says so.
        slow: Whether eager's kernel on the CPU is faster, whatever a kernel would take in with it.
        slow_along: Whether that is so where few rows lie along memory.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|).
        operands: Names of the operands.
        attributes: Names of the attributes. Some are no arguments of the operator: `count`, the
            number of elements in a row, `sizes`, the shape that the operands are broadcast to,
            `place`, the number of an element within its row, `result_dtype`, and `require`, which
            leaves the call to eager where a condition does not hold.
        domain: Returns its iteration domain, from the arguments, the operands' shapes and the
            results'; None for the shape of its operands. The first parameter of `build` is then
            a point of that domain (`movement_table.Point`), which reads the operands.
        checks: Whether eager raises for some values of its operands.
    """

    name: str
    build: Callable[..., Ref | tuple[Ref, ...]]
    axes: Axes
    dtype: Dtype
    alignment: Alignment
    keeps_row: int
    keeps_dims: bool
    tolerance: float
    operands: tuple[str, ...]
    attributes: tuple[str, ...]
    domain: DomainOf | None = None
    checks: bool = False
    slow: bool = False
    slow_along: bool = False

    def input_dtype(self, arguments: Arguments, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """Return the dtype that the operands are cast to before anything else."""
        asked = arguments.get("dtype")
        if isinstance(asked, torch.dtype):
            return asked
        return self.dtype(arguments, functools.reduce(torch.promote_types, dtypes))

    def dims(self, ranks: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the dimensions of the common shape that each operand's dimensions are.

        Args:
            ranks: Operand → number of its dimensions.
        """
        aligned = {name: tuple(dims) for name, dims in self.alignment(ranks).items()}
        spans = [max(dims, default=-1) + 1 for dims in aligned.values()]
        rank = max([*spans, *[own for name, own in ranks.items() if name not in aligned]])
        return {n: aligned.get(n, tuple(range(rank - own, rank))) for n, own in ranks.items()}


TABLE: dict[str, ReductionOp] = {}


def _promoted(arguments: Arguments, dtype: torch.dtype) -> torch.dtype:
    return dtype


def _from_the_right(ranks: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
    return {}


def row(
    *names: str,
    axes: Axes,
    dtype: Dtype = _promoted,
    alignment: Alignment = _from_the_right,
    keeps_row: int = 0,
    keeps_dims: bool = False,
    slow_along: bool = False,
    tolerance: float = 8,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an operator that reduces along axes to the table: the function is its body.

    The positional parameters of the function are operands, tensors that are broadcast to one shape,
    or None; keyword-only ones are attributes. Both have the names of ATen's schema. `count`,
    `sizes`, `place`, `result_dtype` and `require` are no arguments of it; see `ReductionOp`.

    Args:
        names: The operators, as `resolve` names them.
        axes: Returns the dimensions that are reduced, from the arguments and the number of
            dimensions: `by_dim`, `every_dim`, `last_dim` or one of your own.
        dtype: Returns the dtype that the operands are cast to, from the arguments and the dtype
            that they promote to; that one when left out.
        alignment: Returns, from the operands' numbers of dimensions, where the dimensions lie of
            those operands that are not aligned from the right.
        keeps_row: How many of the first results have the operands' shape, as that of softmax has.
        keeps_dims: Whether row scalars keep their reduced dimensions where nothing says so.
        slow_along: Whether eager's kernel on the CPU is faster where few rows lie along memory.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|). 0: equal
            bits.

    Returns:
        A decorator that returns the function as it is.

    Example:
        >>> from fxkit.lower.operators.reduction_table import TABLE, by_dim, largest, row, smallest
        >>> @row("mylib.spread", axes=by_dim, tolerance=1)
        ... def _spread(self):
        ...     return largest(self) - smallest(self)
        >>> TABLE.pop("mylib.spread").keeps_row
        0
    """

    def add_row(build: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(build).parameters.values()
        attributes = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        operands = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        for name in names:
            TABLE[name] = ReductionOp(
                name, build, axes, dtype, alignment, keeps_row, keeps_dims, tolerance,
                operands, attributes, slow_along=slow_along, checks="require" in attributes,
            )  # fmt: skip
        return build

    return add_row


def over_domain(
    *names: str,
    domain: DomainOf,
    slow: bool = False,
    checks: bool = False,
    tolerance: float = 8,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an operator that indexes its operands itself, over an iteration domain of its own.

    Args:
        names: The operators, as `resolve` names them.
        domain: Returns the domain, from the arguments, the operands' shapes and the results'.
        slow: Whether eager's kernel on the CPU is faster, whatever a kernel would take in with it.
        checks: Whether eager raises for some values of the operands.
        tolerance: Largest difference from eager in epsilons, relative to max(1, |result|).
    """

    def add_row(build: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            row(name, axes=no_dim, tolerance=tolerance)(build)
            known = TABLE[name]
            TABLE[name] = replace(
                known, operands=known.operands[1:], domain=domain, checks=checks, slow=slow
            )
        return build

    return add_row


# --- which dimensions


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Return dimensions counted from the front; None or an empty list means all of them."""
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, Sequence) or not len(value):
        return tuple(range(rank))
    return tuple(sorted(d % rank for d in value)) if rank else ()


def by_dim(arguments: Arguments, rank: int) -> tuple[int, ...]:
    """Reduce the dimensions that `dim` names."""
    return dims_of(arguments.get("dim"), rank)


def every_dim(arguments: Arguments, rank: int) -> tuple[int, ...]:
    """Reduce all dimensions."""
    return tuple(range(rank))


def last_dim(arguments: Arguments, rank: int) -> tuple[int, ...]:
    """Reduce the last dimension."""
    return (rank - 1,)


def no_dim(arguments: Arguments, rank: int) -> tuple[int, ...]:
    """Reduce nothing."""
    return ()


# --- which dtype


def sum_dtype(arguments: Arguments, dtype: torch.dtype) -> torch.dtype:
    """Sum integers in int64."""
    return dtype if dtype.is_floating_point else torch.int64


def float_dtype(arguments: Arguments, dtype: torch.dtype) -> torch.dtype:
    """Compute with integers and truth values in torch's default dtype."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


# --- monoids and functions


def total(x: Ref) -> Ref:
    """Sum a value along the row."""
    return x.builder.reduce("add", x)


def largest(x: Ref) -> Ref:
    """Return the largest element of the row; NaN when there is one."""
    return x.builder.reduce("max", x)


def smallest(x: Ref) -> Ref:
    """Return the smallest element of the row; NaN when there is one."""
    return x.builder.reduce("min", x)


def scanned(monoid: str, x: Ref) -> Ref:
    """Fold, at each point of the row, all elements up to it; float32 in float64, as eager."""
    wide = x.cast(torch.float64) if x.dtype == torch.float32 and x.is_float else x
    return x.builder.scan(monoid, wide)


def function(name: str, x: Ref) -> Ref:
    """Apply a function of one number; of integers there is only the absolute value."""
    if not x.is_float and name != "abs":
        raise Unfusable(f"it takes {name} of integers")
    return x.builder.scalar(name, x)


def at_least(x: Ref, bound: float) -> Ref:
    """Clamp from below; NaN stays NaN."""
    return x.builder.scalar("max", x, bound)


def finite_or_zero(x: Ref) -> Ref:
    """Return zero for an infinity."""
    return select(function("abs", x).equals(math.inf), x.builder.const(0.0, x.dtype), x)


def centred(x: Ref, count: int) -> tuple[Ref, Ref, Ref]:
    """Return a row less its mean, its mean, and the sum of the squares of the former.

    What rounding has left of the mean is found by a second sum, in the same loop as the squares:
    rows of nearly equal numbers would show it, enlarged by whatever they are divided by.
    """
    mean = total(x) / count
    rough = x - mean
    excess, squares = total(rough), total(rough * rough)
    rest = excess * (1 / count) if count else excess
    exact = at_least(squares - excess * rest, 0.0)
    # Where the squares overflow, those of the rest may do so too.
    return rough - rest, mean + rest, select(squares.equals(math.inf), squares, exact)
