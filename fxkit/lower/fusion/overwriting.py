"""In-place calls that kernels compute as values, where nobody can see the write."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.ir.op import resolve
from fxkit.ir.types import TensorType, type_of

_CALLS = ("call_function", "call_method", "call_module")


def hidden_overwrites(graph: fx.Graph, aliases: AliasSets) -> frozenset[fx.Node]:
    """Return the in-place calls whose results can be new values, with the same meaning.

    Their memory was made by the graph itself, and nothing reads it afterwards but through their
    results.

    Cost: linear in the graph.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    written = {
        aliases.root(operand)
        for node in aliases.effectful
        for operand in effects_of(node).writes
        if isinstance(operand, fx.Node)
    }
    sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if aliases.root(node) in written:
            sharing[aliases.root(node)].append(node)
    found: set[fx.Node] = set()
    for nodes in sharing.values():
        if all(node.op in _CALLS and not effects_of(node).is_opaque for node in nodes):
            found |= _hidden(nodes, position)
    return frozenset(found)


def _hidden(nodes: list[fx.Node], position: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the hidden overwrites among nodes that share memory, given in graph order."""
    found: set[fx.Node] = set()
    last_read = -1
    for node in nodes:
        if _overwrites_its_operand(node) and last_read <= position[node]:
            found.add(node)
        last_read = max([last_read, *(position[user] for user in node.users)])
    return found


def _overwrites_its_operand(node: fx.Node) -> bool:
    """Tell whether a call changes just its first operand, whole, and returns it in its own type."""
    call = resolve(node)
    if call is None or not call.name.endswith("_") or not node.args:
        return False
    operand, known = node.args[0], type_of(node)
    if not isinstance(operand, fx.Node) or list(effects_of(node).writes) != [operand]:
        return False
    tensors = [type_of(other) for other in node.all_input_nodes]
    return (
        isinstance(known, TensorType)
        and type_of(operand) == known
        and all(isinstance(other, TensorType) and other.dtype == known.dtype for other in tensors)
    )
