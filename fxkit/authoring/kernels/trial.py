"""Trials of kernels: at a place of a graph, the user's kernel against what fxkit makes there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.authoring.kernels.epilogue_fusion import FuseEpilogues
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.autotuning import times
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.lowering import cpp_target
from fxkit.lower.compiling.pipeline import LoweringState, lower
from fxkit.lower.families.products.regions import continues_product
from fxkit.lower.fusion.kernel_faults import KernelFaults
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.runtime.devices import is_on_gpu
from fxkit.passes.base import Pass
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partitioning.parts import GraphPart
from fxkit.patterns.engine import rewrite
from fxkit.patterns.match_results import Match
from fxkit.torch_adapters.fx_nodes import is_erased


@dataclass(frozen=True)
class TrialOptions:
    """How fxkit compiles what it times.

    Attributes:
        passes: The passes that run before lowering.
        policy: When a kernel pays.
        regions: Node → the nodes that fxkit would put into one kernel with it.
    """

    passes: tuple[Pass, ...]
    policy: Policy
    regions: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    def look_at(self, gm: fx.GraphModule) -> None:
        """Find which nodes of a typed graph fxkit would put into one kernel.

        A row of an operator that raises is no matter here: eager runs its nodes, and lowering says
        so in its place.
        """
        self.regions.clear()
        for step in partition(gm, self.policy, continues_product, KernelFaults()).steps:
            if not isinstance(step, fx.Node):
                nodes = frozenset(step.coordinates)
                self.regions.update(dict.fromkeys(nodes, nodes))

    def around(self, match: Match) -> frozenset[fx.Node]:
        """Return the matched nodes with those that fxkit would put into one kernel with them.

        So a trial counts what it costs to cut them apart. The matched nodes alone where others come
        between them, or some of them are gone.
        """
        matched = match.matched
        found = matched.union(*(self.regions.get(node, ()) for node in matched))
        if any(is_erased(node) for node in found) or not _is_convex(found):
            return matched
        return found


def times_at(kernel: AuthoredKernel, match: Match, options: TrialOptions) -> tuple[float, float]:
    """Return the seconds of a call with the kernel, and of one with what fxkit makes itself.

    Both are measured once for operands of these types, and kept.
    """
    part = GraphPart.of(sorted(options.around(match)))
    fragment = part.module(_module_of(match.root))
    types = [type_of(node) for node in part.inputs]
    key = f"{kernel.name} {_form_of(fragment)} {[_told(t) for t in types]}"
    measure = functools.partial(_measured, kernel, match.root.name, fragment, types, options)
    return times.kept_times(key, measure, [_text_of(kernel)])


def _form_of(fragment: fx.GraphModule) -> str:
    """Return what a part of a graph calls, which is the same for each of a model's layers."""
    places = {node: f"%{place}" for place, node in enumerate(fragment.graph.nodes)}
    lines = []
    for node in fragment.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr":
            target = _told(type_of(node))
        elif callable(target):
            target = f"{target.__module__}.{getattr(target, '__qualname__', target)}"
        operands = map_arg((node.args, node.kwargs), places.__getitem__)
        lines.append(f"{'' if node.op == 'placeholder' else target} {operands}")
    return "; ".join(lines)


def _is_convex(nodes: frozenset[fx.Node]) -> bool:
    """Tell whether no node outside comes after one of some nodes, and before another."""
    last = max(nodes)
    queue = [user for node in nodes for user in node.users if user not in nodes]
    seen = set(queue)
    while queue:
        node = queue.pop()
        if node in nodes:
            return False
        fresh = [u for u in node.users if u not in seen and u <= last]
        seen.update(fresh)
        queue += fresh
    return True


def _module_of(node: fx.Node) -> fx.GraphModule:
    owner = node.graph.owning_module
    assert isinstance(owner, fx.GraphModule)
    return owner


def _told(known: Any) -> str:
    """Return a type for the key of a trial; sizes near by share it."""
    if not isinstance(known, TensorType):
        return str(known)
    strides = sorted(range(len(known.shape)), key=lambda axis: (known.stride or ())[axis])
    return f"{known.dtype} {times.all_near(known.shape)} {strides} {known.device}"


def _text_of(kernel: AuthoredKernel) -> str:
    keys = [native.source.key for native in kernel.natives.values()]
    return "\0".join(keys) or repr(kernel.call)


def _measured(
    kernel: AuthoredKernel,
    root: str,
    fragment: fx.GraphModule,
    types: Sequence[Any],
    options: TrialOptions,
) -> tuple[float, float]:
    args = tuple(made_up(known) for known in types)
    authored = copy_graph_module(fragment)
    rewrite(authored, replace(kernel.rule, where=lambda match: match.root.name == root), limit=1)
    if kernel.has_hook:
        typed(authored, args)
        passes = (FuseEpilogues((kernel,), options.policy),)
        PassManager(passes, verify="structure", args=args).run(authored)
    own = _compiled(copy_graph_module(fragment), args, options)
    theirs = _compiled(authored, args, options)
    return times.fastest(lambda: theirs(*args), lambda: own(*args))


@torch.no_grad()
def _compiled(gm: fx.GraphModule, args: tuple[Any, ...], options: TrialOptions) -> CompiledModule:
    """Compile a part of a graph as `fxkit.compile` does."""
    PassManager(options.passes, verify="structure", args=args).run(gm)
    if is_on_gpu(gm, args):
        from fxkit.lower.compiling.cuda_lowering import to_cuda

        return to_cuda(gm, args, policy=options.policy)
    target = cpp_target(gm, options.policy, None)
    return lower(LoweringState(gm, args, policy=options.policy, target=target, packs=True))


def made_up(known: Any) -> Any:
    """Return an operand of a type: random numbers, or zeros where they are integers."""
    if not isinstance(known, TensorType):
        return known
    stride = known.stride or ()
    span = 1 + sum((n - 1) * s for n, s in zip(known.shape, stride, strict=True) if n)
    generator = torch.Generator().manual_seed(0)
    if known.dtype.is_floating_point:
        base = torch.randn(span, generator=generator).to(known.dtype)
    else:
        base = torch.zeros(span, dtype=known.dtype)
    return base.to(known.device).as_strided(known.shape, stride)
