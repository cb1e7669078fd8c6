"""What a pass says of itself, held against what it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from fxkit.analysis.type_inference.type_observations import Observations
from fxkit.errors import PassError, PostconditionError
from fxkit.ir.printer import format_type
from fxkit.ir.types import TensorType
from fxkit.passes.base import NUMERICS, Pass, PassContext
from fxkit.passes.manager.tracking import TrackedSession
from fxkit.passes.properties import Violation, property_named
from fxkit.torch_adapters import pytree


def check_words(current: Pass) -> None:
    """Refuse a pass whose contract names what does not exist.

    Raises:
        PassError: When it does.
    """
    if current.numerics not in NUMERICS:
        raise PassError(
            f"expected numerics of {current.name} to be one of {', '.join(NUMERICS)}, "
            f"got {current.numerics!r}"
        )
    for part in ("requires", "ensures", "preserves"):
        names = getattr(current, part)
        if isinstance(names, str):
            raise PassError(
                f"expected {part} of {current.name} to be a tuple of names, got {names!r}",
                hint=f"write ({names!r},)",
            )
        for name in names:
            property_named(name)


class PropertyChecks:
    """Which properties hold for the graph of a session; asked again only after a change."""

    def __init__(self, session: TrackedSession) -> None:
        self._session = session
        self._known: dict[str, tuple[Any, Violation | None]] = {}
        self._types = 0

    def types_changed(self) -> None:
        """Note that types were recorded, which no journal tells."""
        self._types += 1

    def violation(self, name: str) -> Violation | None:
        """Return why a property does not hold, or None when it does."""
        entries = self._session.journal.entries
        now = (len(entries), id(entries[-1]) if entries else 0, self._types)
        known = self._known.get(name)
        if known is None or known[0] != now:
            known = self._known[name] = now, property_named(name).check(self._session.gm)
        return known[1]

    def holding(self, names: Iterable[str]) -> list[str]:
        """Return those of some properties that hold."""
        return [name for name in names if self.violation(name) is None]

    def check_ensured(self, current: Pass, context: PassContext) -> None:
        """Check that a pass did what it says it ensures, but where it says why it could not.

        Args:
            current: The pass.
            context: What it said of the nodes that it left as they were.

        Raises:
            PostconditionError: When it did not.
        """
        for name in current.ensures:
            violation = self.violation(name)
            if violation is None:
                continue
            if context.exceptions.get(name, {}).keys() >= self._violating(name):
                continue
            left = [note for note in context.notes if note.startswith(f"%{violation.nodes[0]} ")]
            raise _broken(violation, f"to ensure {name}", _kept(left[0]) if left else _MEND)

    def _violating(self, name: str) -> set[fx.Node]:
        return {node for node, _ in property_named(name).predicate(self._session.gm)}

    def check_preserved(self, held: Iterable[str]) -> None:
        """Check that properties that held before a pass still hold.

        Raises:
            PostconditionError: When one does not.
        """
        for name in held:
            violation = self.violation(name)
            if violation is not None:
                raise _broken(violation, f"to preserve {name}", _MEND)


_MEND = "mend the pass, or leave the promise out of its contract"


def _kept(note: str) -> str:
    return f"{note}; verify='structure' keeps what the pass could do"


def _broken(violation: Violation, promise: str, hint: str) -> PostconditionError:
    source = next((s for s in violation.sources if s), None)
    return PostconditionError(
        f"expected the pass {promise}, got a graph where {violation.reason}",
        node=violation.lines[0],
        source=source,
        hint=hint,
    )


def check_idempotent(current: Pass, session: TrackedSession, context: PassContext) -> None:
    """Run a pass a second time, and check that it changes nothing.

    Raises:
        PostconditionError: When it does.
    """
    mark, rewrites, types = session.mark(), len(session.rewrites), Observations(session.graph)
    try:
        current.apply(session, context)
    except Exception as error:
        raise PostconditionError(
            f"expected the pass to change nothing when it runs again, got "
            f"{type(error).__name__}: {error}",
            hint="mend the pass, or set is_idempotent = False",
        ) from error
    changes = session.journal[mark:]
    if changes:
        raise PostconditionError(
            f"expected the pass to change nothing when it runs again, got {len(changes)} changes, "
            f"the first: {changes[0]}",
            hint="mend the pass, or set is_idempotent = False",
        )
    del session.rewrites[rewrites:]
    types.restore()


def check_types(expected: Any, got: Any, *, drops_gradients: bool = False) -> None:
    """Check that the types of the outputs stayed.

    Args:
        expected: The types before.
        got: The types after.
        drops_gradients: Whether what needed a gradient may need none.

    Raises:
        PostconditionError: When they did not.
    """
    if drops_gradients and _without_gradients(expected) == _without_gradients(got):
        return
    if expected != got:
        raise PostconditionError(
            f"expected the pass to keep the output's type {_whole_type(expected)}, "
            f"got {_whole_type(got)}",
            hint="a pass that changes types on purpose is run with verify='structure'",
        )


def _without_gradients(known: Any) -> Any:
    return pytree.tree_map_only(TensorType, lambda t: replace(t, requires_grad=False), known)


def _whole_type(value_type: Any) -> str:
    """Return a type as text, with the strides and requires_grad that its short form leaves out."""
    leaves = [t for t in pytree.tree_leaves(value_type) if isinstance(t, TensorType)]
    details = [f"stride {t.stride}" + (" requires_grad" if t.requires_grad else "") for t in leaves]
    return f"{format_type(value_type)} ({'; '.join(details)})"
