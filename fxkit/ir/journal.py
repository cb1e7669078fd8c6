"""What an edit session writes down: one tuple for each change, made readable when looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.many_operands import EarlierOperands
from fxkit.ir.printer import format_node
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.torch_adapters.fx_nodes import args_of, kwargs_of

Snapshot = tuple[str, Any, Any, Any, Any, Any]


def snapshot(node: fx.Node) -> Snapshot:
    """Return what a node is at this moment: kind, target, operands and type, in one tuple."""
    meta = node.meta
    return (
        node.op,
        node.target,
        args_of(node),
        kwargs_of(node),
        meta.get(TYPE_KEY),
        meta.get("val"),
    )


def snapshot_with(node: fx.Node, operands: EarlierOperands) -> Snapshot:
    """Return the `snapshot` of a wide node, without holding a copy of its operands."""
    meta = node.meta
    return (node.op, node.target, operands, kwargs_of(node), meta.get(TYPE_KEY), meta.get("val"))


class NodeRecord:
    """What a node was at one moment, in the form that the printer takes."""

    __slots__ = ("__dict__", "_held", "_kwargs", "graph", "meta", "name", "op", "target")

    def __init__(self, node: fx.Node, name: str, was: Snapshot) -> None:
        self.name, self.graph = name, node.graph
        self.op, self.target, self._held, self._kwargs, known, value = was
        self.meta = {TYPE_KEY: known} if known is not None else {}
        if value is not None:
            self.meta["val"] = value

    @property
    def args(self) -> Any:
        """The positional operands."""
        if isinstance(self._held, EarlierOperands):
            self._held = self._held.args
        return self._held

    _args = args

    @property
    def kwargs(self) -> Any:
        """The keyword operands."""
        return self._kwargs

    @property
    def all_input_nodes(self) -> list[fx.Node]:
        """The operands, as a node of torch.fx lists them."""
        found: dict[fx.Node, None] = {}
        map_arg((self.args, self._kwargs), lambda n: found.setdefault(n))
        return list(found)

    _input_nodes = all_input_nodes

    def __str__(self) -> str:
        record: Any = self
        return format_node(record)


class GraphChange(NamedTuple):
    """One entry of a journal.

    Attributes:
        kind: `insert`, `erase`, `rewire` (arguments or target changed), `move`, `rename`,
            `retype` (its recorded type is another), `attribute`, `adopt` (the whole graph).
        name: The node, or the attribute's qualified name.
        what: What happened: text, or a record of the node.
        by: The rule or pass that did it.
        node: The node, as it is now; None for `attribute` and `adopt`.
    """

    kind: str
    name: str
    what: str | NodeRecord
    by: str
    node: fx.Node | None = None

    @property
    def detail(self) -> str:
        """What happened, as text."""
        return str(self.what)

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.detail}" + (f"    # {self.by}" if self.by else "")


# A change as it is written down, a bare tuple for its cost: kind, node or None, name, by, text or
# snapshot, and what taking it back needs (see `EditSession`).
Entry = tuple[str, "fx.Node | None", str, str, "str | Snapshot", Any]


class Journal(Sequence[GraphChange]):
    """The changes of a session, oldest first; reading one makes its `GraphChange`.

    Attributes:
        entries: The same, as they were written down.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[GraphChange]:
        return map(_change, self.entries)

    @overload
    def __getitem__(self, index: int) -> GraphChange: ...

    @overload
    def __getitem__(self, index: slice) -> list[GraphChange]: ...

    def __getitem__(self, index: int | slice) -> GraphChange | list[GraphChange]:
        if isinstance(index, slice):
            return [_change(entry) for entry in self.entries[index]]
        return _change(self.entries[index])


def _change(entry: Entry) -> GraphChange:
    kind, node, name, by, what, _ = entry
    if isinstance(what, str) or node is None:
        return GraphChange(kind, name, str(what), by, node)
    return GraphChange(kind, name, NodeRecord(node, name, what), by, node)
