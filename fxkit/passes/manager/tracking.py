"""The edit session that a pass manager opens: it counts, limits and remembers each rewrite."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.editing import CheckedSession
from fxkit.errors import PassError
from fxkit.ir.printer import format_source


@dataclass(frozen=True)
class Rewrite:
    """One application of a rule, or one replacement that a pass made.

    Attributes:
        by: The rule or pass.
        at: Names of the nodes that it replaces, in graph order.
        source: The user's line of the last of them, if it is known.
        start: The place in the session's journal where it begins.
    """

    by: str
    at: tuple[str, ...]
    source: str | None
    start: int

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.by} at {', '.join(f'%{name}' for name in self.at)}{where}"


class RewritesSpent(BaseException):
    """As many rewrites were made as may be; raised inside a pass, to leave it."""


@dataclass(frozen=True)
class Limits:
    """When a pass is stopped.

    Attributes:
        rewrites: How many rewrites the whole run may make; None for any number.
        nodes: How large the graph may become, in nodes.
        deadline: When the pass has to be done, as `time.monotonic` tells it, in seconds.
    """

    rewrites: int | None = None
    nodes: int | None = None
    deadline: float | None = None


class TrackedSession(CheckedSession):
    """An edit session that knows where each rewrite begins.

    A rewrite begins where a pass enters `on_behalf_of`, or, outside of that, calls `replace`. There
    the graph is whole: what came before can be kept without what comes after.

    Attributes:
        rewrites: What was done so far, oldest first.
        limits: When to stop.
        current: By whom and at which nodes a rewrite is being made, or None.
        on_boundary: Called where a rewrite begins, and after a bare `replace`: the graph is whole.
        whole_at: The place in the journal after the latest bare `replace`, or where the pass began;
            None after `on_behalf_of`, of which more may follow.
    """

    def __init__(self, gm: fx.GraphModule, on_boundary: Callable[[], None]) -> None:
        super().__init__(gm)
        self.rewrites: list[Rewrite] = []
        self.limits = Limits()
        self.current: tuple[str, tuple[fx.Node, ...]] | None = None
        self.on_boundary = on_boundary
        self.whole_at: int | None = 0
        self._depth = 0

    def on_behalf_of(
        self, originals: Sequence[fx.Node], by: str
    ) -> contextlib.AbstractContextManager[None]:
        """Begin a rewrite; see `EditSession.on_behalf_of`."""
        nodes = self._replaced(originals)
        return self._rewriting(nodes, by, super().on_behalf_of(nodes, by))

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` use `new`; outside of `on_behalf_of`, a rewrite of its own."""
        old, new = self._given(old), self._given(new)
        if self._depth:
            super().replace(old, new)
            return
        with self._rewriting((old,), self.by, contextlib.nullcontext()):
            super().replace(old, new)
        self.on_boundary()
        self.whole_at = self.mark()

    def insert(self, op: str, target: Any, *operands: Any, **options: Any) -> fx.Node:
        """Insert a node; see `EditSession.insert`.

        Raises:
            PassError: When the graph has become too large, or time is up.
        """
        self.check_limits()
        return super().insert(op, target, *operands, **options)

    def set_args(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Give a node other operands; see `EditSession.set_args`."""
        self.check_limits()
        super().set_args(node, args, kwargs)

    def undo(self, to: int | None = None) -> None:
        """Take changes back, and forget the rewrites that made them."""
        to = self._start if to is None else to
        super().undo(to)
        if self.whole_at is not None and self.whole_at > to:
            self.whole_at = None
        while self.rewrites and self.rewrites[-1].start >= to:
            self.rewrites.pop()

    def check_limits(self) -> None:
        """Raise when the graph has become too large, or time is up."""
        limits = self.limits
        if limits.nodes is not None and len(self.graph.nodes) >= limits.nodes:
            raise PassError(
                f"expected the pass to keep the graph below {limits.nodes:,} nodes, got more",
                hint="does it rewrite its own result? else raise max_nodes= of the PassManager",
            )
        if limits.deadline is not None and time.monotonic() > limits.deadline:
            raise out_of_time()

    def _takes_back(self, error: BaseException) -> bool:
        return not isinstance(error, RewritesSpent)

    @contextlib.contextmanager
    def _rewriting(self, originals: tuple[fx.Node, ...], by: str, inner: Any) -> Iterator[None]:
        """Note where a rewrite begins; one inside of another is part of it."""
        if self._depth == 0:
            self._begin(originals, by)
        outer, self.current = self.current, (by, originals)
        self._depth += 1
        try:
            with inner:
                yield
        finally:
            self._depth -= 1
        self.current = outer  # after an exception it stays, for the report

    def _begin(self, originals: tuple[fx.Node, ...], by: str) -> None:
        limit = self.limits.rewrites
        if limit is not None and len(self.rewrites) >= limit:
            raise RewritesSpent
        if self.whole_at is None:
            self.on_boundary()
        self.whole_at = None
        source = next((s for s in map(format_source, reversed(originals)) if s), None)
        names = tuple(node.name for node in originals)
        self.rewrites.append(Rewrite(by, names, source, len(self.journal)))


def out_of_time() -> PassError:
    """Return the error of a pass that took too long."""
    return PassError(
        "expected the pass to come to an end in time, got no end",
        hint="does it loop? else raise max_seconds= of the PassManager",
    )
