"""Kernels that users bring: a pattern, a source with a plain signature, a proof and a trial."""

from __future__ import annotations

from fxkit.authoring.kernels.definition import AuthoredKernel, kernel
from fxkit.authoring.kernels.registered import register_kernel, registered, unregister_kernel

__all__ = ["AuthoredKernel", "kernel", "register_kernel", "registered", "unregister_kernel"]
