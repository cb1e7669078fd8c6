"""Words for patterns that plain operators can't say; used inside pattern functions.

    def attention_scores(q, k, scale):
        scores = optional(lambda s: s * scale)(q @ k.transpose(-2, -1))
        return any_of(torch.softmax, F.softmax)(scores, -1)

Each leaves a mark in the traced pattern, which `PatternBuilder` turns into a pattern node. None of
them computes anything: a pattern that uses them is for matching only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.errors import PatternError
from fxkit.ir.op import operator_name, resolve
from fxkit.ir.printer import format_type, format_value
from fxkit.ir.types import TensorType, short_dtype

# Metadata key: the function of a `computed` constant.
COMPUTES = "fxkit_computes"


def any_of(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Match the first of several functions of the same operands that fits.

    Args:
        *functions: Pattern functions: `any_of(torch.relu, F.gelu)(x)`.
    """

    def apply(*args: Any, **kwargs: Any) -> Any:
        return _mark(alternatives, [function(*args, **kwargs) for function in functions])

    return apply


def optional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Match a function of an operand, or else the operand itself: `optional(torch.neg)(x)`."""

    def apply(operand: Any, *args: Any, **kwargs: Any) -> Any:
        return _mark(alternatives, [function(operand, *args, **kwargs), operand])

    return apply


def repeated(
    function: Callable[[Any], Any], at_least: int = 1, at_most: int = 64
) -> Callable[[Any], Any]:
    """Match a chain of applications of a function, as long as it goes: `repeated(F.relu)(x)`.

    Args:
        function: A pattern function of one operand.
        at_least: Shortest chain; 0 matches the operand itself.
        at_most: Longest chain.
    """

    def apply(operand: fx.Proxy) -> Any:
        hole = operand.tracer.create_proxy("call_function", chain_operand, (), {})
        return _mark(chain, [function(hole), hole, operand], at_least, at_most)

    return apply


def named(value: Any, name: str) -> Any:
    """Give a value inside of a pattern a name, so that `match[name]` tells the node."""
    return _mark(binding, [value], name)


def computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a constant of a replacement from what the match bound.

    An operand that an `optional` or `any_of` left out is None.

        rule(lambda x, a, b: x * a * b, lambda x, a, b: x * computed(operator.mul)(a, b), ...)

    Args:
        function: Gets the bound constants and nodes, and returns a constant; it is not traced.
    """

    def apply(*values: Any) -> Any:
        mark = _mark(computation, list(values))
        mark.node.meta[COMPUTES] = function
        return mark

    return apply


def alternatives(*_values: Any) -> Any:
    """Mark: any of the values."""
    raise _not_a_program("any_of and optional")


def chain(*_values: Any) -> Any:
    """Mark: a link, repeated. Takes the link, its input in the link, and the first input."""
    raise _not_a_program("repeated")


def chain_operand() -> Any:
    """Mark: where a link of a chain takes the one before it."""
    raise _not_a_program("repeated")


def binding(*_values: Any) -> Any:
    """Mark: the value, under a name."""
    raise _not_a_program("named")


def computation(*_values: Any) -> Any:
    """Mark: what the node's function, in its metadata, makes of the values."""
    raise _not_a_program("computed")


def _not_a_program(word: str) -> PatternError:
    return PatternError(
        f"expected {word} in a pattern, got a call of it outside of one",
        hint="use it in the function that is given to rule, pattern or find",
    )


def _mark(target: Callable[..., Any], values: list[Any], *constants: Any) -> Any:
    proxy = next((v for v in values if isinstance(v, fx.Proxy)), None)
    if proxy is None:
        raise _not_a_program(target.__name__)
    return proxy.tracer.create_proxy("call_function", target, (*values, *constants), {})


