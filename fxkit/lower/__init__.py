"""Fused kernels from graphs: regions → loop IR → C++ or CUDA text → build → `CompiledModule`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxkit.lower.loops.policy import Policy
from fxkit.lower.running.compiled_module import CompiledModule
from fxkit.lower.running.lower_report import LowerReport, Region
from fxkit.lower.running.lowering import to_cpp

if TYPE_CHECKING:
    from fxkit.lower.cuda.lowering import to_cuda

__all__ = ["CompiledModule", "LowerReport", "Policy", "Region", "to_cpp", "to_cuda"]


def __getattr__(name: str) -> Any:
    if name == "to_cuda":  # which few need, and imports a printer of its own
        from fxkit.lower.cuda.lowering import to_cuda

        return to_cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
