"""Find patterns and apply rules, in time proportional to the graph.

Rules are indexed by the operator of their root: a rule costs nothing at nodes of other operators.
A worklist visits the nodes in order; a rewrite puts the nodes that it made, and their users, back
on it. The whole run is one edit session: rolled back on any error, recompiled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fxkit import config
from fxkit.analysis.cost import cost_of
from fxkit.analysis.editing import edit_as
from fxkit.analysis.retyping import propagate_types
from fxkit.errors import RewriteError
from fxkit.gc_pause import paused_collector
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import operator_of, operator_of_overload
from fxkit.ir.printer import format_node_safely, format_source
from fxkit.ir.program_changes import GraphProgram
from fxkit.ir.session import EditSession
from fxkit.patterns.compiled_matcher import find_match
from fxkit.patterns.insertion_point import InsertionPoint
from fxkit.patterns.match_results import Match
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.refusals import refusal
from fxkit.patterns.replacer import Replacer
from fxkit.patterns.rewrite_report import OWN_WORK, RewriteReport, Site, Tally
from fxkit.patterns.rewriting import Rule, check_rules
from fxkit.patterns.rule_index import RuleLevel, by_root_and_benefit
from fxkit.patterns.safety import Safety
from fxkit.patterns.templates import pattern
from fxkit.patterns.termination import Termination
from fxkit.patterns.worklist import Worklist
from fxkit.torch_adapters.fx_nodes import is_erased
from fxkit.torch_adapters.graph_surgery import nodes_by_target

# Rules defined in here are proven, types and all.
_OWN_RULES = str(Path(__file__).parents[1])


def find(
    gm: fx.GraphModule | GraphProgram,
    wanted: Pattern | Callable[..., Any] | Rule,
    *,
    commute: bool = True,
) -> list[Match]:
    """Return every place where a pattern occurs, in graph order; they may overlap.

    Args:
        gm: The module to search; or a captured program, whose graph that ran last is searched.
        wanted: A pattern, a function that computes it, or a rule.
        commute: Try the operands of commutative operators in both orders.

    Returns:
        The matches, each with the nodes it took and what the parameters stand for.

    Raises:
        PatternError: When `wanted` is no pattern.
        UnsupportedError: When `gm` is no `GraphModule`.

    Cost: linear in the nodes.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x, y: (x + 1) * torch.sigmoid(x + 1) + y.sigmoid() * y)
        >>> for found in fxkit.find(gm, lambda x: x * torch.sigmoid(x)):
        ...     print(found.root, found["x"])
        mul_1 y
    """
    gm = graph_module_of(gm)
    rule = wanted if isinstance(wanted, Rule) else None
    searched = wanted.pattern if isinstance(wanted, Rule) else pattern(wanted)
    operators = searched.root_operators
    matches = []
    with paused_collector():
        for node in gm.graph.nodes:
            operator = operator_of(node)
            if operator is None or operator.name not in operators:
                continue
            found = find_match(searched, node, commute=commute)
            if found is not None and (rule is None or refusal(rule, found) is None):
                matches.append(found)
    return matches


def rewrite(
    gm: fx.GraphModule | GraphProgram,
    rules: Rule | Iterable[Rule],
    *,
    fixpoint: bool = True,
    limit: int | None = None,
) -> RewriteReport:
    """Apply rules to a graph, in place.

    Where matches overlap, the rule with the larger benefit goes first, in the whole graph; at one
    node, of rules with the same benefit, the one whose match moves most bytes by the cost model,
    then the one that matches most nodes, else the first given. A
    match that the effects around it forbid is left alone, with the reason in the report; so is one
    of nodes all of which the rule has made itself, at once or in a circle of rules, unless it makes
    fewer of them. What users have noted in the `meta` of a matched result goes to the new node that
    takes its place.

    Rules that are applied to a captured program, or to its graph, belong to the program: graphs
    that it captures from then on, for other calls, are rewritten by them before they run.

    Args:
        gm: The module to rewrite; or a captured program, of which the graph that ran last is
            rewritten.
        rules: The rules, in order of preference.
        fixpoint: Go on with what rewrites made, until nothing matches; else visit each node of the
            graph as it was once.
        limit: Bound on the number of rewrites; `FXKIT_MAX_REWRITES` when left out.

    Returns:
        What was done: each rewrite with its site, what was left alone and why, tries, hits and time
        of each rule.

    Raises:
        RewriteError: When a rule's predicate or replacement raises, or a rule goes on rewriting its
            own result. The graph is then as it was before.
        PatternError: When something is given that is no rule.
        UnsupportedError: When `gm` is no `GraphModule`.

    Example:
        >>> import torch, fxkit
        >>> @fxkit.rule
        ... def negate_twice(x):
        ...     return -(-x), x
        >>> gm = fxkit.symbolic_trace(lambda x: torch.neg(x.neg()) + 1)
        >>> len(fxkit.rewrite(gm, negate_twice).sites)
        1
        >>> print(fxkit.graph(gm))
        graph(%x):
          %add = aten.add(%x, 1)
          return %add
    """
    rules = check_rules(rules)
    change = RulesChange(tuple(rules), fixpoint, limit)
    with paused_collector(), edit_as(change, gm) as session:
        return rewrite_in(session, rules, fixpoint=fixpoint, limit=limit)


def rewrite_in(
    session: EditSession,
    rules: Iterable[Rule],
    *,
    fixpoint: bool = True,
    limit: int | None = None,
) -> RewriteReport:
    """Apply rules as `rewrite` does, in a session that is open already.

    It makes no savepoint and no check at its end, which whoever opened the session makes anyway, as
    the pass manager does. `fxkit.rewrite(session.gm, rules)` joins the session too, with both.

    Args:
        session: The session.
        rules: The rules, in order of preference.
        fixpoint: Go on with what rewrites made, until nothing matches.
        limit: Bound on the number of rewrites; `FXKIT_MAX_REWRITES` when left out.

    Returns:
        What was done, as `rewrite` returns it.
    """
    limit = config.current().max_rewrites if limit is None else limit
    with paused_collector():
        return _Run(session, check_rules(rules), fixpoint, limit).report()


@dataclass(frozen=True)
class RulesChange:
    """Rules that were applied to a captured program, to be applied to its other graphs.

    Attributes:
        rules: The rules.
        fixpoint: As `rewrite` takes it.
        limit: As `rewrite` takes it.
    """

    rules: tuple[Rule, ...]
    fixpoint: bool = True
    limit: int | None = None

    def __str__(self) -> str:
        return f"the rewrite by {', '.join(rule.name for rule in self.rules)}"

    @property
    def alters_results(self) -> bool:
        """Whether a rule is not fxkit's own, so that results may be others on purpose."""
        return any(not rule.file.startswith(_OWN_RULES) for rule in self.rules)

    def apply(self, gm: fx.GraphModule, args: tuple[Any, ...] | None) -> None:
        """Apply the rules to another graph."""
        rewrite(gm, self.rules, fixpoint=self.fixpoint, limit=self.limit)


