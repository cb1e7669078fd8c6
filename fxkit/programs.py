"""Exported programs in files: how the command line gets at a graph."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxkit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

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
    module = program.module()
    if not isinstance(module, fx.GraphModule):
        raise UnsupportedError(
            f"expected a graph module in {path}, got {type(module).__name__}", hint=_EXPORT
        )
    args, kwargs = program.example_inputs or ((), {})
    return module, tuple(args), dict(kwargs)


def load_program(path: Path) -> ExportedProgram:
    """Load a `.pt2` file with `torch.export.load`.

    Torch says of that format: load only files that you trust.

    Args:
        path: What `torch.export.save` wrote.

    Returns:
        The program.

    Raises:
        UnsupportedError: When there is no such file, or it holds no exported program.
    """
    import torch.export

    if not path.is_file() or not zipfile.is_zipfile(path):
        got = "a file of another kind" if path.is_file() else "no such file"
        raise UnsupportedError(f"expected an exported program in {path}, got {got}", hint=_EXPORT)
    try:
        return torch.export.load(path)
    except (RuntimeError, ValueError, OSError, KeyError, AssertionError) as error:
        reason = str(error).strip().splitlines()
        raise UnsupportedError(
            f"expected an exported program in {path}, got a file that torch.export can't load: "
            f"{reason[0] if reason else type(error).__name__}",
            hint=_EXPORT,
        ) from error
