"""The command line: `python -m fxkit doctor | demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fxkit.errors import FxkitError

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
    return parser


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
