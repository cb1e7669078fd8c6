"""Restore the attributes of modules after a symbolic trace: no placeholder stays in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


@contextlib.contextmanager
def modules_kept(root: Any) -> Iterator[None]:
    """Put back the attributes that a program assigns while it runs on placeholders.

    What it assigns is a placeholder, or made of one, and of no use afterwards; `nn.LSTM` keeps its
    weights in a list of its own in this way. Lists, dicts and sets get their items back too.

    Args:
        root: A module; for anything else nothing is done.
    """
    modules = list(root.modules()) if isinstance(root, torch.nn.Module) else []
    kept = [(module.__dict__, dict(module.__dict__)) for module in modules]
    items = [(value, _items(value)) for _, before in kept for value in before.values()]
    try:
        yield
    finally:
        for value, before in items:
            _put_items_back(value, before)
        for namespace, before in kept:
            _put_back(namespace, before)


def _items(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else None


def _put_items_back(value: Any, before: Any) -> None:
    if type(value) is list and list(map(id, value)) != list(map(id, before)):
        value[:] = before
    elif type(value) is set and value != before:
        value.clear()
        value.update(before)
    elif type(value) is dict:
        _put_back(value, before)


def _put_back(namespace: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore what was there; of what is new, only placeholders go: constants are looked up yet."""
    for key, value in before.items():
        if key not in namespace or namespace[key] is not value:
            namespace[key] = value
    for key in [k for k, v in namespace.items() if k not in before and isinstance(v, fx.Proxy)]:
        del namespace[key]
