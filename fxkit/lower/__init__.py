"""Fused kernels from graphs: regions → loop IR → C++ or CUDA text → build → `CompiledModule`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.lower_report import KernelTrial, LowerReport, Region
from fxkit.lower.compiling.lowering import to_cpp
from fxkit.lower.fusion.policy import Policy

if TYPE_CHECKING:
    from fxkit.lower.compiling.cuda_lowering import to_cuda

__all__ = ["CompiledModule", "KernelTrial", "LowerReport", "Policy", "Region", "to_cpp", "to_cuda"]


def __getattr__(name: str) -> Any:
    if name == "to_cuda":  # which few need, and imports a printer of its own
        from fxkit.lower.compiling.cuda_lowering import to_cuda

        return to_cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
