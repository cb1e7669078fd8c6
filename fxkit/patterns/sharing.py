"""With which values of the graph the results of a match, and of its replacement, share memory."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.shared_memory import (
    Sharing,
    is_same_memory,
    memory_below,
    run_without_numbers,
    without_numbers,
)
from fxkit.ir.types import type_of
from fxkit.patterns.insertion_point import bound_to
from fxkit.patterns.language import COMPUTES, computation
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule


def sharing_of_match(match: Match, output: fx.Node, gone: frozenset[fx.Node]) -> Sharing:
    """Return with which nodes that stay, or that are results too, a result shares memory.

    Args:
        match: The match.
        output: One of its results.
        gone: The matched nodes that nobody else uses.
    """
    found = memory_below(output, match.matched)
    return Sharing(*(tuple(n for n in nodes if n is not output and n not in gone)
                     for nodes in (found.may, found.surely)))  # fmt: skip


def sharing_of_replacement(rule: Rule, match: Match, index: int) -> Sharing:
    """Return with which nodes of the graph a result of the replacement will share memory.

    Args:
        rule: The rule.
        match: A match of its pattern.
        index: Which of the results.
    """
    template = rule.template
    shared = {i: bound for i in template.shared[index] if (bound := bound_to(rule, match, i))}
    if not shared:
        return Sharing()
    may = tuple(dict.fromkeys(shared.values()))
    value = template.values[index]
    if value in shared:
        return Sharing(may, may)
    below = memory_below(value, template.body)
    if all(i in below.surely for i in shared):
        return Sharing(may, may)
    known = _run(rule, match)
    if value not in known or any(i not in known for i in shared):
        return Sharing(may, tuple(bound for i, bound in shared.items() if i in below.surely))
    real = [bound for i, bound in shared.items() if is_same_memory(known[value], known[i])]
    return Sharing(tuple(real), tuple(real))


def _run(rule: Rule, match: Match) -> dict[fx.Node, Any]:
    """Run a replacement on tensors without numbers, as far as types are known."""
    template = rule.template
    known: dict[fx.Node, Any] = {}
    bound: dict[fx.Node, Any] = {}
    for node in template.inputs:
        if node.op == "placeholder":
            bound[node] = match.bindings.get(str(node.target))
        elif node in template.reuses:
            bound[node] = match.values[template.reuses[node]]
    for node, value in bound.items():
        is_node = isinstance(value, fx.Node)
        tensor = without_numbers(type_of(value)) if is_node else value
        if not is_node or tensor is not None:
            known[node] = tensor
    for node in template.body:
        if node.target is computation and all(o in bound for o in node.all_input_nodes):
            known[node] = node.meta[COMPUTES](*map_arg(node.args, bound.__getitem__))
    return run_without_numbers([n for n in template.body if n not in known], known)
