"""What serves a call of a compiled program: entries that are asked in turn, the last used first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fxkit.lower.dispatch.eager_fallback import EagerFallback, Leaving
from fxkit.lower.dispatch.fast_path import FastPath, FastPaths
from fxkit.tracing.captured import Captured


class DispatchEntry(Protocol):
    """Something that serves some calls."""

    @property
    def entry(self) -> Callable[..., Any]:
        """Takes the arguments of a call; returns `miss` where it is not sure that it serves."""
        ...

    @property
    def finish(self) -> Callable[[Any], Any] | None:
        """Makes what the program returns of what the entry returns; None: they are the same."""
        ...

    @property
    def miss(self) -> Any:
        """What the entry returns where it is not sure."""
        ...


class DispatchCache:
    """The entries of a program: guards with kernels behind them, and eager.

    Args:
        captured: The program.
        may_leave: Whether the program itself may run in the place of a graph without kernels, as
            nothing that changes results was done to the graph.

    Attributes:
        last: The entry that served the last call, if one did.
    """

    def __init__(self, captured: Captured, *, may_leave: bool) -> None:
        self.last: DispatchEntry | None = None
        self._paths = FastPaths(captured, may_leave=may_leave)
        self._eager = EagerFallback(captured.fn)
        self._is_eager_in_use = False

    @property
    def paths(self) -> tuple[FastPath, ...]:
        """The entries that run kernels, the last used one first."""
        return self._paths.paths

    @property
    def entries(self) -> tuple[DispatchEntry, ...]:
        """All entries, in the order in which they are asked."""
        return (*self._paths.paths, self._eager) if self._is_eager_in_use else self._paths.paths

    def use(self, entry: DispatchEntry) -> None:
        """Note which entry served a call; the next one is asked of it first."""
        if isinstance(entry, FastPath):
            self._paths.use(entry)
            self.last = entry
        elif not self._paths.paths:  # kernels that serve go before eager
            self.last = entry

    def watch(self, module: Leaving) -> None:
        """Take note of a module that leaves calls to eager."""
        self._is_eager_in_use = True
        self._eager.watch(module)

    def learn(self, args: tuple[Any, ...]) -> None:
        """Make an entry for a call that the captured program has just served, if one can be had."""
        self._paths.learn(args)
        self._eager.learn(args)
