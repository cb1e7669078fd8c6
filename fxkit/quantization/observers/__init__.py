"""Observers: what finds the range of a tensor's values while a program is calibrated.

Each is one class in one file of this folder, and is named by its label. A subclass of
`RangeObserver` elsewhere is handed over as a class: `int8_static(observer=MyObserver)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from fxkit.quantization.observers.range_observer import RangeObserver, ValueRange
from fxkit.registry import Registry

__all__ = ["OBSERVERS", "RangeObserver", "ValueRange"]


def _select(module: ModuleType) -> Iterator[tuple[str, type[RangeObserver]]]:
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, RangeObserver) and kind.__module__ == module.__name__ and kind.label:
            yield kind.label, kind


OBSERVERS: Registry[type[RangeObserver]] = Registry("observer", __name__, _select)
"""The observers that a `TensorSpec` can name."""
