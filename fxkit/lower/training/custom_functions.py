"""Custom autograd functions in the graphs of TorchDynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.torch_adapters.grad_modes import set_grad_enabled

# What torch 2.13 says of such a call, the last only where there is any. One of which another
# release says more or less stays as it is.
_SETTINGS = {"non_differentiable_idx", "saved_for_backward_idx"}
_DIRTY = {"dirty_idx"}


def with_custom_functions(gm: fx.GraphModule) -> None:
    """Make Dynamo's operators for custom autograd functions such functions again, in place.

    That operator makes a class of its own at each call, which keeps what its backward needs outside
    of the tape: what repeats such a call, to know types or in another run, would change the
    gradients of the first one.

    Args:
        gm: The graph module that Dynamo gives to a backend.
    """
    operator = torch.ops.higher_order.autograd_function_apply
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = module.graph.find_nodes(op="call_function", target=operator)
        nodes = [node for node in found if node.kwargs.keys() - _DIRTY == _SETTINGS]
        for node in nodes:
            forward, backward = (module.get_submodule(part.target) for part in node.args[:2])
            _let_differentiate(backward)
            node.target = _application(forward, backward, **node.kwargs)
            node.args, node.kwargs = node.args[2:], {}
        if nodes:
            module.recompile()


def _let_differentiate(backward: Any) -> None:
    """Let autograd follow a backward, around which Dynamo turns gradients off."""
    switch = set_grad_enabled
    switches = backward.graph.find_nodes(op="call_function", target=switch)
    if switches and (switches[0].args, switches[-1].args) == ((False,), (True,)):
        backward.graph.erase_node(switches[0])
        backward.graph.erase_node(switches[-1])
        backward.recompile()


def _application(
    run: Callable[..., Any],
    run_backward: Callable[..., Any],
    *,
    non_differentiable_idx: Sequence[int],
    saved_for_backward_idx: Sequence[int],
    dirty_idx: Sequence[int] = (),
) -> Callable[..., Any]:
    """Return a function that applies the custom function of a forward and a backward graph.

    Args:
        run: Gives the results, and what the backward takes besides their gradients.
        run_backward: Gives the gradients of what `run` takes.
        non_differentiable_idx: Places of the results that have no gradient.
        saved_for_backward_idx: Places of what is saved on the tape, where writes to it are counted.
        dirty_idx: Places of the results that are inputs which were written to.
    """

    class CustomFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result, saved = run(*args)
            results = result if isinstance(result, (tuple, list)) else (result,)
            ctx.mark_dirty(*[results[place] for place in dirty_idx])
            ctx.mark_non_differentiable(*[results[place] for place in non_differentiable_idx])
            ctx.kept = list(saved)
            ctx.save_for_backward(*[saved[place] for place in saved_for_backward_idx])
            for place in saved_for_backward_idx:
                ctx.kept[place] = None
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            saved = list(ctx.kept)
            for place, tensor in zip(saved_for_backward_idx, ctx.saved_tensors, strict=True):
                saved[place] = tensor
            return run_backward(*gradients, *saved)

    def apply(*args: Any) -> Any:
        return CustomFunction.apply(*args)

    return apply
