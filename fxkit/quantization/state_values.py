"""What holds the values of a program's state: from the input, by moves and joins, to the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.errors import UnsupportedError
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.probes import is_probe
from fxkit.quantization.sharing import carried
from fxkit.torch_adapters import pytree

_COMPUTE = frozenset(
    ("aten.dropout", *(f"aten.{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)))
)
"""What keeps a scale, but takes no integers."""

_COPY = torch.ops.aten.copy_.default

ROUNDING = frozenset(f"quantized_decomposed.{kind}quantize_per_tensor" for kind in ("", "de"))
"""The operators that a reference graph rounds a tensor by."""


@dataclass(frozen=True, eq=False)
class StateValues:
    """The nodes that hold the values of one state.

    Attributes:
        name: The input's.
        index: Of the result that the next call gets for it; None where the input is written.
        input: The input.
        result: What is returned, or None.
        write: What writes the input in place, at the end, or None.
        members: The input, and what holds its values, moved, or joined with new ones on the way to
            the result; in graph order.
        entering: What members take beside members: the new values. The result itself, where it has
            none of the input's.
    """

    name: str
    index: int | None
    input: fx.Node
    result: fx.Node | None
    write: fx.Node | None
    members: dict[fx.Node, None]
    entering: dict[fx.Node, None]

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the nodes behind which values are rounded: nothing else of it has to be."""
        return (self.input.name, *(node.name for node in self.entering))

    def is_rounded_for(self, user: fx.Node, node: fx.Node) -> bool:
        """Tell whether a user reads the quantised and dequantised value of a node.

        A write to the input, and a result that is the input after it was written, take the raw one.
        """
        if node is not self.input:
            return user in self.members or (user.op == "output" and node is self.result)
        if self.write is not None and (user.op == "output" or user is self.write):
            return False
        return not is_rounding(user)


def state_values(gm: fx.GraphModule, state: Mapping[str, int | None]) -> tuple[StateValues, ...]:
    """Find what holds the values of each state. Cost: linear for each of them.

    Args:
        gm: The graph, quantised or not.
        state: Names of inputs, and for each the index of the result that goes into the next call;
            None where the program writes the input in place, once, as `Functionalise` leaves it.

    Raises:
        UnsupportedError: When there is no such input or result, it is no tensor of floats, values
            are written in place elsewhere, or two states are joined.
    """
    if not state:
        return ()
    check_state(state)
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    results = flat_results(gm.graph)
    found: list[StateValues] = []
    for name, index in state.items():
        if name not in inputs:
            raise UnsupportedError(
                f"expected the name of an input as state, got {name!r}",
                hint=f"the inputs are {', '.join(inputs)}",
            )
        result = None if index is None else _result(name, index, results)
        one = _values(name, index, inputs[name], result)
        _check(one)
        _check_ranks(one.input, result)
        for other in found:
            _check_apart(other, one)
        found.append(one)
    return tuple(found)


def check_state(state: object) -> None:
    """Check that a state maps names to indices or None.

    Raises:
        UnsupportedError: When it does not.
    """
    items = state.items() if isinstance(state, Mapping) else ((None, None),)
    for name, index in items:
        if not isinstance(name, str) or not (index is None or type(index) is int):
            raise UnsupportedError(
                f"expected a state of input names, each with the index of a result or None, got "
                f"{state!r}",
                hint='state={"keys": 1, "values": 2}',
            )


def _check_ranks(start: fx.Node, result: fx.Node | None) -> None:
    if result is None:
        return
    given, made = type_of(start), type_of(result)
    if not isinstance(given, TensorType) or not isinstance(made, TensorType):
        return
    if len(given.shape) != len(made.shape):
        raise UnsupportedError(
            f"expected a result with as many axes as state {start.name!r}, {given}, got {made}",
            node=format_node(result),
            hint="a state is paired with the result that the next call gets for it",
        )


def _result(name: str, index: int, results: list[object]) -> fx.Node:
    result = results[index] if 0 <= index < len(results) else None
    if isinstance(result, fx.Node):
        return result
    got = repr(result) if 0 <= index < len(results) else f"{index} of {len(results)}"
    raise UnsupportedError(
        f"expected the index of a result that is a tensor for state {name!r}, got {got}",
        hint="results are counted from 0, those of nested tuples and dicts one by one",
    )


def state_groups(states: Iterable[StateValues]) -> dict[str, str]:
    """Return for each node of a state what those with the same scale have in common.

    States that take the same new values have one scale.
    """
    groups: dict[str, str] = {}
    for one in states:
        names = [node.name for node in (*one.members, *one.entering)]
        mine = f"state {one.name}"
        joined = {groups[name] for name in names if name in groups}
        groups = {name: mine if group in joined else group for name, group in groups.items()}
        groups |= dict.fromkeys(names, mine)
    return groups


