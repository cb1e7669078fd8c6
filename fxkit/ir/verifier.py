"""Check the invariants that every pass may rely on."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from fxkit.errors import InvalidGraphError
from fxkit.ir.attributes import ABSENT, find_attributes
from fxkit.ir.call_forms import unfit_call
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING, KINDS
from fxkit.ir.op import operator_of
from fxkit.ir.printer import format_node_safely, format_source
from fxkit.ir.program_changes import GraphProgram
from fxkit.torch_adapters.fx_graphs import codegen_of, flattens_inputs
from fxkit.torch_adapters.fx_nodes import input_nodes_of, is_erased
from fxkit.torch_adapters.operators import OpOverload
from fxkit.torch_adapters.pytree import tree_leaves


def verify(gm: fx.GraphModule | GraphProgram, only: Collection[fx.Node] | None = None) -> None:
    """Check a graph; return when all is well.

    The invariants: every operand is defined before its use and belongs to the graph; user lists and
    operands agree; names are unique; there is one output, at the end, and placeholders come first;
    every attribute and module that a node names exists; every called function can be called, and
    takes as many operands as it is given, by the names that they have.

    Cost: linear in the edges; in those of the given nodes when only some are checked.

    Args:
        gm: The module, or a captured program.
        only: Check these nodes, their operands and users, and the end of the graph; the rest is
            taken to be as it was when it was last checked.

    Raises:
        InvalidGraphError: On the first invariant that does not hold, with the node and its source.
        UnsupportedError: When it is no `GraphModule`.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: x.relu())
        >>> gm.graph.output("a second one")
        output_1
        >>> fxkit.verify(gm)
        Traceback (most recent call last):
        ...
        fxkit.errors.InvalidGraphError: expected one output, at the end, got 2...
    """
    gm = graph_module_of(gm)
    for node, message, hint in _faults(gm) if only is None else _faults_of_some(gm, only):
        raise InvalidGraphError(
            message,
            node=None if node is None else format_node_safely(node),
            source=None if node is None else format_source(node),
            hint=hint,
        )


Fault = tuple["fx.Node | None", str, str]


def _faults(gm: fx.GraphModule) -> Iterator[Fault]:
    graph = gm.graph
    nodes = list(graph.nodes)
    yield from _shape_faults(nodes)
    attributes = _attributes(gm, nodes)
    defined: set[fx.Node] = set()
    names: set[str] = set()
    for node in nodes:
        if not _is_plain(node, graph):
            yield from _node_faults(gm, node, attributes)
        yield from _call_faults(gm, node)
        for operand in input_nodes_of(node):
            if operand not in defined or node not in operand.users:
                yield from _operand_faults(node, defined)
        if node.name in names:
            yield node, f"expected unique names, got {node.name!r} twice", "rename one of them"
        defined.add(node)
        names.add(node.name)
    for node in nodes:
        for user in node.users:
            if user not in defined or node not in input_nodes_of(user):
                yield node, f"expected %{user.name} to use it, got no such operand", _USE_EDIT
    yield from _structure_faults(graph)


def _faults_of_some(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> Iterator[Fault]:
    last = next(iter(reversed(gm.graph.nodes)), None)
    if last is None or last.op != "output":
        yield last, "expected one output, at the end, got another node", "call graph.output(...)"
    attributes = _attributes(gm, nodes)
    for node in nodes:
        before = {o for o in input_nodes_of(node) if _is_before(o, node)}
        yield from _node_faults(gm, node, attributes)
        yield from _call_faults(gm, node)
        yield from _operand_faults(node, before)
        if node.op == "placeholder" and node.prev.op not in ("root", "placeholder", "get_attr"):
            yield node, "expected placeholders first, got one after other nodes", "move it up"
        if node.op == "output" and node is not last:
            yield node, "expected one output, at the end, got 2", "call graph.output(...)"
        for user in node.users:
            if user < node or is_erased(user) or node not in input_nodes_of(user):
                yield node, f"expected %{user.name} to use it, got no such operand", _USE_EDIT
    yield from _structure_faults(gm.graph)


def _structure_faults(graph: fx.Graph) -> Iterator[Fault]:
    """Hold inputs and results against the nesting that generated code takes and gives them in."""
    output = next(iter(reversed(graph.nodes)), None)
    if not flattens_inputs(graph) or output is None or output.op != "output":
        return
    told = codegen_of(graph).pytree_info
    inputs = graph.find_nodes(op="placeholder")
    if told.in_spec is not None and told.in_spec.num_leaves != len(inputs):
        yield None, *_nested("inputs", told.in_spec.num_leaves, len(inputs))
    results = len(tree_leaves(output.args[0]))
    if told.out_spec is not None and told.out_spec.num_leaves != results:
        yield output, *_nested("results", told.out_spec.num_leaves, results)


def _nested(what: str, expected: int, got: int) -> tuple[str, str]:
    return (
        f"expected {expected} {what}, which the module's calls are nested by, got {got}",
        "make the graph flat first: gm.graph.set_codegen(torch.fx.graph.CodeGen())",
    )


def _is_before(operand: fx.Node, node: fx.Node) -> bool:
    return operand.graph is node.graph and not is_erased(operand) and operand < node


_OPERATORS = operator.add.__module__
_COUNT = "it is written as an operator in the module's code: give it just as many"
_USE_EDIT = "change graphs through fxkit.edit, which keeps users and operands in step"


def _is_plain(node: fx.Node, graph: fx.Graph) -> bool:
    """Tell quickly that a node has no fault, its operands and its call aside: true of most."""
    is_call = node.op == "call_function" and node.graph is graph and callable(node.target)
    return is_call and getattr(node.target, "__module__", None) != _OPERATORS


def _operand_count(target: Any) -> int | None:
    """Return how many operands a function of `operator` takes, if it takes a fixed number."""
    is_function = type(target) is BuiltinFunctionType and target.__module__ == _OPERATORS
    return _fixed_count(target) if is_function else None


@functools.cache
def _fixed_count(target: Any) -> int | None:
    parameters = inspect.signature(target).parameters.values()
    is_fixed = all(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    return len(parameters) if is_fixed else None


_NAMES_ATTRIBUTE = ("get_attr", "call_module")


def _attributes(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> dict[str, Any]:
    """Return what the module has under the names that nodes have for their target."""
    paths = {str(node.target) for node in nodes if node.op in _NAMES_ATTRIBUTE}
    return find_attributes(gm, paths) if paths else {}


def _node_faults(
    gm: fx.GraphModule, node: fx.Node, attributes: Mapping[str, Any]
) -> Iterator[Fault]:
    if node.op not in KINDS:
        yield node, f"expected a node kind of torch.fx, got {node.op!r}", "see torch.fx.Node.op"
    if node.graph is not gm.graph:
        yield node, "expected a node of this graph, got one of another", "copy it with node_copy"
    yield from _target_faults(node, attributes)


def _call_faults(gm: fx.GraphModule, node: fx.Node) -> Iterator[Fault]:
    """Find a call that can't run; an operator that takes it is known to do so."""
    if node.op in COMPUTES_NOTHING:
        return
    operator = None if type(node.target) is OpOverload else operator_of(node)
    is_known = operator is not None and operator.overload is not None
    taken = None if is_known else unfit_call(gm, node)
    if taken is not None:
        yield node, f"expected operands of {taken}, got {_counted(node)}", "give it what it takes"


