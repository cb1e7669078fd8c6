"""Unwrap exported programs, programs in pieces, and what `torch.compile` returned."""

from __future__ import annotations

from typing import Any

import torch

from fxkit.torch_adapters.compilers import given_to_compiler
from fxkit.tracing.partial import Partial


def callable_of(program: Any) -> Any:
    """Return what to call of an exported or compiled program, or of one in pieces.

    An `ExportedProgram` can't be called itself; in the place of a program in pieces the program
    that was captured is meant, and in that of what `torch.compile` returned what it was given.
    Other values are returned as they are.
    """
    if isinstance(program, torch.export.ExportedProgram):
        return program.module()
    return program.fn if isinstance(program, Partial) else given_to_compiler(program)
