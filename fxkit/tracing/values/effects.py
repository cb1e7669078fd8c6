"""Effects that a graph repeats: texts that the program writes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx.node import has_side_effect

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.ir.op import OPERATOR_NAME


class _Quiet(threading.local):
    is_on = False


_quiet = _Quiet()


@has_side_effect
def write_text(stream: str, text: str) -> None:
    """Write a text as the program did when it was captured.

    Args:
        stream: `stdout` or `stderr`; looked up in `sys` at each call, as `print` does.
        text: What to write.
    """
    if not _quiet.is_on:
        getattr(sys, stream).write(text)


@declare_type(write_text)
def _(stream: str, text: str) -> None:
    """It gives nothing."""


setattr(write_text, OPERATOR_NAME, "effect.write_text")


@contextmanager
def quietly() -> Iterator[None]:
    """Let graphs run in this thread without writing texts."""
    before, _quiet.is_on = _quiet.is_on, True
    try:
        yield
    finally:
        _quiet.is_on = before