def flat_results(graph: fx.Graph) -> list[object]:
    """Return what a graph returns, nested containers opened."""
    return pytree.tree_leaves(graph.output_node().args[0])


def _values(name: str, index: int | None, start: fx.Node, result: fx.Node | None) -> StateValues:
    nodes = list(start.graph.nodes)
    moved = {node: _moved(node) for node in nodes}
    write = next((node for node in start.users if _is_write(node, start)), None)
    from_input, to_result = {start}, {node for node in (result, write) if node is not None}
    for node in nodes:
        if not from_input.isdisjoint(moved[node]):
            from_input.add(node)
    for node in reversed(nodes):
        if node in to_result:
            to_result.update(moved[node])
    members: dict[fx.Node, None] = {}
    for node in nodes:
        is_between = node in from_input and node in to_result
        is_moved = len(moved[node]) == 1 and moved[node][0] in members and not is_rounding(node)
        if node is start or is_between or is_moved:
            members[node] = None
    entering = {one: None for node in members for one in moved[node] if one not in members}
    if result is not None and result not in members:
        entering[result] = None
    return StateValues(name, index, start, result, write, members, entering)


def _is_write(node: fx.Node, tensor: fx.Node) -> bool:
    """Tell whether a node gives a tensor other values, as functional programs do at their end."""
    return node.target is _COPY and node.args[0] is tensor


def _moved(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values a node holds, rounded or not, as integers could be."""
    if is_rounding(node):
        return node.all_input_nodes[:1]
    if node.target is _COPY:
        return node.all_input_nodes
    call = resolve(node)
    if call is None or call.name in _COMPUTE or call.arguments.get("dtype") is not None:
        return []
    return carried(node)


def is_rounding(node: fx.Node) -> bool:
    """Tell whether a node quantises or dequantises a tensor with one scale."""
    call = resolve(node)
    return call is not None and call.name in ROUNDING


def _check(values: StateValues) -> None:
    """Refuse a state that can't be held in integers."""
    known = type_of(values.input)
    members = [type_of(node) for node in values.members if not is_rounding(node)]
    types = [one for one in members if isinstance(one, TensorType)]
    if isinstance(known, TensorType):
        kind = str(known.dtype).removeprefix("torch.")
        if not known.dtype.is_floating_point or known.dtype == torch.float64:
            raise UnsupportedError(
                f"expected a state in float32 or less, got {values.name!r} in {kind}",
                node=format_node(values.input),
                hint="hold_in_integers takes what convert returned, and only once for each state",
            )
        others = [one.dtype for one in types if one.dtype != known.dtype]
        if others:
            raise UnsupportedError(
                f"expected a state of one type, got {values.name!r} in {kind}, and in "
                f"{str(others[0]).removeprefix('torch.')} where it is joined with new values"
            )
    if values.result is None and values.write is None:
        raise UnsupportedError(
            f"expected input {values.name!r} to be written in place, as no result is named for it, "
            "got a program that does not",
            hint=f"state={{{values.name!r}: 1}} names the second result; where the program writes, "
            "run fxkit.passes.Functionalise over fxkit.capture(model, args) first",
        )
    for node in values.members:
        for user in node.users:
            if not _is_in_order(node, user, values):
                raise UnsupportedError(
                    f"expected a state that is written by operators with a result, such as "
                    f"index_copy, got {values.name!r} written in place",
                    node=format_node(user),
                    source=format_source(user),
                    hint="run fxkit.passes.Functionalise over fxkit.capture(model, args) first, "
                    "and quantise that",
                )


def _is_in_order(node: fx.Node, user: fx.Node, values: StateValues) -> bool:
    """Tell whether a user reads a member before the input is written, and writes nothing itself."""
    gm, write = user.graph.owning_module, values.write
    if user.op == "output" or user is write or (gm is not None and is_probe(gm, user)):
        return True
    is_late = write is not None and write < user and not _is_write(user, user.all_input_nodes[0])
    return not is_late and node not in effects_of(user).writes


def _check_apart(one: StateValues, other: StateValues) -> None:
    """Refuse two states of which one holds values of the other."""
    ours, theirs = one.members | one.entering, other.members | other.entering
    common = [node for node in ours if node in theirs]
    joined = [node for node in common if node in one.members or node in other.members]
    is_same = one.index is not None and one.index == other.index
    if joined or is_same:
        node = joined[0] if joined else common[0]
        raise UnsupportedError(
            f"expected states that stay apart, got {one.name!r} and {other.name!r} joined",
            node=format_node(node),
            source=format_source(node),
            hint="return them one by one",
        )
