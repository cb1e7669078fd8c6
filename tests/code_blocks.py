"""Fenced code blocks of a Markdown page, and running them like a reader would."""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(\.py):\d+")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of Python and the output that the page shows right below it.

    Attributes:
        line: The line of the page at which the code starts.
        code: The code.
        output: The text block that follows it with nothing but blank lines between, or None.
    """

    line: int
    code: str
    output: str | None


def python_blocks(text: str) -> list[Block]:
    """Return the page's Python blocks in order."""
    fences = list(_FENCE.finditer(text))
    blocks = []
    for fence, following in itertools.pairwise([*fences, None]):
        if fence is None or fence[1] != "python":
            continue
        is_shown = (
            following is not None
            and following[1] == "text"
            and not text[fence.end() : following.start()].strip()
        )
        output = following[2] if following is not None and is_shown else None
        blocks.append(Block(text.count("\n", 0, fence.start(2)) + 1, fence[2], output))
    return blocks


def run_page(page: Path) -> list[str]:
    """Run all blocks of a page in one namespace; return what went otherwise than shown.

    Three dots in a shown output stand for any text: times and paths.
    """
    namespace: dict[str, object] = {"__name__": page.stem}
    wrong = []
    for block in python_blocks(page.read_text()):
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None and not agrees(block.output, printed.getvalue()):
            wrong.append(
                f"{page.name}:{block.line} shows\n{block.output}\nbut prints\n{printed.getvalue()}"
            )
    return wrong


def agrees(shown: str, printed: str) -> bool:
    """Tell whether a printed text is what a page shows; three dots stand for any text.

    Lines of Python files are not compared: those of torch move with its versions.
    """
    shown, printed = (_LINE.sub(r"\1:_", _without_trailing_blanks(t)) for t in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def _without_trailing_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
