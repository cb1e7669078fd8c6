"""Expressions over sizes as Python: their text, and functions that compute them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.ir.symbols import Symbol
from fxkit.torch_adapters.symbolic_sizes import python_printer

_NAME = re.compile(r"\bs\d+\b")
_KNOWN = {"math": math, "max": max, "min": min, "abs": abs, "int": int, "float": float}


def python_text(expression: Any) -> str:
    """Return a sympy expression over sizes as Python.

    Raises:
        UnsupportedError: When it holds a function that Python's own numbers do not have.
    """
    text = str(python_printer().doprint(expression)).replace("torch.sym_float", "float")
    unknown = set(re.findall(r"\b([A-Za-z_]\w*)\b(?!\s*\.)", text)) - _words(text)
    if unknown:
        raise UnsupportedError(
            f"expected arithmetic of sizes, got {text}",
            hint="capture for each size by itself, with dynamic=False",
        )
    return text


def _words(text: str) -> set[str]:
    names = set(_NAME.findall(text)) | set(_KNOWN) | {"and", "or", "not", "True", "False"}
    return names | set(re.findall(r"math\.(\w+)", text))


def names_in(text: str) -> set[str]:
    """Return the names of the sizes in a text."""
    return set(_NAME.findall(text))


def is_over(symbol: Symbol, names: Sequence[str]) -> bool:
    """Tell whether an expression is over sizes of these names only."""
    return {str(part) for part in symbol.expression.free_symbols} <= set(names)


def named(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the names of sizes in it replaced by those that the user knows."""
    return _NAME.sub(lambda match: names.get(match[0], match[0]), text)


def compiled(text: str, names: Sequence[str]) -> Callable[..., Any]:
    """Return a function of sizes, in the order of `names`, that computes a text of Python."""
    code = f"lambda {', '.join(names)}: {text}"
    return eval(code, {"__builtins__": {}, **_KNOWN})  # made of sympy's own printer's words
