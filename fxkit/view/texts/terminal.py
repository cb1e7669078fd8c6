"""What the command line prints: colours and a spinner by `rich` in a terminal, plain text else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from fxkit.view.texts import text_table

_LINE_STYLES = {"+": "green", "-": "red", "~": "yellow", ">": "cyan", "!": "magenta"}


class Terminal:
    """Prints to a stream; with colours only where somebody looks at it.

    Args:
        stream: Where to print; stdout when left out.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = _console(self._stream)

    @property
    def is_rich(self) -> bool:
        """Whether colours are shown."""
        return self._console is not None

    def text(self, text: str) -> None:
        """Print text as it is."""
        print(text, file=self._stream)

    def difference(self, text: str) -> None:
        """Print a difference; added lines are green, removed ones red."""
        if self._console is None:
            self.text(text)
            return
        for line in text.splitlines():
            style = _LINE_STYLES.get(line.lstrip()[:1]) if line[:1] != " " or line[2:3] else None
            self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = ""
    ) -> None:
        """Print a table."""
        if self._console is None:
            self.text(text_table.table(headers, rows, align=align))
            return
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=None, pad_edge=False, header_style="bold")
        sides = align.ljust(len(headers), "<")
        for header, side in zip(headers, sides, strict=True):
            shown.add_column(header, justify="right" if side == ">" else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*(Text(cell) for cell in row))
        self._console.print(shown)

    @contextlib.contextmanager
    def working(self, words: str) -> Iterator[None]:
        """Say what is being done while it is done; nothing is printed into a pipe."""
        if self._console is None:
            yield
            return
        with self._console.status(words):
            yield


def _console(stream: TextIO) -> Any:
    """Return a console of rich when it is there and the stream is a terminal."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)
