"""What the operands of a replacement may be: a capture may stand for a number, or for nothing.

A pattern that takes a bias matches a call that has none, and one that adds a value matches one that
adds a number. That is right as long as each operator of the replacement takes it in that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from fxkit.ir import schema
from fxkit.ir.call import Call
from fxkit.ir.op import Attribute, resolve
from fxkit.ir.printer import format_value

# Operators whose functions in torch take a number where the schema has a tensor.
_TAKE_NUMBERS = frozenset(
    f"aten.{name}" for name in "add sub rsub mul div floor_divide copy_ to".split()
)
_NUMBERS = frozenset({"number", "int", "float", "bool", "int[]", "float[]", "bool[]"})


class Demands:
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


class _Use:
    """An argument of a call in a replacement that is a capture."""

    def __init__(self, operator: str, takes_nothing: bool, takes_numbers: bool) -> None:
        self.operator = operator
        self._takes_nothing = takes_nothing
        self._takes_numbers = takes_numbers

    def takes(self, value: Any) -> bool:
        if value is None:
            return self._takes_nothing
        return self._takes_numbers or not isinstance(value, (bool, int, float, complex))


def _kind(value: Any) -> str:
    return "None" if value is None else f"number, {format_value(value)},"


def _uses_in(node: fx.Node) -> Iterator[tuple[str, _Use]]:
    call = resolve(node)
    overload = None if call is None else call.operator.overload
    if call is None or overload is None:
        return
    receiver = node.args[0] if node.op == "call_method" and node.args else None
    for key, value in call.arguments.items():
        for operand in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(operand, fx.Node) and operand.op == "placeholder":
                use = _use(node, call, key, operand is receiver)
                yield str(operand.target), use


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
