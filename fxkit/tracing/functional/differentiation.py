"""Run a forward and a backward graph under autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.autograd_state import backward_may_run_again
from fxkit.torch_adapters.grad_modes import is_any_autocast_enabled
from fxkit.torch_adapters.grad_modes import without_autocast as autocast_off
from fxkit.torch_adapters.tensors import is_view_of_another, version_counter_of
from fxkit.torch_adapters.transforms import stands_for_many
from fxkit.tracing.functional.flat_program import FlatProgram
from fxkit.tracing.recorder.state_restore import random_states, set_random_states
from fxkit.tracing.values.refusals import Refusal

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: an input of a captured program, whose second derivative runs it again"
)


class Backward:
    """What a backward needs beside the tensors that its forward kept.

    Args:
        graph: The backward graph.
        flat: The program that it belongs to.

    Attributes:
        run: What is run in place of the graph.
        mutated: Positions of the inputs that are written to.
        reached: For each input, the gradients of results that its own is computed from; all where
            that is a constant, and none where it has no gradient.
        again: How often a gradient was itself differentiated, so that the program ran again.
    """

    def __init__(self, graph: fx.GraphModule, flat: FlatProgram) -> None:
        self.run: Callable[..., Any] = graph.forward
        self.again = 0
        self.flat = flat
        self.mutated = frozenset(flat.mutated)
        carrying = flat.observation.carrying
        self.is_wanted = (
            *flat.is_differentiable,
            *(False for _ in flat.read),
            *(position in carrying for position in flat.mutated),
        )
        self.unwanted = [i for i, is_wanted in enumerate(self.is_wanted) if not is_wanted]
        placeholders = list(graph.graph.find_nodes(op="placeholder"))
        tangents = placeholders[max(0, len(placeholders) - sum(self.is_wanted)) :]
        named = [node for node in tangents if node.name.startswith("tangents")]
        if len(named) != sum(self.is_wanted):
            raise Refusal("torch differentiates other results than eager does")
        self.types = [type_of(node) for node in tangents]
        self.reached = _reached(graph.graph, tangents)
        self.is_random = flat.observation.is_random

    def tangents(self, given: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the gradients of the results in the form that the graph was made for."""
        return [_fitted(g, kind) for g, kind in zip(self._wanted(given), self.types, strict=True)]

    def unreached(self, given: tuple[Any, ...]) -> frozenset[int]:
        """Return the inputs to which no gradient flows, as some results have none."""
        wanted = self._wanted(given)
        absent = {i for i, gradient in enumerate(wanted) if gradient is None}
        if not absent:
            return frozenset()
        return frozenset(i for i, from_ in enumerate(self.reached) if from_ <= absent)

    def _wanted(self, given: tuple[Any, ...]) -> list[Any]:
        if not self.unwanted:
            return list(given)
        return [g for g, is_wanted in zip(given, self.is_wanted, strict=True) if is_wanted]


def _fitted(gradient: torch.Tensor | None, kind: TensorType) -> torch.Tensor:
    if gradient is None:
        fresh = torch.empty_strided(
            kind.shape, kind.stride or (), dtype=kind.dtype, device=kind.device
        )
        return fresh.zero_()
    if gradient.stride() == kind.stride and gradient.dtype is kind.dtype:
        return gradient
    fresh = torch.empty_strided(kind.shape, kind.stride or (), dtype=kind.dtype, device=kind.device)
    return fresh.copy_(gradient)


def _reached(graph: fx.Graph, tangents: list[fx.Node]) -> list[frozenset[int]]:
    """Return, for each gradient, the tangents that it depends on.

    A constant, as the zeros of `sign`, is there whatever they are, and is so if any is.
    """
    reached: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own = frozenset({tangents.index(node)}) if node in tangents else frozenset()
        reached[node] = own.union(*(reached[operand] for operand in node.all_input_nodes))
    gradients: Any = graph.output_node().args[0]
    every = frozenset(range(len(tangents)))
    return [reached[g] or every if isinstance(g, fx.Node) else frozenset() for g in gradients]


class Differentiable(torch.autograd.Function):
    """A forward graph whose gradient is a backward graph.

    A gradient that is itself differentiated comes from the captured graph, which runs again.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backward: Backward, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.program = backward
        ctx.random = random_states() if backward.is_random else None
        if backward.mutated:
            mutated = backward.mutated
            inputs = tuple([t.clone() if i in mutated else t for i, t in enumerate(inputs)])
        ctx.inputs = inputs
        ctx.versions = [version_counter_of(t) for t in inputs]
        ctx.autocast = _autocast_dtype()
        with without_autocast():
            computed = run(*inputs)
        count = len(backward.is_wanted)
        results = tuple([_own(result) for result in computed[:count]])
        ctx.save_for_backward(*computed[count:])
        if backward.unwanted:
            ctx.mark_non_differentiable(*[results[position] for position in backward.unwanted])
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        backward: Backward = ctx.program
        if torch.is_grad_enabled() or any(map(_is_batched, given)):
            return (None, None, *_gradients_in_eager(ctx, given))
        with without_autocast():
            gradients = list(backward.run(*ctx.saved_tensors, *backward.tangents(given)))
        for position in backward.unreached(given):
            gradients[position] = None
        if not backward_may_run_again():
            ctx.inputs = None
        return (None, None, *gradients)


def _own(result: torch.Tensor) -> torch.Tensor:
    """Return a result as what autograd takes for no view: a caller may write to it in place."""
    return result.detach() if is_view_of_another(result) else result


def _is_batched(gradient: torch.Tensor | None) -> bool:
    """Tell whether a gradient stands for many, one after the other along an axis unseen."""
    if gradient is None:
        return False
    return stands_for_many(gradient)


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context in which autocast is off, for what holds its casts already."""
    return autocast_off() if is_any_autocast_enabled() else nullcontext()


def _autocast_dtype() -> Any:
    if not is_any_autocast_enabled():
        return None
    return torch.get_autocast_dtype("cpu")


def _gradients_in_eager(ctx: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute gradients that autograd or a transform can follow: run the captured graph again."""
    program: Backward = ctx.program
    is_followed = torch.is_grad_enabled()
    program.again += 1
    if any(version_counter_of(t) != v for t, v in zip(ctx.inputs, ctx.versions, strict=True)):
        raise RuntimeError(_MODIFIED)
    state = random_states() if ctx.random is not None else None
    if ctx.random is not None:
        set_random_states(ctx.random)
    autocast = torch.autocast("cpu", dtype=ctx.autocast, enabled=ctx.autocast is not None)
    try:
        with torch.enable_grad(), autocast:
            # Views of them, which have no hooks: what is computed here is no backward of theirs.
            inputs = [t.view_as(t) if t.requires_grad else t for t in ctx.inputs]
            results = program.flat.functional(*inputs)
    finally:
        if state is not None:
            set_random_states(state)
    pairs = [(r, g) for r, g in zip(results, given, strict=True) if g is not None]
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(
        [result for result, _ in pairs],
        wanted,
        [gradient for _, gradient in pairs],
        create_graph=is_followed,
        allow_unused=True,
    )
    gradients = iter(found)
    return tuple(next(gradients) if t.requires_grad else None for t in inputs)