class _Run:
    """One run of rules over one graph."""

    def __init__(
        self, session: EditSession, rules: Sequence[Rule], fixpoint: bool, limit: int | None
    ) -> None:
        self.session = session
        self.graph = session.graph
        self.fixpoint = fixpoint
        self.limit = limit
        self.levels: dict[str, list[tuple[int, RuleLevel]]] = by_root_and_benefit(tuple(rules))
        self.tallies: dict[str, Tally] = {}
        self.sites: list[Site] = []
        self.refusals: dict[tuple[str, str], str] = {}
        self._termination = Termination()
        self._safety = Safety(session.graph)
        self._replacer = Replacer(session, self._safety)
        self._queue = Worklist(self._visits())
        self._refused: dict[fx.Node, int] = {}
        self._kept: set[tuple[Rule, fx.Node]] = set()
        self._changed: dict[fx.Node, None] = {}
        self._deepest = 0

    def report(self) -> RewriteReport:
        stopped = None
        while self._queue or self._retry():
            if self.limit is not None and len(self.sites) >= self.limit:
                stopped = f"the limit of {self.limit} rewrites"
                break
            node, level = self._queue.pop()
            if not is_erased(node):
                self._visit(node, level)
        self.session.settle()
        refusals = tuple((rule, root, why) for (rule, root), why in self.refusals.items())
        return RewriteReport(tuple(self.sites), refusals, self.tallies, stopped)

    def _visits(self) -> Iterator[tuple[fx.Node, int, RuleLevel]]:
        """Yield where a rule may match; overloads that are no rule's root are passed over whole."""
        levels = self.levels
        for (kind, target), nodes in nodes_by_target(self.graph):
            if kind in COMPUTES_NOTHING or not nodes:
                continue
            operator = operator_of_overload(target)
            if operator is not None and operator.name not in levels:
                continue
            for node in nodes:
                operator = operator_of(node)
                if operator is not None and operator.name in levels:
                    for benefit, level in levels[operator.name]:
                        yield node, benefit, level

    def _push(self, node: fx.Node) -> None:
        """Queue a node once for each benefit that a rule with its operator has."""
        operator = operator_of(node)
        if operator is not None and operator.name in self.levels:
            for benefit, level in self.levels[operator.name]:
                self._queue.push(node, benefit, level)

    def _retry(self) -> bool:
        """Queue once more what the latest rewrites may let match.

        What was refused before them: its users may be gone. What stands above them, as far as
        patterns reach down: their users were queued at once, and the users of these are now.
        """
        if not self.fixpoint:
            return False
        self._push_above()
        for node, sites in list(self._refused.items()):
            if sites < len(self.sites):
                del self._refused[node]
                if not is_erased(node):
                    self._push(node)
        return bool(self._queue)

    def _push_above(self) -> None:
        """Queue the roots of patterns so deep that they reach down to what has changed.

        Cost: linear in the nodes at most the depth of the deepest pattern above the changes.
        """
        layer, self._changed = list(self._changed), {}
        seen = set(layer)
        for distance in range(1, self._deepest):
            above = {user: None for node in layer if not is_erased(node) for user in node.users}
            layer = [user for user in above if user not in seen]
            seen.update(layer)
            for user in layer:
                operator = operator_of(user)
                for benefit, level in self.levels.get(operator.name, ()) if operator else ():
                    if level.depth > distance:
                        self._queue.push(user, benefit, level)

    def _visit(self, node: fx.Node, level: RuleLevel) -> None:
        """Apply, of the rules of one benefit, the one that saves most, else the first."""
        self._deepest = max(self._deepest, level.depth)
        chosen: Rule | None = None
        match: Match | None = None
        for candidate in level.candidates(node):
            found = self._try(candidate, node)
            if found is None:
                continue
            if match is None or _saved_by(found) > _saved_by(match):
                chosen, match, candidate = candidate, found, chosen
            if candidate is not None and chosen is not None and candidate is not chosen:
                self.refusals[(candidate.name, node.name)] = f"{chosen.name} was taken there"
        if chosen is None or match is None:
            return
        start = time.perf_counter()
        self._apply(chosen, match)
        tally = self.tallies[chosen.name]
        tally.hits += 1
        tally.seconds += time.perf_counter() - start

    def _try(self, candidate: Rule, node: fx.Node) -> Match | None:
        """Return a match that may be rewritten; note why one may not.

        A rule whose replacement takes the root itself is done with it: it would match for ever.
        """
        if (candidate, node) in self._kept:
            return None
        tally = self.tallies.get(candidate.name)
        if tally is None:
            tally = self.tallies[candidate.name] = Tally()
        tally.tries += 1
        start = time.perf_counter()
        found, reason = self._judge(candidate, node)
        tally.seconds += time.perf_counter() - start
        if found is None:
            return None
        if reason is None:
            if self.refusals:
                self.refusals.pop((candidate.name, node.name), None)
            return found
        tally.refused += 1
        self.refusals[(candidate.name, node.name)] = reason
        self._refused[node] = len(self.sites)
        return None

    def _judge(self, candidate: Rule, node: fx.Node) -> tuple[Match | None, str | None]:
        """Return a rule's match at a node, and why it may not be rewritten.

        Raises:
            RewriteError: When the rule raises, with its name.
        """
        try:
            found = find_match(candidate.pattern, node, commute=candidate.commute)
            if found is None:
                return None, None
            reason = refusal(candidate, found)
            if reason is None:
                reason = self._safety.refusal(candidate, found)
            if reason is None and self._termination.is_own_work(candidate, found):
                reason = OWN_WORK
            return found, reason
        except RewriteError:
            raise
        except Exception as error:
            raise RewriteError(
                f"expected {candidate.name} to be matched, got {type(error).__name__}: {error}",
                rule=candidate.name,
                node=format_node_safely(node),
                source=candidate.file or None,
                hint="does a predicate over a constant raise?",
            ) from error

    def _apply(self, candidate: Rule, match: Match) -> None:
        originals = list(match.nodes.values())
        root = match.root
        source = format_source(root)
        place = self._safety.place_of(candidate, match)
        assert isinstance(place, InsertionPoint), place
        with self.session.on_behalf_of(originals, candidate.name):
            for operand in place.lifted:
                self.session.move(operand, before=place.before)
            inserted, values = self._replacer.insert(candidate, match, place.before)
            users: list[fx.Node] = []
            for output, value in zip(match.outputs, values, strict=True):
                users.extend(output.users)
                self._replacer.substitute(output, value, match.matched.union(inserted))
            if not candidate.file.startswith(_OWN_RULES):
                propagate_types(self.session, [v for v in inserted if v in values])
        gone = self._replacer.erase(originals, values)
        if not is_erased(root):
            self._kept.add((candidate, root))
        self._termination.note(candidate, match, gone, inserted)
        self.sites.append(
            Site(candidate.name, root.name, tuple([n.name for n in gone]),
                 tuple([n.name for n in inserted]), source)
        )  # fmt: skip
        if self.fixpoint:
            self._changed.update(dict.fromkeys((*inserted, *users)))
            for node in (*inserted, *users):
                if not is_erased(node):
                    self._push(node)


def _saved_by(match: Match) -> tuple[int, int]:
    """Return what a match takes out of the graph: bytes moved, as far as known, then nodes."""
    moved = sum(cost_of(node).bytes or 0 for node in match.nodes.values())
    return moved, len(match.nodes)
