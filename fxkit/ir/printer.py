"""Graphs as text: one line a node, the same on every run and every release of torch.

    graph(%x: f32[2,4]):
      %linear: f32[2,8] = aten.linear(%x, %fc_weight, %fc_bias)    # fc · model.py:12
      return %linear

An operator is written by its identity, not by the user's spelling, and arguments that have the
schema's default are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.provenance import module_path, source_of
from fxkit.ir.python_signatures import signature_named
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, short_dtype, type_of

_MAX_ELEMENTS = 8


def format_graph(gm: fx.GraphModule | fx.Graph, *, sources: bool = False) -> str:
    """Return a graph as text.

    Args:
        gm: A graph, or the module that owns it.
        sources: Add the module path and the user's line to each node.
    """
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    lines = [f"graph({', '.join(format_typed_name(node) for node in inputs)}):"]
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        line = f"  {format_node(node)}"
        origin = _origin(node) if sources else ""
        lines.append(f"{line}    # {origin}" if origin else line)
    return "\n".join(lines)


def format_node(node: fx.Node) -> str:
    """Return a node as one line of text, such as `%add: f32[2,4] = aten.add(%x, %y, alpha=2)`."""
    if node.op == "placeholder":
        return format_typed_name(node)
    if node.op == "output":
        return f"return {format_value(node.args[0] if node.args else None)}"
    if node.op == "get_attr":
        return f"{format_typed_name(node)} = self.{node.target}"
    call = resolve(node)
    if call is None:
        return node.format_node() or node.name
    return f"{format_typed_name(node)} = {call.name}({format_arguments(call)})"


def format_node_safely(node: fx.Node) -> str:
    """Format a node of a graph that may be broken."""
    try:
        return format_node(node)
    except (AttributeError, TypeError, KeyError):
        return repr(node)


def format_typed_name(node: fx.Node) -> str:
    """Return `%name: type`, or `%name` when the type is not known."""
    known = type_of(node)
    return f"%{node.name}" if known is None else f"%{node.name}: {format_type(known)}"


def format_type(value_type: Any) -> str:
    """Return what `type_of` gives as text: `f32[2,4]`, `(f32[2], i64[2])`, `int 3`."""
    if isinstance(value_type, TensorType):
        return str(value_type)
    if isinstance(value_type, (tuple, list)):
        shown = [format_type(v) for v in value_type[:_MAX_ELEMENTS]]
        more = ", …" if len(value_type) > _MAX_ELEMENTS else ""
        return f"({', '.join(shown)}{more})"
    if isinstance(value_type, dict):
        return f"{{{', '.join(f'{k}: {format_type(v)}' for k, v in value_type.items())}}}"
    if value_type is None:
        return "?"
    kind = value_type.kind if isinstance(value_type, Symbol) else type(value_type)
    is_told = kind.__repr__ is not object.__repr__  # by more than where it lies in memory
    return f"{kind.__name__} {value_type}" if is_told else kind.__name__


def format_arguments(call: Call) -> str:
    """Return a call's arguments: required ones by position, others by name unless default."""
    schema = call.operator.schema
    if schema is None:
        return ", ".join(_arguments_of_python(call))
    shown: list[str] = []
    for argument in schema.arguments:
        value = call.arguments[argument.name]
        if argument.has_default_value() and is_default_value(value, argument.default_value):
            continue
        text = format_value(value)
        positional = not argument.has_default_value() and not argument.kwarg_only
        shown.append(text if positional else f"{argument.name}={text}")
    return ", ".join(shown)


def _arguments_of_python(call: Call) -> Iterator[str]:
    signature = signature_named(call.name)
    for key, value in call.arguments.items():
        parameter = None if signature is None else signature.parameters.get(key)
        if key.isdigit() or (parameter is not None and parameter.default is parameter.empty):
            yield format_value(value)
        elif parameter is None or not is_default_value(value, parameter.default):
            yield f"{key}={format_value(value)}"


def format_value(value: Any) -> str:
    """Return an argument as text; long lists are cut."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Attribute):
        return f"self.{value.path}"
    if isinstance(value, (list, tuple)):
        opening, closing = "[]" if isinstance(value, list) else "()"
        shown = [format_value(v) for v in itertools.islice(value, _MAX_ELEMENTS)]
        if len(value) > _MAX_ELEMENTS:
            shown.append(f"… {len(value)} in all")
        return f"{opening}{', '.join(shown)}{closing}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {format_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        kept = parts if value.step is not None else parts[:2]
        return ":".join("" if part is None else format_value(part) for part in kept)
    if isinstance(value, torch.Tensor):
        return f"tensor {TensorType.of(value)}"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_source(node: fx.Node) -> str | None:
    """Return the user's line that made a node, as errors show it; None when it is not known."""
    source = source_of(node)
    return None if source is None else str(source)


def _origin(node: fx.Node) -> str:
    source = source_of(node)
    return " · ".join(part for part in (module_path(node), str(source) if source else "") if part)


def is_default_value(value: Any, default: Any) -> bool:
    """Tell whether a value may be left out, as it is the default, of its very type."""
    return type(value) is type(default) and value == default
