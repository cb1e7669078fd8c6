"""Stored attributes of objects and classes, read without running any of their code.

Properties, `__getattr__`, `__getattribute__`, `__class__`, and methods of metaclasses and of
subclasses of containers may compute what they give, raise, or have effects. What they compute is no
state: it follows from what is stored, and from their code, which is seen when the program runs it.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

_MRO: Any = vars(type)["__mro__"]
_DICT: Any = vars(type)["__dict__"]
_NAME: Any = vars(type)["__name__"]
_QUALNAME: Any = vars(type)["__qualname__"]
_MODULE: Any = vars(type)["__module__"]
_DICT_OFFSET: Any = vars(type)["__dictoffset__"]
_BASE: Any = vars(type)["__base__"]
_SIZES: Any = vars(type)["__basicsize__"], vars(type)["__itemsize__"]
_FLAGS: Any = vars(type)["__flags__"]
_IS_HEAP_TYPE = 1 << 9
_MANAGED = (types.GetSetDescriptorType, types.MemberDescriptorType)
_WEAK_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)

R = TypeVar("R")
T = TypeVar("T")
Slot = types.MemberDescriptorType | types.GetSetDescriptorType


def is_a(value: Any, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Tell whether a value is an instance of a class, whatever it says of its class."""
    return issubclass(type(value), kinds)


def mro_of(kind: type) -> tuple[type, ...]:
    """Return a class and all before it, in the order in which attributes are looked up."""
    return _MRO.__get__(kind)


def class_attributes(kind: type) -> types.MappingProxyType[str, Any]:
    """Return the attributes of a class itself."""
    return _DICT.__get__(kind)


def module_of(kind: type) -> str:
    """Return the name of the module of a class, "" where it does not tell."""
    try:
        module = _MODULE.__get__(kind)
    except AttributeError:
        return ""
    return module if isinstance(module, str) else ""


def name_of(kind: type) -> str:
    """Return the name of a class."""
    return _NAME.__get__(kind)


def qualname_of(kind: type) -> str:
    """Return the name of a class with those around it."""
    return _QUALNAME.__get__(kind)


def base_of(kind: type) -> type | None:
    """Return the class whose instances those of a class begin like, in memory."""
    return _BASE.__get__(kind)


def sizes_of(kind: type) -> tuple[int, int]:
    """Return how many bytes instances of a class take, and each of their items."""
    return _SIZES[0].__get__(kind), _SIZES[1].__get__(kind)


def is_made_by_statement(kind: type) -> bool:
    """Tell whether a class may be changed, as those can that no C code has made."""
    return bool(_FLAGS.__get__(kind) & _IS_HEAP_TYPE)


def is_comparable(kind: type) -> bool:
    """Tell whether a class is compared by identity, as all are whose metaclass has no other way."""
    made_by = type(kind)
    return made_by is type or (type(made_by) is type and _compares_by_identity(made_by))


@functools.lru_cache(maxsize=256)
def _compares_by_identity(metaclass: type) -> bool:
    names = "__eq__", "__hash__"
    return all(in_classes(metaclass, name) is vars(object)[name] for name in names)


def in_classes(kind: type, name: str) -> Any:
    """Return what a class, or the first before it that has the name, holds; None for nothing."""
    tables = map(class_attributes, mro_of(kind))
    return next((table[name] for table in tables if name in table), None)


def is_made_plainly(kind: type) -> bool:
    """Tell whether a class leaves it to `object` to make and to reduce its instances."""
    if type(kind) is type:
        return kind.__new__ is object.__new__ and kind.__reduce__ is object.__reduce__
    found = in_classes(kind, "__new__"), in_classes(kind, "__reduce__")
    return found == (vars(object)["__new__"], vars(object)["__reduce__"])


def _once_per_class(find: Callable[[type], R]) -> Callable[[type], R]:
    """Let what is found of a class be kept, as long as it has the same bases."""

    @functools.lru_cache(maxsize=8192)
    def known(kind: type) -> tuple[tuple[type, ...], R]:
        return mro_of(kind), find(kind)

    @functools.wraps(find)
    def found(kind: type) -> R:
        if not is_comparable(kind):
            return find(kind)
        mro, result = known(kind)
        return result if mro is mro_of(kind) else find(kind)

    return found


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of the attributes of an object; None where it has none, or hides it."""
    descriptor = _managed_dict(type(value))
    found = None if descriptor is None else descriptor.__get__(value)
    return found if isinstance(found, dict) else None


def has_plain_attributes(kind: type) -> bool:
    """Tell whether `__dict__` of instances of a class is the dict of their attributes itself."""
    found = _managed_dict(kind)
    return found is not None and in_classes(kind, "__dict__") is found


@_once_per_class
def hides_attributes(kind: type) -> bool:
    """Tell whether instances of a class have attributes in a dict that can't be reached."""
    return _DICT_OFFSET.__get__(kind) != 0 and _managed_dict(kind) is None


@_once_per_class
def _managed_dict(kind: type) -> Any:
    for base in mro_of(kind):
        found: Any = class_attributes(base).get("__dict__")
        if type(found) in _MANAGED and found.__objclass__ is base:
            return found
    return None


@_once_per_class
def slots_of(kind: type) -> dict[str, Slot]:
    """Return the slots of a class and of those before it, by the names that messages call them.

    One that a class behind it hides, by a slot or a property of the same name, is called by the
    name of its class as well. Of exceptions, what the interpreter keeps of them counts as slots.
    """
    found: dict[str, Slot] = {}
    for base in mro_of(kind):
        attributes = class_attributes(base)
        if base is BaseException:
            found["args"] = attributes["args"]
        for name, slot in attributes.items():
            if _is_slot(slot, base) and ("__slots__" in attributes or _is_of_exception(name, base)):
                is_first = in_classes(kind, name) is slot
                found[name if is_first else f"{qualname_of(base)}.{name}"] = slot
    return found


def in_slot(value: Any, slot: Slot, default: Any = None) -> Any:
    """Return what a slot of an object holds, or a default where it is empty."""
    try:
        return slot.__get__(value)
    except (AttributeError, TypeError):  # it is empty, or the object is of another class now
        return default


def count_of_slots(kind: type) -> int:
    """Return how many slots a class itself has that can be reached."""
    attributes = class_attributes(kind)
    if "__slots__" not in attributes:
        return 0
    return sum(_is_slot(slot, kind) for slot in attributes.values())


def _is_slot(value: Any, kind: type) -> bool:
    return type(value) is types.MemberDescriptorType and value.__objclass__ is kind


def _is_of_exception(name: str, kind: type) -> bool:
    return issubclass(kind, BaseException) and not name.startswith("__")


def referent_of(proxy: Any) -> Any:
    """Return what a weak proxy stands for, or None where it is dead or can't be told."""
    try:
        return proxy.__reduce_ex__.__self__
    except Exception:  # what it stands for may do as it likes when it is asked for an attribute
        return None


def is_weak_proxy(value: Any) -> bool:
    """Tell whether a value is a weak proxy, which hands on all that it is asked."""
    return type(value) in _WEAK_PROXIES
