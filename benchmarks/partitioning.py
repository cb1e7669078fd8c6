"""What it costs to find the regions of a graph for a backend, beside torch's own partitioner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from benchmarks.rewriting_chains import chain
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partition import Partition, plan_regions
from fxkit.view.texts.text_table import duration, table

_UNSUPPORTED = torch.ops.aten.mul.Tensor
_GOAL = 1.0

# Torch's partitioner took half a minute on the last of these.
_PEER_SIZES = (300, 1_000, 3_000)


class _Backend:
    name = "part"

    def supports(self, node: fx.Node) -> str | None:
        return "not supported" if node.target is _UNSUPPORTED else None

    def compile(self, region: fx.GraphModule, types: tuple[Any, ...]) -> Callable[..., Any]:
        return region


def run(rounds: int, *, with_peer: bool, nodes: int = 10_000) -> str:
    """Partition chains in which each third node is not supported; return a table.

    Args:
        rounds: More means more repetitions, at most three of each.
        with_peer: Whether torch's `CapabilityBasedPartitioner` is timed too, on smaller graphs.
        nodes: Size of the largest chain.
    """
    sizes = sorted({nodes // 10, nodes})
    ways: list[tuple[str, Callable[[fx.GraphModule], int], list[int]]] = [
        ("fxkit: find the regions", _plan, sizes),
        ("fxkit: find, outline, call the backend", _partition, sizes),
    ]
    if with_peer:
        peer_sizes = [size for size in _PEER_SIZES if size <= nodes]
        ways.append(("torch CapabilityBasedPartitioner: find", _propose, peer_sizes))
        ways.insert(0, ("fxkit: find the regions", _plan, peer_sizes))
    rows = []
    for name, way, wanted in ways:
        for size in wanted:
            seconds, regions = _best(way, size, min(3, max(1, rounds // 5)))
            goal = _verdict(seconds) if way is _plan and size == nodes else ""
            rows.append([name, f"{size:,}", f"{regions:,}", duration(seconds), goal])
    return table(["a chain, a third not supported", "nodes", "regions", "CPU time", "goal"],
                 rows, align="<>>><")  # fmt: skip


def _best(way: Callable[[fx.GraphModule], int], size: int, repetitions: int) -> tuple[float, int]:
    """Return the least process time of a few runs, each on a new chain, and the regions found."""
    times, regions = [], 0
    for _ in range(repetitions if size > 1_000 else repetitions + 1):
        gm = chain(size)
        start = time.process_time()
        regions = way(gm)
        times.append(time.process_time() - start)
    return min(times), regions


def _plan(gm: fx.GraphModule) -> int:
    return len(plan_regions(gm.graph, Partition(_Backend())).regions)


def _partition(gm: fx.GraphModule) -> int:
    PassManager([Partition(_Backend())], verify="off").run(gm)
    return sum(1 for _ in gm.children())


def _propose(gm: fx.GraphModule) -> int:
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Supported(OperatorSupportBase):
        def is_node_supported(
            self, submodules: Mapping[str, torch.nn.Module], node: fx.Node
        ) -> bool:
            return node.op == "call_function" and node.target is not _UNSUPPORTED

    return len(CapabilityBasedPartitioner(gm, Supported()).propose_partitions())


def _verdict(seconds: float) -> str:
    return f"≤ {duration(_GOAL)}: {'met' if seconds <= _GOAL else 'not met'}"
