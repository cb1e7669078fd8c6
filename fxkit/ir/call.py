"""What a node computes: an operator, the same object for every spelling, and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fxkit.torch_adapters.operators import schema_of

# A function with this attribute is the operator that the attribute names. One in the namespace
# `guard` only checks: it may raise, and does nothing else.
OPERATOR_NAME = "fxkit_operator"


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An operator: the same object for every spelling, so that `is` compares.

    Attributes:
        name: `aten.<packet>` for ATen, `python.<name>` for plain Python on numbers and containers,
            `torch.nn.functional.<name>` for what has no single ATen operator, `functional.<name>`
            for what `torch.ops.higher_order.auto_functionalized` computes, `opaque.<name>` for a
            callable of which nothing is known.
        overload: The ATen overload that the call binds to, if there is one.
    """

    name: str
    overload: Any = None

    @property
    def is_opaque(self) -> bool:
        """Whether nothing is known of what a call does."""
        return self.name.startswith("opaque.")

    @property
    def schema(self) -> Any:
        """The ATen schema (`torch.FunctionSchema`), or None."""
        return None if self.overload is None else schema_of(self.overload)

    def __str__(self) -> str:
        return self.name


class Call(NamedTuple):
    """What a node computes: an operator and its arguments.

    Attributes:
        operator: The operator.
        arguments: Schema name → value: an `fx.Node`, a constant, an `Attribute`, or lists of them.
            For an operator without schema: the position as text, or the keyword.
    """

    operator: Operator
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.operator.name


@functools.cache
def operator_named(name: str, overload: Any = None) -> Operator:
    """Return the one `Operator` object of a name and overload."""
    return Operator(name, overload)
