"""The kernels that `fxkit.compile` looks for in every program."""

from __future__ import annotations

from fxkit.authoring.kernels.definition import AuthoredKernel
from fxkit.errors import UnsupportedError

_registered: list[AuthoredKernel] = []


def register_kernel(kernel: AuthoredKernel) -> AuthoredKernel:
    """Let `fxkit.compile` look for a kernel's pattern in every program from now on.

    Raises:
        UnsupportedError: When it is no kernel.
    """
    check_kernels((kernel,))
    if kernel not in _registered:
        _registered.append(kernel)
    return kernel


def unregister_kernel(kernel: AuthoredKernel) -> None:
    """Undo `register_kernel`; programs that are compiled stay as they are."""
    if kernel in _registered:
        _registered.remove(kernel)


def registered() -> tuple[AuthoredKernel, ...]:
    """Return the registered kernels, in the order in which they were registered."""
    return tuple(_registered)


def check_kernels(kernels: object) -> tuple[AuthoredKernel, ...]:
    """Return kernels as a tuple.

    Raises:
        UnsupportedError: When something is no kernel.
    """
    given: tuple[object, ...] = tuple(kernels) if isinstance(kernels, (list, tuple)) else (kernels,)
    found: list[AuthoredKernel] = []
    for one in given:
        if not isinstance(one, AuthoredKernel):
            raise UnsupportedError(
                f"expected kernels, got {type(one).__name__}",
                hint="make one with fxkit.kernel(pattern=..., cpp=...)",
            )
        found.append(one)
    return tuple(found)
