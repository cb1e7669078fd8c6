"""Declare private names of torch, look them up, and tell which of them a torch lacks."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.torch_adapters.late_imports import IMPORTING

_declared: dict[str, PrivateName] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class PrivateName:
    """A name that torch may drop or move.

    Attributes:
        path: The dotted path, from `torch` on.
        purpose: What fxkit needs it for.
        without: What fxkit does in a torch that lacks it.
        since: The first version of torch that it was seen in.
        until: The last one, or None where the newest that was looked at has it.
    """

    path: str
    purpose: str
    without: str
    since: tuple[int, int]
    until: tuple[int, int] | None

    def get(self, default: Any = None) -> Any:
        """Return what has the name, or the default; modules on the way are imported."""
        return find(self.path, default)

    def is_missing(self) -> bool:
        """Tell whether this torch should have the name and lacks it."""
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if version < self.since or (self.until is not None and version > self.until):
            return False
        lost = object()
        return self.get(lost) is lost

    def warn(self) -> None:
        """Warn once that this torch lacks the name."""
        if self.path not in _warned:
            _warned.add(self.path)
            warnings.warn(
                f"torch {torch.__version__} has no {self.path}, which fxkit needs for "
                f"{self.purpose}: {self.without}",
                stacklevel=3,
            )


def private(
    path: str,
    purpose: str,
    without: str,
    since: tuple[int, int] = (2, 11),
    until: tuple[int, int] | None = None,
) -> PrivateName:
    """Declare a private name; see `PrivateName`."""
    return _declared.setdefault(path, PrivateName(path, purpose, without, since, until))


def find(path: str, default: Any = None) -> Any:
    """Return what a dotted path of torch leads to, or the default where it leads nowhere."""
    found: Any = torch
    parts = path.split(".")
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                with IMPORTING:
                    found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                return default
    return found


def declared() -> tuple[PrivateName, ...]:
    """Return every private name that fxkit uses, in the order of their paths."""
    for subject in pkgutil.iter_modules([os.path.dirname(__file__)]):
        importlib.import_module(f"{__package__}.{subject.name}")
    return tuple(_declared[path] for path in sorted(_declared))


def missing() -> tuple[PrivateName, ...]:
    """Return the names that this torch should have and lacks."""
    return tuple(name for name in declared() if name.is_missing())
