"""Trials of kernels: at a place of a graph, the user's kernel against what fxkit makes there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.printer import format_graph
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.autotuning import times
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.lowering import cpp_target
from fxkit.lower.compiling.pipeline import Lowering, lower
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.runtime.devices import is_on_gpu
from fxkit.passes.base import Pass
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.partitioning.parts import GraphPart
from fxkit.patterns.engine import rewrite
from fxkit.patterns.matching import Match


@dataclass(frozen=True)
class TrialOptions:
    """How fxkit compiles what it times.

    Attributes:
        passes: The passes that run before lowering.
        policy: When a kernel pays.
    """

    passes: tuple[Pass, ...]
    policy: Policy


def times_at(kernel: AuthoredKernel, match: Match, options: TrialOptions) -> tuple[float, float]:
    """Return the seconds of a call with the kernel, and of one with what fxkit makes itself.

    Both are measured once for operands of these types, and kept.
    """
    part = GraphPart.of(sorted(match.matched))
    fragment = part.module(_module_of(match.root))
    types = [type_of(node) for node in part.inputs]
    key = f"{kernel.name} {format_graph(fragment)} {[_told(t) for t in types]}"
    measure = functools.partial(_measured, kernel, fragment, types, options)
    return times.kept_times(key, measure, [_text_of(kernel)])


def _module_of(node: fx.Node) -> fx.GraphModule:
    owner = node.graph.owning_module
    assert isinstance(owner, fx.GraphModule)
    return owner


def _told(known: Any) -> str:
    return f"{known} {known.stride} {known.device}" if isinstance(known, TensorType) else str(known)


def _text_of(kernel: AuthoredKernel) -> str:
    keys = [native.source.key for native in kernel.natives.values()]
    return "\0".join(keys) or repr(kernel.call)


def _measured(
    kernel: AuthoredKernel, fragment: fx.GraphModule, types: Sequence[Any], options: TrialOptions
) -> tuple[float, float]:
    args = tuple(made_up(known) for known in types)
    authored = copy_graph_module(fragment)
    rewrite(authored, kernel.rule, limit=1)
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
    return lower(Lowering(gm, args, policy=options.policy, target=target, packs=True))


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
