"""What to look for: a pattern is a small graph of operators, captures and constants.

Most patterns come from a function, as `templates` says:

    pattern(lambda x: x * torch.sigmoid(x))

A pattern written in one spelling matches all of them, and what the function leaves to a default is
required to have the default: `torch.add(a, b)` does not match `torch.add(a, b, alpha=5)`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxkit.errors import PatternError
from fxkit.ir.numbers import number_key
from fxkit.patterns.language import Operand

# Operators of two operands that may change places, with the names of the two.
_COMMUTATIVE = frozenset(
    f"aten.{name}"
    for name in """
    add mul maximum minimum eq ne logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor fmax fmin hypot
    """.split()
)


@dataclass(frozen=True, eq=False)
class Capture:
    """Matches any operand: a node, or a constant where the schema takes one.

    Attributes:
        name: What the match calls it; the parameter of the pattern function.
    """

    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """Matches one value, of the same type unless the difference can't show.

    Attributes:
        value: The number, text, dtype, or nested list of them.
    """

    value: Any


@dataclass(frozen=True, eq=False, repr=False)
class Operation:
    """Matches a call of one operator with the given arguments.

    Attributes:
        operator: Name of the operator's identity.
        arguments: Schema name → what the argument has to match.
        source: The line of the pattern that it came from.
    """

    operator: str
    arguments: Mapping[str, Any]
    source: str = ""

    @property
    def is_commutative(self) -> bool:
        """Whether the two operands may change places: not when one of them is scaled."""
        if self.operator not in _COMMUTATIVE or not {"self", "other"} <= self.arguments.keys():
            return False
        scale = self.arguments.get("alpha")
        return scale is None or (isinstance(scale, Constant) and scale.value == 1)

    @functools.cached_property
    def swaps(self) -> tuple[int, int] | None:
        """The two axes that change places, where the operation does that and names them."""
        if self.operator != "aten.transpose":
            return None
        one, other = self.arguments.get("dim0"), self.arguments.get("dim1")
        if not isinstance(one, Constant) or not isinstance(other, Constant):
            return None
        are_known = type(one.value) is int and type(other.value) is int
        return (one.value, other.value) if are_known else None

    def __repr__(self) -> str:
        return f"{self.operator}({', '.join(self.arguments)})"


@dataclass(frozen=True, eq=False)
class AnyOf:
    """Matches the first of several pattern nodes that fits.

    Attributes:
        choices: What to try, in order.
    """

    choices: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """Matches an operation applied again and again, as long as it goes.

    Attributes:
        link: What is applied.
        hole: Where a link takes the one before it.
        start: What the first link takes.
        at_least: Shortest chain.
        at_most: Longest chain.
    """

    link: Any
    hole: Capture
    start: Any
    at_least: int
    at_most: int

    def next_link(self) -> tuple[Any, Capture]:
        """Return a link of its own, and its hole."""
        hole = Capture(self.hole.name)
        return _copied(self.link, {self.hole: hole}), hole


@dataclass(frozen=True, eq=False)
class Named:
    """Matches what its inner node matches, and binds it to a name.

    Attributes:
        inner: The pattern node.
        name: What the match calls it.
    """

    inner: Any
    name: str


PatternNode = Capture | Constant | Operation | AnyOf | Chain | Named


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """A pattern with its outputs.

    Attributes:
        outputs: What it matches; the last is the root, where matching begins.
        captures: Names of the captures, in the order of the function's parameters.
        name: What reports call it.
        operands: Capture → what it has to be.
        operations: All operations in it, operands before users.
    """

    outputs: tuple[PatternNode, ...]
    captures: tuple[str, ...]
    name: str = "pattern"
    operands: Mapping[str, Operand] = field(default_factory=dict)
    operations: tuple[Operation, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operations", tuple(_operations(self.outputs)))
        unknown = [name for name in self.operands if name not in self.captures]
        if unknown:
            raise PatternError(
                f"expected captures among {', '.join(self.captures)}, got {', '.join(unknown)}",
                hint="name a parameter of the pattern function in where=",
            )

    @property
    def root(self) -> PatternNode:
        """The pattern node at which matching begins."""
        return self.outputs[-1]

    @functools.cached_property
    def root_operators(self) -> tuple[str, ...]:
        """Names of the operators that its root can be.

        Raises:
            PatternError: When the root may be any operand at all.
        """
        return tuple(dict.fromkeys(first_operators(self.root)))

    @functools.cached_property
    def operand_operators(self) -> tuple[str, ...]:
        """Operators of which one must have computed an operand of the root; empty: anything may."""
        if not isinstance(self.root, Operation):
            return ()
        for value in self.root.arguments.values():
            with contextlib.suppress(PatternError):
                return tuple(dict.fromkeys(first_operators(value)))
        return ()

    @functools.cached_property
    def depth(self) -> int:
        """How many operations stand above one another at most, the root among them."""
        return _depth(self.outputs, {})

    @functools.cached_property
    def bound(self) -> frozenset[str]:
        """The captures that stand somewhere in it; a match may leave out those of an optional."""
        return frozenset(v.name for v in below(self.outputs) if isinstance(v, Capture))

    @property
    def named(self) -> frozenset[str]:
        """The names given to values in it by `named`."""
        return frozenset(v.name for v in below(self.outputs) if isinstance(v, Named))

    def __len__(self) -> int:
        return len(self.operations)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.captures)})"


def _depth(values: Iterable[Any], known: dict[Any, int]) -> int:
    """Return how many operations stand above one another in some pattern nodes."""
    return max((_depth_of(value, known) for value in values), default=0)


def _depth_of(value: Any, known: dict[Any, int]) -> int:
    if isinstance(value, (list, tuple)):
        return _depth(value, known)
    if isinstance(value, slice):
        return _depth(slice_parts(value), known)
    if not isinstance(value, PatternNode):
        return 0
    if value not in known:
        inner = _depth(_inside(value), known)
        if isinstance(value, Chain):
            inner = _depth([value.start], known) + _depth([value.link], known) * value.at_most
        known[value] = inner + isinstance(value, Operation)
    return known[value]


def slice_parts(value: slice) -> tuple[Any, Any, Any]:
    """Return start, stop and step of a slice: in a pattern, each is a pattern node of its own."""
    return value.start, value.stop, value.step


def _spelled_out(value: slice) -> tuple[Any, Any, Any]:
    """Return the parts of a slice, with what `:stop` leaves out: tensors take no step backwards."""
    start, stop, step = slice_parts(value)
    return 0 if start is None else start, stop, 1 if step is None else step


def is_same_constant(wanted: Any, got: Any, in_floating: bool) -> bool:
    """Tell whether a literal of a pattern equals one of a graph.

    An int and a float of the same value are the same only where the other operand is known to be
    floating point, since `i64 * 2.0` is no integer. Zeros of different sign are never the same.
    """
    if isinstance(wanted, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(wanted) == len(got)
            and all(is_same_constant(w, g, in_floating) for w, g in zip(wanted, got, strict=True))
        )
    if isinstance(got, (fx.Node, torch.Tensor)):
        return False
    if isinstance(wanted, slice):
        return isinstance(got, slice) and is_same_constant(
            _spelled_out(wanted), _spelled_out(got), False
        )
    if type(wanted) is type(got):
        return number_key(wanted) == number_key(got)
    numbers = (int, float)
    if type(wanted) in numbers and type(got) in numbers and in_floating and wanted == got:
        return wanted != 0 or number_key(float(wanted)) == number_key(float(got))
    return False


def _inside(value: PatternNode) -> list[Any]:
    """Return what a pattern node is made of."""
    if isinstance(value, Operation):
        return list(value.arguments.values())
    if isinstance(value, AnyOf):
        return list(value.choices)
    if isinstance(value, Chain):
        return [value.start, value.link]
    return [value.inner] if isinstance(value, Named) else []


def _copied(value: Any, known: dict[Any, Any]) -> Any:
    """Copy the operations of a pattern, with some of its nodes replaced."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, known) for item in value)
    if isinstance(value, slice):
        return slice(*(_copied(part, known) for part in slice_parts(value)))
    if not isinstance(value, PatternNode) or isinstance(value, (Capture, Constant)):
        return known.get(value, value) if isinstance(value, Capture) else value
    if value not in known:
        if isinstance(value, Operation):
            arguments = {key: _copied(v, known) for key, v in value.arguments.items()}
            known[value] = replace(value, arguments=arguments)
        elif isinstance(value, AnyOf):
            known[value] = AnyOf(tuple(_copied(v, known) for v in value.choices))
        elif isinstance(value, Named):
            known[value] = replace(value, inner=_copied(value.inner, known))
        else:
            start, link = _copied(value.start, known), _copied(value.link, known)
            known[value] = replace(value, start=start, link=link)
    return known[value]


