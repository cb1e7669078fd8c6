"""The commands that look: `tree`, `draw`, `diff`, `profile` and `report`, on exported programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.passes.base import Pass
from fxkit.view.differences.diffing import GraphDiff, diff
from fxkit.view.differences.gates import parse_gate
from fxkit.view.drawings.colouring import COLUMNS
from fxkit.view.drawings.drawing import draw
from fxkit.view.drawings.module_tree import tree
from fxkit.view.pages.page import write_file
from fxkit.view.profiling.profile_numbers import GROUPINGS
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.profiling.profile_rows import total
from fxkit.view.profiling.profiler import profile
from fxkit.view.reports.program_report import program_report
from fxkit.view.texts.terminal import Terminal

Load = Callable[[Path], tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]]
"""Reads a file: a graph module with example inputs, args and kwargs."""

_OK, _FAILED = 0, 1
_GATE = "exit with 1 when this holds, such as 'nodes>+5%%'; may be repeated"


def add_commands(commands: Any, load: Load, pipelines: Mapping[str, tuple[Pass, ...]]) -> None:
    """Add the commands to a parser.

    Args:
        commands: What `add_subparsers` returned.
        load: Reads a file.
        pipelines: Named orders of passes, for `report`.
    """
    _add_tree(commands, load)
    _add_draw(commands, load)
    _add_diff(commands, load)
    _add_profile(commands, load)
    _add_report(commands, load, pipelines)


def _on_file(commands: Any, name: str, what: str, *files: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=what)
    for file in files or ("file",):
        command.add_argument(
            file, type=Path, metavar=f"{file.upper()}.pt2", help="from torch.export.save"
        )
    return command


def _add_tree(commands: Any, load: Load) -> None:
    command = _on_file(commands, "tree", "print the modules and nodes of an exported program")
    command.add_argument("--depth", type=int, metavar="N", help="open only N levels of modules")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "-o", "--output", type=Path, help="write HTML, JSON or text, by its ending"
    )

    def run(options: argparse.Namespace) -> int:
        found = tree(load(options.file)[0], depth=options.depth)
        if options.output is not None:
            writers = {".html": found.html, ".json": found.to_json}
            write_file(options.output, writers.get(options.output.suffix, found.__str__)())
            print(options.output)
        else:
            print(found.to_json(indent=2) if options.json else found)
        return _OK

    command.set_defaults(run=run)


def _add_draw(commands: Any, load: Load) -> None:
    command = _on_file(commands, "draw", "draw an exported program")
    command.add_argument(
        "-o", "--output", type=Path, help="SVG, HTML, DOT, JSON, PNG or PDF, by its ending"
    )
    command.add_argument("--json", action="store_true", help="print the graph as JSON")
    command.add_argument("--depth", type=int, metavar="N", help="open only N levels of modules")
    known = [name for name in COLUMNS if name not in ("time", "region", "error")]
    command.add_argument(
        "--colour", "--color", choices=known, default="family", help="what colours stand for"
    )

    def run(options: argparse.Namespace) -> int:
        depth = "auto" if options.depth is None else options.depth
        view = draw(load(options.file)[0], depth=depth, color_by=options.colour)
        if options.json:
            print(view.to_json())
        else:
            print(view.save(options.output or options.file.with_suffix(".svg")))
        return _OK

    command.set_defaults(run=run)


def _add_diff(commands: Any, load: Load) -> None:
    command = _on_file(
        commands, "diff", "tell what is different of two exported programs", "before", "after"
    )
    command.add_argument(
        "-o", "--output", type=Path, help="write HTML, JSON or text, by its ending"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--fail-if", action="append", default=[], metavar="LIMIT", help=_GATE)

    def run(options: argparse.Namespace) -> int:
        gates = [parse_gate(text) for text in options.fail_if]
        found = diff(load(options.before)[0], load(options.after)[0])
        if options.output is not None:
            print(found.save(options.output))
        elif options.json:
            print(found.to_json(indent=2))
        else:
            Terminal().difference(str(found))
        before, after = _of_diff(found)
        return _judge("diff", [gate.failure(before, after) for gate in gates])

    command.set_defaults(run=run)


def _of_diff(found: GraphDiff) -> tuple[dict[str, float | None], dict[str, float | None]]:
    sides = (found.nodes_before, found.cost_before), (found.nodes_after, found.cost_after)
    before, after = (
        {"nodes": nodes, "flops": cost.flops, "bytes": cost.bytes} for nodes, cost in sides
    )
    return before, after


def _judge(command: str, failures: list[str | None]) -> int:
    found = [failure for failure in failures if failure is not None]
    for failure in found:
        print(f"fxkit {command}: {failure}", file=sys.stderr)
    return _FAILED if found else _OK


def _add_profile(commands: Any, load: Load) -> None:
    command = _on_file(commands, "profile", "time the nodes of an exported program")
    command.add_argument("--by", choices=GROUPINGS, default="node", help="group")
    command.add_argument("--iters", type=int, default=20, metavar="N", help="timed runs (20)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "-o", "--output", type=Path, help="write HTML, JSON or text, by its ending"
    )
    command.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write a trace for Perfetto"
    )
    command.add_argument(
        "--baseline", type=Path, metavar="FILE.json", help="an earlier profile, to compare with"
    )
    command.add_argument("--fail-if", action="append", default=[], metavar="LIMIT", help=_GATE)

    def run(options: argparse.Namespace) -> int:
        return _profile(options, load)

    command.set_defaults(run=run)


def _profile(options: argparse.Namespace, load: Load) -> int:
    gates = [parse_gate(text) for text in options.fail_if]
    baseline = _read_profile(options.baseline) if options.baseline is not None else None
    gm, args, kwargs = _with_inputs(options.file, load)
    terminal = Terminal()
    with torch.no_grad(), terminal.working(f"measuring {options.file.name}"):
        found = profile(gm, args, kwargs, iters=options.iters)
    if options.trace is not None:
        found.export_chrome_trace(options.trace)
    if options.output is not None:
        writers = {".html": found.html, ".json": found.to_json}
        print(write_file(options.output, writers.get(options.output.suffix, found.table)()))
    elif options.json:
        print(found.to_json(indent=2))
    elif baseline is not None:
        print(baseline.compare(found, group_by=options.by))
    else:
        _print_profile(terminal, found, options.by)
    before = _of_profile(baseline) if baseline is not None else {}
    return _judge("profile", [gate.failure(before, _of_profile(found)) for gate in gates])


def _print_profile(terminal: Terminal, found: Profile, group_by: str) -> None:
    headers, rows, align, rest = found.cells(group_by=group_by)
    terminal.text("\n".join([*found.summary(), ""]))
    terminal.table(headers, rows, align=align)
    terminal.text("\n".join(rest))


def _of_profile(found: Profile) -> dict[str, float | None]:
    return {
        "nodes": found.node_count,
        "time": found.end_to_end,
        "flops": total([row.flops for row in found.rows]),
        "bytes": total([row.bytes for row in found.rows]),
        "memory": found.peak_bytes,
    }


def _read_profile(path: Path) -> Profile:
    try:
        return Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"expected a profile in {path}, got a file that can't be read: {error}",
            hint="write one with python -m fxkit profile model.pt2 -o profile.json",
        ) from error


def _with_inputs(path: Path, load: Load) -> tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]:
    gm, args, kwargs = load(path)
    if not args and not kwargs:
        raise UnsupportedError(
            f"expected example inputs in {path}, got none",
            hint="export the program with them: torch.export.export(model, args)",
        )
    return gm, args, kwargs


def _add_report(commands: Any, load: Load, pipelines: Mapping[str, tuple[Pass, ...]]) -> None:
    command = _on_file(
        commands, "report", "run passes, compile, measure, and tell all of it in one page"
    )
    command.add_argument("-o", "--output", type=Path, help="the page (report.html)")
    command.add_argument(
        "--passes", choices=sorted(pipelines), default="inference", help="the passes to run"
    )
    command.add_argument("--iters", type=int, default=10, metavar="N", help="timed runs (10)")

    def run(options: argparse.Namespace) -> int:
        gm, args, kwargs = _with_inputs(options.file, load)
        with Terminal().working(f"measuring {options.file.name}"):
            found = program_report(
                gm,
                args,
                kwargs,
                passes=pipelines[options.passes],
                title=options.file.stem,
                iters=options.iters,
            )
        print(found.save(options.output or Path("report.html")))
        return _OK

    command.set_defaults(run=run)
