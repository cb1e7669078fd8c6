"""Times the cases of a family and says what became of its goals, met or not."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.fusion import bounds, kernels, models
from benchmarks.fusion.case import Case, Family, Work
from benchmarks.fusion.ways import (
    BEST,
    COPY,
    EAGER,
    FRESH,
    INDUCTOR,
    KEPT,
    Way,
    in_turn,
    keep_freed_memory,
    least,
    medians,
    tensors_of,
    ways_of,
)
from fxkit.view.texts.text_table import duration, table

FAMILIES: dict[str, Family] = {**kernels.FAMILIES, **models.FAMILIES}

# A kernel that is bound by memory should take at most so many times as long as a copy.
NEAR_ROOFLINE = 1.2

# Below this ratio a case counts as slower; less is what two runs of one program differ by.
SLOWER = 0.98


# An error that a single rounding to float32 makes is no reason to complain.
ONE_ROUNDING = 2.0**-24

# What one call with a few numbers errs is a matter of luck. Where it is more than twice eager's, it
# is the mean of so many, whose inputs differ by so much.
DRAWS = 17
SHARE = 2.0**-6


@dataclass(frozen=True)
class Measured:
    """What was measured of one case.

    Attributes:
        case: The case.
        seconds: Way → the median seconds of a call; what could not be compiled is absent.
        least: Way → the least seconds of a call.
        roofline: Seconds of the copy, or of as many operations at full speed, if that is more.
        errors: Distance from float64 of eager and of fxkit.
    """

    case: Case
    seconds: Mapping[str, float]
    least: Mapping[str, float]
    roofline: float
    errors: tuple[float, float]

    def gain(self, over: str) -> float | None:
        """Return how many times as fast as another way fxkit is."""
        return self.seconds[over] / self.seconds[KEPT] if over in self.seconds else None

    def verdict(self, family: Family) -> str:
        """Say what is not as it should be, in words."""
        found = []
        if (self.gain(INDUCTOR) or 1) < SLOWER:
            found.append("BELOW Inductor")
        if (self.gain(EAGER) or 1) < SLOWER:
            found.append("SLOWER than eager")
        limit = self.case.in_microseconds
        if limit is not None and self.seconds[KEPT] * 1e6 > limit:
            found.append(f"more than {limit:g} µs")
        if family.is_memory_bound and self.seconds[KEPT] > NEAR_ROOFLINE * self.roofline:
            found.append(f"{self.seconds[KEPT] / self.roofline:.1f} × roofline")
        if _is_too_large(self.errors):
            found.append("ERROR above twice eager's")
        return ", ".join(found)


def run(rounds: int, *, with_peer: bool, family: str | None = None, case: str | None = None) -> str:
    """Time one family, or each in a process of its own; return the tables.

    Args:
        rounds: How often each way is timed.
        with_peer: Whether torch.compile takes part.
        family: The only family to run.
        case: The first word of the only case to run, of whatever family.
    """
    if family is None and case is None:
        for name in FAMILIES:  # memory and compiled code of one family must not burden the next
            print(f"\n{name}", flush=True)
            subprocess.run(_command(name, rounds, with_peer), check=True)
        return ""
    names = [family] if family else [n for n, f in FAMILIES.items() if _chosen(f, case)]
    return "\n\n".join(_family(name, rounds, with_peer, case) for name in names)


def _command(family: str, rounds: int, with_peer: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks", "kernels", "--family", family, "--bare"]
    command += ["--rounds", str(rounds), "--threads", str(torch.get_num_threads())]
    return command if with_peer else [*command, "--no-peer"]


def _chosen(family: Family, case: str | None) -> list[Case]:
    return [c for c in family.cases if case in (None, c.name.split()[0])]


def _family(name: str, rounds: int, with_peer: bool, only: str | None) -> str:
    family = FAMILIES[name]
    peak = bounds.peak() if family.has_roofline else math.inf
    ready, found = [], []
    for case in _chosen(family, only):
        print(f"compiling and timing {case.name} ...", file=sys.stderr, flush=True)
        measured, ways = _measure(case, rounds, with_peer, peak)
        found.append(measured)
        ready.append((case, ways))
    parts = [_main_table(found, family, with_peer), summary(name, family, found)]
    if keep_freed_memory():
        kept = [(case, medians(in_turn(ways, rounds))) for case, ways in ready]
        parts.append(f"with mallopt(M_MMAP_MAX, 0) for all\n{_mallopt_table(kept, with_peer)}")
    return "\n".join(parts)


def _measure(
    case: Case, rounds: int, with_peer: bool, peak: float
) -> tuple[Measured, dict[str, Way]]:
    work = case.make()
    with torch.set_grad_enabled(bool(work.wanted)):
        moved = bounds.bytes_moved(work)
        at_peak = bounds.operations(work) / peak
        ways = ways_of(work, moved, with_peer=with_peer)
        found = errors(work, ways)
        taken = in_turn(ways, rounds)
    seconds = medians(taken)
    roofline = max(seconds[COPY], at_peak)
    return Measured(case, seconds, least(taken), roofline, found), ways


def errors(work: Work, ways: Mapping[str, Way]) -> tuple[float, float]:
    """Return how far eager and fxkit are from float64; means over inputs where that is much."""
    found = _errors_of_call(work, ways)
    if not _is_too_large(found):
        return found
    numbers = [arg.detach() for arg in work.args if arg.is_floating_point()]
    before = [it.clone() for it in numbers]
    generator = torch.Generator().manual_seed(0)
    all_found = [found]
    for _ in range(DRAWS - 1):
        for tensor, first in zip(numbers, before, strict=True):
            moved = torch.rand(first.shape, generator=generator) * 2 - 1
            tensor.copy_(first * (1 + SHARE * moved))
        all_found.append(_errors_of_call(work, ways))
    for tensor, first in zip(numbers, before, strict=True):
        tensor.copy_(first)
    eager, ours = zip(*all_found, strict=True)
    return statistics.mean(eager), statistics.mean(ours)


def _errors_of_call(work: Work, ways: Mapping[str, Way]) -> tuple[float, float]:
    true = bounds.exact(work)
    eager, ours = (bounds.error(_result(ways[way]), true) for way in (EAGER, KEPT))
    return eager, ours


def _is_too_large(errors: tuple[float, float]) -> bool:
    eager, ours = errors
    return ours > 2 * max(eager, ONE_ROUNDING)


def _result(way: Way) -> tuple[torch.Tensor, ...]:
    assert way.call is not None
    return tensors_of(way.call())


def _main_table(found: Sequence[Measured], family: Family, with_peer: bool) -> str:
    names = [EAGER, *((INDUCTOR, BEST) if with_peer else ()), FRESH, KEPT]
    over = [EAGER, *((INDUCTOR, BEST) if with_peer else ())]
    headers = ["case", *names, "roofline", *(f"× {n}" for n in over), "error ÷ eager's", ""]
    rows = []
    for one in found:
        times = [duration(one.seconds[n]) if n in one.seconds else "failed" for n in names]
        bound = duration(one.roofline) if family.has_roofline else "–"
        eager, ours = one.errors
        ratio = f"{ours / eager:.2f}" if eager else f"{ours:.0e}"
        gains = [_times(one.gain(n)) for n in over]
        rows.append([one.case.name, *times, bound, *gains, ratio, one.verdict(family)])
    align = "<" + ">" * (len(headers) - 2) + "<"
    return table(headers, rows, align=align)


def _mallopt_table(found: Sequence[tuple[Case, Mapping[str, float]]], with_peer: bool) -> str:
    names = [EAGER, *((INDUCTOR, BEST) if with_peer else ()), FRESH, KEPT]
    rows = []
    for case, seconds in found:
        times = [duration(seconds[n]) if n in seconds else "failed" for n in names]
        gains = [_times(seconds[n] / seconds[KEPT] if n in seconds else None) for n in names[:-2]]
        rows.append([case.name, *times, *gains])
    headers = ["case", *names, *(f"× {n}" for n in names[:-2])]
    return table(headers, rows, align="<" + ">" * (len(headers) - 1))


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def _bound(family: Family, found: Sequence[Measured]) -> str:
    """Say what the gain would be if each case took as long as its roofline."""
    if not family.has_roofline:
        return ""
    gains = [one.seconds[INDUCTOR] / one.roofline for one in found if INDUCTOR in one.seconds]
    return f"; {_geometric_mean(gains):.2f} at the roofline"


def summary(name: str, family: Family, found: Sequence[Measured]) -> str:
    """Say in one line how far a family is from its goals."""
    parts = []
    for over, goal in ((INDUCTOR, family.goal), (EAGER, None)):
        gains = [gain for one in found if (gain := one.gain(over)) is not None]
        if not gains:
            continue
        mean = _geometric_mean(gains)
        met = ""
        if goal is not None:
            verdict = "met" if mean >= goal else f"NOT met{_bound(family, found)}"
            met = f" (goal {goal:g}: {verdict})"
        slower = [one.case.name.split()[0] for one in found if (one.gain(over) or 1) < SLOWER]
        below = f", slower: {', '.join(slower)}" if slower else ", no case slower"
        fastest = _geometric_mean(
            [one.least[over] / one.least[KEPT] for one in found if over in one.least]
        )
        parts.append(f"{mean:.2f} × {over}{met}{below}, by least times {fastest:.2f}")
    if family.is_memory_bound:
        near = sum(one.seconds[KEPT] <= NEAR_ROOFLINE * one.roofline for one in found)
        parts.append(f"within {NEAR_ROOFLINE:g} × of roofline: {near} of {len(found)}")
    return f"{name}, geometric mean: {'; '.join(parts)}"
