"""Exported programs in files: how the command line gets at a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.tracing.exported import load_program

__all__ = ["load", "load_program"]

_EXPORT = "write one with torch.export.save(torch.export.export(model, args), 'model.pt2')"


def load(path: Path) -> tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]:
    """Load a `.pt2` file as a graph module.

    Args:
        path: What `torch.export.save` wrote.

    Returns:
        The program as a graph module, and its example inputs: args and kwargs.

    Raises:
        UnsupportedError: When there is no such file, or it holds no exported program.
    """
    program = load_program(path)
    module = program.module(check_guards=False)
    if not isinstance(module, fx.GraphModule):
        raise UnsupportedError(
            f"expected a graph module in {path}, got {type(module).__name__}", hint=_EXPORT
        )
    args, kwargs = program.example_inputs or ((), {})
    return module, tuple(args), dict(kwargs)
