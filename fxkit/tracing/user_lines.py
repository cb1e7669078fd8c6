"""Name a line of the user's program for a guard that knows none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from fxkit.tracing.guarding.guards import Mismatch
from fxkit.tracing.guarding.state_guards import line_that_names


def with_line(fn: Callable[..., Any], parameters: Sequence[str], mismatch: Mismatch) -> Mismatch:
    """Return a mismatch that names a line of the program.

    Args:
        fn: The program.
        parameters: The names of its positional parameters.
        mismatch: What differs; where it names no line, the first one that reads the argument, the
            submodule or the attribute is named, or else the line where the program begins.
    """
    code = _code_of(fn)
    if mismatch.source is not None or code is None:
        return mismatch
    codes = tuple(_with_nested(code))
    lines = (line_that_names(codes, name) for name in _names(mismatch.what, parameters))
    begin = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"
    return replace(mismatch, source=next((line for line in lines if line), begin))


def _names(what: str, parameters: Sequence[str]) -> Iterable[str]:
    """Return what the program may call a thing, the closest name first."""
    match = re.match(r"args\[(\d+)\]", what)
    if match is not None and int(match[1]) < len(parameters):
        what = parameters[int(match[1])] + what[match.end() :]
    return reversed(re.findall(r"[A-Za-z_]\w*", what))


def _code_of(fn: Any) -> CodeType | None:
    if isinstance(fn, torch.nn.Module):
        fn = fn.forward
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    fn = getattr(fn, "__wrapped__", fn)
    if not hasattr(fn, "__code__") and not hasattr(fn, "__func__"):
        fn = type(fn).__call__
    return getattr(fn, "__code__", None)


def _with_nested(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
