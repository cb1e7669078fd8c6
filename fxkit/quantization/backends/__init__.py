"""Descriptions of accelerators: each is data in one file of this folder, found by its name.

One elsewhere is handed over as it is: `BackendDescription("mine", ...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from fxkit.quantization.backends.backend_description import BackendDescription
from fxkit.registry import Registry

__all__ = ["BACKENDS", "BackendDescription"]


def _select(module: ModuleType) -> Iterator[tuple[str, BackendDescription]]:
    for _, one in inspect.getmembers(module, lambda value: isinstance(value, BackendDescription)):
        yield one.name, one


BACKENDS: Registry[BackendDescription] = Registry("backend description", __name__, _select)
"""The descriptions by their names."""
