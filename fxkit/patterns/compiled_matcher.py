"""Compiled matching: a plain pattern as a straight list of steps, without backtracking.

A pattern is plain when each of its operations is found in one way only: no alternatives, chains or
names, one output, and commutative operators only above captures that stand nowhere else, whose
order can't matter. Anything else goes through the search of `matching`, and so does who wants to
know why something did not match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from fxkit.ir.attributes import type_of_operand
from fxkit.ir.op import resolve
from fxkit.patterns.axes import same_axes, same_swap
from fxkit.patterns.match_results import Match
from fxkit.patterns.matcher import is_floating, is_same_binding, match_at
from fxkit.patterns.pattern_nodes import (
    Capture,
    Constant,
    Operation,
    Pattern,
    is_same_constant,
)
from fxkit.torch_adapters.fx_nodes import order_key


class _Step(NamedTuple):
    """One demand on the node in a slot; those on its arguments follow the `call` of that slot.

    Attributes:
        kind: `call`: it calls an operator (key) with arguments of these names (value); `load`: an
            argument is the node of another slot (value); `bind`: an argument is what a capture
            (value) stands for; `free`: the same, of a capture without demands that stands nowhere
            else; `equal`: an argument is a constant (value); `swap`: the same two axes (value)
            change places.
        slot: The slot; there is one for each operation.
        key: The argument's name; for `call` the operator's.
        value: See `kind`.
    """

    kind: str
    slot: int
    key: str
    value: Any


_Program = tuple[tuple[_Step, ...], tuple[Operation, ...]]


def find_match(pattern: Pattern, node: fx.Node, *, commute: bool = True) -> Match | None:
    """Return the match of a pattern with its root at one node, or None.

    The same as `match_at`, which tells the reason for a miss too.
    """
    cache = pattern.__dict__
    key = "_steps" if commute else "_steps_in_order"
    if key not in cache:
        cache[key] = _steps_of(pattern, commute)
    steps = cache[key]
    if steps is None:
        found = match_at(pattern, node, commute=commute)
        return found if isinstance(found, Match) else None
    return _run(pattern, steps, node)


def _run(pattern: Pattern, program: _Program, root: fx.Node) -> Match | None:
    steps, operations = program
    slots: list[Any] = [None] * len(operations)
    slots[0] = root
    bindings: dict[str, Any] = {}
    arguments: Any = {}
    for kind, slot, key, wanted in steps:
        if kind == "call":
            call = resolve(slots[slot])
            if call is None or call[0].name != key:
                return None
            arguments = call[1]
            if len(arguments) != len(wanted) or arguments.keys() != wanted:
                return None
            continue
        value = arguments[key]
        if kind == "free":
            bindings[wanted] = value
        elif kind == "load":
            if type(value) is not fx.Node or slots[wanted] not in (None, value):
                return None
            slots[wanted] = value
        elif kind == "bind":
            if not _may_bind(pattern, root, bindings, wanted, value):
                return None
            bindings[wanted] = value
        elif kind == "swap":
            if not same_swap(wanted, (value, arguments["dim1"]), slots[slot]):
                return None
        elif not _is_equal(wanted, value, slots[slot]) and not same_axes(
            key, wanted, value, slots[slot]
        ):
            return None
    if len(slots) == 1:
        nodes: dict[Any, Any] = {operations[0]: root}
        return Match(pattern, root, bindings, nodes, nodes)
    if len(set(slots)) < len(slots):
        return None
    nodes = dict(sorted(zip(operations, slots, strict=True), key=_place_of))
    return Match(pattern, root, bindings, nodes, nodes)


def _place_of(pair: tuple[Operation, fx.Node]) -> Any:
    return order_key(pair[1])


def _may_bind(
    pattern: Pattern, root: fx.Node, bindings: dict[str, Any], name: str, value: Any
) -> bool:
    if name in bindings:
        return is_same_binding(bindings[name], value)
    operand = pattern.operands.get(name)
    return operand is None or operand.objection(value, type_of_operand(value, root.graph)) is None


def _is_equal(wanted: Any, value: Any, node: fx.Node) -> bool:
    if type(wanted) is type(value) and is_same_constant(wanted, value, False):
        return True
    return is_same_constant(wanted, value, is_floating(node))


def _steps_of(pattern: Pattern, commute: bool) -> _Program | None:
    if len(pattern.outputs) > 1 or not isinstance(pattern.root, Operation):
        return None
    uses = Counter(
        value.name
        for operation in pattern.operations
        for value in operation.arguments.values()
        if isinstance(value, Capture)
    )
    slots: dict[Operation, int] = {}
    try:
        steps = tuple(_emit(pattern, pattern.root, slots, uses, commute))
    except _NotPlain:
        return None
    return steps, tuple(slots)


class _NotPlain(Exception):
    """A pattern that needs the search."""


def _emit(
    pattern: Pattern, operation: Operation, slots: dict[Operation, int], uses: Counter[str],
    commute: bool,
) -> Iterator[_Step]:  # fmt: skip
    if commute and operation.is_commutative:
        for key in ("self", "other"):
            value = operation.arguments[key]
            is_free = isinstance(value, Capture) and value.name not in pattern.operands
            if not is_free or uses[value.name] > 1:
                raise _NotPlain
    slot = slots.setdefault(operation, len(slots))
    yield _Step("call", slot, operation.operator, operation.arguments.keys())
    made: list[Operation] = []
    for key, value in operation.arguments.items():
        if operation.swaps is not None and key in ("dim0", "dim1"):
            if key == "dim0":
                yield _Step("swap", slot, key, operation.swaps)
        elif isinstance(value, Capture):
            is_free = uses[value.name] == 1 and value.name not in pattern.operands
            yield _Step("free" if is_free else "bind", slot, key, value.name)
        elif isinstance(value, Operation):
            if value not in slots:
                made.append(value)
            yield _Step("load", slot, key, slots.setdefault(value, len(slots)))
        else:
            yield _Step("equal", slot, key, _constant(value))
    for operand in made:
        yield from _emit(pattern, operand, slots, uses, commute)


def _constant(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, (list, tuple)):
        return type(value)(_constant(item) for item in value)
    raise _NotPlain
