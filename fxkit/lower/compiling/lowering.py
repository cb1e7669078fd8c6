"""`to_cpp`: from a graph of calls to a module whose fused regions run as C++ kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.eager_module import eager_module
from fxkit.lower.compiling.inferred_types import has_type
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.compiling.pipeline import KernelTarget, LoweringState, lower, lower_typed
from fxkit.lower.compiling.plan import make_plan
from fxkit.lower.compiling.whole_operators import Choosing, choose_kernels
from fxkit.lower.families.products.regions import continues_product
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.passes.manager.instruments import Instrument


def to_cpp(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    tune: bool = False,
    kernel_cache: KernelCache | None = None,
    instruments: tuple[Instrument, ...] = (),
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
        kernel_cache: Kernels built for other sizes, which serve here too where they can.
        instruments: What is told of each step.

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
    chosen = policy or Policy()
    target = cpp_target(gm, chosen, kernel_cache)
    return lower(
        LoweringState(gm, args, kwargs, chosen, target, tunes=tune, instruments=instruments)
    )


def cpp_target(
    gm: fx.GraphModule, policy: Policy, kernel_cache: KernelCache | None
) -> KernelTarget:
    """Return how kernels for the processor are made, alone or for further sizes too."""
    if kernel_cache is None:
        return KernelTarget(Choosing.by_speed())
    # What pays at one size only would ask for another build at the next.
    build = functools.partial(kernel_cache.build, others=lambda: _alternatives(gm, policy))
    return KernelTarget(Choosing.by_kind(), build=build)


def _alternatives(gm: fx.GraphModule, policy: Policy) -> dict[str, Kernel]:
    """Return the kernels of a graph all or none of whose products are left to torch's library."""
    kernels: dict[str, Kernel] = {}
    regions = partition(gm, policy, continues_product)
    for reason in (None, "another size may be left to torch's library"):
        choices = choose_kernels(gm, regions.steps, Choosing.all_library(reason), KernelFaults())
        plan = make_plan(gm, regions, choices)
        kernels |= {f"other_{len(kernels)}_{name}": kernel for name, kernel in plan.kernels.items()}
    return kernels


def to_cpp_as_recorded(
    gm: fx.GraphModule,
    reason: str,
    policy: Policy | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> CompiledModule:
    """Compile a captured graph for the types that its nodes had when they were recorded.

    Serves a graph whose types can't be found without running it. Where a value inside has another
    type at a later call, eager computes what depends on it.

    Args:
        gm: The graph.
        reason: Why its types can't be found; that of all nodes in eager if some have no type.
        policy: When a kernel pays.
        instruments: What is told of each step.
    """
    if not all(has_type(node) for node in gm.graph.nodes if node.op != "output"):
        return eager_module(gm, reason)
    module = lower_typed(gm, policy, instruments=instruments)
    is_fused = any(region.kernel is not None for region in module.regions)
    return module if is_fused else eager_module(gm, reason)
