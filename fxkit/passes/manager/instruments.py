"""What watches a pass manager and a compile: callbacks, and the ones that print and dump.

class Progress(Instrument):
    def after(self, current, record, gm):
        print(record.name, record.nodes_after)

fxkit.PassManager(passes, instruments=[Progress()]).run(gm)
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch import fx

from fxkit.errors import FxkitError, PassError
from fxkit.ir.printer import format_graph
from fxkit.ir.writing import check_folder, writing
from fxkit.passes.base import Pass
from fxkit.passes.manager.records import PassRecord


class Instrument:
    """Base of what watches a pass manager; each method does nothing.

    The module that a method is given can be called: its code is up to date.
    """

    def begin(self, gm: fx.GraphModule) -> None:
        """Called before `fxkit.compile` compiles a captured graph."""

    def before(self, current: Pass, gm: fx.GraphModule) -> None:
        """Called before a pass runs."""

    def changed(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Called after a pass that changed the graph, once that was verified."""

    def after(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Called after a pass, whether it changed the graph or not."""

    def failed(self, current: Pass, error: FxkitError, gm: fx.GraphModule) -> None:
        """Called when a pass has failed; the graph is as it was before it."""

    def after_step(self, step: Any, state: Any, seconds: float) -> None:
        """Called after a step of lowering; `step.show(state)` is what it made, as text."""


class InstrumentError(PassError):
    """An instrument raised while it was told of a step of lowering."""


def tell_of_step(instrument: Instrument, step: Any, state: Any, seconds: float) -> None:
    """Tell an instrument of a step of lowering.

    Raises:
        InstrumentError: When the instrument raises: that is no fault of the step.
    """
    try:
        instrument.after_step(step, state, seconds)
    except Exception as error:
        name = type(instrument).__name__
        raise InstrumentError(
            f"expected {name}.after_step to return, got {type(error).__name__}: {error}",
            hint="correct it, or leave it out of instruments=",
        ) from error


@dataclass(frozen=True)
class PrintAfter(Instrument):
    """Write the graph after each pass that changed it.

    Attributes:
        names: The passes to write it after, changed or not; all that change it when left out. With
            `fxkit.compile` also the steps of lowering, whose result is written.
        file: Where to; standard output when left out.
    """

    names: Collection[str] | None = None
    file: TextIO | None = None

    def after(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Write it."""
        if record.modified if self.names is None else current.name in self.names:
            self._write(record.place, format_graph(gm, sources=True))

    def after_step(self, step: Any, state: Any, seconds: float) -> None:
        """Write what a step of lowering made."""
        if self.names is None or step.name in self.names:
            self._write(step.name, step.show(state))

    def _write(self, place: str, text: str) -> None:
        file = sys.stdout if self.file is None else self.file
        file.write(f"after {place}:\n{text}\n")


@dataclass(frozen=True)
class DumpOnChange(Instrument):
    """Write a file with the graph, and the changes that led to it, for each pass that changed it.

    Attributes:
        folder: Where to; made when it is not there. Files are `01_canonicalise.txt` and so on.
    """

    folder: Path
    _count: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def before(self, current: Pass, gm: fx.GraphModule) -> None:
        """Make the folder, so that no pass runs in vain."""
        if not self.folder.is_dir():
            check_folder(self.folder)

    def changed(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Write it."""
        self._count[0] += 1
        changes = "\n".join(f"  {change}" for change in record.changes)
        path = self.folder / f"{self._count[0]:02}_{current.name}.txt"
        with writing(path):
            path.write_text(f"{format_graph(gm, sources=True)}\n\n{record.place}:\n{changes}\n")
