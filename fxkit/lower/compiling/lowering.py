"""`to_cpp`: from a graph of calls to a module whose fused regions run as C++ kernels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxkit import config
from fxkit.analysis.tensor_types import propagate_types
from fxkit.gc_pause import paused_collector
from fxkit.ir import types
from fxkit.ir.graph_arguments import check_graph_module
from fxkit.ir.types import type_of
from fxkit.lower.compiling.compiled_module import CompiledModule, is_of_type
from fxkit.lower.compiling.kernel_builds import BuiltKernels, build_kernels
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.compiling.lower_report import Region
from fxkit.lower.compiling.plan import Calls, Plan, make_plan
from fxkit.lower.compiling.tuning import spread, tuned
from fxkit.lower.families.family import Alone, Joined
from fxkit.lower.families.products.regions import continues_product
from fxkit.lower.fusion.candidates import is_candidate
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel


def to_cpp(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    tune: bool = False,
    stock: KernelCache | None = None,
) -> CompiledModule:
    """Compile what is pointwise, reduces, moves elements, multiplies or attends into C++ kernels.

    Neighbours share a kernel. All other nodes run in ATen as before. Kernels have no formula for
    gradients: when gradients are on and an input or a parameter asks for them, the original graph
    runs.

    Args:
        gm: A graph of torch-level or ATen-level calls. It is not changed, but for the types that
            are recorded on its nodes.
        args: Inputs of the types to compile for; calls with other types run the original graph.
        kwargs: Keyword inputs.
        policy: When a kernel pays.
        tune: Whether to time each kernel against eager, on made-up inputs, and keep the faster one;
            the times are kept beside the built kernels.
        stock: Kernels built for other sizes, which serve here too where they can.

    Returns:
        A module that is called like `gm`. Without a C++ compiler, or when it fails, a warning is
        given and the module runs the original graph.

    Raises:
        InvalidGraphError: When an input is missing, or a node can't take its operands; names the
            node, its source line and the types.
        UnsupportedError: When `gm` is no `GraphModule`, or `args` is not a tuple.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.softmax(x * 2, -1))
        >>> compiled = fxkit.lower.to_cpp(gm, (torch.ones(64, 256),))
        >>> [region.nodes for region in compiled.regions]
        [('mul', 'softmax')]
        >>> compiled(torch.ones(64, 256)).shape
        torch.Size([64, 256])
    """
    typed(gm, args, kwargs)
    if stock is None:
        return lower_typed(gm, policy, tune=tune)
    # What pays at one size only would ask for another build at the next.
    structural = policy or Policy()
    calls = Calls(objection=objection_by_kind)
    build = functools.partial(stock.build, others=lambda: _alternatives(gm, structural))
    return lower_typed(gm, structural, tune=tune, calls=calls, build=build)


def objection_by_kind(kernels: Alone | Joined, found: Any) -> str | None:
    """Do as `plan.objection` for one of many sizes: those near by get the same answer."""
    return kernels.objection_by_kind(found)


def _alternatives(gm: fx.GraphModule, policy: Policy) -> dict[str, Kernel]:
    """Return the kernels of a graph all or none of whose products are left to torch's library."""
    kernels: dict[str, Kernel] = {}
    for reason in (None, "another size may be left to torch's library"):
        plan = make_plan(gm, partition(gm, policy, continues_product), _with_objection(reason))
        kernels |= {f"other_{len(kernels)}_{name}": kernel for name, kernel in plan.kernels.items()}
    return kernels


def _with_objection(reason: str | None) -> Calls:
    """Return how kernels are called where each product and attention gets the same answer."""

    def objection(*_: Any) -> str | None:
        return reason

    return Calls(objection=objection)


def to_cpp_as_recorded(
    gm: fx.GraphModule, reason: str, policy: Policy | None = None
) -> CompiledModule:
    """Compile a captured graph for the types that its nodes had when they were recorded.

    Serves a graph whose types can't be found without running it. Where a value inside has another
    type at a later call, eager computes what depends on it.

    Args:
        gm: The graph.
        reason: Why its types can't be found; that of all nodes in eager if some have no type.
        policy: When a kernel pays.
    """
    if not all(_has_type(node) for node in gm.graph.nodes if node.op != "output"):
        return eager_module(gm, reason)
    module = lower_typed(gm, policy)
    is_fused = any(region.kernel is not None for region in module.regions)
    return module if is_fused else eager_module(gm, reason)


