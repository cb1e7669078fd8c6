"""Say what is going on while something takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

PATIENCE = 1.0


@dataclass
class Stopwatch:
    """How long the block took; read it after the block.

    Attributes:
        seconds: Wall time, 0.0 while the block runs.
    """

    seconds: float = 0.0


@contextlib.contextmanager
def progress(
    doing: str, stream: TextIO | None = None, *, patience: float = PATIENCE
) -> Iterator[Stopwatch]:
    """Time a block, and show `doing` on `stream` once it has taken longer than `patience` seconds.

    A terminal shows the seconds counting and the line goes away at the end; a pipe gets one line.
    """
    stream = sys.stderr if stream is None else stream
    finished = threading.Event()
    ticker = threading.Thread(target=_tick, args=(doing, stream, patience, finished), daemon=True)
    watch = Stopwatch()
    start = time.perf_counter()
    ticker.start()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - start
        finished.set()
        ticker.join()


def _tick(doing: str, stream: TextIO, patience: float, finished: threading.Event) -> None:
    start = time.perf_counter()
    if finished.wait(patience):
        return
    if not stream.isatty():
        stream.write(f"... {doing}\n")
        stream.flush()
        return
    while not finished.wait(0.2):
        stream.write(f"\r... {doing} {time.perf_counter() - start:.0f} s")
        stream.flush()
    stream.write("\r\x1b[K")
    stream.flush()
