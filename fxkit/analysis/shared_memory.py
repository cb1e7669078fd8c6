"""Who would notice that two values share memory from now on, or share it no more.

A write to one of two tensors that share memory shows in the other. So a value may only be replaced
by one in other memory when nobody writes to either side and reads the other later, and when the
caller does not get hold of both. All is read from the graph as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import attribute_memory, effects_of, holds_memory
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.op_table import MAY_COPY, UNDECLARED_ALIASES
from fxkit.ir.types import MEMORY_KEY, TensorType, type_of


@dataclass(frozen=True)
class Sharing:
    """With which nodes of a graph a value shares memory.

    Attributes:
        may: Those that it may share memory with.
        surely: Those of them that it does.
    """

    may: tuple[fx.Node, ...] = ()
    surely: tuple[fx.Node, ...] = ()


def shares_memory(node: fx.Node, operand: fx.Node) -> bool | None:
    """Tell whether the result of a node shares memory with an operand; None when not known.

    The operator's schema says it of most. An operator that copies only where it has to, as
    `reshape` does, is run on tensors without numbers, where the types of its operands are known.
    """
    if operand not in effects_of(node).aliases or not holds_memory(node):
        return False
    call = resolve(node)
    assert call is not None
    if call.operator.is_opaque:
        return None
    if call.operator.overload is None:
        if not call.name.startswith("python."):
            return False  # the functions that are known without a schema all make new tensors
        if _picks_by_list(node, call, operand):
            return False
        is_sure = _is_container(operand) or _takes_a_view(node, call)
    else:
        is_sure = call.name not in MAY_COPY and call.name not in UNDECLARED_ALIASES
    return True if is_sure else _shares_when_run(node, call, operand)


def memory_around(
    starts: Iterable[fx.Node], but: Collection[fx.Node] = (), most: int | None = None
) -> set[fx.Node] | None:
    """Return all nodes that may share memory with one of some nodes, these among them.

    Args:
        starts: The nodes to begin with.
        but: Nodes to leave out, with all that is reached through them only.
        most: How many edges to follow; None for any number.

    Returns:
        The nodes; None when there are too many edges.
    """
    stack = [node for node in starts if node not in but]
    found: set[fx.Node] = set()
    followed_from: set[fx.Node] = set()
    followed = 0
    while stack:
        node = stack.pop()
        if node in followed_from:
            continue
        followed_from.add(node)
        found.add(node)
        links = [*_operand_links(node), *_other_links(node)]
        followed += len(links) + len(node.users)
        if most is not None and followed > most:
            return None
        found.update(link for link, leads_on in links if not leads_on and link not in but)
        stack.extend(link for link, leads_on in links if leads_on and link not in but)
    return found


def memory_beneath(node: fx.Node) -> set[fx.Node]:
    """Return all nodes with which a node shares memory by what it is made of, without itself."""
    links = list(_operand_links(node))
    found = memory_around([link for link, leads_on in links if leads_on], (node,)) or set()
    return found.union(link for link, leads_on in links if not leads_on)


def memory_below(node: fx.Node, within: Collection[fx.Node] | None = None) -> Sharing:
    """Return what a node shares memory with through its operands, itself among them.

    Args:
        node: The node.
        within: The nodes whose operands are looked at; all when left out.
    """

    def operands(current: fx.Node, answers: tuple[bool | None, ...]) -> Iterator[fx.Node]:
        if within is not None and current not in within:
            return
        for operand in effects_of(current).aliases:
            if shares_memory(current, operand) not in answers:
                continue
            if _part(current) is None or (within is not None and operand not in within):
                yield operand
            else:
                yield from operands(operand, answers)

    may = _closure(node, lambda current: operands(current, (True, None)))
    return Sharing(may, _closure(node, lambda current: operands(current, (True,))))


def memory_above(
    node: fx.Node, but: Collection[fx.Node] = (), most: int | None = None
) -> set[fx.Node] | None:
    """Return a node and all that may share its memory, but for what it shares with its operands.

    Args:
        node: The node.
        but: Nodes to leave out.
        most: How many edges to follow; None for any number.

    Returns:
        The nodes; None when there are too many edges.
    """
    views = [u for u in node.users if u not in but and shares_memory(u, node) is not False]
    found = memory_around(views, {node, *but}, most)
    return None if found is None else found | {node}


def _closure(
    start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]
) -> tuple[fx.Node, ...]:
    found, stack = {start: None}, [start]
    while stack:
        new = [node for node in following(stack.pop()) if node not in found]
        found.update(dict.fromkeys(new))
        stack.extend(new)
    return tuple(found)


def who_notices(
    one: Collection[fx.Node],
    other: Collection[fx.Node],
    since: fx.Node,
    but: Collection[fx.Node] = (),
    attribute_writers: Callable[[fx.Node], Iterable[fx.Node]] | None = None,
) -> str | None:
    """Return who could tell whether the memory of some nodes is that of others, or None.

    Args:
        one: Nodes that may share memory.
        other: The others.
        since: The node up to which writes don't count: both sides are made of what they left.
        but: Nodes that go away.
        attribute_writers: Gives the calls of modules that write to what a `get_attr` reads, such
            as running statistics; looked up in the graph when left out.
    """
    find_writers = attribute_writers or _attribute_writers
    for written, read in ((one, other), (other, one)):
        last = _last_read(read, but)
        if last is None:
            continue
        for writer in _writers(written, find_writers):
            if since < writer < last and writer not in but:
                reader = "the caller gets" if last.op == "output" else f"%{last.name} reads"
                return f"%{writer.name} writes to it before {reader} the other"
    if is_with_caller(one) and is_with_caller(other):
        return "the caller gets both"
    return None


# A node that may share another's memory, and whether all that shares memory with it does too.
_Link = tuple[fx.Node, bool]


def _operand_links(node: fx.Node) -> Iterator[_Link]:
    """Yield what a node shares memory with by what it is made of.

    A part of several results has to do with that part only, not with the others.
    """
    part = _part(node)
    for operand in effects_of(node).aliases:
        if shares_memory(node, operand) is False:
            continue
        yield operand, part is None
        if part is not None:
            yield from _operand_links(operand)
            users = (user for user in operand.users if user is not node)
            yield from ((user, True) for user in users if _part(user) in (None, part)
                        and shares_memory(user, operand) is not False)  # fmt: skip


def _other_links(node: fx.Node) -> Iterator[_Link]:
    yield from ((user, True) for user in node.users if shares_memory(user, node) is not False)
    yield from ((other, True) for other in _tied(node))


def _part(node: fx.Node) -> int | None:
    """Return which of several results a node takes, counted from the front; None when none."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    whole, index = node.args
    if type(index) is not int or index < 0 or not isinstance(whole, fx.Node):
        return None
    return index if _is_container(whole) else None


