"""Whether rules come to an end: which of them have made which nodes."""

from __future__ import annotations

from torch import fx

from fxkit.errors import RewriteError
from fxkit.ir.printer import format_source
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule

# A rule whose result it rewrites again and again, this often in a row, is taken to have no end.
_MAX_GENERATIONS = 64


class Termination:
    """What the rewrites of one run have made, in turn out of one another's nodes."""

    def __init__(self) -> None:
        self._makers: dict[fx.Node, frozenset[Rule]] = {}
        self._generation: dict[fx.Node, int] = {}

    def is_own_work(self, candidate: Rule, match: Match) -> bool:
        """Tell whether a rule made all that it matches, and makes no fewer nodes of it.

        It made them alone, or in a circle with other rules in which no node of the program was
        used up.
        """
        makers = self._makers
        is_own = all(candidate in makers.get(node, ()) for node in match.nodes.values())
        return is_own and len(match.nodes) <= len(candidate.template.body)

    def note(
        self, candidate: Rule, match: Match, gone: list[fx.Node], inserted: list[fx.Node]
    ) -> None:
        """Take note of a rewrite.

        Raises:
            RewriteError: When rules go on rewriting their own results.
        """
        self._grow_old(candidate, match, gone, inserted)
        self._note_makers(candidate, match, gone, inserted)

    def _note_makers(
        self, candidate: Rule, match: Match, gone: list[fx.Node], inserted: list[fx.Node]
    ) -> None:
        """Note which rules have made the new nodes, in turn out of one another's."""
        makers = self._makers
        rules = {candidate}
        if all(node in makers for node in gone):
            rules.update(*(makers.get(node, ()) for node in match.nodes.values()))
        makers.update(dict.fromkeys(inserted, frozenset(rules)))

    def _grow_old(
        self, candidate: Rule, match: Match, gone: list[fx.Node], inserted: list[fx.Node]
    ) -> None:
        """Count the rewrites in a row that used up no node of the program and made none fewer.

        Both kinds of progress end by themselves, so that only rules without an end grow old.
        """
        ages = self._generation
        if gone and ages.keys().isdisjoint(match.nodes.values()):
            ages.update(dict.fromkeys(inserted, 0))
            return
        is_progress = len(gone) > len(inserted) or any(node not in ages for node in gone)
        oldest = max([ages.get(node, 0) for node in match.nodes.values()])
        if oldest >= _MAX_GENERATIONS and not is_progress:
            raise RewriteError(
                f"expected rules to come to an end, got {oldest + 1} rewrites of the same place",
                source=format_source(inserted[-1]) if inserted else None,
                hint=f"{candidate.name} matches what it, or another rule, made; add a where=, or "
                "visit each node once with fixpoint=False",
            )
        for node in inserted if is_progress else (*inserted, *match.nodes.values()):
            ages[node] = oldest if is_progress else oldest + 1
