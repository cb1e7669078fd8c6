"""What an edit session writes down: one entry for each change, as text only when asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.printer import format_node
from fxkit.ir.types import KEY as TYPE_KEY


class NodeRecord:
    """What a node was at one moment, in the form that the printer takes; costs next to nothing."""

    __slots__ = ("__dict__", "args", "graph", "kwargs", "meta", "name", "op", "target")

    def __init__(self, node: fx.Node) -> None:
        self.op, self.target, self.name = node.op, node.target, node.name
        self.args, self.kwargs = node.args, node.kwargs
        self.graph = node.graph
        meta = node.meta
        self.meta = {TYPE_KEY: meta[TYPE_KEY]} if TYPE_KEY in meta else {}
        if "val" in meta:
            self.meta["val"] = meta["val"]

    @property
    def all_input_nodes(self) -> list[fx.Node]:
        """The operands, as a node of torch.fx lists them."""
        found: dict[fx.Node, None] = {}
        map_arg((self.args, self.kwargs), lambda n: found.setdefault(n))
        return list(found)

    _input_nodes = all_input_nodes

    def __str__(self) -> str:
        record: Any = self
        return format_node(record)


class Change(NamedTuple):
    """One entry of a journal.

    Attributes:
        kind: `insert`, `erase`, `rewire` (arguments or target changed), `move`, `rename`,
            `attribute`, `adopt` (the whole graph).
        name: The node, or the attribute's qualified name.
        what: What happened: text, or a record of the node.
        by: The rule or pass that did it.
    """

    kind: str
    name: str
    what: str | NodeRecord
    by: str

    @property
    def detail(self) -> str:
        """What happened, as text."""
        return str(self.what)

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.detail}" + (f"    # {self.by}" if self.by else "")
