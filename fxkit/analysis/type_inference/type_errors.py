"""What shape propagation says when types do not fit, in fxkit's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from fxkit.analysis.type_inference.fake_tensors import is_about_data, is_about_memory
from fxkit.errors import InvalidGraphError
from fxkit.ir.printer import format_node, format_source, format_type


def show_operands(operands: Iterable[tuple[fx.Node, Any]]) -> str:
    """Return operands with their types: `%x: f32[2,3], %y: f32[4]`."""
    return ", ".join(f"%{node.name}: {format_type(known)}" for node, known in operands)


def finder(node: fx.Node) -> str:
    """Return the node that finds a size in the data, in words."""
    source = format_source(node)
    return f"found in the data by %{node.name}" + (f" ({source})" if source else "")


def misfit(
    node: fx.Node, error: Exception, operands: str, origins: Mapping[str, fx.Node]
) -> InvalidGraphError:
    """Return the error for operands that a node can't take."""
    if is_about_data(error):
        return _undecided(node, error, operands, origins)
    if is_about_memory(error):
        return _without_memory(node, operands)
    return _at(
        node,
        f"expected operands that {node.name} can take, got {operands or 'none'}: {_first(error)}",
        hint="check the shapes and dtypes of the example inputs against this line",
    )


def _without_memory(node: fx.Node, operands: str) -> InvalidGraphError:
    name = getattr(node.target, "__name__", node.name)
    return _at(
        node,
        f"expected a call whose type can be told without memory, got {node.name} of {operands}, "
        "which asks for that of a tensor",
        hint=f"declare what it returns with fxkit.declare_type({name})",
    )


def _undecided(
    node: fx.Node, error: Exception, operands: str, origins: Mapping[str, fx.Node]
) -> InvalidGraphError:
    text = _first(error)
    told = [
        f"{name} is {finder(of)}" for name, of in origins.items() if name in f"{operands}{text}"
    ]
    words = f"; {', '.join(told)}" if told else ""
    return _at(
        node,
        f"expected sizes and numbers that are known without the data for {node.name}, "
        f"got {operands or 'none'}{words}",
        hint="say what holds of it with torch._check in the program, or capture the program, which "
        "records the number",
    )


def fixed_size(node: fx.Node, name: str, value: Any, operands: str) -> InvalidGraphError:
    """Return the error for a node that works for one value of a symbolic size only."""
    return _at(
        node,
        f"expected {node.name} to work for every {name}, got one that needs {name} = {value} "
        f"with {operands or 'no operands'}",
        hint="leave that size out of dynamic_shapes, or use Dim.AUTO for it",
    )


def missing_input(node: fx.Node) -> InvalidGraphError:
    """Return the error for a placeholder that was given nothing."""
    return _at(
        node,
        f"expected an example input for {node.name}, got none",
        hint="give one value for each input of the graph, by position or by name",
    )


def unfollowed(node: fx.Node, error: Exception) -> InvalidGraphError:
    """Return the error for a tensor that torch knows no fake of, such as a quantised one."""
    return _at(
        node,
        f"expected tensors whose types can be followed without numbers, got %{node.name}: "
        f"{_first(error)}",
        hint="take that part out of the graph with fxkit.opaque",
    )


def observed_otherwise(
    node: fx.Node, error: Exception, then: tuple[Any, ...], now: tuple[Any, ...]
) -> InvalidGraphError:
    """Return the error for a call that can't run on types, seen with other operands only."""
    return _at(
        node,
        f"expected the operands that {node.name} was captured with, "
        f"({', '.join(map(format_type, then))}), got ({', '.join(map(format_type, now))}); it "
        f"can't run without numbers: {_first(error)}",
        hint="declare what it returns with fxkit.declare_type",
    )


def _at(node: fx.Node, message: str, *, hint: str) -> InvalidGraphError:
    """Return an error that shows a node with its source line."""
    return InvalidGraphError(message, node=format_node(node), source=format_source(node), hint=hint)


def _first(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
