"""Symbolic sizes: their names and limits, the dimensions of `torch.export.Dim`, and their text."""

from __future__ import annotations

from typing import Any

from fxkit.torch_adapters.fake_tensors import needed
from fxkit.torch_adapters.private_names import private

_FREE = "programs whose sizes are free"
_EAGER = "each size is captured by itself"
_SOURCE = private("torch._dynamo.source.ConstantSource", _FREE, _EAGER)
_INFINITY = private("torch.utils._sympy.numbers.int_oo", _FREE, _EAGER)
_RANGES = private("torch.utils._sympy.value_ranges.ValueRanges", _FREE, _EAGER)
_PRINTER = private("torch.utils._sympy.printers.PythonPrinter", _FREE, _EAGER)
_DIM = "dynamic_shapes with dimensions of torch.export"
_PLAIN = "dimensions are read by their attributes"
_HINT = private("torch.export.dynamic_shapes._DimHint", _DIM, _PLAIN)
_KIND = private("torch.export.dynamic_shapes._DimHintType", _DIM, _PLAIN)
_DERIVED = private("torch.export.dynamic_shapes._DerivedDim", _DIM, _PLAIN)


def named_source(name: str) -> Any:
    """Return what a symbol is named after."""
    return needed(_SOURCE)(name)


def value_range(low: int, high: int | None) -> Any:
    """Return the limits of a symbol; no high one where that is None."""
    return needed(_RANGES)(low, needed(_INFINITY) if high is None else high)


def python_printer() -> Any:
    """Return what writes expressions of sizes as Python."""
    return needed(_PRINTER)()


def hint_of(entry: Any) -> str | None:
    """Return the name of `Dim.AUTO`, `Dim.DYNAMIC` or `Dim.STATIC`, or None for others."""
    kind = _HINT.get()
    said = getattr(entry, "type", None)
    if kind is None or not isinstance(entry, kind):
        return None
    return getattr(said, "name", None)


def is_derived(entry: Any) -> bool:
    """Tell whether a dimension is computed from another one, as `2 * dim` is."""
    kind = _DERIVED.get()
    if kind is None:
        return hasattr(entry, "root") and hasattr(entry, "fn")
    return isinstance(entry, kind)
