"""Speculative single-pass softmax: exponentials without subtracting the maximum.

The shares exp(x) / sum(exp(x)) are the same whatever is subtracted from all x, as long as no
exponential overflows, and none that counts underflows. So one sweep takes exp(x), sums it and finds
the maximum; where that is near zero, a sweep, its loads and a subtraction are saved, and the shares
are nearer to exact ones, as no difference was rounded. Where it is not, the exponentials are taken
again, with the maximum subtracted; and for the next rows the maximum is found first, until one is
near zero. What is subtracted in a row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxkit.lower.codegen.cpp.known_values import KnownValues
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.kernel_cost import is_costly
from fxkit.lower.scheduling.row_sweeps import RowSweep, Schedule

# Powers are kept times 2^64, and from exp(-131) on. Of a maximum of this size, 10^9 of them have a
# sum that is finite in float32, and those that are left out are none of its shares in float32.
NEAR = 20.0


@dataclass(frozen=True)
class EarlyPowers:
    """Two sweeps of a softmax, and the one that is tried before them.

    Attributes:
        maximum: The maximum of a row, by its position in the body of the kernel.
        scale: What it is multiplied with before it is subtracted, if it is.
        exponent: What there are powers of: the difference from the maximum.
        total: The sum of the powers.
        original: The two sweeps as they were.
        both: The sweep that is tried.
        first: The sweep that finds the maximum.
        second: The sweep that takes and sums the powers.
    """

    maximum: int
    scale: int | None
    exponent: int
    total: int
    original: tuple[RowSweep, RowSweep]
    both: RowSweep
    first: RowSweep
    second: RowSweep

    @property
    def dropped(self) -> set[int]:
        """Values that need no row buffer any more: the second sweep computes them again."""
        return {*self.original[0].keeps} - {*self.first.keeps}


def early_powers(kernel: Kernel, plan: Schedule, facts: KnownValues) -> list[EarlyPowers]:
    """Return the softmaxes along a kernel's rows whose powers can be taken early.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        facts: What is known of its values.
    """
    found = []
    for first, second in zip(plan.sweeps, plan.sweeps[1:], strict=False):
        if len(first.reductions) == len(second.reductions) == 1:
            early = _of_sweeps(kernel, plan.sweeps, (first, second), facts)
            found += [] if early is None else [early]
    return found


def _of_sweeps(
    kernel: Kernel, sweeps: Sequence[RowSweep], pair: tuple[RowSweep, RowSweep], facts: KnownValues
) -> EarlyPowers | None:
    first, second = pair
    (maximum,), (total,) = first.reductions, second.reductions
    power = kernel.body[total].operands[0]
    if kernel.body[total].op != "reduce_add" or kernel.body[power].op != "exp":
        return None
    exponent = kernel.body[power].operands[0]
    largest = facts.largest_above(exponent)
    if largest is None or largest.maximum != maximum or not facts.is_softmax_only(power):
        return None
    chain = (maximum, *largest.between, exponent, power)
    if maximum not in facts.nan_insensitive or not facts.serves_only(chain):
        return None
    values = {*first.values, *second.values}
    is_alone = not any(kernel.body[p].is_scan or kernel.body[p].op == "check" for p in values)
    if first.stores or second.stores or not is_alone:
        return None
    kept_for_later = {p for one in sweeps if one not in pair for p in one.buffered}
    takes_long = any(is_costly(kernel.body[p]) for p in first.values)
    alone, again = first, second
    if not takes_long and kept_for_later.isdisjoint(first.keeps):
        read = sorted({*first.buffered, *second.buffered} - {*first.keeps})
        computed = sorted(values.difference(read))
        alone = replace(first, keeps=())
        again = replace(second, values=tuple(computed), buffered=tuple(read))
    both = RowSweep(
        scalars=first.scalars,
        values=tuple(sorted(values)),
        buffered=tuple(sorted({*first.buffered, *second.buffered} - values)),
        keeps=tuple(sorted({*alone.keeps, *second.keeps})),
        reductions=(maximum, total),
        stores=(),
    )
    return EarlyPowers(maximum, largest.scale, exponent, total, pair, both, alone, again)
