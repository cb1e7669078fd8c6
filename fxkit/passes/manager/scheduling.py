"""See to it that what a pass requires holds, by running the pass that ensures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fxkit.errors import PreconditionError
from fxkit.passes.base import Pass
from fxkit.passes.manager.groups import leaves
from fxkit.passes.manager.protocols import PassRun
from fxkit.passes.pass_registry import PASSES
from fxkit.passes.properties import Violation


def satisfy(execution: PassRun, current: Pass, place: str, waiting: tuple[str, ...] = ()) -> None:
    """Run what has to run before a pass.

    Looked at are the passes of the same list, then the registered ones that need no options and
    keep the numbers. What they require is satisfied in the same way.

    Args:
        execution: The run.
        current: The pass that is to run.
        place: Where it stands.
        waiting: Names of the passes that wait for this one.

    Raises:
        PreconditionError: When nothing makes a required property hold.
    """
    for name in current.requires:
        if execution.checks.violation(name) is None:
            continue
        tried: list[str] = []
        for provider in _providers(execution, name, (*waiting, current.name)):
            satisfy(execution, provider, place, (*waiting, current.name))
            execution.run_pass(provider, f"{provider.name} for {place}", current.name)
            tried.append(provider.name)
            if execution.checks.violation(name) is None:
                break
        violation = execution.checks.violation(name)
        if violation is not None:
            notes = execution.records[-1].notes if tried else ()
            raise _unsatisfied(current, name, violation, place, tried, notes)


def _providers(execution: PassRun, name: str, waiting: tuple[str, ...]) -> Iterator[Pass]:
    seen: set[str] = set()
    for candidate in (*leaves(execution.manager.items), *_registered()):
        if name in candidate.ensures and candidate.name not in (*waiting, *seen):
            seen.add(candidate.name)
            yield candidate


def _registered() -> Iterator[Pass]:
    for cls in map(PASSES.__getitem__, PASSES):
        has_defaults = all(
            f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        )
        if has_defaults and cls.numerics != "changed":
            yield cls()


def _unsatisfied(
    current: Pass,
    name: str,
    violation: Violation,
    place: str,
    tried: list[str],
    notes: tuple[str, ...],
) -> PreconditionError:
    source = next((s for s in violation.sources if s), None)
    after = f" after {', '.join(tried)}" if tried else ""
    hint = (
        f"{', '.join(tried)} {'says: ' + notes[0] if notes else 'should have ensured it'}"
        if tried
        else f"no pass ensures {name}; run one that does before {current.name}"
    )
    return PreconditionError(
        f"expected {name}, which {current.name} requires, got a graph{after} where "
        f"{violation.reason}",
        node=violation.lines[0],
        source=source,
        in_pass=place,
        hint=hint,
    )
