"""The call site of an opaque call: which function of the user led to it."""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType

from fxkit.tracing.environment.foreign_calls import FILES_OF_TORCH
from fxkit.tracing.values.allowlist import is_allowlisted

_reach_out: weakref.WeakSet[CodeType] = weakref.WeakSet()


def makes_opaque_calls(code: CodeType | None) -> bool:
    """Tell whether functions of a library with this code are known to reach out of the program."""
    return code is not None and code in _reach_out


def innermost_user_code(frame: FrameType | None) -> CodeType | None:
    """Return the code of the program that led to a call, and note what it calls as opaque.

    Args:
        frame: The frame that made the call: of the program, or of a library that it uses.

    Returns:
        The code; None where torch stands between, whose functions are recorded call by call.
    """
    callee: FrameType | None = None
    while frame is not None and _is_of_library(frame):
        callee, frame = frame, frame.f_back
    if frame is None:
        return None
    if callee is not None:
        name = callee.f_globals["__name__"]
        if name.startswith("torch.") and not name.startswith(FILES_OF_TORCH):
            return None
        _reach_out.add(callee.f_code)
    return frame.f_code


def user_code(frame: FrameType | None) -> CodeType | None:
    """Return the code of the program that led to a frame of a library."""
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _is_of_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    if not isinstance(name, str):
        return False
    return is_allowlisted(name) or name.partition(".")[0] in sys.stdlib_module_names - {"__main__"}
