"""Opaque calls as custom operators of torch, so that they survive another tracer.

AOTAutograd follows a graph with tensors that hold no numbers, drops calls whose results nobody uses
and may change the order of others. An operator with a registered, ordered effect is left in place.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.ir.types import KEY, TensorType
from fxkit.torch_adapters.operators import effect_of, register_ordered
from fxkit.tracing.environment.object_kinds import OPAQUE
from fxkit.tracing.opaque_calls.automatic_calls import AUTOMATIC

_numbers = itertools.count()
_bodies: weakref.WeakValueDictionary[int, _Body] = weakref.WeakValueDictionary()


class _Body:
    """What one operator call runs: a node's function with its plain arguments."""

    def __init__(self, node: fx.Node, types: tuple[TensorType, ...], is_single: bool) -> None:
        self.target: Callable[..., Any] = node.target  # type: ignore[assignment]
        self.args, self.kwargs = node.args, node.kwargs
        self.inputs = list(node.all_input_nodes)
        self.types = types
        self.is_single = is_single
        self.kept: dict[int, Any] = {}

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        values = dict(zip(self.inputs, tensors, strict=True))
        args = fx.map_arg(self.args, lambda node: values[node])
        kwargs = fx.map_arg(self.kwargs, lambda node: values[node])
        result = self.target(*args, **kwargs)
        if result is None:
            return []
        found = [result] if self.is_single else list(result)
        return [tensor.clone() for tensor in found]


@torch.library.custom_op("fxkit::opaque_call", mutates_args=())
def _opaque_call(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return _bodies[number].run([tensor.detach() for tensor in tensors])


@_opaque_call.register_fake
def _(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty(kind.shape, dtype=kind.dtype, device=kind.device)
        for kind in _bodies[number].types
    ]


def _gradients(context: Any, grads: list[torch.Tensor]) -> tuple[None, list[Any]]:
    raise UnsupportedError(
        "expected an opaque call without gradients, got one that gradients flow through",
        hint="detach what is given to it, or run the graph itself",
    )


_opaque_call.register_autograd(_gradients)


def as_operators(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a captured graph whose opaque calls are operators with ordered effects.

    The copy can be compiled by `torch.compile` and traced by AOTAutograd: each call stays, in its
    order, and runs once a call. No gradient flows through it, and it may not write to what it gets.

    Args:
        graph_module: A graph that `fxkit.capture` gave.

    Raises:
        UnsupportedError: When an opaque call gives something else than tensors or None.
    """
    _register_effect()
    copied = fx.GraphModule(graph_module, fx.Graph())
    copied.graph = fx.Graph()
    output = copied.graph.graph_copy(graph_module.graph, {})
    copied.graph.output(output)
    calls = [node for node in copied.graph.nodes if _is_opaque(node.target)]
    copied.meta["fxkit_opaque"] = [_replace(copied.graph, node) for node in calls]
    copied.graph.lint()
    copied.recompile()
    return copied


def _is_opaque(target: Any) -> bool:
    return getattr(target, OPAQUE, False) is True or getattr(target, AUTOMATIC, False) is True


def _replace(graph: fx.Graph, node: fx.Node) -> _Body:
    kind = node.meta.get(KEY)
    types = () if kind is None else (kind,) if isinstance(kind, TensorType) else kind
    is_known = KEY in node.meta and isinstance(types, (tuple, list))
    if not is_known or not all(isinstance(t, TensorType) for t in types):
        raise UnsupportedError(
            f"expected {node.name} to give tensors or None, got {kind or 'a number'}",
            hint="let the function give a tensor",
        )
    body = _Body(node, tuple(types), isinstance(kind, TensorType))
    number = next(_numbers)
    _bodies[number] = body
    with graph.inserting_before(node):
        call = graph.call_function(
            torch.ops.fxkit.opaque_call.default, (number, list(node.all_input_nodes))
        )
        call.meta.update(node.meta)
        result = graph.call_function(_first, (call,)) if body.is_single else call
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return body


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _register_effect() -> None:
    operator = torch.ops.fxkit.opaque_call.default
    if effect_of(operator) is None:
        register_ordered(operator)
