"""Patterns of functions: their parameters are captures, what they compute is the pattern."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxkit.errors import CaptureError, PatternError
from fxkit.ir.binding import bind_method
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.patterns import language
from fxkit.patterns.language import Operand
from fxkit.patterns.pattern_nodes import (
    AnyOf,
    Capture,
    Chain,
    Constant,
    Named,
    Operation,
    Pattern,
    PatternNode,
    slice_parts,
)

_MARKS = (language.alternatives, language.binding, language.chain, language.chain_operand)


def pattern(
    function: Callable[..., Any] | Pattern, operands: Mapping[str, Operand] | None = None
) -> Pattern:
    """Make a pattern of a function.

    Args:
        function: Computes what to look for from its parameters. It is traced, not run: use tensor
            operations, and the words of `fxkit.patterns.language`.
        operands: Capture → what it has to be.

    Raises:
        PatternError: When the function can't be traced, or computes nothing.
    """
    if isinstance(function, Pattern):
        return function if operands is None else replace(function, operands=operands)
    graph = trace_template(function)
    builder = PatternBuilder(graph)
    outputs = builder.outputs(output_values(graph))
    name = getattr(function, "__name__", "pattern")
    return Pattern(outputs, tuple(builder.captures), name, operands or {})


def trace_template(function: Callable[..., Any]) -> fx.Graph:
    """Trace a pattern or replacement function, recording the line of each operation.

    Raises:
        PatternError: When it can't be traced.
    """
    # Here: it imports over a hundred modules, which a program without rules does not need.
    from fxkit.tracing.short_functions import trace_function

    for parameter in _signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PatternError(
                f"expected named parameters, got *{parameter.name}",
                source=_where(function),
                hint="give each captured operand a parameter of its own",
            )
    try:
        return trace_function(function)
    except CaptureError as error:
        raise PatternError(
            f"expected a function of tensor operations, got one that can't be traced: "
            f"{error.message}",
            source=error.source or _where(function),
            hint="compute with tensor operations only; conditions belong into where=",
        ) from error


def _signature(function: Any) -> inspect.Signature:
    """Return the parameters of a function.

    Raises:
        PatternError: When it is none, or does not tell them, as torch's own functions do not.
    """
    shown = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, torch.nn.Module):
        raise PatternError(
            f"expected a function, got the module {type(function).__name__}",
            hint="write lambda x: torch.relu(x) for nn.ReLU(): it matches modules too; "
            "fxkit.patterns.importers makes rules of pairs of modules",
        )
    if not callable(function):
        raise PatternError(
            f"expected a function, got {function!r}", hint="write a function of the operands"
        )
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise PatternError(
            f"expected a function with named parameters, got the builtin {shown}",
            hint=f"write lambda x: torch.{shown}(x), or fxkit.graph(gm).find(torch.{shown})",
        ) from error


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """Return what a template returns, always as a tuple."""
    returned = next(iter(reversed(graph.nodes))).args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


class PatternBuilder:
    """Turns the nodes of a traced template into pattern nodes, each once.

    Args:
        graph: The traced template.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.captures = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        self.nodes: dict[fx.Node, PatternNode] = {}

    def outputs(self, values: tuple[Any, ...]) -> tuple[PatternNode, ...]:
        """Build the pattern of the given results."""
        built = tuple(self._build(value) for value in values)
        for value in built:
            if not isinstance(value, (Operation, AnyOf, Chain, Named)):
                raise PatternError(
                    "expected a pattern that computes something, got "
                    + (
                        f"the parameter {value.name!r}" if isinstance(value, Capture) else "a value"
                    ),
                    hint="a pattern that is one parameter would match every node; "
                    "return an operation",
                )
        return built

    def _build(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in self.nodes:
                self.nodes[value] = self._build_node(value)
            return self.nodes[value]
        if isinstance(value, (list, tuple)):
            return type(value)(self._build(item) for item in value)
        if isinstance(value, slice) and any(isinstance(p, fx.Node) for p in slice_parts(value)):
            return slice(*map(self._build, slice_parts(value)))
        return Constant(value)

    def _build_node(self, node: fx.Node) -> PatternNode:
        if node.op == "placeholder":
            return Capture(str(node.target))
        if node.target in _MARKS:
            return self._build_mark(node)
        call = resolve(node)
        source = format_source(node)
        if call is None or has_own_values(node):
            raise PatternError(
                f"expected operations on the parameters, got {node.op} {node.target!r}",
                node=format_node(node),
                source=source,
                hint="pass tensors that a pattern needs as parameters",
            )
        calls = (call, *_conversions(node))
        readings = [self._build_call(node, each, source) for each in calls]
        return AnyOf(tuple(readings)) if len(readings) > 1 else readings[0]

    def _build_call(self, node: fx.Node, call: Call, source: str | None) -> Operation:
        arguments = {key: self._build(_whole(value, node)) for key, value in call.arguments.items()}
        return Operation(call.name, arguments, source or "")

    def _build_mark(self, node: fx.Node) -> PatternNode:
        """Build what a word of the pattern language stands for."""
        values = [self._build(value) for value in node.args]
        if node.target is language.chain_operand:
            return Capture(f"<link {node.name}>")
        if node.target is language.alternatives:
            return AnyOf(tuple(values))
        if node.target is language.binding:
            return Named(values[0], values[1].value)
        link, hole, start, at_least, at_most = values
        return Chain(link, hole, start, at_least.value, at_most.value)


def _conversions(node: fx.Node) -> list[Call]:
    """Return what else a conversion to a bare parameter may be: `x.to(y)` takes dtypes and devices.

    Without its value, `y` is taken for a tensor, and that of `x.type(y)` for the name of a type.
    """
    if node.op != "call_method" or node.target not in ("to", "type"):
        return []
    operands: list[Any] = list(node.args)
    wanted = operands[-1]
    if len(operands) != 2 or not isinstance(wanted, fx.Node) or wanted.op != "placeholder":
        return []
    keys = ("dtype", "device") if node.target == "to" else ("dtype",)
    return [bind_method("to", (operands[0],), {**node.kwargs, key: wanted}) for key in keys]


def _whole(value: Any, node: fx.Node) -> Any:
    """Return a parameter that stands for a list of sizes, which the binding repeated for each."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[0], fx.Node):
        return value
    one = value[0]
    is_given = any(given is one for given in (*node.args, *node.kwargs.values()))
    return one if is_given and all(item is one for item in value) else value


def has_own_values(node: fx.Node) -> bool:
    """Tell whether a template's node reads a tensor or a module that is no operand of it."""
    if node.op != "call_module":
        return node.op == "get_attr"
    call = None if node.graph.owning_module is None else resolve(node)
    return call is None or any(isinstance(v, Attribute) for v in call.arguments.values())


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} in {code.co_name}"
