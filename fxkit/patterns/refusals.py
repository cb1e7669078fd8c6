"""Why a rule itself refuses a match: its predicate says no, or its replacement does not fit."""

from __future__ import annotations

from torch import fx

from fxkit.errors import RewriteError
from fxkit.patterns.match_results import Match
from fxkit.patterns.operand_checks import user_requiring_tensor
from fxkit.patterns.rewriting import Rule, objection_of


def refusal(candidate: Rule, match: Match) -> str | None:
    """Return why a rule itself refuses a match, or None when it does not.

    Its predicate says no, or its replacement can't be made with what the captures stand for.

    Raises:
        RewriteError: When the predicate raises.
    """
    unfit = candidate.template.demands.objection(match.bindings) or _unfit_result(candidate, match)
    if candidate.where is None or unfit is not None:
        return unfit
    try:
        return objection_of(candidate.where(match))
    except Exception as error:
        raise RewriteError(
            f"expected the predicate of {candidate.name} to answer, got "
            f"{type(error).__name__}: {error}",
            rule=candidate.name,
            node=str(match),
            source=candidate.file or None,
            hint="return True, False or a text with the reason; a type may be None when unknown",
        ) from error


def _unfit_result(candidate: Rule, match: Match) -> str | None:
    """Return why a result can't be the number that the replacement gives for it, if it does."""
    for output, value in zip(match.outputs, candidate.template.values, strict=True):
        if isinstance(value, fx.Node) and value.op == "placeholder":
            value = match.bindings.get(str(value.target))
        if (unfit := user_requiring_tensor(output, value, match.matched)) is not None:
            return unfit
    return None
