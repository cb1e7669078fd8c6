"""What runs of a program that another tool or mode holds."""

from __future__ import annotations

from typing import Any

import torch

from fxkit.tracing.partial import Partial


def callable_of(program: Any) -> Any:
    """Return what to call of an exported program, or of one in pieces; other values as they are.

    An `ExportedProgram` can't be called itself, and in the place of a program in pieces the
    program that was captured is meant.
    """
    if isinstance(program, torch.export.ExportedProgram):
        return program.module()
    return program.fn if isinstance(program, Partial) else program
