"""Parts of a graph as modules of their own: cut out a copy, put a part into a submodule, undo that.

part = extract(gm, nodes)            # a new GraphModule that computes what the nodes compute
outline(gm, nodes, "attention")      # the nodes become one call of a submodule
inline(gm, "attention")              # and are back
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.dependencies import EffectOrder, descendants
from fxkit.analysis.editing import edit
from fxkit.errors import InvalidGraphError, RewriteError
from fxkit.ir.node_arguments import node_in
from fxkit.ir.printer import format_node
from fxkit.ir.session import EditSession
from fxkit.torch_adapters.fx_nodes import order_key


@dataclass(frozen=True)
class Boundary:
    """Where values enter and leave a set of nodes.

    Attributes:
        inputs: Nodes outside of the set that a member takes, in graph order.
        members: The nodes of the set, in graph order.
        outputs: Members that a node outside takes, in graph order.
    """

    inputs: tuple[fx.Node, ...]
    members: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def boundary(nodes: Iterable[fx.Node]) -> Boundary:
    """Return where values enter and leave a set of nodes. Cost: linear in their edges."""
    members = sorted(set(nodes), key=order_key)
    inside = set(members)
    inputs = {o for n in members for o in n.all_input_nodes if o not in inside}
    outputs = [n for n in members if any(user not in inside for user in n.users)]
    ordered = tuple(sorted(inputs, key=order_key))
    return Boundary(ordered, tuple(members), tuple(outputs))


def extract(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """Return a new module that computes a set of nodes.

    Its inputs are what the nodes take from outside, parameters left out: those are read, and
    shared with `gm`. It returns what is used outside: one value, or a tuple of them.

    Args:
        gm: The module that owns the nodes; it is not changed.
        nodes: The nodes to copy: no placeholders, no output.

    Raises:
        InvalidGraphError: When the set is empty or holds a placeholder or the output.
    """
    part = boundary(_with_attributes(nodes))
    if not part.members or any(n.op in ("placeholder", "output") for n in part.members):
        raise InvalidGraphError(
            "expected nodes that compute something, got none, an input or the output",
            hint="inputs of the part become its placeholders by themselves",
        )
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in part.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part.members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    kept = [n for n in part.outputs if n.op != "get_attr"] or [part.members[-1]]
    results = [copies[node] for node in kept]
    graph.output(results[0] if len(results) == 1 else tuple(results))
    return fx.GraphModule(gm, graph)


def outline(gm: fx.GraphModule, nodes: Iterable[fx.Node], name: str) -> fx.Node:
    """Move a set of nodes into a submodule, and call that in their place.

    Args:
        gm: The module to change, in place.
        nodes: The nodes to move.
        name: Name for the submodule; a number is added when it is taken.

    Returns:
        The call.

    Raises:
        RewriteError: When a path leaves the set and enters it again, or when an effect keeps the
            nodes around it from moving out of the way.
    """
    members = _with_attributes(node_in(gm.graph, node) for node in nodes)
    part = extract(gm, members)
    ends = boundary(members)
    after = _nodes_to_move_behind(gm.graph, ends)
    with edit(gm, by=f"outline {name}") as session:
        place = ends.members[-1]
        for node in after:
            session.move(node, after=place)
            place = node
        path = session.register(name, part)
        first = ends.members[-1].next
        with session.on_behalf_of(ends.members, f"outline {name}"):
            call = session.insert("call_module", path, ends.inputs, before=first, name=name)
            results = [n for n in ends.outputs if n.op != "get_attr"] or [ends.members[-1]]
            for index, node in enumerate(results):
                value = call
                if len(results) > 1:
                    value = session.call(
                        operator.getitem, call, index, before=first, name=node.name
                    )
                session.replace_uses(node, value, where=lambda u: u not in ends.members)
        for node in reversed(ends.members):
            if not node.users:
                session.erase(node)
    return call


def inline(gm: fx.GraphModule, call: fx.Node | str) -> list[fx.Node]:
    """Put the nodes of a called `GraphModule` in the place of its call.

    Args:
        gm: The module to change, in place.
        call: The `call_module` node, or its name.

    Returns:
        The new nodes.

    Raises:
        RewriteError: When it calls something that is no `GraphModule`.
    """
    node = _call_named(gm, call) if isinstance(call, str) else node_in(gm.graph, call)
    inner = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(inner, fx.GraphModule):
        raise RewriteError(
            f"expected a call of a GraphModule, got {type(inner).__name__}",
            node=format_node(node),
            hint="trace the module first, or name it in leaf_modules= to keep it whole",
        )
    with edit(gm, by=f"inline {node.target}") as session:
        return _inline(session, node, inner)


def _inline(session: EditSession, call: fx.Node, inner: fx.GraphModule) -> list[fx.Node]:
    bound = _bind(call, inner)
    values: dict[fx.Node, Any] = {}
    made: list[fx.Node] = []
    with session.on_behalf_of([call], session.by):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                values[node] = bound[node]
            elif node.op == "output":
                _replace_call(session, call, map_arg(node.args[0], values.__getitem__))
            else:
                values[node] = session.copy(node, values.__getitem__, before=call)
                if node.op in ("get_attr", "call_module"):
                    session.set_target(values[node], f"{call.target}.{node.target}")
                made.append(values[node])
    session.erase(call)
    return made


def _bind(call: fx.Node, inner: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return the value of each placeholder of a called module."""
    bound: dict[fx.Node, Any] = {}
    inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(inputs):
        if index < len(call.args):
            bound[node] = call.args[index]
        elif node.target in call.kwargs:
            bound[node] = call.kwargs[str(node.target)]
        elif node.args:
            bound[node] = node.args[0]
        else:
            raise RewriteError(
                f"expected a value for {node.target!r}, got none",
                node=format_node(call),
                hint="call the submodule with all of its arguments",
            )
    return bound


