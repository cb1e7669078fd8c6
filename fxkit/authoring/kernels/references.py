"""A kernel's pattern as a function that torch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.patterns.inputs import captures_of, pattern_module
from fxkit.patterns.pattern_nodes import Named, Pattern
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.variants import plain_variants


def reference_of(function: Callable[..., Any], found: Pattern) -> Callable[..., Any]:
    """Return a function of torch for a pattern: the user's own, unless it uses words of patterns.

    Args:
        function: What the pattern was made of.
        found: The pattern.
    """
    variants = plain_variants(found)
    has_words = len(variants) > 1 or any(isinstance(o, Named) for o in found.outputs)
    if not has_words and not found.named and not isinstance(function, Pattern):
        return function
    return _Spelled(found)


class _Spelled:
    """The first reading of a pattern, as torch runs it."""

    def __init__(self, found: Pattern) -> None:
        self._rule = Rule("reference", plain_variants(found)[0], None)  # type: ignore[arg-type]
        self._captures = found.captures
        self._made: dict[Any, fx.GraphModule] = {}

    def __call__(self, *values: Any) -> Any:
        given = dict(zip(self._captures, values, strict=True))
        tensors = [n for n in captures_of(self._rule) if isinstance(given[n], torch.Tensor)]
        key = tuple((n, v) for n, v in given.items() if n not in tensors)
        if key not in self._made:
            self._made[key] = pattern_module(self._rule, given)
        results = self._made[key](*(given[name] for name in tensors))
        results = results[: len(self._rule.pattern.outputs)]
        return results[0] if len(results) == 1 else tuple(results)
