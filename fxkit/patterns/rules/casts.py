"""Casts that do nothing."""

from __future__ import annotations

from fxkit.patterns.rewriting import rule
from fxkit.patterns.rules.shapes import _is_same_type


@rule(where=_is_same_type)
def cast_to_same(x, dtype):
    """A cast to the dtype that is there already; torch returns the tensor itself.

    Rewrites:
        x.to(dtype)  →  x
    """
    return x.to(dtype), x
