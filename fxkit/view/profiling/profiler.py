"""Measure a graph node by node: time, operations, bytes, and the memory that is live."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.analysis.cost import Cost, cost_of, is_sized
from fxkit.errors import UnsupportedError
from fxkit.ir.provenance import module_path
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.view.profiling.allocations import allocator_peak
from fxkit.view.profiling.clocks import clock_for
from fxkit.view.profiling.costs import costs_of, is_call, signature
from fxkit.view.profiling.instrument import Instrumented, graph_inputs, instrument, tensors_in
from fxkit.view.profiling.kept_state import state_kept
from fxkit.view.profiling.observing import Observed, observe
from fxkit.view.profiling.profile_result import METRICS, Profile
from fxkit.view.profiling.profile_rows import Row
from fxkit.view.profiling.timed_runs import TimedRuns, measure, no_garbage_collection, quartiles
from fxkit.view.texts.labels import label_of
from fxkit.view.texts.subject import Runnable, runnable


def profile(
    gm: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 3,
    iters: int = 20,
    device: torch.device | str | None = None,
    metrics: tuple[str, ...] = METRICS,
    baseline: Profile | None = None,
) -> Profile:
    """Run a graph and measure each of its nodes.

    The clock is read between the statements of generated code; on a CUDA device events are put
    into the stream. The module itself is called in turn with it, so that the sum over nodes can be
    judged against the whole; where the two do not agree, both are run up to four times as often,
    for a second at most, and the summary says by how much they still differ. What reading the clock
    costs is measured by itself and taken off each node's time; Python collects no garbage
    meanwhile. Gradients are recorded or not, as the caller has set it. Buffers, inputs and random
    generators are as they were afterwards.

    Args:
        gm: A graph module, or anything that holds one: in `.lowered` the graph of kernels that a
            compiled module runs, or in `.graph_module`. Any other callable is captured.
        args: The inputs of the graph module.
        kwargs: More inputs, by name.
        warmup: Runs that are not counted.
        iters: Runs, of whose calmer half means are taken; more where they do not agree.
        device: Where the work is done; that of the inputs and parameters when left out.
        metrics: Some of `"time"`, `"flops"`, `"bytes"`, `"memory"`; the others are left None.
        baseline: An earlier profile. The times of nodes whose operator, operand types and constants
            it has are taken over, and marked; the others, and the whole, are measured.

    Returns:
        A value with `.table()`, `.html()`, `.to_dict()`, `.roofline()` and more.

    Raises:
        UnsupportedError: An argument has a value that it can't have.
        InvalidGraphError: A node can't take what it gets of the inputs.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        >>> measured = fxkit.profile(gm, (torch.ones(2, 4),), iters=4)
        >>> [(row.name, row.flops, row.bytes) for row in measured.rows]
        [('_0', 64, 144), ('_1', 8, 64)]
        >>> measured.peak_bytes
        64
    """
    _check(metrics, warmup, iters)
    program = runnable(gm, args, kwargs)
    module = program.graph_module
    inputs = graph_inputs(module, program.args, program.kwargs)
    where = torch.device(device) if device is not None else _device_of(module, inputs)
    with state_kept(module, (inputs, args, kwargs), where):
        return _profiled(gm, program, inputs, warmup, iters, where, metrics, baseline)


def _profiled(
    gm: Any,
    program: Runnable,
    inputs: list[Any],
    warmup: int,
    iters: int,
    where: torch.device,
    metrics: tuple[str, ...],
    baseline: Profile | None,
) -> Profile:
    module = program.graph_module
    observed = observe(instrument(module), inputs, where if "memory" in metrics else None)
    nodes = list(module.graph.nodes)
    marks = [_mark(node) for node in _typed(module, nodes, observed)]
    earlier = _earlier(baseline, nodes, marks) if baseline is not None else {}
    runs = TimedRuns([], [])
    code = instrument(module)
    if "time" in metrics:
        clock = clock_for(where)
        wanted = [i for i in range(len(nodes)) if i not in earlier]
        code = instrument(module, clock=clock.tick, only=wanted)
        with no_garbage_collection():
            runs = measure(code, inputs, clock, program.call, warmup, iters)
    costs = _costs(module, nodes, observed) if {"flops", "bytes"} & set(metrics) else None
    builder = _Rows(code, runs, costs, observed, metrics, _origins(gm), marks, earlier)
    peak, holders, allocated = _memory(program, observed, where, metrics)
    return Profile(
        title=type(gm).__name__,
        node_count=len(nodes),
        rows=tuple(builder.row(i) for i, node in enumerate(nodes) if is_call(node)),
        end_to_end=runs.end_to_end(),
        quartiles=quartiles(runs.whole) if runs.whole else None,
        instrumented=runs.instrumented(),
        clock_seconds=runs.clock_cost * runs.timers,
        noise=runs.noise(),
        peak_bytes=peak,
        peak_holders=holders,
        allocator_peak=allocated,
        warmup=warmup,
        iters=len(runs.readings) or iters,
        threads=torch.get_num_threads(),
        device=str(where),
    )


def _check(metrics: tuple[str, ...], warmup: int, iters: int) -> None:
    unknown = set(metrics) - set(METRICS)
    if unknown:
        raise UnsupportedError(
            f"expected metrics out of {', '.join(METRICS)}, got {', '.join(sorted(unknown))}"
        )
    if iters < 1 or warmup < 0:
        raise UnsupportedError(
            f"expected iters >= 1 and warmup >= 0, got iters={iters} and warmup={warmup}"
        )


def _device_of(module: torch.nn.Module, inputs: list[Any]) -> torch.device:
    tensors = [*tensors_in(inputs), *module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in tensors}
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _memory(
    program: Runnable,
    observed: Observed,
    device: torch.device,
    metrics: tuple[str, ...],
) -> tuple[int | None, tuple[tuple[str, int], ...], int | None]:
    """Return the peak of live values, the nodes that hold it, and the allocator's peak."""
    if "memory" not in metrics:
        return None, (), None
    peak = max(observed.live, default=0)
    at = observed.live.index(peak) if observed.live else 0
    args, kwargs = program.args, program.kwargs
    allocated = allocator_peak(lambda: program.graph_module(*args, **kwargs), device)
    return peak, tuple(observed.holders(at)), allocated


