"""The modules and nodes of a graph as an indented tree, with operators, types and parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.drawings.hierarchy import Hierarchy, Leaf, ModuleGroup, stands_for
from fxkit.view.pages.page import fragment_page, notebook_bundle
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.labels import clip, one_line
from fxkit.view.texts.subject import graph_module_of
from fxkit.view.texts.text_table import aligned, plural, quantity

VERSION = 1
"""Version of the dictionaries that `Tree.to_dict` returns."""

_TEXT_LIMITS = (72, 40, 44)


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of a tree: a module, a node, or a module that holds a single node.

    Attributes:
        name: Name of the module, relative to its parent, or of the node.
        kind: Name of the module's class; "" for a node.
        operator: Identity of the node's operator; "" for a module with several nodes.
        node: Name of the node; "" for a module with several nodes.
        constants: The node's arguments that are no tensors.
        type: Shape and dtype of the output; "" when it isn't known.
        parameters: Elements of the parameters and buffers, those of folded layers included.
        source: The user's line.
        nodes: Number of nodes, those of folded layers and the parameters that they read included.
        repeats: How many like layers the line stands for.
        children: The lines below.
    """

    name: str
    kind: str
    operator: str
    node: str
    constants: str
    type: str
    parameters: int
    source: str
    nodes: int
    repeats: int
    children: tuple[TreeEntry, ...]

    def walk(self) -> Iterator[TreeEntry]:
        """Iterate over this line and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def to_dict(self) -> dict[str, Any]:
        """Return the line and those below as plain values; what is empty is left out."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "children"}
        shown: dict[str, Any] = {name: value for name, value in values.items() if value}
        if self.children:
            shown["children"] = [child.to_dict() for child in self.children]
        return shown


