"""Values as text for messages, without running `__repr__` of a user's classes."""

from __future__ import annotations

import types
from typing import Any

from fxkit.tracing.values.allowlist import is_allowlisted, is_allowlisted_class
from fxkit.tracing.values.stored import class_attributes, mro_of, qualname_of

_BRACKETS = {list: "[]", tuple: "()", set: "{}", frozenset: "()", dict: "{}"}
_MAX_ITEMS = 100


def text_of(value: Any, depth: int = 4) -> str:
    """Return the `repr` of a value; of an object whose class has its own, the class only."""
    kind = type(value)
    if kind in _BRACKETS and value and depth:
        return _text_of_items(value, depth - 1)
    try:
        return repr(value) if _has_plain_repr(kind) else f"<{qualname_of(kind)} object>"
    except Exception:  # it may consist of objects of any class, which raise what they like
        return f"<{qualname_of(kind)} object>"


def _text_of_items(value: Any, depth: int) -> str:
    items = list(value.items() if type(value) is dict else value)[:_MAX_ITEMS]
    if type(value) is dict:
        texts = [f"{text_of(key, depth)}: {text_of(item, depth)}" for key, item in items]
    else:
        texts = [text_of(item, depth) for item in items]
    inner = ", ".join(texts) + ("," if type(value) is tuple and len(texts) == 1 else "")
    start, end = _BRACKETS[type(value)]
    text = f"{start}{inner}{end}"
    return f"frozenset({{{inner}}})" if type(value) is frozenset else text


def _has_plain_repr(kind: type) -> bool:
    for base in mro_of(kind):
        if "__repr__" in class_attributes(base):
            found = class_attributes(base)["__repr__"]
            if isinstance(found, types.FunctionType):
                return is_allowlisted(found.__globals__.get("__name__"))
            return is_allowlisted_class(base)
    return False
