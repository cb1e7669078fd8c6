"""What is different between two graphs, node by node; `matching` says which nodes are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.analysis.cost import Cost
from fxkit.errors import UnsupportedError
from fxkit.ir.journal import GraphChange as Edit
from fxkit.ir.printer import format_node
from fxkit.ir.provenance import provenance_of
from fxkit.ir.types import TensorType, type_of
from fxkit.view.differences.graph_states import comparison
from fxkit.view.differences.matching import Matcher, constants, identity, operands
from fxkit.view.differences.patch import Patch, attributes_of
from fxkit.view.pages.page import fragment_page, notebook_bundle, write_file
from fxkit.view.profiling.costs import costs_of, is_call
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.subject import graph_module_of
from fxkit.view.texts.text_table import plural, quantity

VERSION = 2
"""Version of the dictionaries that `GraphDiff.to_dict` returns."""

KINDS: tuple[str, ...] = ("added", "removed", "replaced", "rewired", "changed")

_TYPES = (TensorType, tuple, list, dict)
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
        why: What is different, in words: `operands`, `operator`, `constants`, `type`, `name`.
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
        changes: The differences: those of what computes, then those of inputs and parameters, each
            in the order of the graphs.
        matched: Name before → name after, for the nodes that are in both.
        nodes_before: Number of nodes of the first graph.
        nodes_after: Number of nodes of the second graph.
        cost_before: Operations and bytes of the first graph, as far as they are known.
        cost_after: The same of the second graph.
        patch: The differences in a form that can be applied.
        modules: The two graphs.
    """

    changes: tuple[Change, ...]
    matched: Mapping[str, str]
    nodes_before: int
    nodes_after: int
    cost_before: Cost
    cost_after: Cost
    patch: Patch
    modules: tuple[fx.GraphModule, fx.GraphModule]

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

    @property
    def rerouted(self) -> tuple[str, ...]:
        """Names of the nodes that are as they were, but read what stands for their operands."""
        return tuple(self.patch.rerouted)

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return what the second graph is, made of the first one and the differences.

        Args:
            gm: The first graph, or a copy of it; it is left as it is.

        Raises:
            RewriteError: It is another graph.
        """
        return self.patch.apply(gm)

    def summary(self) -> str:
        """Return one line with the counts, and what became of the cost."""
        head = f"{plural(self.nodes_before, 'node')} before, {self.nodes_after:,} after"
        parts = [f"{count:,} {kind}" for kind, count in self.counts.items() if count]
        return f"{head}: {', '.join([*parts, *self._costs()]) or 'no difference'}"

    def _costs(self) -> Iterator[str]:
        for name, unit in (("flops", "FLOP"), ("bytes", "B")):
            before, after = getattr(self.cost_before, name), getattr(self.cost_after, name)
            if before and after and before != after:
                change = f"{100 * (after - before) / before:+.1f} %"
                yield f"{quantity(before, unit)} → {quantity(after, unit)} ({change})"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(line for c in self.changes for line in _lines(c))])

    __repr__ = __str__

    def html(self) -> str:
        """Return one self-contained page: the graphs side by side, everything at its place in both,
        and below them every difference.
        """
        body = f'<div class="fx-page">{self._drawing()}<h2>Every difference</h2>'
        page = f"{body}{self.html_fragment()}</div>"
        return fragment_page("difference of two graphs", page, kind="fx-plain")

    def _drawing(self) -> str:
        return comparison(self).html_fragment() if self.changes else ""

    def save(self, path: str | Path) -> Path:
        """Write the differences to a file that ends in `.html`, `.json` or `.txt`.

        Raises:
            UnsupportedError: The path ends otherwise, or can't be written.
        """
        writers = {".html": self.html, ".json": self.to_json, ".txt": self.__str__}
        suffix = Path(path).suffix.lower()
        if suffix not in writers:
            raise UnsupportedError(
                f"expected a path that ends in .html, .json or .txt, got {str(path)!r}"
            )
        return write_file(path, writers[suffix]())

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
            "cost_before": asdict(self.cost_before),
            "cost_after": asdict(self.cost_after),
            "rerouted": list(self.rerouted),
            "changes": [asdict(change) for change in self.changes],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return notebook_bundle(str(self), self.html())


def diff(before: Any, after: Any, *, journal: Sequence[Edit] | None = None) -> GraphDiff:
    """Compare two graphs.

    Args:
        before: A graph module, or a program that holds one; copy it (`copy.deepcopy`) before a
            pass that works in place, or take it from `PassResult.timeline`.
        after: What became of it, or another graph.
        journal: What an edit session or a pass recorded between the two, such as
            `PassRecord.changes`: then nodes are the same that were never erased.

    Returns:
        The differences; false when there are none.

    Raises:
        UnsupportedError: When one of the two holds no graph.

    Example:
        >>> import copy, torch, fxkit
        >>> before = fxkit.symbolic_trace(lambda x: x.sin().sin() * 2)
        >>> after = copy.deepcopy(before)
        >>> with fxkit.edit(after) as e:
        ...     sin = fxkit.graph(after)["sin_1"].fx_node
        ...     e.replace(sin, e.call(torch.cos, *sin.args))
        >>> print(fxkit.diff(before, after))
        5 nodes before, 5 after: 1 replaced
        ~ %sin_1 → %cos    # replaced: by edit
          - %sin_1 = aten.sin(%sin)
          + %cos = aten.cos(%sin)
    """
    modules = graph_module_of(before), graph_module_of(after)
    old, new = (list(gm.graph.nodes) for gm in modules)
    finder = _Finder(Matcher(old, new, journal), old, new)
    changes = [change for _, change in sorted(finder.changes(), key=lambda found: found[0])]
    made = {name for change in changes for name in change.after}
    nodes = {node.name: node for node in new if node.name in made}
    matched = {a.name: b.name for a, b in finder.matcher.pairs.items()}
    return GraphDiff(
        changes=tuple(changes),
        matched=matched,
        nodes_before=len(old),
        nodes_after=len(new),
        cost_before=_cost(old),
        cost_after=_cost(new),
        patch=Patch(
            order=tuple(node.name for node in new),
            matched={after: before for before, after in matched.items()},
            made=nodes,
            rerouted=finder.rerouted,
            attributes=attributes_of(modules[1], nodes),
        ),
        modules=modules,
    )


def _cost(nodes: list[fx.Node]) -> Cost:
    """Add up what is known of the costs; None where nothing is."""
    found = [cost for node, cost in zip(nodes, costs_of(nodes), strict=True) if is_call(node)]
    flops = [cost.flops for cost in found if cost.flops is not None]
    moved = [cost.bytes for cost in found if cost.bytes is not None]
    return Cost(sum(flops) if flops else None, sum(moved) if moved else None)


_Place = tuple[bool, int, int]


class _Finder:
    """Finds what is different about nodes that are the same, and tells of those that are not."""

    def __init__(self, matcher: Matcher, old: list[fx.Node], new: list[fx.Node]) -> None:
        self.matcher = matcher
        self._old = old
        self._new = new
        self.rerouted: dict[str, dict[str, str]] = {}

    def changes(self) -> Iterator[tuple[_Place, Change]]:
        """Yield the differences, each with its place; inputs and parameters come last."""
        matcher = self.matcher
        gone = set(matcher.pairs)
        come = set(matcher.back)
        for olds, news in matcher.replaced:
            gone.update(olds)
            come.update(news)
            by = dict.fromkeys(name for node in news for name in provenance_of(node).by)
            yield self._place(0, *olds, *news), _change("replaced", olds, news, by=tuple(by))
        for node in self._old:
            if node not in gone:
                yield self._place(0, node), _change("removed", [node], [])
        for node in self._new:
            if node not in come:
                by = provenance_of(node).by
                yield self._place(1, node), _change("added", [], [node], by=by)
        for a, b in matcher.pairs.items():
            why = self._differences(a, b)
            if why:
                kind = "rewired" if why[0] == "operands" else "changed"
                yield self._place(2, a), _change(kind, [a], [b], why=tuple(why))

    def _place(self, rank: int, *nodes: fx.Node) -> _Place:
        is_data = all(node.op in ("placeholder", "get_attr") for node in nodes)
        return is_data, self.matcher.at(nodes[0]), rank

    def _differences(self, a: fx.Node, b: fx.Node) -> list[str]:
        why: list[str] = []
        if not self._has_same_operands(a, b):
            why.append("operands")
        elif a.op != "placeholder" and identity(a) != identity(b):
            why.append("operator")
        elif constants(a) != constants(b):
            why.append("constants")
        known = type_of(a), type_of(b)
        if (
            a.op != "output"
            and all(isinstance(t, _TYPES) for t in known)
            and str(known[0]) != str(known[1])
        ):
            why.append("type")
        if a.name != b.name:
            why.append("name")
        return why

    def _has_same_operands(self, a: fx.Node, b: fx.Node) -> bool:
        """Compare operands; what stands for a replaced operand is the same, and is noted."""
        olds, news = operands(a), operands(b)
        if len(olds) != len(news):
            return False
        routes: dict[str, str] = {}
        for old, new in zip(olds, news, strict=True):
            if self.matcher.pairs.get(old) is new:
                continue
            if new not in self.matcher.stands_for.get(old, ()):
                return False
            if routes.setdefault(old.name, new.name) != new.name:
                return False
        if routes:
            self.rerouted[b.name] = routes
        return True


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
