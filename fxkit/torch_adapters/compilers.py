"""Whether torch's own compiler is there, which the demo and the benchmarks compare with."""

from __future__ import annotations

import importlib.util


def has_inductor() -> bool:
    """Tell whether this torch has Inductor; it is not imported."""
    return importlib.util.find_spec("torch._inductor") is not None