def _replace_call(session: EditSession, call: fx.Node, value: Any) -> None:
    """Let the users of an inlined call use what it returned."""
    for user in list(call.users):
        taken = user.args[1] if user.target is operator.getitem and user.args[0] is call else None
        if isinstance(taken, int) and isinstance(value, (list, tuple)):
            if isinstance(value[taken], fx.Node):
                session.replace_uses(user, value[taken])
            if not user.users:
                session.erase(user)
                continue
        session.set_args(
            user,
            map_arg(user.args, lambda n: value if n is call else n),
            map_arg(user.kwargs, lambda n: value if n is call else n),
        )


def _with_attributes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Add the parameter reads that only these nodes use."""
    members = dict.fromkeys(nodes)
    for node in list(members):
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                members[operand] = None
    return list(members)


def _nodes_to_move_behind(graph: fx.Graph, ends: Boundary) -> list[fx.Node]:
    """Return the nodes between the members that take one of their values, in graph order."""
    inside = set(ends.members)
    first, last = ends.members[0], ends.members[-1]
    later = descendants(ends.members) - inside
    entering = next((i for i in ends.inputs if i in later), None)
    if entering is not None:
        raise RewriteError(
            f"expected a part that no path leaves and enters again, got one through "
            f"%{entering.name}",
            node=format_node(entering),
            hint="take that node in too",
        )
    between = [n for n in graph.nodes if first < n < last and n not in inside]
    moving = [n for n in between if n in later]
    order = EffectOrder(graph)
    for node in moving:
        passed = [n for n in (*ends.members, *between) if node < n and n not in moving]
        blocked = next((n for n in passed if not order.may_swap(node, n)), None)
        if blocked is not None:
            raise RewriteError(
                f"expected that %{node.name} may move behind %{blocked.name}, got an effect",
                node=format_node(node),
                hint="outline fewer nodes",
            )
    return moving


def _call_named(gm: fx.GraphModule, name: str) -> fx.Node:
    for node in gm.graph.find_nodes(op="call_module", target=name):
        return node
    found = next((n for n in gm.graph.nodes if n.name == name), None)
    if found is None:
        raise RewriteError(f"expected a call of {name!r}, got none", hint="print the graph")
    return found
