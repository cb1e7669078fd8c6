"""What is different between two graphs, node by node.

Nodes are the same when they have name and operator in common; else when a rewrite recorded that one
stands for the other; else when they do the same to the same operands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.printer import format_node
from fxkit.ir.provenance import provenance_of
from fxkit.ir.types import TensorType, type_of
from fxkit.view.labels import operator_name
from fxkit.view.page import escape, fragment_page, notebook_bundle
from fxkit.view.subject import graph_module_of
from fxkit.view.text_table import plural

VERSION = 1
"""Version of the dictionaries that `GraphDiff.to_dict` returns."""

KINDS: tuple[str, ...] = ("added", "removed", "replaced", "rewired", "changed")

_SIGNS = {"added": "+", "removed": "-", "replaced": "~", "rewired": ">", "changed": "!"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        kind: `added`, `removed`; `replaced` where other nodes stand for these; `rewired` where a
            node reads other values; `changed` where its constants, type or name are others.
        before: Names of the nodes in the first graph.
        after: Names of the nodes in the second graph.
        old: The first graph's nodes as text.
        new: The second graph's nodes as text.
        by: Rules and passes that made the change, where they recorded it.
        why: What is different, in words: `operands`, `constants`, `type`, `name`.
    """

    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    by: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class GraphDiff:
    """What `diff` returns.

    Attributes:
        changes: The differences, in the order of the graphs.
        matched: Name before → name after, for the nodes that are in both.
        nodes_before: Number of nodes of the first graph.
        nodes_after: Number of nodes of the second graph.
    """

    changes: tuple[Change, ...]
    matched: Mapping[str, str]
    nodes_before: int
    nodes_after: int

    @property
    def counts(self) -> dict[str, int]:
        """Number of nodes that are added, removed, ...; `replaced` counts nodes before."""
        counts = dict.fromkeys(KINDS, 0)
        for change in self.changes:
            counts[change.kind] += len(change.after if change.kind == "added" else change.before)
        return counts

    def __bool__(self) -> bool:
        return bool(self.changes)

    def of_kind(self, kind: str) -> tuple[Change, ...]:
        """Return the changes of one of the `KINDS`."""
        return tuple(change for change in self.changes if change.kind == kind)

    def summary(self) -> str:
        """Return one line with the counts."""
        head = f"{plural(self.nodes_before, 'node')} before, {self.nodes_after:,} after"
        parts = [f"{count:,} {kind}" for kind, count in self.counts.items() if count]
        return f"{head}: {', '.join(parts) if parts else 'no difference'}"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(line for c in self.changes for line in _lines(c))])

    __repr__ = __str__

    def html(self) -> str:
        """Return one self-contained page, the graphs side by side."""
        return fragment_page("difference of two graphs", self.html_fragment())

    def html_fragment(self) -> str:
        """Return the differences as an HTML table without a page around it."""
        rows = "".join(_html_row(change) for change in self.changes)
        head = f'<p class="fx-summary">{escape(self.summary())}</p>'
        if not rows:
            return head
        return (
            f'{head}<table class="fx-table fx-diff"><thead><tr><th></th><th>before</th>'
            f"<th>after</th><th>by</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as plain values, with a `version` on top."""
        return {
            "version": VERSION,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "counts": self.counts,
            "changes": [asdict(change) for change in self.changes],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html())


def diff(before: Any, after: Any) -> GraphDiff:
    """Compare two graphs.

    Args:
        before: A graph module, or a program that holds one; copy it (`copy.deepcopy`) before a
            pass that works in place.
        after: What became of it, or another graph.

    Returns:
        The differences; false when there are none.
    """
    old, new = (list(graph_module_of(gm).graph.nodes) for gm in (before, after))
    matcher = _Matcher(old, new)
    changes = sorted(matcher.changes(), key=lambda found: found[0])
    return GraphDiff(
        changes=tuple(change for _, change in changes),
        matched={a.name: b.name for a, b in matcher.pairs.items()},
        nodes_before=len(old),
        nodes_after=len(new),
    )


class _Matcher:
    """Finds which nodes of two graphs are the same."""

    def __init__(self, old: list[fx.Node], new: list[fx.Node]) -> None:
        self._old = old
        self._new = new
        self._position = {node: i for i, node in enumerate(old)}
        self._position.update({node: i for i, node in enumerate(new)})
        self.pairs: dict[fx.Node, fx.Node] = {}
        self._back: dict[fx.Node, fx.Node] = {}
        self.replaced: list[tuple[list[fx.Node], list[fx.Node]]] = []
        self._match_by_name()
        self._match_by_provenance()
        self._match_by_structure()
        self._stands_for = self._replacements()

    def _pair(self, a: fx.Node, b: fx.Node) -> None:
        self.pairs[a] = b
        self._back[b] = a

    def _match_by_name(self) -> None:
        by_name = {node.name: node for node in self._new}
        for node in self._old:
            other = by_name.get(node.name)
            if other is not None and _identity(node) == _identity(other):
                self._pair(node, other)

    def _match_by_provenance(self) -> None:
        """Join what is left by the original nodes that they say to stand for."""
        origin: dict[str, list[fx.Node]] = {}
        for node in self._old:
            if node not in self.pairs:
                for name in provenance_of(node).replaced:
                    origin.setdefault(name, []).append(node)
        group_of: dict[fx.Node, int] = {}
        groups: dict[int, tuple[dict[fx.Node, None], dict[fx.Node, None]]] = {}
        for number, node in enumerate(self._new):
            if node in self._back:
                continue
            claimed = [o for name in provenance_of(node).replaced for o in origin.get(name, ())]
            if not claimed or provenance_of(node).replaced == (node.name,):
                continue
            groups[number] = (dict.fromkeys(claimed), {node: None})
            for other in {group_of[o] for o in claimed if o in group_of}:
                olds, news = groups.pop(other)
                groups[number][0].update(olds)
                groups[number][1].update(news)
            group_of.update(dict.fromkeys(groups[number][0], number))
        for olds, news in groups.values():
            self.replaced.append((sorted(olds, key=self._at), sorted(news, key=self._at)))

    def _match_by_structure(self) -> None:
        """Join what does the same to the same operands, in the order of the graphs."""
        taken = {node for olds, news in self.replaced for node in (*olds, *news)}
        waiting: dict[object, list[fx.Node]] = {}
        for node in reversed(self._old):
            if node not in self.pairs and node not in taken:
                operands = tuple(self.pairs.get(o) for o in node.all_input_nodes)
                key = (_identity(node), _constants(node), operands)
                waiting.setdefault(key, []).append(node)
        for node in self._new:
            if node in self._back or node in taken:
                continue
            key = (_identity(node), _constants(node), tuple(node.all_input_nodes))
            if waiting.get(key):
                self._pair(waiting[key].pop(), node)

    def _replacements(self) -> dict[fx.Node, set[fx.Node]]:
        return {old: set(news) for olds, news in self.replaced for old in olds}

    def _at(self, node: fx.Node) -> int:
        return self._position[node]

    def changes(self) -> Iterator[tuple[tuple[int, int], Change]]:
        """Yield the differences, each with its place."""
        gone = set(self.pairs)
        come = set(self._back)
        for olds, news in self.replaced:
            gone.update(olds)
            come.update(news)
            by = dict.fromkeys(name for node in news for name in provenance_of(node).by)
            yield (self._at(olds[0]), 0), _change("replaced", olds, news, by=tuple(by))
        for node in self._old:
            if node not in gone:
                yield (self._at(node), 0), _change("removed", [node], [])
        for node in self._new:
            if node not in come:
                by = provenance_of(node).by
                yield (self._at(node), 1), _change("added", [], [node], by=by)
        for a, b in self.pairs.items():
            why = self._differences(a, b)
            if why:
                kind = "rewired" if why[0] == "operands" else "changed"
                yield (self._at(a), 2), _change(kind, [a], [b], why=tuple(why))

    def _differences(self, a: fx.Node, b: fx.Node) -> list[str]:
        why: list[str] = []
        operands = list(zip(a.all_input_nodes, b.all_input_nodes, strict=False))
        if len(a.all_input_nodes) != len(b.all_input_nodes) or not all(
            self.pairs.get(o) is n or n in self._stands_for.get(o, ()) for o, n in operands
        ):
            why.append("operands")
        elif _constants(a) != _constants(b):
            why.append("constants")
        known = type_of(a), type_of(b)
        if all(isinstance(t, TensorType) for t in known) and str(known[0]) != str(known[1]):
            why.append("type")
        if a.name != b.name:
            why.append("name")
        return why


def _identity(node: fx.Node) -> tuple[str, str]:
    target = str(node.target) if node.op in ("get_attr", "placeholder", "call_module") else ""
    return operator_name(node), target


def _constants(node: fx.Node) -> str:
    """Write the arguments with a mark in place of each operand."""
    return repr(map_arg((node.args, node.kwargs), lambda _: "%"))


def _change(
    kind: str,
    olds: list[fx.Node],
    news: list[fx.Node],
    *,
    by: tuple[str, ...] = (),
    why: tuple[str, ...] = (),
) -> Change:
    return Change(
        kind=kind,
        before=tuple(node.name for node in olds),
        after=tuple(node.name for node in news),
        old=tuple(format_node(node) for node in olds),
        new=tuple(format_node(node) for node in news),
        by=by,
        why=why,
    )


def _lines(change: Change) -> Iterator[str]:
    sign = _SIGNS[change.kind]
    notes = [*change.why, *(f"by {name}" for name in change.by)]
    note = f"    # {change.kind}: {', '.join(notes)}" if notes else f"    # {change.kind}"
    if change.kind in ("added", "removed"):
        yield from (f"{sign} {text}{note}" for text in (*change.old, *change.new))
        return
    before = ", ".join(f"%{name}" for name in change.before)
    after = ", ".join(f"%{name}" for name in change.after)
    yield f"{sign} {before}{note}" if before == after else f"{sign} {before} → {after}{note}"
    yield from (f"  - {text}" for text in change.old)
    yield from (f"  + {text}" for text in change.new)


def _html_row(change: Change) -> str:
    old = "<br>".join(f"<code>{escape(text)}</code>" for text in change.old)
    new = "<br>".join(f"<code>{escape(text)}</code>" for text in change.new)
    note = escape(", ".join([*change.by, *change.why]))
    return (
        f'<tr class="fx-{change.kind}"><td><b>{change.kind}</b></td><td class="fx-old">{old}</td>'
        f'<td class="fx-new">{new}</td><td>{note}</td></tr>'
    )
