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

from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.cpu.cpu_schedule import (
    AlongRows,
    CpuPass,
    CpuSchedule,
    SpeculativeSoftmax,
)
from fxkit.lower.scheduling.cpu.lanes import lanes_of
from fxkit.lower.scheduling.kernel_cost import is_costly
from fxkit.lower.scheduling.known_values import KnownValues
from fxkit.lower.scheduling.row_sweeps import RowSweep, SweepPlan

# Exponentials are kept times 2^64, and from exp(-131) on. Of a maximum of this size, 10^9 of them
# have a sum that is finite in float32, and those left out are none of its shares in float32.
NEAR = 20.0


@dataclass(frozen=True)
class SpeculateSoftmax(CpuPass):
    """Take the exponentials of a softmax before its maximum is known.

    max x, then sum exp(x - max)  ->  max x and sum exp(x) at once, where |max| < 20
    """

    def apply(self, schedule: CpuSchedule) -> CpuSchedule:
        """Return the schedule with softmaxes whose exponentials are summed in lanes."""
        traversal = schedule.traversal
        if not isinstance(traversal, AlongRows) or traversal.is_split or schedule.jammed:
            return schedule
        if len(schedule.kernel.row_sizes) != 1:
            return schedule
        found = speculative_softmaxes(schedule.kernel, schedule.plan, schedule.facts)
        pays = (softmax for softmax in found if _is_summed_in_lanes(schedule, softmax.both))
        return replace(schedule, speculative=tuple(pays))


def _is_summed_in_lanes(schedule: CpuSchedule, both: RowSweep) -> bool:
    return (
        lanes_of(schedule, both) is not None
        and not schedule.parts_of(both)
        and not schedule.row_sums.are_in_double(both)
    )


def speculative_softmaxes(
    kernel: Kernel, plan: SweepPlan, facts: KnownValues
) -> list[SpeculativeSoftmax]:
    """Return the softmaxes along a kernel's rows whose exponentials can be summed at once.

    Args:
        kernel: The kernel.
        plan: Its sweeps.
        facts: What is known of its values.
    """
    found = []
    for first, second in zip(plan.sweeps, plan.sweeps[1:], strict=False):
        if len(first.reductions) == len(second.reductions) == 1:
            softmax = _of_sweeps(kernel, plan.sweeps, (first, second), facts)
            found += [] if softmax is None else [softmax]
    return found


def _of_sweeps(
    kernel: Kernel, sweeps: Sequence[RowSweep], pair: tuple[RowSweep, RowSweep], facts: KnownValues
) -> SpeculativeSoftmax | None:
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
    return SpeculativeSoftmax(maximum, largest.scale, exponent, total, pair, both, alone, again)
