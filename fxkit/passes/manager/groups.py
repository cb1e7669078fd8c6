"""Passes that run together: in order, until nothing changes, or when something holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from fxkit.errors import PassError
from fxkit.passes.base import Pass
from fxkit.passes.manager.functions import as_pass
from fxkit.passes.properties import property_named

Item = Any
Condition = Callable[[fx.GraphModule], bool] | str


class Group:
    """Passes in order, under one name.

    Args:
        *passes: Passes, functions, and other groups.
        name: What tables call it.
    """

    def __init__(self, *passes: Any, name: str = "group") -> None:
        self.passes = items_of(passes)
        self.name = name

    def __iter__(self) -> Iterator[Item]:
        return iter(self.passes)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.passes))})"


class FixedPoint(Group):
    """Passes that run in turn until a whole round of them changes nothing.

    Args:
        *passes: Passes, functions, and other groups.
        max_rounds: How many rounds may change something before that is an error.
        name: What tables call it.
    """

    def __init__(self, *passes: Any, max_rounds: int = 10, name: str = "fixed_point") -> None:
        super().__init__(*passes, name=name)
        if max_rounds < 1:
            raise PassError(f"expected at least one round, got max_rounds={max_rounds}")
        self.max_rounds = max_rounds


class When(Group):
    """Passes that run only when something holds of the graph.

    Args:
        condition: A function of the `GraphModule`, or the name of a property.
        *passes: Passes, functions, and other groups.
        otherwise: Passes to run when it does not hold.
        name: What tables call it; the condition's name when left out.
    """

    def __init__(
        self,
        condition: Condition,
        *passes: Any,
        otherwise: Sequence[Any] = (),
        name: str | None = None,
    ) -> None:
        if isinstance(condition, str):
            property_named(condition)
        elif not callable(condition):
            raise PassError(
                f"expected a function of the module or a property's name, got {condition!r}",
                hint="When(condition, pass, ...)",
            )
        shown = condition if isinstance(condition, str) else getattr(condition, "__name__", "when")
        super().__init__(*passes, name=f"when {shown}" if name is None else name)
        self.condition = condition
        self.otherwise = items_of(otherwise)

    def __iter__(self) -> Iterator[Item]:
        yield from self.passes
        yield from self.otherwise

    def choose(self, gm: fx.GraphModule) -> tuple[Item, ...]:
        """Return the passes to run on a module as it is now.

        Raises:
            PassError: When the condition raises.
        """
        if isinstance(self.condition, str):
            holds = property_named(self.condition).check(gm) is None
        else:
            holds = self._answer(self.condition, gm)
        return self.passes if holds else self.otherwise

    def _answer(self, condition: Callable[[fx.GraphModule], Any], gm: fx.GraphModule) -> bool:
        try:
            return bool(condition(gm))
        except Exception as error:
            raise PassError(
                f"expected the condition of {self.name} to answer, got "
                f"{type(error).__name__}: {error}",
                hint="it takes the GraphModule as it is then, and returns True or False",
            ) from error


def items_of(passes: Sequence[Any]) -> tuple[Item, ...]:
    """Return passes and groups; lists, tuples and other pass managers become groups.

    Raises:
        PassError: When something is neither.
    """
    return tuple(map(_item, passes))


def _item(candidate: Any) -> Item:
    if isinstance(candidate, Group):
        return candidate
    if isinstance(candidate, (list, tuple)):
        return Group(*candidate)
    if isinstance(inner := getattr(candidate, "items", None), tuple):
        return Group(*inner)
    return as_pass(candidate)


def leaves(items: Sequence[Item]) -> Iterator[Pass]:
    """Iterate over the passes in groups, in order, each where it stands."""
    for item in items:
        if isinstance(item, Group):
            yield from leaves(tuple(item))
        else:
            yield item
