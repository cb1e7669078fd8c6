"""Trace symbolic scalars: arithmetic on them becomes nodes of the graph.

Wherever a program uses the number itself, it is guarded to be the same one.
"""

from __future__ import annotations

import operator
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.recorder.calls import CallSpelling
from fxkit.tracing.recorder.tape import Tape
from fxkit.tracing.values.symbolic_scalars import (
    INFIX,
    SYMBOLIC,
    SymbolicScalar,
    has_symbolic,
    plain,
    stand_in,
)

NAME = "fxkit_name"
"""Key of a node's meta: where a number that a graph is given lies, as the user would write it."""

# Where functions that are not pointwise take a number that decides no type: by place or by name.
_DATA: dict[str, frozenset[int | str]] = {
    "full": frozenset({1, "fill_value"}),
    "full_like": frozenset({1, "fill_value"}),
    "new_full": frozenset({2, "fill_value"}),
    "fill": frozenset({1, "value"}),
    "masked_fill": frozenset({2, "value"}),
    "setitem": frozenset({2}),
    "tensor": frozenset({0, "data"}),
    "dropout": frozenset({1, "p"}),
    "bernoulli": frozenset({1, "p"}),
    "normal_": frozenset({1, 2, "mean", "std"}),
    "uniform_": frozenset({1, 2, "from", "to"}),
    "layer_norm": frozenset({4, "eps"}),
    "addmm": frozenset({"beta", "alpha"}),
    "baddbmm": frozenset({"beta", "alpha"}),
    "scaled_dot_product_attention": frozenset({"scale", "dropout_p"}),
}


class ScalarTracing(Tape):
    """A tape that writes down what a program computes of symbolic scalars.

    Attributes:
        scalars: The value of each node that computes a scalar, or guards one.
        pinned: The nodes whose very value is guarded.
    """

    def __init__(
        self, leaves: Iterable[tuple[str, torch.Tensor]], environment: EnvironmentWalk
    ) -> None:
        self.scalars: dict[fx.Node, Any] = {}
        self.pinned: list[fx.Node] = []
        self._fixed: set[fx.Node] = set()
        self._thread = threading.get_ident()
        super().__init__(leaves, environment)

    @property
    @abstractmethod
    def is_following(self) -> bool:
        """Whether the graph still grows."""

    @abstractmethod
    def guard_scalar(self, node: fx.Node, value: Any) -> None:
        """Append a guard that expects a scalar to be what it was."""

    @abstractmethod
    def append_scalar(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        """Append a node that computes a scalar."""

    @property
    def traces_scalars(self) -> bool:
        """Whether a node is appended for what is computed now; else it is computed only."""
        return self.is_following and threading.get_ident() == self._thread

    def stand_in(self, value: Any, node: fx.Node) -> SymbolicScalar:
        """Return what stands for an int or float that a node computes."""
        self.scalars[node] = value
        return stand_in(value, node, self)

    def compute(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Compute a scalar, and return a stand-in for it."""
        if not self.traces_scalars:
            return self._compute_elsewhere(target, operands)
        operands = tuple([it if self.is_own(it) else plain(it) for it in operands])
        try:
            value = target(*plain(operands))
        except Exception:
            self.fix_all(operands)
            raise
        self._guard_domain(target, operands)
        args = tuple([it.fx_node if type(it) in SYMBOLIC else it for it in operands])
        node = self.append_scalar(target, args, value)
        if type(value) in (int, float):
            return self.stand_in(value, node)
        if type(value) is bool:
            self.guard_scalar(node, value)
        else:
            self.fix_all(operands)
        return value

    def is_own(self, value: Any) -> bool:
        """Tell whether a value is a stand-in of this run; those of others are plain numbers."""
        return type(value) in SYMBOLIC and value.tracer is self

    def _compute_elsewhere(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Compute with a stand-in that outlived its run, and maybe with one of another run."""
        for operand in operands:
            if type(operand) in SYMBOLIC and operand.tracer is not self:
                rest = tuple([plain(it) if self.is_own(it) else it for it in operands])
                return operand.tracer.compute(target, rest)
        return target(*plain(operands))

    def _guard_domain(self, target: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        """Guard what decides whether a power is an int, a float or a complex number."""
        if target is not operator.pow:
            return
        base, exponent = operands
        if type(plain(exponent)) is float:
            is_real = base >= 0  # a guard where the base is a stand-in
            if not is_real:
                self.fix_all(exponent)
        elif type(plain(base)) is int and type(exponent) in SYMBOLIC:
            self.compute(operator.ge, (exponent, 0))

    def fix(self, scalar: Any) -> Any:
        """Guard the value of a stand-in, and return it."""
        node = scalar.fx_node
        if self.traces_scalars and node not in self._fixed:
            self._fixed.add(node)
            self.guard_scalar(node, scalar.value)
        return scalar.value

    def fix_all(self, value: Any) -> None:
        """Guard the values of all stand-ins of this run in a nested value."""
        if self.is_own(value):
            self.fix(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.fix_all(item)
        elif isinstance(value, dict):
            self.fix_all(tuple(value.values()))
        elif type(value) is slice:
            self.fix_all((value.start, value.stop, value.step))

    def fixed(self, value: Any) -> Any:
        """Guard all stand-ins in a nested value, and return it with numbers in their places."""
        if not has_symbolic(value):
            return value
        self.fix_all(value)
        return plain(value)

    def without_settings(
        self, spelling: CallSpelling, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a torch call with stand-ins where they can't decide a type.

        All others, such as sizes, axes and indices, are guarded to be the numbers that they are.
        """
        places = _DATA.get(spelling.name, _DATA.get(spelling.name.rstrip("_"), frozenset()))

        def settled(key: int | str, value: Any) -> Any:
            if self.is_own(value) and (spelling.is_pointwise or key in places):
                return value
            return self.fixed(value)

        return (
            tuple([settled(index, value) for index, value in enumerate(args)]),
            {name: settled(name, value) for name, value in kwargs.items()},
        )


def scalar_text(value: Any) -> str:
    """Return what a node computes of numbers, as the user would write it."""
    if not isinstance(value, fx.Node):
        return repr(value)
    sign = INFIX.get(value.target)
    if sign is None or len(value.args) != 2:
        return value.meta.get(NAME, value.name)
    parts = [scalar_text(arg) for arg in value.args]
    texts = [f"({text})" if " " in text else text for text in parts]
    return f"{texts[0]} {sign} {texts[1]}"
