"""A compiled module without kernels: eager runs the graph, and the report says why."""

from __future__ import annotations

import functools

from torch import fx

from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.lower_report import Region
from fxkit.lower.compiling.plan import Plan
from fxkit.lower.fusion.candidates import is_candidate


def eager_module(gm: fx.GraphModule, reason: str) -> CompiledModule:
    """Return a module that runs a graph as it is, and says why for each node of interest."""
    names = [node.name for node in gm.graph.nodes if is_candidate(node)]
    return module_without_kernels(
        gm, [Region(name, (name,), None, reason, None) for name in names], reason
    )


def module_without_kernels(
    gm: fx.GraphModule, regions: list[Region], reason: str
) -> CompiledModule:
    """Return a module that runs a graph as it is, with what became of its regions."""
    again = functools.partial(module_without_kernels, regions=regions, reason=reason)
    return CompiledModule(gm, Plan(gm.graph, regions=regions, reason=reason), BuiltKernels(), again)
