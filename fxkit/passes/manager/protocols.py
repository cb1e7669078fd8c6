"""What the parts of a pass manager know of it, and of a run: the types that they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from fxkit.errors import PassError
from fxkit.passes.base import Pass
from fxkit.passes.manager.contracts import PropertyChecks
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.records import PassRecord, PassResult


class Manager(Protocol):
    """A pass manager: its passes, and the options of `PassManager`."""

    items: Any
    verify: str
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    instruments: list[Instrument]
    max_seconds: float | None
    max_nodes: int | None
    reproduce: str | Path | None
    on_failure: Callable[[Pass, PassError], bool] | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, those of groups where their group stands."""
        ...

    def run(
        self, program: Any, *, stop_after: int | None = None, max_rewrites: int | None = None
    ) -> PassResult:
        """Run all passes over a module, in place."""
        ...

    def again(
        self,
        gm: fx.GraphModule,
        args: tuple[Any, ...] | None,
        stop_after: int | None,
        max_rewrites: int | None,
    ) -> PassResult:
        """Run the passes on another graph of a program that they have run on already."""
        ...


class PassRun(Protocol):
    """One run of a manager over one module."""

    manager: Manager
    checks: PropertyChecks
    records: list[PassRecord]

    def run_pass(self, current: Pass, place: str, scheduled_for: str | None = None) -> None:
        """Run one pass wholly, verify it, and record it."""
        ...
