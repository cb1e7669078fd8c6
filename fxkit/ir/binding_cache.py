"""A cache of bound calls: a later call of the same form costs a dictionary copy.

Two calls have the same form when they call the same target with arguments of the same kinds.
Numbers count by their type, nodes by what is known of theirs, all else by its value. A recipe is
learnt by binding a call whose numbers and nodes are marked, and looking where the marks end up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from fxkit.ir.python_signatures import float_parameters
from fxkit.ir.schema import as_float, signature_of
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, type_of

_BY_VALUE = (bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class _Int(int):
    """A number that can be told from its equals."""


class _Float(float):
    """A number that can be told from its equals."""


class BoundForm:
    """Where the arguments of calls of one form go.

    Args:
        operator: The operator that such calls resolve to.
        fixed: Schema name → what is the same in all of them.
        places: `(schema name, position)` of what differs, positions counted over arguments and then
            keyword arguments; several positions become one list.
        floats: Names of those that are integers where a float belongs.
    """

    __slots__ = ("fixed", "floats", "operator", "places")

    def __init__(
        self,
        operator: Any,
        fixed: dict[str, Any],
        places: tuple[tuple[str, int | tuple[int, ...]], ...],
        floats: tuple[str, ...] = (),
    ) -> None:
        self.operator = operator
        self.fixed = fixed
        self.places = places
        self.floats = floats

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by the schema's names."""
        bound = dict(self.fixed)
        given = (*args, *kwargs.values()) if kwargs else args
        for name, position in self.places:
            if isinstance(position, int):
                bound[name] = given[position]
            else:
                bound[name] = [given[p] for p in position]
        for name in self.floats:
            bound[name] = as_float(bound[name])
        return bound


def form_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return the form of a call, or None when it holds lists or anything else of many kinds."""
    kinds: list[Any] = [target]
    nodes: list[fx.Node] = []
    for value in args:
        if type(value) is fx.Node:
            known = value.meta.get(TYPE_KEY)
            if type(known) is TensorType:
                kinds.append("tensor" if known.shape else "scalar tensor")
            else:
                kinds.append(_kind(value))
            nodes.append(value)
            continue
        kind = _kind(value)
        if kind is None:
            return None
        kinds.append(kind)
    if kwargs:
        for key, value in kwargs.items():
            if type(value) is fx.Node:
                nodes.append(value)
            kind = _kind(value)
            if kind is None:
                return None
            kinds.append((key, kind))
    if len(nodes) > 1 and len(set(nodes)) < len(nodes):
        return None
    return tuple(kinds)


def learn(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    bind: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
) -> BoundForm | None:
    """Bind a marked copy of a call and return what was learnt; None when it can't be told.

    Args:
        args: Positional arguments of one call of the form.
        kwargs: Its keyword arguments.
        bind: Resolves a call from its arguments.
    """
    marked_args = tuple(_marked(value) for value in args)
    marked_kwargs = {key: _marked(value) for key, value in kwargs.items()}
    call = bind(marked_args, marked_kwargs)
    marks = {
        id(value): position
        for position, value in enumerate((*marked_args, *marked_kwargs.values()))
        if isinstance(value, (fx.Node, _Int, _Float))
    }
    fixed: dict[str, Any] = {}
    places: list[tuple[str, int | tuple[int, ...]]] = []
    for name, value in call.arguments.items():
        if id(value) in marks:
            places.append((name, marks[id(value)]))
            fixed[name] = None
        elif isinstance(value, list) and value and all(id(v) in marks for v in value):
            places.append((name, tuple(marks[id(v)] for v in value)))
            fixed[name] = None
        elif _holds_mark(value):
            return None
        else:
            fixed[name] = value
    overload = call.operator.overload
    name = call.operator.name
    known = float_parameters(name) if overload is None else signature_of(overload).floats
    numbers = (name for name, _ in places if isinstance(call.arguments[name], _Int))
    return BoundForm(call.operator, fixed, tuple(places), tuple(known.intersection(numbers)))


def _kind(value: Any) -> Hashable | None:
    kind = type(value)
    if kind is fx.Node:
        meta = value.meta
        known = meta[TYPE_KEY] if TYPE_KEY in meta else type_of(value)
        if known is None:
            return "node"
        if type(known) is TensorType:
            return "tensor" if known.shape else "scalar tensor"
        return ("node of", type(known))
    if kind is int or kind is float:
        return kind
    return ("value", kind, value) if kind in _BY_VALUE else None


def _marked(value: Any) -> Any:
    if type(value) is int:
        return _Int(value)
    return _Float(value) if type(value) is float else value


def _holds_mark(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_mark, value))
    return isinstance(value, (fx.Node, _Int, _Float))
