"""Operand checks of a replacement: a capture may stand for a number, or for no operand at all.

A pattern that takes a bias matches a call that has none, and one that adds a value matches one that
adds a number. That is right as long as each operator of the replacement takes it in that place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx

from fxkit.ir import schema
from fxkit.ir.call import Call
from fxkit.ir.op import Attribute, resolve
from fxkit.ir.printer import format_value
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.operators import schema_of

# Operators whose functions in torch take a number where the schema has a tensor.
_TAKE_NUMBERS = frozenset(
    f"aten.{name}" for name in "add sub rsub mul div floor_divide copy_ to".split()
)
_NUMBER = (bool, int, float, complex)
_NUMBERS = frozenset({"number", "int", "float", "bool", "int[]", "float[]", "bool[]"})


class OperandRequirements:
    """Where a replacement takes its captures, and which constants fit there.

    Args:
        body: The nodes of the traced replacement.
    """

    def __init__(self, body: tuple[fx.Node, ...]) -> None:
        self._uses: dict[str, list[_Use]] = {}
        for node in body:
            for name, use in _uses_in(node):
                self._uses.setdefault(name, []).append(use)

    def objection(self, bindings: Mapping[str, Any]) -> str | None:
        """Return why the replacement can't be made with what a match bound, or None if it can.

        Args:
            bindings: Capture → what it stands for; one that a match left out stands for None.
        """
        for name, uses in self._uses.items():
            value = bindings.get(name)
            if isinstance(value, (fx.Node, Attribute)):
                continue
            for use in uses:
                if not use.takes(value):
                    return f"{use.operator} of the replacement takes no {_kind(value)} for {name!r}"
        return None


def user_requiring_tensor(result: fx.Node, value: Any, matched: Collection[fx.Node]) -> str | None:
    """Return who can't do with a number in the place of a tensor, or None if all can.

    Args:
        result: A matched node.
        value: What is to take its place.
        matched: The matched nodes, which go.

    Cost: linear in the users; constant where `value` is no number.
    """
    if not isinstance(value, _NUMBER) or not _is_tensor(result):
        return None
    for user in result.users:
        if user in matched:
            continue
        uses = [use for operand, use in _operands_in(user) if operand is result]
        is_number_then = user.op == "output" or user.all_input_nodes == [result]
        if is_number_then or not all(use.takes(value) for use in uses):
            number = format_value(value)
            return f"{_name(user)} needs a tensor for %{result.name}, not the number {number}"
    return None


def _name(user: fx.Node) -> str:
    return "the caller" if user.op == "output" else f"%{user.name}"


def _is_tensor(node: fx.Node) -> bool:
    known = type_of(node)
    if known is not None:
        return isinstance(known, TensorType)
    call = resolve(node)
    overload = None if call is None else call.operator.overload
    return overload is not None and str(schema_of(overload).returns[0].type) == "Tensor"


class _Use:
    """An argument of a call in a replacement that is a capture."""

    def __init__(self, operator: str, takes_nothing: bool, takes_numbers: bool) -> None:
        self.operator = operator
        self._takes_nothing = takes_nothing
        self._takes_numbers = takes_numbers

    def takes(self, value: Any) -> bool:
        if value is None:
            return self._takes_nothing
        return self._takes_numbers or not isinstance(value, _NUMBER)


def _kind(value: Any) -> str:
    return "None" if value is None else f"number, {format_value(value)},"


def _uses_in(node: fx.Node) -> Iterator[tuple[str, _Use]]:
    for operand, use in _operands_in(node):
        if operand.op == "placeholder":
            yield str(operand.target), use


def _operands_in(node: fx.Node) -> Iterator[tuple[fx.Node, _Use]]:
    call = resolve(node)
    overload = None if call is None else call.operator.overload
    if call is None or overload is None:
        return
    receiver = node.args[0] if node.op == "call_method" and node.args else None
    for key, value in call.arguments.items():
        for operand in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(operand, fx.Node):
                yield operand, _use(node, call, key, operand is receiver)


def _use(node: fx.Node, call: Call, key: str, is_receiver: bool) -> _Use:
    name = call.name
    packet = name.removeprefix("aten.")
    overloads = (
        schema.signatures(packet)
        if name != packet
        else (schema.signature_of(call.operator.overload),)
    )
    found = [p for s in overloads for p in s.parameters if p.name == key]
    is_infix = getattr(node.target, "__module__", "") == "_operator"
    takes_numbers = not is_receiver and (
        is_infix or name in _TAKE_NUMBERS or any(p.kind in _NUMBERS | {"any"} for p in found)
    )
    takes_nothing = not is_receiver and any(p.optional or p.default is None for p in found)
    return _Use(name, takes_nothing, takes_numbers)
