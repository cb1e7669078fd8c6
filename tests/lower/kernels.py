"""Graphs for the tests of `fxkit.lower`, and how their results are compared."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.lower import CompiledModule, Policy, to_cpp

# Compile whatever can be compiled, be it ever so small.
ALWAYS = Policy(min_members=1)


def compile_all(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]],
    results: Sequence[int] = (),
    lowering: Callable[..., CompiledModule] | None = None,
) -> tuple[CompiledModule, list[torch.Tensor], list[fx.Node]]:
    """Compile many calls as one graph, so that the compiler is started once.

    Args:
        calls: `(function, arguments, keyword arguments)`; each tensor becomes an input of its own,
            so that no two calls share a region.
        results: How many results each call has, where one has several.
        lowering: Compiles a graph for its inputs; `to_cpp` where it is left out.

    Returns:
        The compiled module, its inputs, and the node of each call.
    """
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    nodes: list[fx.Node] = []

    def as_input(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return graph.placeholder(f"x{len(inputs)}")
        return value

    bound = [pytree.tree_map(as_input, (list(args), kwargs)) for _, args, kwargs in calls]
    for (function, _, _), (args, kwargs) in zip(calls, bound, strict=True):
        nodes.append(graph.call_function(function, tuple(args), kwargs))
    given: list[Any] = list(nodes)
    for place, count in enumerate(results):
        if count > 1:
            node = nodes[place]
            given[place] = tuple(
                graph.call_function(operator.getitem, (node, i)) for i in range(count)
            )
    graph.output(tuple(given))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    lowering = lowering or functools.partial(to_cpp, policy=ALWAYS)
    return lowering(gm, tuple(inputs)), inputs, nodes


def fused_names(compiled: CompiledModule) -> set[str]:
    """Return the names of the nodes that kernels compute."""
    return {name for region in compiled.regions if region.kernel for name in region.nodes}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in epsilons of the dtype, relative to max(1, |expected|).

    Not-a-number and infinities must be in the same places; where not, the difference is infinite.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(found, expected) else float("inf")
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = (a - b).abs() / b.abs().clamp(min=1) / torch.finfo(expected.dtype).eps
    error = torch.where(same, torch.zeros_like(error), error)
    return float(error.nan_to_num(float("inf"), float("inf"), float("inf")).max())
