"""Fused kernels from graphs: regions → loop IR → C++ or CUDA text → build → `CompiledModule`."""

from __future__ import annotations

from fxkit.lower.cuda.compiled import to_cuda
from fxkit.lower.loops.regions import Policy, Region
from fxkit.lower.running.compiled import CompiledModule, LowerReport, to_cpp

__all__ = ["CompiledModule", "LowerReport", "Policy", "Region", "to_cpp", "to_cuda"]
