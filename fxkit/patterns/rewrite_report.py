"""What a run of rules did: the sites, the refusals, the tally of each rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from fxkit.ir.text_table import aligned

# Why a rule leaves a match alone that it has made itself.
OWN_WORK = "a rule is not applied again to what it made itself"


class Site(NamedTuple):
    """One application of a rule.

    Attributes:
        rule: Name of the rule.
        root: Name of the node that the pattern's root had matched.
        replaced: Names of the nodes that went.
        inserted: Names of the nodes that came.
        source: The user's line of the root, as text, if it is known.
    """

    rule: str
    root: str
    replaced: tuple[str, ...]
    inserted: tuple[str, ...]
    source: str | None = None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        made = ", ".join(f"%{name}" for name in self.inserted) or "its operand"
        return f"{self.rule} at %{self.root}{where}: {len(self.replaced)} nodes -> {made}"


@dataclass
class Tally:
    """How often one rule was tried, hit and refused, and the seconds that took."""

    tries: int = 0
    hits: int = 0
    refused: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RewriteReport:
    """What a run of rules did.

    Attributes:
        sites: Every application, in the order in which they were made.
        refusals: Matches that were not rewritten, with the reason.
        tallies: Rule → tries, hits, refused, seconds.
        stopped: Why the run ended before its fixpoint, or None.
    """

    sites: tuple[Site, ...]
    refusals: tuple[tuple[str, str, str], ...] = ()
    tallies: dict[str, Tally] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def count(self) -> int:
        """How many rewrites were made."""
        return len(self.sites)

    @property
    def hits(self) -> Counter[str]:
        """Rewrites by rule."""
        return Counter(site.rule for site in self.sites)

    def table(self) -> str:
        """Return the rules that were tried, with tries, hits, refusals and time, as text."""
        rows = [("rule", "tries", "hits", "refused", "ms")]
        for name, tally in sorted(self.tallies.items(), key=lambda item: -item[1].hits):
            rows.append((name, str(tally.tries), str(tally.hits), str(tally.refused),
                         f"{tally.seconds * 1e3:.2f}"))  # fmt: skip
        lines = aligned(rows, align="<>>>>")
        lines.extend(
            f"not rewritten: {rule} at %{root}: {why}" for rule, root, why in self.refusals
        )
        return "\n".join(lines if not self.stopped else [*lines, f"stopped: {self.stopped}"])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return self.table()
