"""Proofs of all kernels that a file of Python defines: `python -m fxkit prove-kernels FILE.py`."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.errors import FxkitError, UnsupportedError


def proofs_in(
    path: Path, device: str | None = None, *, checked: bool = False
) -> Iterator[tuple[str, bool]]:
    """Run a file, and prove each kernel that it defines, on each kind of device that it serves.

    Args:
        path: The file, which is not run as the main one.
        device: The only kind of device to prove them on.
        checked: Build C++ sources with sanitizers, which tell the line of a fault.

    Yields:
        What a proof has shown, as text, and whether the kernel holds.

    Raises:
        UnsupportedError: When there is no such file, or it defines no kernel.
    """
    if not path.is_file():
        raise UnsupportedError(f"expected a file of Python, got {path}, which is none")
    names = runpy.run_path(str(path))
    kernels = dict.fromkeys(k for k in names.values() if isinstance(k, AuthoredKernel))
    if not kernels:
        raise UnsupportedError(
            f"expected kernels in {path.name}, got none",
            hint="assign what fxkit.kernel returns to names of the module",
        )
    for kernel in kernels:
        for kind in kernel.natives or ("cpu",):
            if device in (None, kind):
                yield _proof(kernel, kind, checked and kind in kernel.natives)


def _proof(kernel: AuthoredKernel, device: str, checked: bool) -> tuple[str, bool]:
    try:
        compared = kernel.prove(device, checked=checked)
        return f"{kernel.name} on {device}: holds on {compared} inputs", True
    except FxkitError as error:
        return f"{kernel.name} on {device}: {error}", False
