"""Exchange operands of a node that has very many, each at the cost of one copy of their list.

`Node.replace_input_with` of torch.fx visits each operand of the node, some microseconds each: 8,000
values that are replaced one by one, all of them parts of one `torch.stack`, took it 14 s. Here the
places of each operand are known, and the journal keeps the exchange in place of the operands.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_list
from torch.fx.node import map_arg

from fxkit.torch_adapters.fx_nodes import args_of, input_nodes_of, kwargs_of, set_arguments

WIDE = 64
"""From how many operands on a node is wide."""

# Where an operand stands: in which argument, and where in it when that is a list or tuple.
_Place = tuple[int, int | None]

_set = object.__setattr__


class ManyOperands:
    """The operands of one node, where each stands, and what was exchanged so far.

    Args:
        node: A node for which `is_flat` holds.

    Attributes:
        node: The node.
        args: Its operands as this object left them; others when somebody else changed them.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.args = self._first = args_of(node)
        self._exchanges: list[tuple[tuple[_Place, ...], fx.Node]] = []
        self._locate()

    @property
    def is_current(self) -> bool:
        """Whether nobody else has changed the operands since."""
        return args_of(self.node) is self.args

    def exchange(self, old: fx.Node, new: fx.Node) -> Exchange:
        """Put another node in all places of an operand."""
        places = tuple(self._places[old])
        self.put(places, old, new)
        return Exchange(self, EarlierOperands(self, len(self._exchanges)), places, old, new)

    def put(self, places: tuple[_Place, ...], old: fx.Node, new: fx.Node) -> None:
        """Put a node in some of the places of another one; `settle` is due then.

        Cost: a copy of the operands.
        """
        node, inputs = self.node, input_nodes_of(self.node)
        self._exchanges.append((places, new))
        left, taken = self._places[old], self._places.setdefault(new, {})
        for place in places:
            del left[place]
            taken[place] = None
        if not left:
            del self._places[old], inputs[old], old.users[node]
        inputs[new] = new.users[node] = None
        self.args = _with(self.args, [(places, new)])
        _set(node, "_args", self.args)

    def put_anew(self, places: tuple[_Place, ...], new: fx.Node) -> None:
        """Do the same after somebody else changed the operands, and changed them back."""
        self._exchanges.append((places, new))
        set_arguments(self.node, self.at(len(self._exchanges)), kwargs_of(self.node))
        self.args = args_of(self.node)
        self._locate()

    def at(self, count: int) -> tuple[Any, ...]:
        """Return the operands as they were after some exchanges."""
        return _with(self._first, self._exchanges[:count])

    def _locate(self) -> None:
        self._places: dict[fx.Node, dict[_Place, None]] = {}
        for place, operand in _places(self.args):
            self._places.setdefault(operand, {})[place] = None


class WideNodes:
    """The operands of the wide nodes of a graph, found once each as long as they are current."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, ManyOperands] = {}

    def of(self, node: fx.Node) -> ManyOperands | None:
        """Return the operands of a node, unless they are nested too deep."""
        known = self._known.get(node)
        if known is None or not known.is_current:
            if not is_flat(node):
                return None
            known = self._known[node] = ManyOperands(node)
        return known


class EarlierOperands:
    """The operands of a wide node as they were at one moment, put together when looked at."""

    __slots__ = ("_count", "_operands")

    def __init__(self, operands: ManyOperands, count: int) -> None:
        self._operands, self._count = operands, count

    @property
    def args(self) -> tuple[Any, ...]:
        """The operands."""
        return self._operands.at(self._count)


class Exchange:
    """What takes the exchange of an operand back.

    Attributes:
        node: The node whose operand it is.
        after: The operands right after it.
    """

    __slots__ = ("_new", "_old", "_operands", "_places", "after", "node")

    def __init__(
        self,
        operands: ManyOperands,
        after: EarlierOperands,
        places: tuple[_Place, ...],
        old: fx.Node,
        new: fx.Node,
    ) -> None:
        self.node, self.after = operands.node, after
        self._operands = operands
        self._places, self._old, self._new = places, old, new

    def __call__(self) -> None:
        operands = self._operands
        if operands.is_current:
            operands.put(self._places, self._new, self._old)
        else:
            operands.put_anew(self._places, self._old)


def settle(node: fx.Node) -> None:
    """Let a node list its inputs in the order of its operands. Cost: linear in those."""
    found: dict[fx.Node, None] = {}
    map_arg((args_of(node), kwargs_of(node)), lambda operand: found.setdefault(operand))
    input_nodes_of(node).clear()
    input_nodes_of(node).update(found)


def is_flat(node: fx.Node) -> bool:
    """Tell whether the operands are arguments by position, or parts of lists and tuples there."""
    found = {operand for _, operand in _places(args_of(node))}
    deeper: list[fx.Node] = []
    args: tuple[Any, ...] = args_of(node)
    for value in args:
        for part in value if type(value) in (immutable_list, tuple) else (value,):
            if not isinstance(part, fx.Node):
                map_arg(part, deeper.append)
    map_arg(kwargs_of(node), deeper.append)
    return not deeper and len(found) == len(input_nodes_of(node))


def _places(args: tuple[Any, ...]) -> list[tuple[_Place, fx.Node]]:
    found: list[tuple[_Place, fx.Node]] = []
    for i, value in enumerate(args):
        if isinstance(value, fx.Node):
            found.append(((i, None), value))
        elif type(value) in (immutable_list, tuple):
            found.extend(((i, j), v) for j, v in enumerate(value) if isinstance(v, fx.Node))
    return found


def _with(
    args: tuple[Any, ...], exchanges: list[tuple[tuple[_Place, ...], fx.Node]]
) -> tuple[Any, ...]:
    """Return operands with others in some places."""
    made = list(args)
    opened: dict[int, list[Any]] = {}
    for places, new in exchanges:
        for i, j in places:
            if j is None:
                made[i] = new
                continue
            if i not in opened:
                opened[i] = list(args[i])
            opened[i][j] = new
    for i, values in opened.items():
        made[i] = type(args[i])(values)
    return tuple(made)