def _tied(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the other inputs or attributes that are the same memory."""
    if node.op == "get_attr":
        key = attribute_memory(node.graph, str(node.target))
        for other in node.graph.find_nodes(op="get_attr", sort=False):
            if attribute_memory(node.graph, str(other.target)) == key:
                yield other
    elif node.op == "placeholder" and MEMORY_KEY in node.meta:
        for other in node.graph.find_nodes(op="placeholder", sort=False):
            if other.meta.get(MEMORY_KEY) == node.meta[MEMORY_KEY]:
                yield other


def _writers(
    nodes: Iterable[fx.Node], attribute_writers: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    for node in nodes:
        yield from (user for user in node.users if node in effects_of(user).writes)
        if node.op == "get_attr":
            yield from attribute_writers(node)


def _attribute_writers(node: fx.Node) -> Iterator[fx.Node]:
    graph = node.graph
    key = attribute_memory(graph, str(node.target))
    for call in graph.find_nodes(op="call_module", sort=False):
        written = [w for w in effects_of(call).writes if isinstance(w, Attribute)]
        if any(attribute_memory(graph, attribute.path) == key for attribute in written):
            yield call


def _last_read(nodes: Iterable[fx.Node], but: Collection[fx.Node]) -> fx.Node | None:
    """Return the last node that reads the numbers of any of some nodes: the output for the caller.

    Who only takes a view reads nothing: the view is among the nodes.
    """
    last = None
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            return next(iter(reversed(node.graph.nodes)))
        for user in node.users:
            if (last is None or last < user) and user not in but and not _is_view(user, node):
                last = user
    return last


def _is_view(node: fx.Node, operand: fx.Node) -> bool:
    return effects_of(node).is_pure and shares_memory(node, operand) is not False


def is_with_caller(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether the caller gets one of some nodes: an input, an attribute or a result."""
    return any(
        node.op in ("placeholder", "get_attr") or any(user.op == "output" for user in node.users)
        for node in nodes
    )


def _is_container(node: fx.Node) -> bool:
    """Tell whether an operator, of which something is known, gives several results."""
    call = resolve(node)
    if call is None or call.operator.is_opaque:
        return False
    if call.operator.schema is None:
        return isinstance(type_of(node), (list, tuple))
    returns = call.operator.schema.returns
    return len(returns) > 1 or any(isinstance(r.type, torch.ListType) for r in returns)


def _takes_a_view(node: fx.Node, call: Call) -> bool:
    """Tell whether a call is an index of numbers and slices, which copies nothing."""
    if call.name != "python.getitem":
        return False
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is ... or type(part) in (int, slice, type(None)) for part in parts)


