"""Where the programs of a compiled method are kept: each instance of its class has one of its own.

A program holds what it was made of, parameters and all. A module's programs therefore lie in the
module itself, and end with it. Other objects keep their attributes as they are: the program of the
class holds those of a few instances.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Program = TypeVar("Program")

_NAME = "_fxkit_methods"

# The instances of a class that is no module, of which each has a program; later ones share one.
_MAX_OTHERS = 8


class MethodPrograms:
    """The programs of one module's compiled methods.

    Copies and pickles of the module begin with none, as a program is of one object.

    Attributes:
        table: The attributes of the module; those of a copy are others.
        programs: The programs, by what they were bound from and the class they were bound for.
    """

    def __init__(self, table: dict[str, Any] | None = None) -> None:
        self.table = table
        self.programs: dict[tuple[int, type], Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodPrograms:
        """Return none."""
        return MethodPrograms()

    def __reduce__(self) -> Any:
        """Pickle none."""
        return MethodPrograms, ()


def kept_program(instance: Any, key: int, others: dict[int, Program]) -> Program | None:
    """Return an instance's program for a method, if it has one.

    Args:
        instance: The instance.
        key: Which method it is.
        others: The programs of instances that are no modules, by identity.
    """
    if not isinstance(instance, nn.Module):
        return others.get(id(instance))
    kept = _kept_in(vars(instance))
    return None if kept is None else kept.programs.get((key, type(instance)))


def keep_program(
    instance: Any, key: int, others: dict[int, Program], program: Program
) -> Program | None:
    """Keep an instance's program for a method; of two that threads make at once, the first.

    Args:
        instance: The instance.
        key: Which method it is.
        others: The programs of instances that are no modules, by identity.
        program: The program.

    Returns:
        The instance's program; None where it is to share that of its class.
    """
    if not isinstance(instance, nn.Module):
        return None if len(others) >= _MAX_OTHERS else others.setdefault(id(instance), program)
    table = vars(instance)
    kept = _kept_in(table)
    if kept is None:
        kept = table[_NAME] = MethodPrograms(table)
    return kept.programs.setdefault((key, type(instance)), program)


def _kept_in(table: dict[str, Any]) -> MethodPrograms | None:
    """Return a module's programs; None where a shallow copy has those of what it was made of."""
    kept = table.get(_NAME)
    return kept if type(kept) is MethodPrograms and kept.table is table else None
