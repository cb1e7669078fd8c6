"""Fused C++ kernels from graphs: regions → loop IR → C++ text → build → `CompiledModule`."""

from __future__ import annotations

from fxkit.lower.compiled import CompiledModule, LowerReport, to_cpp
from fxkit.lower.regions import Policy, Region

__all__ = ["CompiledModule", "LowerReport", "Policy", "Region", "to_cpp"]