def first_operators(value: Any) -> Iterator[str]:
    """Yield the operators that a pattern node may match at."""
    if isinstance(value, Operation):
        yield value.operator
    elif isinstance(value, AnyOf):
        for choice in value.choices:
            yield from first_operators(choice)
    elif isinstance(value, Named):
        yield from first_operators(value.inner)
    elif isinstance(value, Chain):
        yield from first_operators(value.link)
        if value.at_least == 0:
            yield from first_operators(value.start)
    else:
        raise PatternError(
            "expected a pattern that ends in an operation, got one that may be any operand",
            hint="an optional operation can't be the last one of a pattern",
        )


def _operations(outputs: tuple[PatternNode, ...]) -> Iterator[Operation]:
    """Yield the operations below the outputs, each once, operands before users."""
    return (value for value in below(outputs) if isinstance(value, Operation))


def below(outputs: tuple[PatternNode, ...]) -> Iterator[PatternNode]:
    """Yield the pattern nodes below the outputs and these, each once, operands before users."""
    seen: set[int] = set()

    def visit(value: Any) -> Iterator[PatternNode]:
        if isinstance(value, slice):
            value = slice_parts(value)
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from visit(item)
        elif isinstance(value, PatternNode) and id(value) not in seen:
            seen.add(id(value))
            for inner in _inside(value):
                yield from visit(inner)
            yield value

    for output in outputs:
        yield from visit(output)
