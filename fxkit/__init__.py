"""fxkit: a workbench for people who write graph transformations for PyTorch.

Everything in and out is a `torch.fx.GraphModule`. The names below are the public face; each is
loaded when it is first used, so that `import fxkit` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fxkit.gc_pause import paused_collector

if TYPE_CHECKING:
    from fxkit import authoring, lower, passes, quantization, testing
    from fxkit.analysis.abstract_interpretation import Analysis, transfer
    from fxkit.analysis.cost import flop_formula
    from fxkit.analysis.editing import edit
    from fxkit.analysis.fake_values import fill_fake_values
    from fxkit.analysis.objects import graph
    from fxkit.analysis.tensor_types import TypeAnalysis, propagate_types
    from fxkit.analysis.type_inference.declared_types import declare_type
    from fxkit.authoring.kernels import kernel, register_kernel
    from fxkit.authoring.operators.elementwise import operator
    from fxkit.authoring.operators.rowwise import row_operator
    from fxkit.compiling.compiler import compile
    from fxkit.ir.verifier import verify
    from fxkit.lower.runtime.memory import memory_stats, trim
    from fxkit.passes.manager.manager import PassManager
    from fxkit.patterns.engine import find, rewrite
    from fxkit.patterns.reasons import explain
    from fxkit.patterns.rewriting import rule
    from fxkit.quantization.calibration import quantize
    from fxkit.reporting import report
    from fxkit.tracing import capture, opaque, symbolic_trace
    from fxkit.view import diff, draw, profile, timeline, tree

__version__ = "0.1.0"

_HOMES = {
    "symbolic_trace": "fxkit.tracing",
    "capture": "fxkit.tracing",
    "opaque": "fxkit.tracing",
    "graph": "fxkit.analysis.objects",
    "propagate_types": "fxkit.analysis.tensor_types",
    "fill_fake_values": "fxkit.analysis.fake_values",
    "Analysis": "fxkit.analysis.abstract_interpretation",
    "transfer": "fxkit.analysis.abstract_interpretation",
    "TypeAnalysis": "fxkit.analysis.tensor_types",
    "declare_type": "fxkit.analysis.type_inference.declared_types",
    "edit": "fxkit.analysis.editing",
    "verify": "fxkit.ir.verifier",
    "rule": "fxkit.patterns.rewriting",
    "find": "fxkit.patterns.engine",
    "rewrite": "fxkit.patterns.engine",
    "explain": "fxkit.patterns.reasons",
    "PassManager": "fxkit.passes.manager.manager",
    "compile": "fxkit.compiling.compiler",
    "memory_stats": "fxkit.lower.runtime.memory",
    "trim": "fxkit.lower.runtime.memory",
    "tree": "fxkit.view",
    "draw": "fxkit.view",
    "diff": "fxkit.view",
    "profile": "fxkit.view",
    "timeline": "fxkit.view",
    "flop_formula": "fxkit.analysis.cost",
    "quantize": "fxkit.quantization.calibration",
    "kernel": "fxkit.authoring.kernels",
    "register_kernel": "fxkit.authoring.kernels",
    "operator": "fxkit.authoring.operators.elementwise",
    "row_operator": "fxkit.authoring.operators.rowwise",
    "report": "fxkit.reporting",
}

_PACKAGES = (
    "ir", "analysis", "tracing", "patterns", "passes", "lower", "quantization", "authoring", "view",
    "testing",
)  # fmt: skip

__all__ = [
    "Analysis",
    "PassManager",
    "TypeAnalysis",
    "authoring",
    "capture",
    "compile",
    "declare_type",
    "diff",
    "draw",
    "edit",
    "explain",
    "fill_fake_values",
    "find",
    "flop_formula",
    "graph",
    "kernel",
    "lower",
    "memory_stats",
    "opaque",
    "operator",
    "passes",
    "profile",
    "propagate_types",
    "quantization",
    "quantize",
    "register_kernel",
    "report",
    "rewrite",
    "row_operator",
    "rule",
    "symbolic_trace",
    "testing",
    "timeline",
    "transfer",
    "tree",
    "trim",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return _module(f"fxkit.{name}")
    raise AttributeError(f"module 'fxkit' has no attribute {name!r}")


def _module(home: str) -> ModuleType:
    if home in sys.modules:
        return importlib.import_module(home)  # waits where another thread is still at it
    with paused_collector():
        return importlib.import_module(home)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, "__version__"})
