"""Declare private names of torch, look them up, and tell which of them a torch lacks."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

SEEN = "2.11 to 2.14"

_declared: dict[str, PrivateName] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class PrivateName:
    """A name that torch may drop or move.

    Attributes:
        path: The dotted path, from `torch` on.
        purpose: What fxkit needs it for.
        without: What fxkit does in a torch that lacks it.
        versions: The versions of torch that it was seen in.
    """

    path: str
    purpose: str
    without: str
    versions: str = SEEN

    def get(self, default: Any = None) -> Any:
        """Return what has the name, or the default; modules on the way are imported."""
        return find(self.path, default)

    def warn(self) -> None:
        """Warn once that this torch lacks the name."""
        if self.path not in _warned:
            _warned.add(self.path)
            warnings.warn(
                f"torch {torch.__version__} has no {self.path}, which fxkit needs for "
                f"{self.purpose}: {self.without}",
                stacklevel=3,
            )


def private(path: str, purpose: str, without: str, versions: str = SEEN) -> PrivateName:
    """Declare a private name.

    Args:
        path: The dotted path, from `torch` on.
        purpose: What fxkit needs it for.
        without: What fxkit does in a torch that lacks it.
        versions: The versions of torch that it was seen in.
    """
    return _declared.setdefault(path, PrivateName(path, purpose, without, versions))


def find(path: str, default: Any = None) -> Any:
    """Return what a dotted path of torch leads to, or the default where it leads nowhere."""
    found: Any = torch
    parts = path.split(".")
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                return default
    return found


def declared() -> tuple[PrivateName, ...]:
    """Return every private name that fxkit uses, in the order of their paths."""
    for subject in SUBJECTS:
        importlib.import_module(f"{__package__}.{subject}")
    return tuple(_declared[path] for path in sorted(_declared))


def missing() -> tuple[PrivateName, ...]:
    """Return the names that this torch lacks."""
    lost = object()
    return tuple(name for name in declared() if name.get(lost) is lost)


SUBJECTS = ("custom_functions", "fx_tracing")