def _picks_by_list(node: fx.Node, call: Call, operand: fx.Node) -> bool:
    """Tell whether a tensor is indexed by lists of numbers, alone or among others: that copies."""
    if call.name != "python.getitem" or not isinstance(type_of(operand), TensorType):
        return False
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, tuple)) and holds_numbers(part) for part in parts)


def holds_numbers(value: Any) -> bool:
    """Tell whether an index is made of integers and booleans, in lists or not."""
    if isinstance(value, (list, tuple)):
        return all(map(holds_numbers, value))
    return type(value) in (int, bool)


def _shares_when_run(node: fx.Node, call: Call, operand: fx.Node) -> bool | None:
    """Run a call on tensors without numbers, and see; None when that can't be."""
    if call.name in _BY_FLAG:
        training = call.arguments.get("train")
        return training is False if isinstance(training, bool) else None
    operands = {o: without_numbers(type_of(o)) for o in node.all_input_nodes}
    if any(value is None for value in operands.values()):
        return None
    result = run_without_numbers([node], operands).get(node)
    return None if result is None else is_same_memory(result, operands[operand])


# They give their operand back outside of training, and copy it else.
_BY_FLAG = frozenset(["aten.dropout", "aten.alpha_dropout", "aten.feature_dropout"])


def without_numbers(known: Any) -> torch.Tensor | None:
    """Return a tensor of a type, in memory of its own; None when too little is known of it.

    The numbers of a complex tensor may be those of its conjugate, which no type tells.
    """
    if not isinstance(known, TensorType) or known.stride is None or known.is_symbolic:
        return None
    if known.dtype.is_complex:
        return None
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")


def run_without_numbers(
    nodes: Sequence[fx.Node], operands: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    """Run pure calls on tensors without numbers.

    Args:
        nodes: The calls, in order.
        operands: Node → tensor, or a constant, for all that they take.

    Returns:
        Node → result, for `operands` and for those that could be run.
    """
    known = dict(operands)
    for node in nodes:
        result = _run(node, known)
        if result is not None:
            known[node] = result
    return known


def _run(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    call = resolve(node)
    if call is None or call.operator.is_opaque or not effects_of(node).is_pure:
        return None
    if any(operand not in known for operand in node.all_input_nodes):
        return None
    try:
        with torch.no_grad():
            if call.operator.overload is not None:
                arguments = {k: map_arg(v, known.__getitem__) for k, v in call.arguments.items()}
                return call.operator.overload(**arguments)
            if not callable(node.target):
                return None
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            return node.target(*args, **kwargs)
    except Exception:  # what can't be run without numbers says nothing
        return None


def is_same_memory(one: Any, other: Any) -> bool:
    """Tell whether two tensors lie in the same memory; of a list, whether one of it does."""
    if isinstance(one, (list, tuple)):
        return any(is_same_memory(item, other) for item in one)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.untyped_storage() is other.untyped_storage()
