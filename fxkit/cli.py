"""The command line: `python -m fxkit doctor | demo | tree | draw | profile | passes`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxkit.errors import FxkitError, UnsupportedError

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        arguments: The command line without the program's name; `sys.argv[1:]` when left out.

    Returns:
        0 when all went well, 1 after an error (its message is on stderr), 130 when interrupted.
        A command line that can't be read exits with 2, as `argparse` does.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except FxkitError as error:
        print(f"fxkit {options.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxkit", description="A workbench for graph transformations over torch.fx."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="check that what fxkit needs is there and works")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="take a trained BERT through every layer of fxkit")
    demo.add_argument("--peer", action="store_true", help="time torch.compile too")
    demo.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="where files go (./out)"
    )
    demo.add_argument(
        "--sentences", type=_sentence_count, metavar="N", help="encode only the first N sentences"
    )
    demo.set_defaults(run=_demo)

    tree = _on_file(commands, "tree", "print the modules and nodes of an exported program")
    tree.add_argument("--depth", type=int, metavar="N", help="open only N levels of modules")
    tree.add_argument("--json", action="store_true", help="print JSON")
    tree.set_defaults(run=_tree)

    draw = _on_file(commands, "draw", "draw an exported program")
    draw.add_argument("-o", "--output", type=Path, help="SVG, HTML, DOT or JSON, by its ending")
    draw.set_defaults(run=_draw)

    profile = _on_file(commands, "profile", "time the nodes of an exported program")
    profile.add_argument("--by", choices=("node", "module", "op"), default="node", help="group")
    profile.add_argument("--iters", type=int, default=20, metavar="N", help="timed runs (20)")
    profile.add_argument("--json", action="store_true", help="print JSON")
    profile.set_defaults(run=_profile)
    _add_passes(commands)
    return parser


def _add_passes(commands: Any) -> None:
    passes = commands.add_parser("passes", help="list passes, or run some on an exported program")
    passes.set_defaults(run=_list_passes)
    actions = passes.add_subparsers(metavar="run")
    run = actions.add_parser("run", help="run passes on an exported program")
    run.add_argument(
        "passes", metavar="PASSES", help="a pipeline, or passes with commas between them"
    )
    run.add_argument("file", type=Path, metavar="FILE.pt2", help="from torch.export.save")
    run.add_argument("-o", "--output", type=Path, metavar="FILE.pt2", help="where the result goes")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PASS.OPTION=VALUE",
        help="give a pass an option; may be repeated",
    )
    run.add_argument("--verify", default="each", help="off, structure, each (default) or numerics")
    run.add_argument("--max-rewrites", type=int, metavar="N", help="stop after N rewrites")
    run.add_argument("--reproduce", type=Path, metavar="DIR", help="write what fails there")
    run.add_argument("--timings", action="store_true", help="print where the time went, too")
    run.set_defaults(run=_run_passes)


def _on_file(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=what)
    command.add_argument("file", type=Path, metavar="FILE.pt2", help="from torch.export.save")
    return command


def _sentence_count(text: str) -> int:
    if not text.isdigit() or int(text) < 4:
        raise argparse.ArgumentTypeError(f"expected a count of at least 4, got {text!r}")
    return int(text)


def _doctor(options: argparse.Namespace) -> int:
    from fxkit.doctor import examine, report

    checks = examine()
    print(report(checks))
    return EXIT_FAILED if any(check.status == "fail" for check in checks) else EXIT_OK


def _demo(options: argparse.Namespace) -> int:
    from fxkit.demo.steps import run

    run(out=options.out, sentences=options.sentences, with_peer=options.peer)
    return EXIT_OK


def _tree(options: argparse.Namespace) -> int:
    import fxkit
    from fxkit.programs import load

    shown = fxkit.tree(load(options.file)[0], depth=options.depth)
    print(shown.to_json(indent=2) if options.json else shown)
    return EXIT_OK


def _draw(options: argparse.Namespace) -> int:
    import fxkit
    from fxkit.programs import load

    path = options.output or options.file.with_suffix(".svg")
    print(fxkit.draw(load(options.file)[0]).save(path))
    return EXIT_OK


def _profile(options: argparse.Namespace) -> int:
    import torch

    import fxkit
    from fxkit.programs import load

    gm, args, kwargs = load(options.file)
    if not args and not kwargs:
        raise UnsupportedError(
            f"expected example inputs in {options.file}, got none",
            hint="export the program with them: torch.export.export(model, args)",
        )
    with torch.no_grad():
        measured = fxkit.profile(gm, args, kwargs, iters=options.iters)
    print(measured.to_json(indent=2) if options.json else measured.table(group_by=options.by))
    return EXIT_OK


def _list_passes(options: argparse.Namespace) -> int:
    from fxkit.passes import PASSES
    from fxkit.passes.listing import describe_passes, describe_pipelines, describe_properties
    from fxkit.passes.pipelines import PIPELINES

    print(f"passes\n{describe_passes(PASSES.items())}")
    print(f"\nproperties\n{describe_properties()}")
    print(f"\npipelines\n{describe_pipelines(PIPELINES.items())}")
    return EXIT_OK


def _run_passes(options: argparse.Namespace) -> int:
    import torch

    import fxkit
    from fxkit.passes import PASSES
    from fxkit.passes.listing import passes_of
    from fxkit.passes.pipelines import PIPELINES
    from fxkit.programs import load_program

    manager = fxkit.PassManager(
        passes_of(options.passes, PASSES, PIPELINES, options.set),
        verify=options.verify,
        reproduce=options.reproduce,
    )
    with torch.no_grad():
        result = manager.run(load_program(options.file), max_rewrites=options.max_rewrites)
    print(result.table())
    if options.timings:
        print(f"\n{result.timings()}")
    print(f"\n{result.diff() or 'nothing changed'}")
    if options.output is not None:
        with torch.no_grad():
            torch.export.save(result.exported_program(), options.output)
        print(f"\n{options.output}")
    return EXIT_OK
