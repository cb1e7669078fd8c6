"""Find out whether code can be generated of some nodes, without generating that of the graph."""

from __future__ import annotations

import enum
import keyword
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxkit.ir.names import keep_module_name
from fxkit.torch_adapters.fx_nodes import input_nodes_of

# What is written as code that gives it back.
_PLAIN = frozenset(
    [int, float, bool, str, complex, type(None), type(...), fx.Node, torch.dtype, torch.device]
)


def try_code(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Generate code of those among some nodes that it may fail for, and compile it.

    Of calls of one function by plain operands one is tried.

    Args:
        graph: The graph.
        nodes: Nodes of it.

    Raises:
        Exception: Whatever `torch.fx` raises; SyntaxError when the code is none.

    Cost: linear in the nodes given.
    """
    tried: dict[Any, fx.Node] = {}
    for node in nodes:
        is_plain = _is_plain(node.args) and _is_plain(node.kwargs) and node.type is None
        tried.setdefault((node.op, node.target) if is_plain else node, node)
    chosen = dict.fromkeys(tried.values())
    if any(node.op == "placeholder" for node in chosen):  # what is one's default decides of others
        chosen.update(dict.fromkeys(graph.find_nodes(op="placeholder")))
    if chosen:
        _compile(list(chosen))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        names = (name.isidentifier() and not keyword.iskeyword(name) for name in value)
        return all(names) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def _compile(nodes: list[fx.Node]) -> None:
    graph = keep_module_name(fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in nodes if node.op == "placeholder"]
    others = [node for node in nodes if node.op not in ("placeholder", "output")]
    for node in sorted(inputs):
        copies[node] = graph.node_copy(node)
    for operand in {operand: None for node in nodes for operand in input_nodes_of(node)}:
        if operand not in copies:
            copies[operand] = graph.get_attr("operand")
    for node in others:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = next((node for node in nodes if node.op == "output"), None)
    graph.output(None if output is None else fx.map_arg(output.args[0], copies.__getitem__))
    compile(graph.python_code("self").src, "<fxkit>", "exec")
