"""Measure a graph node by node: time, operations, bytes, and the memory that is live."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxkit.analysis.cost import Cost, cost_of
from fxkit.analysis.liveness import Liveness
from fxkit.errors import UnsupportedError
from fxkit.ir.provenance import module_path
from fxkit.ir.types import TensorType, set_type, type_of, type_of_value
from fxkit.view.instrument import Instrumented, graph_inputs, instrument, tensors_in
from fxkit.view.labels import label_of
from fxkit.view.profile_result import METRICS, Profile, Row
from fxkit.view.subject import graph_module_of

_QUIET = ("placeholder", "get_attr", "output")


def profile(
    gm: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 3,
    iters: int = 20,
    metrics: tuple[str, ...] = METRICS,
) -> Profile:
    """Run a graph and measure each of its nodes.

    The clock is read between the statements of generated code. The module itself is called in turn
    with it, so that the sum over nodes can be judged against the whole. Gradients are recorded or
    not, as the caller has set it.

    Args:
        gm: A graph module, or anything that holds one: in `.lowered` the graph of kernels that a
            compiled module runs, or in `.graph_module`.
        args: The inputs of the graph module.
        kwargs: More inputs, by name.
        warmup: Runs that are not counted.
        iters: Runs of which medians are taken.
        metrics: Some of `"time"`, `"flops"`, `"bytes"`, `"memory"`; the others are left None.

    Returns:
        A value with `.table()`, `.html()`, `.to_dict()` and `.export_chrome_trace(path)`.

    Raises:
        UnsupportedError: An argument has a value that it can't have.
    """
    _check(metrics, warmup, iters)
    module = graph_module_of(gm)
    inputs = graph_inputs(module, args, kwargs)
    code = instrument(module)
    observed = _observe(code, inputs)
    stamps, whole = ([], [])
    if "time" in metrics:
        stamps, whole = _measure(code, inputs, gm, module, args, kwargs or {}, warmup, iters)
    costs = _costs(module, code, observed) if {"flops", "bytes"} & set(metrics) else None
    origins = _origins(gm)
    rows = tuple(
        _row(node, i, stamps, costs[i] if costs else None, observed, metrics, origins)
        for i, node in enumerate(code.nodes)
        if node.op not in _QUIET
    )
    return Profile(
        title=type(gm).__name__,
        rows=rows,
        end_to_end=statistics.median(whole) if whole else None,
        quartiles=_quartiles(whole) if whole else None,
        instrumented=statistics.median((s[-1] - s[0]) / 1e9 for s in stamps) if stamps else None,
        peak_bytes=max(observed.live, default=0) if "memory" in metrics else None,
        warmup=warmup,
        iters=iters,
        threads=torch.get_num_threads(),
    )


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


class _Observed:
    """What one run tells of values: their types, and the storages that are alive.

    Attributes:
        types: The type of each node's value.
        live: Bytes of the storages that nodes made and that are alive, while each node runs.
    """

    def __init__(self, nodes: tuple[fx.Node, ...], inputs: list[Any]) -> None:
        graph = nodes[0].graph if nodes else fx.Graph()
        liveness = Liveness(graph)
        position = {node: i for i, node in enumerate(nodes)}
        self._dying = [[position[n] for n in liveness.dying_at(node)] for node in nodes]
        self._is_given = [node.op in ("placeholder", "get_attr") for node in nodes]
        self._holders: dict[int, set[int]] = {}
        self._held: list[set[int]] = [set() for _ in nodes]
        self._sizes: dict[int, int] = {}
        self._given = {t.untyped_storage().data_ptr() for t in tensors_in(inputs) if _is_plain(t)}
        self._alive = 0
        self.types: list[Any] = [None] * len(nodes)
        self.live: list[int] = [0] * len(nodes)

    def __call__(self, index: int, value: Any) -> None:
        self.types[index] = type_of_value(value)
        for tensor in tensors_in(value):
            if _is_plain(tensor):
                self._hold(index, tensor.untyped_storage())
        self.live[index] = self._alive
        for dead in self._dying[index]:
            self._drop(dead)

    def _hold(self, index: int, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if self._is_given[index]:
            self._given.add(key)
        if not size or key in self._given:
            return
        if key not in self._holders:
            self._holders[key] = set()
            self._sizes[key] = size
            self._alive += size
        self._holders[key].add(index)
        self._held[index].add(key)

    def _drop(self, index: int) -> None:
        for key in self._held[index]:
            self._holders[key].discard(index)
            if not self._holders[key]:
                del self._holders[key]
                self._alive -= self._sizes.pop(key)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _observe(code: Instrumented, inputs: list[Any]) -> _Observed:
    observed = _Observed(code.nodes, inputs)
    code.observed(observed, *inputs)
    return observed


def _measure(
    code: Instrumented,
    inputs: list[Any],
    gm: Any,
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    warmup: int,
    iters: int,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Call the timed code and the module in turn; return the stamps, and the module's seconds."""
    call = module if not callable(gm) else gm
    stamps: list[tuple[int, ...]] = []
    whole: list[float] = []
    for run in range(warmup + iters):
        result, times = code.timed(*inputs)
        del result
        start = time.perf_counter_ns()
        result = call(*args, **kwargs)
        spent = time.perf_counter_ns() - start
        del result
        if run >= warmup:
            stamps.append(times)
            whole.append(spent / 1e9)
    return stamps, whole


def _costs(module: fx.GraphModule, code: Instrumented, observed: _Observed) -> list[Cost]:
    """Return each node's cost; on a copy of the graph where types have to be filled in."""
    nodes = list(code.nodes)
    if any(type_of(node) is None and node.op != "output" for node in nodes):
        nodes = _typed_copy(module, nodes, observed)
    return [cost_of(node) for node in nodes]


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def _typed_copy(module: fx.GraphModule, nodes: list[fx.Node], observed: _Observed) -> list[fx.Node]:
    """Copy the nodes into a graph of their own, where observed types stand in for missing ones."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, copied)
    outputs = [node for node in nodes if node.op == "output"]
    copied.update(dict.fromkeys(outputs, graph.output(result)))
    fx.GraphModule(module, graph)
    copies = [copied[node] for node in nodes]
    for node, known in zip(copies, observed.types, strict=True):
        if type_of(node) is None and node.op != "output":
            set_type(node, known)
    return copies


def _row(
    node: fx.Node,
    index: int,
    stamps: list[tuple[int, ...]],
    cost: Cost | None,
    observed: _Observed,
    metrics: tuple[str, ...],
    origins: Mapping[str, list[fx.Node]],
) -> Row:
    spent = [(s[index + 1] - s[index]) / 1e9 for s in stamps]
    label = label_of(node)
    known = observed.types[index]
    fused = origins.get(node.name, [])
    if fused and cost is not None:
        cost = Cost(sum((cost_of(n) for n in fused), Cost(0, 0)).flops, cost.bytes)
    return Row(
        name=node.name,
        operator=label.operator,
        module=_common_module(fused) if fused else module_path(node),
        type=str(known) if isinstance(known, TensorType) else label.type,
        family=label.family,
        source=str(label.source) if label.source else "",
        seconds=statistics.median(spent) if spent else None,
        low=_quartiles(spent)[0] if spent else None,
        high=_quartiles(spent)[1] if spent else None,
        flops=cost.flops if cost and "flops" in metrics else None,
        bytes=cost.bytes if cost and "bytes" in metrics else None,
        live_bytes=observed.live[index] if "memory" in metrics else None,
        computes=tuple(n.name for n in fused),
    )