def _mark(node: fx.Node) -> str:
    """Return a short text that is equal for nodes that do the same work."""
    return hashlib.sha256(repr(signature(node) or node.name).encode()).hexdigest()[:16]


def _earlier(baseline: Profile, nodes: list[fx.Node], marks: list[str]) -> dict[int, Row]:
    """Map the positions of nodes that the baseline has measured to its rows."""
    by_mark: dict[str, Row] = {}
    by_name: dict[tuple[str, str], Row] = {}
    for row in baseline.rows:
        if row.seconds is not None:
            by_mark.setdefault(row.mark, row)
            by_name[row.name, row.mark] = row
    found = {}
    for i, (node, mark) in enumerate(zip(nodes, marks, strict=True)):
        row = by_name.get((node.name, mark)) or by_mark.get(mark)
        if row is not None and is_call(node):
            found[i] = row
    return found


def _costs(module: fx.GraphModule, nodes: list[fx.Node], observed: Observed) -> list[Cost]:
    """Return each node's cost; on a copy of the graph where types have to be filled in."""
    return costs_of(_typed(module, nodes, observed))


def _typed(module: fx.GraphModule, nodes: list[fx.Node], observed: Observed) -> list[fx.Node]:
    """Return the nodes, or copies with observed types where theirs are missing or have symbols."""
    if all(_is_known(node) or node.op == "output" for node in nodes):
        return nodes
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, copied)
    outputs = [node for node in nodes if node.op == "output"]
    copied.update(dict.fromkeys(outputs, graph.output(result)))
    fx.GraphModule(module, graph)
    copies = [copied[node] for node in nodes]
    for node, known in zip(copies, observed.types, strict=True):
        if not _is_known(node) and node.op != "output":
            set_type(node, known)
    return copies


def _is_known(node: fx.Node) -> bool:
    known = type_of(node)
    return known is not None and is_sized(known)


def _origins(gm: Any) -> dict[str, list[fx.Node]]:
    """Map the names of a compiled module's kernel calls to the nodes that they compute."""
    original = getattr(gm, "graph_module", None)
    if not isinstance(original, fx.GraphModule) or not hasattr(gm, "regions"):
        return {}
    nodes = {node.name: node for node in original.graph.nodes}
    fused = (region for region in gm.regions if region.kernel is not None)
    return {region.name: [nodes[name] for name in region.nodes] for region in fused}


def _common_module(nodes: list[fx.Node]) -> str:
    """Return the path of the innermost module that all nodes ran in."""
    paths = [module_path(node).split(".") for node in nodes]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


@dataclass(frozen=True)
class _Rows:
    """Makes the rows of a profile."""

    code: Instrumented
    runs: TimedRuns
    costs: list[Cost] | None
    observed: Observed
    metrics: tuple[str, ...]
    origins: Mapping[str, list[fx.Node]]
    marks: list[str]
    earlier: Mapping[int, Row]

    def row(self, index: int) -> Row:
        """Return the row of the node at this position."""
        node = self.code.nodes[index]
        label = label_of(node)
        known = self.observed.types[index]
        fused = self.origins.get(node.name, [])
        cost = self._cost(index, fused)
        row = Row(
            name=node.name,
            operator=label.operator,
            module=_common_module(fused) if fused else module_path(node),
            type=str(known) if isinstance(known, TensorType) else label.type,
            family=label.family,
            source=str(label.source) if label.source else "",
            seconds=None,
            low=None,
            high=None,
            flops=cost.flops if "flops" in self.metrics else None,
            bytes=cost.bytes if "bytes" in self.metrics else None,
            live_bytes=self.observed.live[index] if "memory" in self.metrics else None,
            workspace_bytes=self.observed.workspace(index) if "memory" in self.metrics else None,
            computes=tuple(n.name for n in fused),
            mark=self.marks[index],
        )
        return self._timed(row, index)

    def _cost(self, index: int, fused: list[fx.Node]) -> Cost:
        if self.costs is None:
            return Cost(None, None)
        cost = self.costs[index]
        if not fused:
            return cost
        return Cost(sum((cost_of(node) for node in fused), Cost(0, 0)).flops, cost.bytes)

    def _timed(self, row: Row, index: int) -> Row:
        known = self.earlier.get(index)
        if known is not None and self.runs.readings:
            times = {"seconds": known.seconds, "low": known.low, "high": known.high}
            return replace(row, **times, is_reused=True, is_launch_bound=known.is_launch_bound)
        if not self.runs.readings:
            return row
        span = self.code.spans[index]
        spent = self.runs.seconds(span)
        low, high = quartiles(spent)
        return replace(
            row,
            seconds=self.runs.typical(span),
            low=low,
            high=high,
            is_launch_bound=self.runs.is_launch_bound(span),
        )
