"""What is inside a container, and how a container with other content is made."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.torch_adapters import pytree
from fxkit.tracing.values.stored import (
    attributes_of,
    hides_attributes,
    in_classes,
    in_slot,
    is_made_plainly,
    slots_of,
)
from fxkit.tracing.values.symbolic_scalars import plain

PLAIN = frozenset(
    {
        *(type(None), bool, int, str, bytes, complex, type(...), range, slice, type, torch.dtype),
        *(torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
    }
)
"""Types whose values are what they are: equal ones may stand for each other."""

_EMPTY = object()


@dataclass(slots=True)
class Content:
    """What is inside one container.

    Attributes:
        label: What has to be equal for two containers of one type to hold the same places.
        values: What is inside, in order.
        steps: How each place is written behind the path of the container.
        make: Builds an empty container of this kind; None where it needs its values.
        fill: Puts values into a container, replacing what it held; None where it can't be changed.
        build: Builds the container from its values, where it can't be changed afterwards.
    """

    label: Any
    values: list[Any]
    steps: list[str]
    make: Callable[[], Any] | None = None
    fill: Callable[[Any, list[Any]], None] | None = None
    build: Callable[[list[Any]], Any] | None = None

    def children(self) -> Iterator[tuple[str, Any]]:
        """Iterate over `(step, value)`."""
        return zip(self.steps, self.values, strict=True)


def content_of(value: Any) -> Content | None:
    """Look into a container; None for a value that is not one, or can't be looked into."""
    kind = type(value)
    if kind is list:
        return _list_content(value)
    if kind is tuple:
        return Content(len(value), list(value), _indices(len(value)), build=tuple)
    if kind in (dict, OrderedDict):
        return _dict_content(value, kind, kind)
    if kind is defaultdict:
        factory = value.default_factory
        return _dict_content(value, factory, lambda: defaultdict(factory))
    if kind in (set, frozenset):
        return _set_content(value, kind)
    if issubclass(kind, tuple) and (fields := in_classes(kind, "_fields")) is not None:
        steps = [f".{name}" for name in fields]
        return Content(len(value), list(value), steps, build=lambda values: kind(*values))
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return _registered_content(value, node)
    return _object_content(value, kind)


def _indices(count: int) -> list[str]:
    return [f"[{index}]" for index in range(count)]


def _list_content(value: list[Any]) -> Content:
    def fill(target: list[Any], values: list[Any]) -> None:
        target[:] = values

    return Content(len(value), list(value), _indices(len(value)), list, fill)


def _dict_content(value: dict[Any, Any], label: Any, make: Callable[[], Any]) -> Content | None:
    keys = tuple([plain(key) for key in value])
    if not all(isinstance(key, (str, int, bool, type(None), enum.Enum, type)) for key in keys):
        return None

    def fill(target: dict[Any, Any], values: list[Any]) -> None:
        target.clear()
        target.update(zip(keys, values, strict=True))

    steps = [f"[{key!r}]" for key in keys]
    return Content((label, keys), list(value.values()), steps, make, fill)


def _set_content(value: Any, kind: type) -> Content | None:
    if any(type(item) not in PLAIN for item in value):
        return None
    items = frozenset(value)

    def fill(target: set[Any], _: list[Any]) -> None:
        target.clear()
        target.update(items)

    if kind is frozenset:
        return Content(items, [], [], build=lambda _: items)
    return Content(items, [], [], set, fill)


def _registered_content(value: Any, node: Any) -> Content:
    values, context = node.flatten_fn(value)
    if isinstance(value, dict) and len(value) == len(values):
        steps = [f"[{key!r}]" for key in value]
    else:
        steps = _indices(len(values))
    keys = tuple(value) if isinstance(value, dict) else ()

    def build(new: list[Any]) -> Any:
        built = node.unflatten_fn(new, context)
        if keys and tuple(built) != keys and set(built) == set(keys):
            for key in keys:  # made of its keys in the order of its fields
                built.move_to_end(key)
        return built

    return Content((len(values), _comparable(context)), list(values), steps, build=build)


def _comparable(context: Any) -> Any:
    if isinstance(context, (list, tuple)):
        return tuple(_comparable(item) for item in context)
    return context


def _object_content(value: Any, kind: type) -> Content | None:
    """Look into an ordinary object; None for one that C code or a `__new__` of its own made."""
    if not is_made_plainly(kind) or hides_attributes(kind):
        return None
    attributes, slots = attributes_of(value), slots_of(kind)
    if attributes is None and not slots:
        return None
    contents = {name: in_slot(value, slot, _EMPTY) for name, slot in slots.items()}
    filled = [name for name, item in contents.items() if item is not _EMPTY]
    names = (*filled, *dict.keys(attributes or {}))

    def fill(target: Any, values: list[Any]) -> None:
        for name, slot in slots.items():
            if name not in filled and in_slot(target, slot, _EMPTY) is not _EMPTY:
                slot.__delete__(target)
        for name, item in zip(filled, values, strict=False):
            slots[name].__set__(target, item)
        if attributes is not None:
            table = attributes_of(target)
            assert table is not None  # it is of the class of one that has them
            dict.clear(table)
            dict.update(table, zip(names[len(filled) :], values[len(filled) :], strict=True))

    values = [contents[name] for name in filled]
    values += [] if attributes is None else dict.values(attributes)
    return Content(
        names, values, [f".{name}" for name in names], lambda: object.__new__(kind), fill
    )


def content_of_dict_of_a_class(value: Any, kind: type) -> Content | None:
    """Look into a result that is of a subclass of `dict`, with what it has as attributes.

    Arguments of such classes are told by identity, and what they hold is guarded as state.
    """
    base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
    is_made_by_base = in_classes(kind, "__new__") is in_classes(base, "__new__")
    if not issubclass(kind, dict) or not is_made_by_base or slots_of(kind):
        return None
    items = {key: dict.__getitem__(value, key) for key in base.__iter__(value)}
    table, attributes = _dict_content(items, kind, dict), attributes_of(value)
    if table is None or attributes is None or issubclass(kind, defaultdict):
        return None
    keys, names = table.label[1], tuple(dict.keys(attributes))

    def fill(target: Any, values: list[Any]) -> None:
        for key, item in zip(keys, values, strict=False):
            base.__setitem__(target, key, item)
        held = attributes_of(target)
        assert held is not None  # it is of the class of one that has them
        dict.update(held, zip(names, values[len(keys) :], strict=True))

    return Content(
        (kind, keys, names),
        [*table.values, *dict.values(attributes)],
        [*table.steps, *(f".{name}" for name in names)],
        lambda: base.__new__(kind),
        fill,
    )
