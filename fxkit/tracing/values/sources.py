"""Sources of outside tensors: parameters, buffers, globals, closures.

A later call can tell whether the same tensor still lies where it was found. A tensor that turns up
during a run and was neither recorded nor found has no known source, and is refused.
"""

from __future__ import annotations

import functools
import keyword
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_STANDARD = frozenset(torch.nn.Module().__dict__)
_GOOD_NAME = re.compile(r"\w+(\.\w+)*")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a tensor lies: a key of a dict, an index of a list, or the content of a closure's cell.

    Attributes:
        holder: The dict, list, tuple or cell.
        key: The key or index; None for a cell.
        name: The place as the user would write it.
    """

    holder: Any
    key: Any
    name: str

    def read(self) -> Any:
        """Return what lies there now, or a marker that equals nothing else."""
        if self.key is None:
            return self.holder.cell_contents
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return _MISSING


def attribute_name(place: ValueSource, taken: set[str]) -> str:
    """Turn a place into the name of an attribute of a graph module.

    Args:
        place: The place; its name is kept as it is where that is possible.
        taken: The names that are taken, and with a dot behind them those of submodules; added to.
    """
    name = place.name
    if not _GOOD_NAME.fullmatch(name):
        name = ".".join(re.sub(r"\W+", "_", atom).strip("_") or "_" for atom in name.split("."))
    if _is_reserved(name.partition(".")[0]):
        name = f"outer_{name}"
    first, *inner = name.split(".")
    name = ".".join([first, *(f"outer_{atom}" if _is_of_module(atom) else atom for atom in inner)])
    base = name
    first, _, rest = base.partition(".")
    number = 0
    while name in taken or f"{name}." in taken or not taken.isdisjoint(_prefixes(name)):
        number += 1  # on the first part, since it may be a prefix that is taken
        name = f"{first}_{number}.{rest}" if rest else f"{first}_{number}"
    taken.add(name)
    taken.update(f"{prefix}." for prefix in _prefixes(name))
    return name


@functools.cache
def _is_reserved(name: str) -> bool:
    known = hasattr(fx.GraphModule, name) or name in _STANDARD
    return known or keyword.iskeyword(name)


@functools.cache
def _is_of_module(name: str) -> bool:
    """Tell whether no tensor can take this name: modules have it already, or Python."""
    return hasattr(torch.nn.Module(), name) or keyword.iskeyword(name)


def _prefixes(name: str) -> list[str]:
    """Return `a` and `a.b` for `a.b.c`."""
    atoms = name.split(".")
    return [".".join(atoms[:depth]) for depth in range(1, len(atoms))]