@dataclass(frozen=True, repr=False)
class Tree:
    """What `tree` returns; print it, or let a notebook show it.

    Attributes:
        root: The line of the graph module itself.
    """

    root: TreeEntry

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def head(self, count: int = 20) -> str:
        """Return the first `count` lines as text, and how many are left out."""
        lines = self._lines()
        if len(lines) <= count:
            return "\n".join(lines)
        return "\n".join([*lines[:count], f"… {plural(len(lines) - count, 'more line')}"])

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, with a `version` on top."""
        return {"version": VERSION, "tree": self.root.to_dict()}

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def html(self) -> str:
        """Return one self-contained page with a tree that opens and closes."""
        return fragment_page(self.root.name, self.html_fragment())

    def html_fragment(self) -> str:
        """Return the tree as HTML without a page around it, for reports."""
        return f'<div class="fx-tree">{"".join(_html(self.root, 0))}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html())

    def _lines(self) -> list[str]:
        rows = list(_rows(self.root, "", ""))
        cut = [
            [clip(cell, limit) for cell, limit in zip(row, (*_TEXT_LIMITS, 12, 40), strict=True)]
            for row in rows
        ]
        return aligned(cut, align="<<<><")


def tree(
    gm: Any,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    fold: bool = True,
) -> Tree:
    """Show the modules of a graph and, in each, its nodes.

    Args:
        gm: A graph module, or a captured or compiled program that holds one; shapes are shown
            where the nodes carry them. With inputs, any callable: it is captured.
        args: Inputs to capture with.
        kwargs: More inputs, by name.
        depth: How many levels of modules are opened; all when left out.
        fold: Whether layers with the same operators, types and wiring are shown once, `× n`.

    Returns:
        A value with `str()`, `.head(n)`, `.html()` and `.to_json()`.

    Raises:
        UnsupportedError: When there is no graph, or `depth` is no count.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        >>> print(fxkit.tree(gm))
        Sequential    4 nodes        20
        ├─ input_1    input
        ├─ 0: Linear  aten.linear    20  container.py:... in forward
        ├─ 1: ReLU    aten.relu          container.py:... in forward
        └─ output     output
    """
    if depth is not None and depth < 0:
        raise UnsupportedError(
            f"expected depth to be None or a count of levels, got {depth!r}",
            hint="depth=1 opens the outermost modules",
        )
    hierarchy = Hierarchy(graph_module_of(gm, args, kwargs), fold=fold)
    root = _entry(hierarchy.root, depth)
    name = root.kind or "GraphModule"
    return Tree(replace(root, name=name, kind="", nodes=hierarchy.size))


def _entry(item: Leaf | ModuleGroup, depth: int | None) -> TreeEntry:
    if isinstance(item, Leaf):
        return _leaf_entry(item)
    leaf = item.only
    if leaf is not None and item.path:
        line = _leaf_entry(leaf)
        return replace(line, name=item.title, kind=item.kind, parameters=item.parameters)
    below = None if depth is None else depth - 1
    return TreeEntry(
        name=item.title,
        kind=item.kind,
        operator="",
        node="",
        constants="",
        type=_output_type(item),
        parameters=item.parameters,
        source="",
        nodes=_count(item),
        repeats=item.fold.count if item.fold else 1,
        children=()
        if depth is not None and depth <= 0
        else tuple(_entry(child, below) for child in item.items),
    )


def _leaf_entry(leaf: Leaf) -> TreeEntry:
    label = leaf.label
    return TreeEntry(
        name=one_line(label.name),
        kind="",
        operator=label.operator,
        node=label.name,
        constants=label.constants,
        type=label.type,
        parameters=0,
        source=str(label.source) if label.source else "",
        nodes=stands_for(leaf.node),
        repeats=1,
        children=(),
    )


def _output_type(group: ModuleGroup) -> str:
    last = group.items[-1] if group.items else None
    if isinstance(last, Leaf):
        return last.label.type if group.path else ""
    return _output_type(last) if last is not None and group.path else ""


def _count(item: Leaf | ModuleGroup) -> int:
    if isinstance(item, Leaf):
        return stands_for(item.node)
    below = sum(_count(child) for child in item.items)
    return below + sum(_count(member) for member in (item.fold.members if item.fold else ()))


def _rows(entry: TreeEntry, lead: str, below: str) -> Iterator[list[str]]:
    name = f"{entry.name}: {entry.kind}" if entry.kind else entry.name
    operator = entry.operator
    if entry.constants and operator:
        operator = f"{operator}({entry.constants})"
    if not entry.operator:
        operator = plural(entry.nodes, "node") if not entry.children or not lead else ""
    parameters = quantity(entry.parameters) if entry.parameters else ""
    yield [lead + one_line(name), operator, entry.type, parameters, entry.source]
    for i, child in enumerate(entry.children):
        last = i == len(entry.children) - 1
        yield from _rows(
            child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")
        )


def _html(entry: TreeEntry, level: int) -> Iterator[str]:
    parameters = f"{quantity(entry.parameters)} parameters" if entry.parameters else ""
    kind = f'<span class="fx-kind">{escape(entry.kind)}</span>' if entry.kind else ""
    operator = (
        f'<code class="fx-operator">{escape(entry.operator)}'
        f"<span>{escape(f'({entry.constants})' if entry.constants else '')}</span></code>"
        if entry.operator
        else f'<span class="fx-count">{plural(entry.nodes, "node")}</span>'
    )
    line = (
        f'<span class="fx-name">{escape(entry.name)}</span>{kind}{operator}'
        f'<code class="fx-type">{escape(entry.type)}</code>'
        f'<span class="fx-parameters">{parameters}</span>'
        f'<span class="fx-source">{escape(entry.source)}</span>'
    )
    if not entry.children:
        yield f'<div class="fx-leaf">{line}</div>'
        return
    yield f"<details{' open' if level < 2 else ''}><summary>{line}</summary>"
    for child in entry.children:
        yield from _html(child, level + 1)
    yield "</details>"
