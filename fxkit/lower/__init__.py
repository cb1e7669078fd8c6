"""Fused kernels from graphs: regions → loop IR → C++ or CUDA text → build → `CompiledModule`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxkit.lower.compiling.backend_lowering import to_backend
    from fxkit.lower.compiling.compiled_module import CompiledModule
    from fxkit.lower.compiling.cuda_lowering import to_cuda
    from fxkit.lower.compiling.lower_report import KernelTrial, LowerReport, Region
    from fxkit.lower.compiling.lowering import to_cpp
    from fxkit.lower.fusion.policy import Policy

__all__ = [
    "CompiledModule",
    "KernelTrial",
    "LowerReport",
    "Policy",
    "Region",
    "to_backend",
    "to_cpp",
    "to_cuda",
]

# Loaded when they are first used: who needs the loop IR alone does not wait for a compiler.
_HOMES = {
    "CompiledModule": "compiling.compiled_module",
    "KernelTrial": "compiling.lower_report",
    "LowerReport": "compiling.lower_report",
    "Policy": "fusion.policy",
    "Region": "compiling.lower_report",
    "to_backend": "compiling.backend_lowering",
    "to_cpp": "compiling.lowering",
    "to_cuda": "compiling.cuda_lowering",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
