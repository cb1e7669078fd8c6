"""The command line: `python -m fxkit doctor | demo | passes | explain-kernel | …`, and views."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxkit import __version__
from fxkit.errors import FxkitError, UnsupportedError

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

# Lines of changes that `passes run` prints unless it is asked for all.
CHANGES_SHOWN = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        arguments: The command line without the program's name; `sys.argv[1:]` when left out.

    Returns:
        0 when all went well, 1 after an error (its message is on stderr), 130 when interrupted.
        A command line that can't be read exits with 2, as `argparse` does.
    """
    _write_any_character()
    options = _parser().parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except FxkitError as error:
        print(f"fxkit {options.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # Whoever reads has enough; nothing more may be written, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        print(f"fxkit {options.command}: {_of_system(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _of_system(error: OSError) -> FxkitError:
    """Say of which file the system refused something; of none, it was the output."""
    where = "the output" if error.filename is None else repr(str(error.filename))
    return UnsupportedError(
        f"expected to read or write {where}, got: {(error.strerror or str(error)).lower()}",
        hint="make room on the disk, or choose another file or folder",
    )


def _write_any_character() -> None:
    """Let a terminal that lacks a character, such as a line of a tree, show a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxkit", description="A workbench for graph transformations over torch.fx."
    )
    parser.add_argument("--version", action="version", version=f"fxkit {__version__}")
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

    from fxkit.exported_files import load
    from fxkit.passes.pipelines import PIPELINES
    from fxkit.quantization import command
    from fxkit.view.commands import add_commands

    add_commands(commands, load, PIPELINES)
    command.add_command(commands, load)
    _add_passes(commands)
    explain = commands.add_parser(
        "explain-kernel", help="print the way of a kernel, from its nodes to its text"
    )
    explain.add_argument("file", type=Path, metavar="FILE.pt2", help="from torch.export.save")
    explain.add_argument(
        "--kernel", metavar="NAME", help="its name or number, as kernel_0 or 0; all when left out"
    )
    explain.set_defaults(run=_explain_kernel)
    prove = commands.add_parser(
        "prove-kernels", help="hold the kernels that a file defines to their patterns"
    )
    prove.add_argument("file", type=Path, metavar="FILE.py", help="it calls fxkit.kernel")
    prove.add_argument("--device", choices=("cpu", "cuda"), help="prove them there only")
    prove.add_argument("--checked", action="store_true", help="build them with sanitizers")
    prove.set_defaults(run=_prove_kernels)
    return parser


def _add_passes(commands: Any) -> None:
    passes = commands.add_parser("passes", help="list passes, or run some on an exported program")
    passes.set_defaults(run=_list_passes)
    actions = passes.add_subparsers(metavar="run")
    run = actions.add_parser("run", help="run passes on an exported program")
    run.add_argument(
        "passes", metavar="PASSES", help="pipelines and passes, with commas between them"
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
    run.add_argument("--diff", action="store_true", help="print every change, not the first few")
    run.add_argument("--timings", action="store_true", help="print where the time went, too")
    run.set_defaults(run=_run_passes)


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


def _explain_kernel(options: argparse.Namespace) -> int:
    from fxkit.exported_files import load
    from fxkit.lower import to_cpp
    from fxkit.lower.compiling.kernel_explanation import explain_kernel
    from fxkit.passes.manager.manager import PassManager
    from fxkit.passes.pipelines import LOWERING

    gm, args, kwargs = load(options.file)
    PassManager(LOWERING, verify="structure", args=args, kwargs=kwargs).run(gm)
    module = to_cpp(gm, args, kwargs)
    names = list(module.kernels)
    if options.kernel is not None:
        asked = f"kernel_{options.kernel}" if options.kernel.isdigit() else options.kernel
        if asked not in names:
            raise UnsupportedError(
                f"expected one of {', '.join(names) or 'no kernels'}, got {options.kernel!r}",
                hint="leave --kernel out to print all",
            )
        names = [asked]
    print("\n\n\n".join(explain_kernel(module, name) for name in names) or module.report())
    return EXIT_OK


def _prove_kernels(options: argparse.Namespace) -> int:
    from fxkit.authoring.kernels.file_proofs import proofs_in

    is_fine = True
    for told, holds in proofs_in(options.file, options.device, checked=options.checked):
        print(told)
        is_fine = is_fine and holds
    return EXIT_OK if is_fine else EXIT_FAILED


def _list_passes(options: argparse.Namespace) -> int:
    from fxkit.passes import PASSES
    from fxkit.passes.manager.listing import (
        describe_passes,
        describe_pipelines,
        describe_properties,
    )
    from fxkit.passes.pipelines import PIPELINES

    print(f"passes\n{describe_passes(PASSES.items())}")
    print(f"\nproperties\n{describe_properties()}")
    print(f"\npipelines\n{describe_pipelines(PIPELINES.items())}")
    return EXIT_OK


def _changes(text: str, *, in_full: bool) -> str:
    """Return what passes changed, or its first lines and how many follow."""
    lines = text.splitlines()
    if not lines:
        return "nothing changed"
    if in_full or len(lines) <= CHANGES_SHOWN:
        return text
    rest = len(lines) - CHANGES_SHOWN
    return "\n".join([*lines[:CHANGES_SHOWN], f"… and {rest} more lines; --diff prints them all"])


def _run_passes(options: argparse.Namespace) -> int:
    import torch

    import fxkit
    from fxkit.exported_files import load_program
    from fxkit.ir.writing import check_file, writing
    from fxkit.passes import PASSES
    from fxkit.passes.manager.listing import passes_of
    from fxkit.passes.pipelines import PIPELINES

    manager = fxkit.PassManager(
        passes_of(options.passes, PASSES, PIPELINES, options.set),
        verify=options.verify,
        reproduce=options.reproduce,
    )
    if options.output is not None:
        check_file(options.output)
    with torch.no_grad():
        result = manager.run(load_program(options.file), max_rewrites=options.max_rewrites)
    print(result.table())
    if options.timings:
        print(f"\n{result.timings()}")
    print(f"\n{_changes(result.diff(), in_full=options.diff)}")
    if options.output is not None:
        written = io.BytesIO()
        with torch.no_grad():
            torch.export.save(result.exported_program(), written)
        with writing(options.output):
            # Not a view: Python 3.12.1 dies in its garbage collector where an error keeps one.
            options.output.write_bytes(written.getvalue())
        print(f"\n{options.output}")
    return EXIT_OK
