"""Passes that were run on a captured program, to be run on its other graphs too."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxkit.passes.base import Pass
from fxkit.passes.manager.protocols import Manager


def alters_results(current: Pass) -> bool:
    """Tell whether a call may do something else after a pass, on purpose.

    What a pass of the user's says of its numbers is taken for granted by nobody but the pass
    manager, which can check it.
    """
    made_of = getattr(current, "function", type(current))
    is_own = str(getattr(made_of, "__module__", "")).startswith("fxkit.")
    return not is_own or current.numerics == "changed" or current.adds_effects


@dataclass(eq=False)
class PassesChange:
    """Passes that were run on a captured program.

    Attributes:
        manager: What ran them.
        stop_after: How many passes of its list were run; None for all.
        max_rewrites: How many rewrites they could make.
    """

    manager: Manager
    stop_after: int | None = None
    max_rewrites: int | None = None

    def __str__(self) -> str:
        return f"the passes {', '.join(map(str, self.manager.items))}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassesChange) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.manager.items, self.stop_after, self.max_rewrites

    @property
    def alters_results(self) -> bool:
        """Whether results may be others after them, on purpose."""
        return any(map(alters_results, self.manager.passes))

    def for_copy(self, memo: dict[int, Any]) -> PassesChange:
        """Return what was run on a deep copy of the program: passes may hold objects of it."""
        items = [it.for_copy(memo) if isinstance(it, Pass) else it for it in self.manager.items]
        if all(new is old for new, old in zip(items, self.manager.items, strict=True)):
            return self
        manager = copy.copy(self.manager)
        manager.items = tuple(items)
        return replace(self, manager=manager)

    def apply(self, gm: fx.GraphModule, args: tuple[Any, ...] | None) -> None:
        """Run the passes on another graph; what they say of themselves was checked on the first."""
        self.manager.again(gm, args, self.stop_after, self.max_rewrites)