def lower_typed(
    gm: fx.GraphModule,
    policy: Policy | None = None,
    *,
    tune: bool = False,
    calls: Calls | None = None,
    build: Callable[[Mapping[str, Kernel]], BuiltKernels] = build_kernels,
) -> CompiledModule:
    """Compile a graph whose nodes have their types.

    Args:
        gm: The graph.
        policy: When a kernel pays, and on which device kernels run.
        tune: Whether to time kernels against eager; only on the processor.
        calls: How kernels are called.
        build: Builds kernels.
    """
    if config.current().backend == "eager":
        return eager_module(gm, "FXKIT_BACKEND=eager turns kernels off")
    # A default device, or whatever else modes do to tensors, is meant for those of the program.
    with torch.DisableTorchFunction():
        return _lowered(gm, policy, tune, calls, build)


def _lowered(
    gm: fx.GraphModule,
    policy: Policy | None,
    tune: bool,
    calls: Calls | None,
    build: Callable[[Mapping[str, Kernel]], BuiltKernels],
) -> CompiledModule:
    faults = KernelFaults()
    with paused_collector(keeps_all=False):
        may_split = policy is not None and policy.splits
        steps = partition(gm, policy, continues_product, faults)
        plan = make_plan(gm, steps, calls, may_split, faults)
    built = build(plan.kernels)
    if (error := built.general_failure) is not None:
        _warn_once(str(error))
        return eager_module(gm, error.message)
    built.bind(plan, _noted_failures(gm, plan, built, faults))
    faults.warn()
    if built.failures and not (built.libraries or plan.has_packed):
        return _without_kernels(gm, plan.regions, "no kernel could be built")
    if tune:
        policy = tuned(policy, plan)
        if policy.refused:
            return lower_typed(gm, policy, calls=calls, build=build)
    spread(plan, policy)
    again = functools.partial(lower_typed, policy=policy, calls=calls, build=build)
    return CompiledModule(gm, plan, built, again)


def _noted_failures(
    gm: fx.GraphModule, plan: Plan, built: BuiltKernels, faults: KernelFaults
) -> dict[str, str]:
    """Take note of the kernels that could not be built; return for each of them why."""
    nodes = {node.name: node for node in gm.graph.nodes}
    reasons: dict[str, str] = {}
    for region in plan.regions:
        error = built.failures.get(region.kernel or "")
        if region.kernel is not None and error is not None:
            reasons[region.kernel] = faults.note([nodes[name] for name in region.nodes], error)
    return reasons


def typed(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Find the types of a graph's nodes for some inputs, unless they are known.

    Raises:
        UnsupportedError: When it is given no graph module, or `args` is not a tuple.
    """
    check_graph_module(gm)
    if not _is_typed(gm, args, dict(kwargs or {})):
        propagate_types(gm, args, kwargs)


def _is_typed(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the types on the nodes are those for these inputs."""
    if not isinstance(args, (tuple, list)):
        return False
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = [*args, *(kwargs[n.target] for n in inputs[len(args) :] if n.target in kwargs)]
    if len(given) != len(inputs):
        return False
    return all(
        is_of_type(type_of(n), value) for n, value in zip(inputs, given, strict=True)
    ) and all(_has_type(n) for n in gm.graph.nodes if n.op != "output")


def _has_type(node: fx.Node) -> bool:
    return any(key in node.meta for key in (types.KEY, "val", "tensor_meta"))


def eager_module(gm: fx.GraphModule, reason: str) -> CompiledModule:
    """Return a module that runs a graph as it is, and says why for each node of interest."""
    names = [node.name for node in gm.graph.nodes if is_candidate(node)]
    return _without_kernels(
        gm, [Region(name, (name,), None, reason, None) for name in names], reason
    )


def _without_kernels(gm: fx.GraphModule, regions: list[Region], reason: str) -> CompiledModule:
    again = functools.partial(_without_kernels, regions=regions, reason=reason)
    return CompiledModule(gm, Plan(gm.graph, regions=regions, reason=reason), BuiltKernels(), again)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(f"{text}\n  The graph runs in eager.", stacklevel=3)
