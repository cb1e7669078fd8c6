"""Run one node on fake tensors: what type it gives, and which operators it calls on the way."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.operator_mode import OperatorMode
from fxkit.analysis.tensor_types import fake_mode, fake_value
from fxkit.analysis.type_inference.type_facts import made_by_autograd
from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import TensorType, type_of, type_of_value
from fxkit.torch_adapters.grad_modes import without_autocast as autocast_off

Context = contextlib.AbstractContextManager[Any]


class _OperatorLog(OperatorMode):
    """Keeps the names of the operators called, with the dtypes that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        dtypes = tuple(r.dtype for r in results if isinstance(r, torch.Tensor))
        self.seen.append((str(func).removesuffix(".default"), dtypes))
        return result


def without_autocast() -> Context:
    """Return a context in which no autocast is on, for whatever device."""
    return autocast_off()


def type_under(node: fx.Node, context: Context) -> Any:
    """Return the type a call gives when it runs in a context, from its operands' recorded types.

    Returns:
        As `type_of`; None when an operand's type is not known or it can't run on fake tensors.
    """
    return _run(node, context, None)


def operators_under(node: fx.Node, context: Context) -> list[Any] | None:
    """Return the operators that a call comes down to when it runs in a context, with dtypes.

    Returns:
        `(name, dtypes of the results)` of each; None when it can't run on fake tensors.
    """
    log = _OperatorLog()
    return None if _run(node, context, log) is None else log.seen


def _run(node: fx.Node, context: Context, log: _OperatorLog | None) -> Any:
    if any(type_of(operand) is None for operand in node.all_input_nodes):
        return None
    with fake_mode():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _operand(type_of(n)))
        try:
            with context, log or contextlib.nullcontext():
                return type_of_value(_call(node, args, kwargs))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None


def _operand(known: Any) -> Any:
    """Make a value of a recorded type."""
    made = fake_value(known)
    if not isinstance(known, TensorType) or not known.requires_grad:
        return made
    try:
        return made_by_autograd(made)
    except RuntimeError:  # elements that share memory
        return made.requires_grad_()


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target = node.target
    if callable(target):
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    module = find_attribute(node.graph.owning_module, target)
    held = [*module.named_parameters(), *module.named_buffers()]
    fakes = {name: _operand(TensorType.of(tensor)) for name, tensor in held}
    return torch.func.functional_call(module, fakes, args, kwargs)
