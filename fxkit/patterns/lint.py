"""Find rules that can't act, or that stand in one another's way, by running them on their patterns.

Every reading of every rule's pattern becomes a small graph, and all rules are tried on it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import FxkitError
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_graph
from fxkit.patterns.engine import rewrite
from fxkit.patterns.inputs import captures_of, make_operands, operand_cases, pattern_module
from fxkit.patterns.match_results import Match
from fxkit.patterns.matcher import match_at
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.refusals import refusal
from fxkit.patterns.rewrite_report import OWN_WORK
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.variants import plain_variants

# How many readings of a pattern are looked at, and how many operands are tried for each.
_READINGS = 8
_TRIES = 48
# More rewrites than this on a pattern's own small graph have no end.
_LIMIT = 40


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a rule, or with several together.

    Attributes:
        kind: `"never matches"`, `"shadowed"`, `"endless"` or `"depends on order"`.
        rules: Names of the rules; the one to mend first.
        reason: What is wrong, in words.
    """

    kind: str
    rules: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(self.rules)}: {self.kind}: {self.reason}"


@dataclass(frozen=True)
class Example:
    """A graph that a rule acts on by itself, with the place where it does."""

    rule: Rule
    module: fx.GraphModule
    root: str

    def node(self) -> fx.Node:
        return next(node for node in self.module.graph.nodes if node.name == self.root)

    def result_of(self, rule: Rule) -> str:
        """Return the graph that one rewrite by `rule` leaves, as text."""
        rewritten = copy.deepcopy(self.module)
        rewrite(rewritten, rule, limit=1)
        for index, node in enumerate(rewritten.graph.nodes):
            node.name = f"v{index}" if node.op != "output" else node.name
            node.meta.clear()
        return format_graph(rewritten)


def lint_rules(rules: Iterable[Rule]) -> list[Finding]:
    """Check that rules can act, come to an end and do not depend on their order.

    Found are rules that never match: their root is no operator, or no operands were found that all
    their demands accept; rules that are shadowed by others with the same root, so that they never
    get to act; rules that rewrite their own results, or undo each other, without end; and rules of
    equal benefit that match as much at the same root and give different results. Patterns of other
    callables than ATen's operators can't be run, and are left out.

    Args:
        rules: The rules that are used together, in their order.

    Returns:
        The findings, in the order of the rules; an empty list when there is nothing to mend.

    Cost: each rule's readings times the rules of the same root, with a small graph for each.
    """
    rules = list(rules)
    findings: list[Finding] = []
    for rule in rules:
        missing = _unknown_operator(rule)
        if missing is not None:
            reason = f"expected operators, got {missing}, which torch does not have"
            findings.append(Finding("never matches", (rule.name,), reason))
        elif _is_runnable(rule):
            findings.extend(_check(rule, rules))
    return list({(f.kind, frozenset(f.rules)): f for f in reversed(findings)}.values())[::-1]


def _check(rule: Rule, rules: Sequence[Rule]) -> Iterator[Finding]:
    examples = list(examples_of(rule))
    if not examples:
        reason = "expected operands that its demands accept, got none; give samples= if there are"
        yield Finding("never matches", (rule.name,), reason)
        return
    yield from _shadows(rule, examples, rules)
    for example in examples:
        yield from _endless(example, rules)


def _shadows(rule: Rule, examples: Sequence[Example], rules: Sequence[Rule]) -> Iterator[Finding]:
    """Look who is taken at the rule's own root: nobody else may always be."""
    winners = []
    for example in examples:
        found = _matching(example, rules)
        best = max((candidate.benefit, size) for candidate, size in found)
        first, *equals = [c for c, size in found if (c.benefit, size) == best]
        for other in equals:
            if example.result_of(first) != example.result_of(other):
                reason = f"both match {best[1]} operations of {rule.name}, with other results"
                yield Finding("depends on order", (first.name, other.name), reason)
        winners.append(first)
    if all(winner is not rule for winner in winners):
        names = dict.fromkeys(winner.name for winner in winners)
        reason = f"wherever it matches, {' or '.join(names)} is taken"
        yield Finding("shadowed", (rule.name, *names), reason)


def _matching(example: Example, rules: Sequence[Rule]) -> list[tuple[Rule, int]]:
    """Return the rules that accept the example's root, with the size of their matches."""
    node = example.node()
    call = resolve(node)
    found = []
    for rule in rules:
        if call is None or call.name not in rule.pattern.root_operators:
            continue
        match = match_at(rule.pattern, node, commute=rule.commute)
        if isinstance(match, Match) and refusal(rule, match) is None:
            found.append((rule, len(match.nodes)))
    return found


def _endless(example: Example, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Run all rules: a small graph must be done after a few rewrites."""
    report = rewrite(copy.deepcopy(example.module), rules, limit=_LIMIT)
    again = {rule for rule, _, why in report.refusals if why == OWN_WORK}
    applied = [site.rule for site in report.sites]
    first = min((applied.index(name) for name in again), default=len(applied))
    if report.stopped is not None:
        first = min(first, _LIMIT // 2)
    going_on = tuple(dict.fromkeys(applied[first:]))
    if len(going_on) == 1:
        yield Finding("endless", going_on, "it matches its own result again and again")
    elif going_on:
        yield Finding("endless", tuple(sorted(going_on)), "they undo each other's results")


def examples_of(rule: Rule) -> Iterator[Example]:
    """Yield a small typed graph for each reading of a pattern, with operands that it accepts."""
    for reading in plain_variants(rule.pattern, _READINGS):
        found = _example(rule, reading)
        if found is not None:
            yield found


def _example(rule: Rule, reading: Pattern) -> Example | None:
    plain = replace(rule, pattern=reading)
    generator = torch.Generator().manual_seed(0)
    for case in itertools.islice(operand_cases(rule), _TRIES):
        values = make_operands(rule, *case, generator)
        module = pattern_module(plain, values)
        args = tuple(
            values[name] for name in captures_of(plain) if isinstance(values[name], torch.Tensor)
        )
        try:
            propagate_types(module, args)
        except FxkitError:
            continue
        report = rewrite(copy.deepcopy(module), rule, limit=1)
        if report.count:
            return Example(rule, module, report.sites[0].root)
    return None


def _unknown_operator(rule: Rule) -> str | None:
    """Return an operator of ATen that a pattern names and that is none."""
    for operation in rule.pattern.operations:
        packet = operation.operator.removeprefix("aten.")
        if packet != operation.operator and not hasattr(torch.ops.aten, packet):
            return operation.operator
    return None


def _is_runnable(rule: Rule) -> bool:
    known = ("aten.", "python.getitem", "python.getattr")
    return all(operation.operator.startswith(known) for operation in rule.pattern.operations)
