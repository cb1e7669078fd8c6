"""Calls of `torch.cond` and `torch.while_loop` in a program: nodes with graphs for their functions.

Dynamo traces those functions, as it does when such a call is made in eager; the graph that it finds
is copied into that of the program.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.compilers import compiled_as_usual
from fxkit.torch_adapters.fake_tensors import mode_class
from fxkit.tracing.recorder.control_sides import results_of_side
from fxkit.tracing.recorder.tape import Tape
from fxkit.tracing.recorder.writes import version_of
from fxkit.tracing.values.refusals import Refusal


@declare_type(torch.ops.higher_order.cond)
def _(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return results_of_side(true_fn, operands)


@declare_type(torch.ops.higher_order.while_loop)
def _(cond_fn: Any, body_fn: Any, carried: Any, additional: Any) -> Any:
    return results_of_side(body_fn, (*carried, *additional))


def record_control(
    recorder: Tape, watcher: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    """Make such a call as part of a graph.

    Args:
        recorder: Records the program.
        watcher: Watches it, and is to see what the functions may read.
        function: `torch.cond` or `torch.while_loop`.
        args: What it is given.
        kwargs: What it is given by keyword.

    Returns:
        What the call gives, and why it is not in the graph, if it is not.
    """
    watcher.pause()
    try:
        traced = _Traced(function, args, kwargs)
    finally:
        watcher.resume()
    if traced.graph_module is None or traced.reason is not None:
        result = traced.result if traced.has_run else function(*args, **kwargs)
        return result, traced.reason or "Dynamo finds no graph"
    try:
        _run_unseen(function, args, kwargs)
        watcher.pause()
        recorder.append_graph(traced.graph_module, traced.inputs, traced.values)
    except Refusal as refusal:
        return traced.result, refusal.reason
    finally:
        watcher.resume()
    return traced.result, None


def _run_unseen(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the functions that a call is given on tensors without numbers, for the watcher to see."""
    bound = inspect.signature(inspect.unwrap(function)).bind(*args, **kwargs).arguments
    *_, given = bound.values()
    mode = mode_class()(allow_non_fake_inputs=True)
    for inner in (it for it in bound.values() if callable(it)):
        with mode:
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
            try:
                inner(*fakes)
            except Exception as error:
                raise Refusal(f"it raises {type(error).__name__} without numbers") from None


class _Traced:
    """The graph that Dynamo finds for one call, and what the call gives.

    Attributes:
        graph_module: The graph.
        inputs: What it was given.
        values: What each of its nodes gave.
        result: What the call gave.
        has_run: Whether it did.
        reason: Why there is no graph for it.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.graph_module: fx.GraphModule | None = None
        self.inputs: tuple[Any, ...] = ()
        self.values: dict[fx.Node, Any] = {}
        self.result: Any = None
        self.has_run = False
        self.reason: str | None = None
        # Dynamo keeps what it compiles beside the code, and compiles some codes too often.
        wrapper = types.FunctionType(_call.__code__.replace(), globals())
        compiled = torch.compile(wrapper, backend=self._backend, fullgraph=True, dynamic=False)
        try:
            with compiled_as_usual(), torch.DisableTorchFunction():
                self.result = compiled(function, args, kwargs)
        except Exception as error:  # the call itself says what is wrong with it
            self.reason = f"Dynamo raises {type(error).__name__}"
            return
        self.has_run = True

    def _backend(self, module: fx.GraphModule, example: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            versions = [_version(it) for it in inputs]
            interpreter = fx.Interpreter(module, garbage_collect_values=False)
            result = interpreter.run(*inputs)
            self.graph_module, self.inputs = module, inputs
            self.values = dict(interpreter.env)
            if versions != [_version(it) for it in inputs]:
                self.reason = "it writes to a tensor"
            return result

        return run


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _version(value: Any) -> Any:
    return version_of(value) if isinstance(value, torch.Tensor) else None
