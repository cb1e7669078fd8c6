"""Every stage of a compile as a file of text, in a folder for each graph.

graph_0000/index.txt                    what each file holds, and how long that stage took
graph_0000/00_captured_graph.txt        the graph as it was captured
graph_0000/01_pass_canonicalise.txt     after each pass that changed it, with the changes
graph_0000/02_infer_types.txt           after each step of lowering
graph_0000/03_partition.txt             regions, and why other nodes are in none
graph_0000/04_choose_kernels.txt        which products a kernel computes, and why not others
graph_0000/05_plan.txt                  the graph of kernel calls, and the loop IR
graph_0000/06_build.txt                 the C++ text
graph_0000/07_assemble.txt              the report
graph_0000/08_kernel_0.txt              each kernel: nodes, loop IR, schedule, text

A backward is lowered when it is first called; its files follow.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from torch import fx

from fxkit.errors import FxkitError
from fxkit.ir.printer import format_graph
from fxkit.ir.writing import check_folder, writing
from fxkit.lower.compiling.kernel_explanation import explain_kernel
from fxkit.lower.compiling.pipeline import LoweringState, LoweringStep
from fxkit.passes.base import Pass
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.records import PassRecord


class CompileDump(Instrument):
    """Writes every stage of a compile to a folder.

    Args:
        folder: Where to; made when it is not there. Each graph gets a folder of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._folder: Path | None = None
        self._count = 0
        self._shown = ""

    def begin(self, gm: fx.GraphModule) -> None:
        """Begin a folder with a captured graph."""
        self._folder, self._count, self._shown = self._fresh(), 0, ""
        self._write("captured_graph", format_graph(gm, sources=True), "as it was captured")

    def changed(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Write the graph after a pass that changed it, and the changes."""
        changes = "\n".join(f"  {change}" for change in record.changes)
        text = f"{format_graph(gm, sources=True)}\n\n{record.place}:\n{changes}"
        self._write(f"pass_{current.name}", text, record.place, record.seconds)

    def after(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Note the time of a pass that changed nothing."""
        if not record.modified:
            self._note("", f"{record.place}: no change", record.seconds)

    def failed(self, current: Pass, error: FxkitError, gm: fx.GraphModule) -> None:
        """Write why a pass failed."""
        self._write(f"pass_{current.name}_failed", str(error), "failed")

    def after_step(self, step: LoweringStep, state: LoweringState, seconds: float) -> None:
        """Write what a step of lowering made, if that is new."""
        text = step.show(state)
        if text in ("", self._shown):
            self._note("", f"{step.name}: no change", seconds)
        else:
            self._write(step.name, text, step.does, seconds)
        self._shown = text
        if state.module is None:
            return
        for name in state.module.kernels:
            text = explain_kernel(state.module, name)
            self._write(name, text, "its nodes, loop IR, schedule and text")

    def _fresh(self) -> Path:
        """Return a new folder for a graph."""
        check_folder(self._parent)
        for number in itertools.count():
            folder = self._parent / f"graph_{number:04}"
            with writing(folder, "folder"):
                try:
                    folder.mkdir(parents=True)
                except FileExistsError:
                    continue
            return folder
        raise AssertionError("numbers do not end")

    def _write(self, name: str, text: str, what: str, seconds: float | None = None) -> None:
        if self._folder is None:
            self._folder = self._fresh()
        path = self._folder / f"{self._count:02}_{name}.txt"
        self._count += 1
        with writing(path):
            path.write_text(f"{text}\n")
        self._note(path.name, what, seconds)

    def _note(self, file: str, what: str, seconds: float | None) -> None:
        """Add a line to the index."""
        assert self._folder is not None
        time = "" if seconds is None else f"{seconds * 1e3:.2f} ms"
        with writing(self._folder / "index.txt"), (self._folder / "index.txt").open("a") as index:
            index.write(f"{file:<40} {time:>12}  {what}\n")