@dataclass(frozen=True)
class Operand:
    """What a captured operand has to be; make one with `operand`."""

    dtypes: tuple[torch.dtype, ...] | None = None
    floating: bool | None = None
    rank: int | None = None
    shape: tuple[int | None, ...] | None = None
    device: str | None = None
    constant: bool | None = None
    value: Callable[[Any], bool] | None = None
    unless: tuple[str, ...] = ()
    only_use: bool = False

    def objection(self, value: Any, known: Any) -> tuple[str, str] | None:
        """Return what was expected and what was got, or None when a value fits.

        Args:
            value: What a capture stands for: a node, a constant, or a module's `Attribute`.
            known: What is known of its type, as `type_of` gives it.
        """
        return self._as_constant(value) or self._as_tensor(known) or self._as_node(value)

    def _as_constant(self, value: Any) -> tuple[str, str] | None:
        is_node = isinstance(value, fx.Node) and value.op != "get_attr"
        if self.constant is not None and self.constant == is_node:
            kind = "a constant" if self.constant else "a computed value"
            return kind, format_value(value)
        if self.value is not None and (isinstance(value, fx.Node) or not self.value(value)):
            return "a value that its predicate accepts", format_value(value)
        return None

    def _as_tensor(self, known: Any) -> tuple[str, str] | None:
        wanted = self._wanted()
        if not wanted:
            return None
        if not isinstance(known, TensorType):
            return wanted, "a value of unknown type: call propagate_types first"
        fits = (
            (self.dtypes is None or known.dtype in self.dtypes)
            and (self.floating is None or known.dtype.is_floating_point == self.floating)
            and (self.rank is None or len(known.shape) == self.rank)
            and (self.shape is None or _fits(known.shape, self.shape))
            and (self.device is None or known.device.type == self.device)
        )
        return None if fits else (wanted, f"{format_type(known)} on {known.device}")

    def _as_node(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, fx.Node):
            return None
        call = resolve(value)
        if call is not None and call.name in self.unless:
            return f"an operand that is not computed by {call.name}", f"%{value.name}"
        if self.only_use and len(value.users) > 1:
            return f"%{value.name} to be used here only", f"{len(value.users)} users"
        return None

    def _wanted(self) -> str:
        """Return the tensor that is asked for in words; "" when any is right."""
        parts = []
        if self.dtypes is not None:
            parts.append(" or ".join(short_dtype(dtype) for dtype in self.dtypes))
        if self.floating is not None:
            parts.append("floating point" if self.floating else "no floating point")
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.shape is not None:
            parts.append(f"[{','.join('_' if s is None else str(s) for s in self.shape)}]")
        if self.device is not None:
            parts.append(f"on {self.device}")
        return ", ".join(parts)


def operand(
    *,
    dtype: torch.dtype | Iterable[torch.dtype] | None = None,
    floating: bool | None = None,
    rank: int | None = None,
    shape: tuple[int | None, ...] | None = None,
    device: str | None = None,
    constant: bool | None = None,
    value: Callable[[Any], bool] | None = None,
    unless: Any = (),
    only_use: bool = False,
) -> Operand:
    """Say what a captured operand has to be, for `rule(..., where={"x": operand(rank=2)})`.

    Args:
        dtype: One element type, or several to choose from.
        floating: Whether the element type is floating point.
        rank: Number of axes.
        shape: Sizes; None fits any size.
        device: Kind of device: `"cpu"`, `"cuda"`.
        constant: True: a number, text, list, parameter or buffer; False: a computed value.
        value: Predicate over a constant that is no tensor.
        unless: Operators, in any spelling, that must not have computed it.
        only_use: Whether nobody else may use it.
    """
    one = isinstance(dtype, torch.dtype)
    dtypes = None if dtype is None else ((dtype,) if one else tuple(dtype))
    spellings = unless if isinstance(unless, (tuple, list)) else (unless,)
    return Operand(
        dtypes,
        floating,
        rank,
        shape,
        device,
        constant,
        value,
        tuple(operator_name(spelling) for spelling in spellings),
        only_use,
    )


def _fits(found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(found) == len(wanted) and all(
        w is None or w == f for f, w in zip(found, wanted, strict=True)
    )