def _counted(node: fx.Node) -> str:
    names = "".join(f", {name}=" for name in node.kwargs)
    return f"{len(node.args)} by position{names}"


def _shape_faults(nodes: list[fx.Node]) -> Iterator[Fault]:
    outputs = [node for node in nodes if node.op == "output"]
    if len(outputs) != 1 or nodes[-1] is not outputs[0]:
        where = outputs[0] if outputs else None
        yield (
            where,
            f"expected one output, at the end, got {len(outputs)}",
            "call graph.output(...)",
        )
    body_began = False
    for node in nodes:
        if node.op == "placeholder" and body_began:
            yield node, "expected placeholders first, got one after other nodes", "move it up"
        body_began |= node.op not in ("placeholder", "get_attr")


def _operand_faults(node: fx.Node, defined: set[fx.Node]) -> Iterator[Fault]:
    for operand in node.all_input_nodes:
        if operand not in defined:
            yield (
                node,
                f"expected its operand %{operand.name} to be defined before it, got it later or "
                "in no place",
                "move the operand before its first use, or insert the new node later",
            )
        elif node not in operand.users:
            yield node, f"expected to be a user of %{operand.name}, got none", _USE_EDIT


def _target_faults(node: fx.Node, attributes: Mapping[str, Any]) -> Iterator[Fault]:
    if node.op == "call_function" and not callable(node.target):
        yield node, f"expected a function to call, got {node.target!r}", "set node.target"
    count = _operand_count(node.target) if node.op == "call_function" else None
    if count is not None and len(node.args) != count:
        name = node.target.__name__  # type: ignore[union-attr]
        yield node, f"expected {count} operands of operator.{name}, got {len(node.args)}", _COUNT
    if node.op in _NAMES_ATTRIBUTE:
        found = attributes[str(node.target)]
        if found is ABSENT:
            yield (
                node,
                f"expected the module to have {node.target!r}, got no such attribute",
                "register it with edit.add_attribute or add_module before it is used",
            )
        elif node.op == "call_module" and not isinstance(found, torch.nn.Module):
            yield (
                node,
                f"expected a module at {node.target!r}, got {type(found).__name__}",
                ("use get_attr for what is no module"),
            )
    if node.op == "call_method" and not isinstance(node.target, str):
        yield node, f"expected the name of a method, got {node.target!r}", "pass its name as text"
