"""What finding and rewriting cost, beside torch's own tools and a loop without any safety."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

import fxkit
from benchmarks import rewriting_chains as chains
from fxkit.ir.op import resolve
from fxkit.view.texts.text_table import duration, table

Rewriting = Callable[[chains.TimedModule], object]

_SLOW_REPETITIONS = 3


@dataclass(frozen=True)
class Contender:
    """A way to work on a chain.

    Attributes:
        name: What the table calls it.
        run: Does it.
        sizes: The chains that it is given instead of the usual ones, where it can't bear those.
        fake: Whether it wants fake tensors on the nodes.
    """

    name: str
    run: Rewriting
    sizes: tuple[int, ...] = ()
    fake: bool = False


@dataclass(frozen=True)
class Timing:
    """Median seconds of one contender on one chain.

    Attributes:
        seconds: All but the recompile.
        recompile: The recompile.
    """

    seconds: float
    recompile: float


def run(rounds: int, *, with_peer: bool, nodes: int = 100_000) -> str:
    """Rewrite chains in every way and return tables.

    Args:
        rounds: More means more repetitions; large chains are repeated less.
        with_peer: Whether torch's own tools are timed too.
        nodes: Size of the largest chain, at least 3,000; the others have a tenth and a hundredth.
    """
    before = _state_of_the_machine()
    nodes = max(nodes, 3_000)
    sizes = [nodes // 100, nodes // 10, nodes]
    tables = [_scaling(sizes, rounds, with_peer), _goals(nodes, rounds)]
    return "\n\n".join([f"before: {before}", *tables, f"after: {_state_of_the_machine()}"])


def _state_of_the_machine() -> str:
    """Tell how busy the machine is: a loop of plain Python says how fast it is just now."""
    seconds = statistics.median(_plain_loop() for _ in range(9))
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"a loop of 1,000,000 additions in plain Python takes {duration(seconds)}; load {load} "
        f"on {os.cpu_count()} cores"
    )


def _plain_loop() -> float:
    start = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - start


def _contenders(with_peer: bool, nodes: int) -> list[Contender]:
    found = [
        Contender("fxkit.find", lambda gm: fxkit.find(gm, chains.RULE)),
        Contender("fxkit.rewrite", chains.with_fxkit),
        Contender("a bare loop, no safety", chains.by_hand),
    ]
    if with_peer:
        quadratic = tuple(size for size in (1_000, 3_000, 9_000) if size <= nodes)
        slow = tuple(size for size in (300, 1_000) if size <= nodes)
        inductor = chains.with_inductor()
        found += [
            Contender("torch.fx.replace_pattern", chains.with_replace_pattern, quadratic),
            Contender("Inductor register_replacement", inductor, slow, fake=True),
        ]
    return found


def _scaling(sizes: Sequence[int], rounds: int, with_peer: bool) -> str:
    """Time every contender on every chain that it can bear."""
    contenders = _contenders(with_peer, sizes[-1])
    wanted = {each.name: each.sizes or tuple(sizes) for each in contenders}
    found: dict[str, dict[int, Timing]] = {each.name: {} for each in contenders}
    for size in sorted({size for some in wanted.values() for size in some}):
        taking_part = [each for each in contenders if size in wanted[each.name]]
        for name, timing in _in_turn(taking_part, size, _repetitions(rounds, size)).items():
            found[name][size] = timing
    rows = [row for name, timings in found.items() for row in _rows(name, timings)]
    headers = ["relu(a + b) in a chain", "nodes", "a hit", "recompile, a hit", "growth", "goal"]
    return table(headers, rows, align="<>>>><")


def _rows(name: str, timings: Mapping[int, Timing]) -> list[list[str]]:
    """Return one row a size; growth and verdict are in the last."""
    each = {size: timing.seconds / chains.hits(size) for size, timing in timings.items()}
    rows = [
        ["", f"{size:,}", _microseconds(each[size]),
         _microseconds(timing.recompile / chains.hits(size)), "", ""]
        for size, timing in timings.items()
    ]  # fmt: skip
    rows[0][0] = name
    growth = _exponent({size: timing.seconds for size, timing in timings.items()})
    rows[-1][4] = f"n^{growth:.2f}"
    if name.startswith("fxkit"):
        verdicts = [_verdict("≤ 50 µs", max(each.values()) <= 50e-6),
                    _verdict("≤ n^1.10", growth <= 1.1)]  # fmt: skip
        rows[-1][5] = ", ".join(verdicts)
    return rows


def _in_turn(contenders: Sequence[Contender], size: int, repetitions: int) -> Mapping[str, Timing]:
    """Run the contenders A B C A B C, each on a new chain, once more than is counted."""
    taken: dict[str, list[Timing]] = {each.name: [] for each in contenders}
    for repetition in range(repetitions + 1):
        for each in contenders:
            if each.sizes and repetition > _SLOW_REPETITIONS:
                continue
            gm = chains.chain(size, fake=each.fake)
            taken[each.name].append(_timed(each.run, gm))
    return {name: _median(timings[1:]) for name, timings in taken.items()}


def _timed(work: Rewriting, gm: chains.TimedModule) -> Timing:
    gc.collect()
    gm.recompile_seconds = 0.0
    start = time.perf_counter()
    work(gm)
    seconds = time.perf_counter() - start
    return Timing(seconds - gm.recompile_seconds, gm.recompile_seconds)


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(
        statistics.median(t.seconds for t in timings),
        statistics.median(t.recompile for t in timings),
    )


def _repetitions(rounds: int, size: int) -> int:
    """Return how often a chain of a size is rewritten."""
    return max(3, rounds // 2 if size <= 10_000 else rounds // 5)


def _exponent(seconds: Mapping[int, float]) -> float:
    """Return the slope of log(time) over log(nodes), by least squares."""
    x = [math.log(size) for size in seconds]
    y = [math.log(value) for value in seconds.values()]
    return statistics.linear_regression(x, y).slope


def _goals(nodes: int, rounds: int) -> str:
    """Time what has a goal of its own."""
    middle, large = nodes // 10, nodes // 2
    rows = [
        _more_rules_row(middle, rounds),
        _same_root_row(middle, rounds),
        _edits_row(large, rounds),
        _resolve_row(middle, rounds),
    ]
    return table(["what", "measured", "goal"], rows, align="<><")


def _more_rules_row(nodes: int, rounds: int) -> list[str]:
    many = [chains.RULE, *chains.rules_with_other_roots(99)]
    ratio = _ratio(lambda gm: fxkit.rewrite(gm, many), chains.with_fxkit, nodes, rounds)
    return [
        f"one rule and 99 with other roots, beside one rule, {nodes:,} nodes",
        f"{ratio:.2f} ×",
        _verdict("≤ 1.2 ×", ratio <= 1.2),
    ]


def _same_root_row(nodes: int, rounds: int) -> list[str]:
    many = chains.rules_with_the_same_root(100)
    ratio = _ratio(
        lambda gm: fxkit.rewrite(gm, many),
        lambda gm: fxkit.rewrite(gm, many[:1]),
        nodes,
        rounds,
    )
    return [
        f"100 rules with the same root and no hit, beside one, {nodes:,} nodes",
        f"{ratio:.2f} ×",
        _verdict("≤ 3 ×", ratio <= 3),
    ]


def _ratio(one: Rewriting, other: Rewriting, nodes: int, rounds: int) -> float:
    pair = [Contender("one", one), Contender("other", other)]
    timings = _in_turn(pair, nodes, _repetitions(rounds, nodes))
    return timings["one"].seconds / timings["other"].seconds


def _edits_row(nodes: int, rounds: int) -> list[str]:
    timings = _in_turn(
        [Contender("edits", _edit_twenty)], nodes, max(_repetitions(rounds, nodes), 5)
    )
    took = timings["edits"]
    return [
        f"20 edits in one session, {nodes:,} nodes (its recompile: {duration(took.recompile)})",
        duration(took.seconds),
        _verdict("≤ 10 ms", took.seconds <= 10e-3),
    ]


def _edit_twenty(gm: chains.TimedModule) -> None:
    """Put something else in place of twenty nodes."""
    relus = gm.graph.find_nodes(op="call_function", target=chains.RELU, sort=False)
    with fxkit.edit(gm) as session:
        for node in relus[:: max(len(relus) // 20, 1)][:20]:
            session.replace(node, session.call(chains.NEG, *node.args, before=node))


def _resolve_row(nodes: int, rounds: int) -> list[str]:
    seen: list[fx.Node] = [n for n in chains.chain(nodes).graph.nodes if n.op == "call_function"]
    seconds: list[float] = []
    for _ in range(max(3, rounds) + 1):
        start = time.perf_counter()
        for node in seen:
            resolve(node)
        seconds.append((time.perf_counter() - start) / len(seen))
    took = statistics.median(seconds[1:])
    return [
        "resolve() of a node seen before",
        _microseconds(took),
        _verdict("≤ 3 µs", took <= 3e-6),
    ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


def _verdict(goal: str, is_met: bool) -> str:
    return f"{goal}: {'met' if is_met else 'not met'}"
