"""The progress line appears when a block takes long, and only then."""

from __future__ import annotations

import io
import threading

import pytest

from fxkit.demo.progress import progress


class Terminal(io.StringIO):
    """Takes text like a terminal, and tells when the first has come."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_quick_block_prints_nothing() -> None:
    stream = Terminal()
    with progress("thinking", stream, patience=60):
        pass
    assert stream.getvalue() == ""


def test_a_slow_block_counts_on_a_terminal_and_clears_its_line() -> None:
    stream = Terminal()
    with progress("thinking", stream, patience=0):
        assert stream.written.wait(30)
    assert stream.getvalue().startswith("\r... thinking ")
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_pipe_gets_one_plain_line() -> None:
    class Pipe(Terminal):
        def isatty(self) -> bool:
            return False

    stream = Pipe()
    with progress("thinking", stream, patience=0):
        assert stream.written.wait(30)
    assert stream.getvalue() == "... thinking\n"


def test_the_seconds_are_there_after_an_error_too() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), progress("thinking", stream) as watch:
        raise ValueError
    assert watch.seconds > 0
