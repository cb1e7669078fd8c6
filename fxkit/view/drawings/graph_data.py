"""A graph as plain data: what `.json` files hold and what the viewer in an HTML page draws.

The data is one JSON object, `schema` "fxkit.graph". docs/views.md describes it; `VERSION` goes up
with each change that an older reader would get wrong. It holds the program and no coordinates: the
viewer places boxes by itself, so that modules can be opened and closed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.types import TensorType, type_of
from fxkit.view.drawings.hierarchy import Hierarchy, Leaf, ModuleGroup, stands_for
from fxkit.view.profiling.costs import costs_of, is_call

SCHEMA = "fxkit.graph"
VERSION = 2
"""Version of the data; 1 held coordinates."""

NUMBERS = ("seconds", "flops", "bytes", "error")
"""The columns of numbers: seconds, operations, bytes, relative error."""


def graph_data(
    hierarchy: Hierarchy,
    opened: Collection[ModuleGroup],
    *,
    title: str,
    total: int,
    colour: str = "family",
    numbers: Mapping[str, Mapping[str, float]] | None = None,
    texts: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Describe a graph.

    Args:
        hierarchy: Its nodes and groups.
        opened: The groups that are open at first.
        title: What it is called.
        total: Nodes of the whole graph, of which the hierarchy may hold a part.
        colour: The column that colours at first.
        numbers: More columns of numbers, each by node name: `seconds`, `error`, ...
        texts: More columns of text, each by node name: `region`, ...

    Returns:
        Plain values, to be written as JSON.
    """
    groups, numbering = _groups(hierarchy)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "title": title,
        "nodes": total,
        "shown": hierarchy.size,
        "colour": colour,
        "columns": _columns(hierarchy, numbers or {}, texts or {}),
        "operands": _operands(hierarchy),
        "groups": groups,
        "opened": sorted(numbering[group] for group in opened),
    }


def as_json(data: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return data as JSON, without blanks unless it is indented."""
    separators = (",", ":") if indent is None else None
    return json.dumps(data, indent=indent, ensure_ascii=False, separators=separators)


def as_script(data: Mapping[str, Any]) -> str:
    """Return data as JSON that may stand inside a `<script>` element of a page."""
    text = as_json(data).encode("utf-8", "replace").decode("utf-8")
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _columns(
    hierarchy: Hierarchy,
    numbers: Mapping[str, Mapping[str, float]],
    texts: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    nodes = hierarchy.nodes
    labels = [hierarchy.labels[node] for node in nodes]
    subjects = [hierarchy.subject(node) for node in nodes]
    columns: dict[str, Any] = {
        "name": [label.name for label in labels],
        "nodes": _indexed(stands_for(node) for node in subjects),
        "operator": _indexed(label.operator for label in labels),
        "constants": _indexed(label.constants for label in labels),
        "type": _indexed(label.type for label in labels),
        "family": _indexed(label.family for label in labels),
        "stride": _indexed(_stride(node) for node in subjects),
        "source": _indexed(str(label.source or "") for label in labels),
        "reads": _indexed(_attributes(node) for node in subjects),
        "effect": _indexed(effect_word(node) for node in subjects),
    }
    found = _costs(subjects)
    for key, values in numbers.items():
        found[key] = [values.get(label.name) for label in labels]
    for key, words in texts.items():
        columns[key] = _indexed(words.get(label.name, "") for label in labels)
    columns.update({k: _indexed(v) for k, v in found.items() if any(x is not None for x in v)})
    return columns


def _costs(nodes: Sequence[fx.Node]) -> dict[str, list[float | None]]:
    """Return operations and bytes; nothing where no call's are known."""
    costs = costs_of(nodes)
    calls = [cost for node, cost in zip(nodes, costs, strict=True) if is_call(node)]
    return {
        name: [getattr(cost, name) for cost in costs]
        for name in ("flops", "bytes")
        if any(getattr(cost, name) is not None for cost in calls)
    }


def _indexed(values: Iterable[Any]) -> dict[str, list[Any]]:
    """Write each value once, and for each node which one it has."""
    known: dict[Any, int] = {}
    index = [known.setdefault(value, len(known)) for value in values]
    return {"values": list(known), "index": index}


def _stride(node: fx.Node) -> str:
    known = type_of(node)
    if not isinstance(known, TensorType) or known.stride is None:
        return ""
    return f"({', '.join(str(step) for step in known.stride)})"


def _attributes(node: fx.Node) -> str:
    return ", ".join(str(o.target) for o in node.all_input_nodes if o.op == "get_attr")


def effect_word(node: fx.Node) -> str:
    """Return the strongest effect of a node: `unknown`, `writes`, `random`, ..., `pure`."""
    effects = effects_of(node)
    if effects.is_opaque:
        return "unknown"
    if effects.writes:
        return "writes"
    if effects.is_random:
        return "random"
    if effects.is_global:
        return "mode"
    if effects.may_raise:
        return "check"
    return "alias" if effects.aliases else "pure"


def _operands(hierarchy: Hierarchy) -> list[list[int]]:
    position = {node: i for i, node in enumerate(hierarchy.nodes)}
    return [[position[operand] for operand in hierarchy.operands[node]] for node in hierarchy.nodes]


def _groups(hierarchy: Hierarchy) -> tuple[list[dict[str, Any]], dict[ModuleGroup, int]]:
    """Number the groups, the root first, folded-away ones included, and describe each."""
    position = {node: i for i, node in enumerate(hierarchy.nodes)}
    ordered = _walk(hierarchy.root)
    numbering = {group: i for i, group in enumerate(ordered)}
    return [_group(group, numbering, position) for group in ordered], numbering


def _walk(root: ModuleGroup) -> list[ModuleGroup]:
    found: list[ModuleGroup] = []
    waiting = [root]
    while waiting:
        group = waiting.pop()
        found.append(group)
        below = [item for item in group.items if isinstance(item, ModuleGroup)]
        below += group.fold.members if group.fold else ()
        waiting.extend(reversed(below))
    return found


def _group(
    group: ModuleGroup, numbering: Mapping[ModuleGroup, int], position: Mapping[Any, int]
) -> dict[str, Any]:
    items = [
        position[item.node] if isinstance(item, Leaf) else ~numbering[item] for item in group.items
    ]
    described: dict[str, Any] = {
        "path": group.path,
        "name": group.name,
        "kind": group.kind,
        "parameters": group.parameters,
        "items": items,
    }
    if group.call:
        described["call"] = group.call
    if group.fold is not None:
        described["fold"] = [numbering[member] for member in group.fold.members]
    return described


def column(data: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return one column of the data as a plain list, one value a node."""
    stored = data["columns"][name]
    if isinstance(stored, dict):
        return [stored["values"][i] for i in stored["index"]]
    return stored
