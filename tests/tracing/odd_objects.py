"""Objects whose attributes are not simply there: each kind with how it is read and changed.

All code of theirs that has an effect notes that in a log, so that a walk over a program's state
which runs such code is found out.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import importlib.util
import sys
import threading
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Odd(NamedTuple):
    """One object.

    Attributes:
        value: The object.
        read: Gives a number of it; what a program does.
        change: Gives it another number; what is done between two calls, or by a program.
        keep: What has to stay alive.
    """

    value: Any
    read: Callable[[Any], Any]
    change: Callable[[Any], Any] | None = None
    keep: Any = None


Log = list[str]
KINDS: dict[str, Callable[[Log], Odd]] = {}


def _kind(make: Callable[[Log], Odd]) -> Callable[[Log], Odd]:
    KINDS[make.__name__] = make
    return make


@_kind
def property_over_slot(log: Log) -> Odd:
    class Cell:
        __slots__ = ("v",)

    class Fixed(Cell):
        v = property(lambda self: tuple(range(2)))  # type: ignore[assignment]

    return Odd(Fixed(), lambda it: len(it.v))


@_kind
def property_over_a_slot_with_a_value(log: Log) -> Odd:
    class Cell:
        __slots__ = ("v",)

    raw = vars(Cell)["v"]

    class Fixed(Cell):
        v = property(lambda self: raw.__get__(self) + 1)  # type: ignore[assignment]

    it = Fixed()
    raw.__set__(it, 1)
    return Odd(it, lambda it: it.v, lambda it: raw.__set__(it, 5))


@_kind
def slot_twice(log: Log) -> Odd:
    class Cell:
        __slots__ = ("v",)

        def first(self) -> int:
            return vars(Cell)["v"].__get__(self)

    class Second(Cell):
        __slots__ = ("v",)

    it = Second()
    it.v = 2
    vars(Cell)["v"].__set__(it, 3)
    return Odd(it, lambda it: it.v + it.first(), lambda it: vars(Cell)["v"].__set__(it, 7))


@_kind
def slot_hidden_after_the_class(log: Log) -> Odd:
    class Cell:
        __slots__ = ("v",)

    raw = vars(Cell)["v"]
    Cell.v = property(lambda self: raw.__get__(self))  # type: ignore[assignment]
    it = Cell()
    raw.__set__(it, 2)
    return Odd(it, lambda it: it.v, lambda it: raw.__set__(it, 3))


@_kind
def slot_by_a_logging_property(log: Log) -> Odd:
    class Cell:
        __slots__ = ("_v",)

        @property
        def v(self) -> int:
            log.append("v")
            return self._v

    it = Cell()
    it._v = 2
    return Odd(it, lambda it: it.v, lambda it: setattr(it, "_v", 3))


@_kind
def empty_slot_with_getattr(log: Log) -> Odd:
    class Lazy:
        __slots__ = ("v",)

        def __getattr__(self, name: str) -> Any:
            log.append(name)
            if name != "v":
                raise AttributeError(name)
            self.v = 2
            return self.v

    return Odd(Lazy(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def getattr_that_raises(log: Log) -> Odd:
    class Strict:
        def __init__(self) -> None:
            self.v = 2

        def __getattr__(self, name: str) -> Any:
            log.append(name)
            raise ValueError(name)

    return Odd(Strict(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def dict_with_getattr(log: Log) -> Odd:
    class Attributes(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    return Odd(Attributes(v=2), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def dict_that_is_its_own_attributes(log: Log) -> Odd:
    class Attributes(dict):
        def __init__(self, **values: Any) -> None:
            super().__init__(values)
            self.__dict__ = self

    return Odd(Attributes(v=2), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def getattribute_that_logs(log: Log) -> Odd:
    class Proxy:
        def __init__(self) -> None:
            object.__setattr__(self, "v", 2)

        def __getattribute__(self, name: str) -> Any:
            log.append(name)
            return object.__getattribute__(self, name)

    return Odd(Proxy(), lambda it: it.v, lambda it: object.__setattr__(it, "v", 3))


@_kind
def class_that_raises(log: Log) -> Odd:
    class Unbound:
        def __init__(self) -> None:
            self.v = 2

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            log.append("class")
            raise RuntimeError("no object is bound")

    return Odd(Unbound(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def class_that_is_another(log: Log) -> Odd:
    class Fake:
        __class__ = dict  # type: ignore[assignment]

        def __init__(self) -> None:
            self.v = 2

    return Odd(Fake(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def dict_that_raises(log: Log) -> Odd:
    class Bare:
        v = 2

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            log.append("dict")
            raise RuntimeError("it has none")

    return Odd(Bare(), lambda it: it.v, lambda it: setattr(type(it), "v", 3))


@_kind
def dict_that_lies(log: Log) -> Odd:
    class Bare:
        def __init__(self) -> None:
            self.v = 2

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            return {}

    return Odd(Bare(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def read_only_over_attributes(log: Log) -> Odd:
    class Fixed:
        v = property(lambda self: self.__dict__["v"])

    it = Fixed()
    vars(it)["v"] = 2
    return Odd(it, lambda it: it.v, lambda it: vars(it).update(v=3))


@_kind
def cached(log: Log) -> Odd:
    class Lazy:
        size = 2

        @functools.cached_property
        def v(self) -> int:
            log.append("computed")
            return self.size

    return Odd(Lazy(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def descriptor_with_effects(log: Log) -> Odd:
    class Counted:
        def __get__(self, instance: Any, owner: Any = None) -> Any:
            log.append("get")
            return 2 if instance is None else vars(instance)["_v"]

        def __set__(self, instance: Any, value: Any) -> None:
            log.append("set")
            vars(instance)["_v"] = value

    class Holder:
        v = Counted()

    it = Holder()
    vars(it)["_v"] = 2
    return Odd(it, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def descriptor_that_raises(log: Log) -> Odd:
    class Broken:
        def __get__(self, instance: Any, owner: Any = None) -> Any:
            log.append("get")
            raise KeyError("broken")

    class Holder:
        w = Broken()
        v = 2

    return Odd(Holder(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def descriptor_with_its_own_state(log: Log) -> Odd:
    class ByObject:
        def __init__(self) -> None:
            self.values: Any = weakref.WeakKeyDictionary()

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return self.values[instance]

        def __set__(self, instance: Any, value: Any) -> None:
            self.values[instance] = value

    class Holder:
        v = ByObject()

    it = Holder()
    it.v = 2
    return Odd(it, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def setattr_that_raises(log: Log) -> Odd:
    class Locked:
        def __init__(self) -> None:
            vars(self)["v"] = 2

        def __setattr__(self, name: str, value: Any) -> None:
            log.append(name)
            raise AttributeError(f"{name} is read-only")

        def step(self) -> None:
            vars(self)["v"] += 1

    return Odd(Locked(), lambda it: it.v, lambda it: it.step())


@_kind
def frozen_dataclass(log: Log) -> Odd:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        v: int = 2

    return Odd(Settings(), lambda it: it.v, lambda it: object.__setattr__(it, "v", 3))


@_kind
def slotted_dataclass(log: Log) -> Odd:
    @dataclasses.dataclass(slots=True)
    class Settings:
        v: int = 2
        rest: Any = dataclasses.field(init=False)

    return Odd(Settings(), lambda it: it.v, lambda it: setattr(it, "v", it.v + 1))


@_kind
def frozen_and_slotted_dataclass(log: Log) -> Odd:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Settings:
        v: int = 2

        def step(self) -> None:
            object.__setattr__(self, "v", self.v + 1)

    return Odd(Settings(), lambda it: it.v, lambda it: it.step())


@_kind
def weakly_referable_slots(log: Log) -> Odd:
    class Cell:
        __slots__ = ("__dict__", "__weakref__", "v")

    it = Cell()
    it.v, it.w = 2, 3
    return Odd(it, lambda it: it.v + it.w, lambda it: setattr(it, "w", 5))


@_kind
def slots_of_an_iterator(log: Log) -> Odd:
    class Cell:
        __slots__ = iter(("v",))

    it: Any = Cell()
    it.v = 2
    return Odd(it, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def private_slot(log: Log) -> Odd:
    class _Cell:
        __slots__ = ("__v",)

        def __init__(self) -> None:
            self.__v = 2

        def step(self) -> int:
            self.__v += 1
            return self.__v

        def now(self) -> int:
            return self.__v

    return Odd(_Cell(), lambda it: it.now(), lambda it: it.step())


@_kind
def enumeration(log: Log) -> Odd:
    class Level(enum.Enum):
        low = 2

        @property
        def v(self) -> int:
            log.append("v")
            return self.value

    return Odd(Level.low, lambda it: it.v, lambda it: setattr(it, "_value_", 3))


@_kind
def flags(log: Log) -> Odd:
    class Bits(enum.IntFlag):
        a = 1
        b = 2

    return Odd(Bits.a | Bits.b, lambda it: int(it) + (Bits.a in it))


@_kind
def enumeration_class(log: Log) -> Odd:
    class Level(enum.Enum):
        low = 2
        high = 3

    return Odd(Level, lambda it: it.low.value + len(it))


@_kind
def module_with_getattr(log: Log) -> Odd:
    module: Any = types.ModuleType("odd_settings")

    def __getattr__(name: str) -> Any:
        log.append(name)
        if name == "v":
            return module.__dict__["w"]
        raise AttributeError(name)

    vars(module).update(__getattr__=__getattr__, w=2)
    return Odd(module, lambda it: it.v, lambda it: setattr(it, "w", 3))


@_kind
def module_without_a_name(log: Log) -> Odd:
    module: Any = types.ModuleType("odd_settings")
    del module.__name__

    def __getattr__(name: str) -> Any:
        log.append(name)
        raise KeyError(name)

    vars(module).update(__getattr__=__getattr__, v=2)
    return Odd(module, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def module_of_a_class(log: Log) -> Odd:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            log.append(name)
            if name != "v":
                raise AttributeError(name)
            return 2

    return Odd(Lazy("odd_lazy"), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def module_that_is_not_loaded(log: Log) -> Odd:
    class Loader:
        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            log.append("loaded")
            module.v = 2

    loader = importlib.util.LazyLoader(Loader())  # type: ignore[arg-type]
    spec = importlib.util.spec_from_loader("odd_unloaded", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["odd_unloaded"] = module
    spec.loader.exec_module(module)
    return Odd(module, lambda it: 2)


@_kind
def module_that_loads_when_it_is_read(log: Log) -> Odd:
    module = module_that_is_not_loaded(log).value
    return Odd(module, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def weak_proxy(log: Log) -> Odd:
    class Box:
        v = 2

    box = Box()
    return Odd(weakref.proxy(box), lambda it: it.v, lambda it: setattr(box, "v", 3), box)


@_kind
def dead_weak_proxy(log: Log) -> Odd:
    class Box:
        pass

    return Odd([weakref.proxy(Box()), 2], lambda it: it[1], lambda it: it.__setitem__(1, 3))


@_kind
def weak_reference(log: Log) -> Odd:
    class Box:
        __slots__ = ("__weakref__", "v")

    box = Box()
    box.v = 2
    return Odd(weakref.ref(box), lambda it: it().v, lambda it: setattr(it(), "v", 3), box)


@_kind
def weak_method(log: Log) -> Odd:
    class Box:
        v = 2

        def get(self) -> int:
            return self.v

    box = Box()
    return Odd(weakref.WeakMethod(box.get), lambda it: it()(), lambda it: setattr(box, "v", 3), box)


@_kind
def mapping_proxy(log: Log) -> Odd:
    inner = {"v": 2}
    return Odd(types.MappingProxyType(inner), lambda it: it["v"], lambda it: inner.update(v=3))


@_kind
def mapping_proxy_of_an_object(log: Log) -> Odd:
    inner = UserDict(v=2)
    proxy = types.MappingProxyType(inner)
    return Odd(proxy, lambda it: it["v"], lambda it: inner.update(v=3))


@_kind
def namespace(log: Log) -> Odd:
    class Spread(types.SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            log.append(name)
            raise AttributeError(name)

    return Odd(Spread(v=2), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def list_that_logs(log: Log) -> Odd:
    class Logged(list):
        def __iter__(self) -> Iterator[Any]:
            log.append("iter")
            return list.__iter__(self)

        def __len__(self) -> int:
            log.append("len")
            return list.__len__(self)

        def __setitem__(self, key: Any, value: Any) -> None:
            log.append("set")
            list.__setitem__(self, key, value)

    return Odd(Logged([2, 3]), lambda it: it[0] + it[1], lambda it: it.__setitem__(0, 5))


@_kind
def deque_that_logs(log: Log) -> Odd:
    class Logged(deque):
        def __iter__(self) -> Iterator[Any]:
            log.append("iter")
            return deque.__iter__(self)

    return Odd(Logged([2, 3], maxlen=4), lambda it: it[0] + it[1], lambda it: it.append(5))


@_kind
def set_that_logs(log: Log) -> Odd:
    class Logged(set):
        def __iter__(self) -> Iterator[Any]:
            log.append("iter")
            return set.__iter__(self)

        def __eq__(self, other: object) -> bool:
            log.append("eq")
            return set.__eq__(self, other)

        __hash__ = None  # type: ignore[assignment]

    return Odd(Logged({2, 3}), lambda it: 2 in it, lambda it: it.discard(2))


@_kind
def tuple_that_logs(log: Log) -> Odd:
    class Logged(tuple):
        def __iter__(self) -> Iterator[Any]:
            log.append("iter")
            return tuple.__iter__(self)

    inner = [2]
    return Odd(
        Logged((inner, 3)), lambda it: it[0][0] + it[1], lambda it: inner.append(inner.pop() + 1)
    )


@_kind
def dict_that_logs(log: Log) -> Odd:
    class Logged(dict):
        def __getitem__(self, key: Any) -> Any:
            log.append("get")
            return dict.__getitem__(self, key)

        def __iter__(self) -> Iterator[Any]:
            log.append("iter")
            return dict.__iter__(self)

        def keys(self) -> Any:
            log.append("keys")
            return dict.keys(self)

        def items(self) -> Any:
            log.append("items")
            return dict.items(self)

        def __missing__(self, key: Any) -> Any:
            log.append("missing")
            return 1

    return Odd(Logged(v=2), lambda it: it["v"] + it["w"], lambda it: it.update(v=3))


@_kind
def ordered_dict_that_logs(log: Log) -> Odd:
    class Logged(OrderedDict):
        def __setitem__(self, key: Any, value: Any) -> None:
            log.append("set")
            OrderedDict.__setitem__(self, key, value)

    it = Logged(v=2)
    it.extra = 5
    return Odd(it, lambda it: it["v"] + it.extra, lambda it: setattr(it, "extra", 6))


@_kind
def default_dict(log: Log) -> Odd:
    return Odd(defaultdict(lambda: 2), lambda it: it["v"], lambda it: it.update(v=3))


@_kind
def attributes_in_a_dict_of_a_class(log: Log) -> Odd:
    class Table(dict):
        def get(self, key: Any, default: Any = None) -> Any:
            log.append("get")
            return dict.get(self, key, default)

        def keys(self) -> Any:
            log.append("keys")
            return dict.keys(self)

    class Box:
        pass

    it: Any = Box()
    it.__dict__ = Table(v=2)
    return Odd(it, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def metaclass_that_logs(log: Log) -> Odd:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            log.append(name)
            return type.__getattribute__(cls, name)

    class Holder(metaclass=Meta):
        v = 2

    return Odd(Holder, lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def metaclass_with_getattr(log: Log) -> Odd:
    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            log.append(name)
            raise RuntimeError(name)

        def __setattr__(cls, name: str, value: Any) -> None:
            log.append(f"set {name}")
            type.__setattr__(cls, name, value)

    class Holder(metaclass=Meta):
        v = 2

    return Odd(Holder(), lambda it: it.v, lambda it: type.__setattr__(type(it), "v", 3))


@_kind
def class_without_a_hash(log: Log) -> Odd:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            log.append("eq")
            return cls is other

        __hash__ = None  # type: ignore[assignment]

    class Holder(metaclass=Meta):
        def __init__(self) -> None:
            self.v = 2

    return Odd(Holder(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def class_without_a_module(log: Log) -> Odd:
    class Holder:
        __module__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.v = 2

    return Odd(Holder(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def object_that_equals_nothing(log: Log) -> Odd:
    class Never:
        def __init__(self) -> None:
            self.v = 2

        def __eq__(self, other: object) -> bool:
            log.append("eq")
            raise TypeError("not comparable")

        def __hash__(self) -> int:
            log.append("hash")
            return 1

        def __repr__(self) -> str:
            log.append("repr")
            raise TypeError("not printable")

        def __bool__(self) -> bool:
            log.append("bool")
            raise TypeError("neither")

        def __len__(self) -> int:
            log.append("len")
            return 0

    return Odd(Never(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def key_that_logs(log: Log) -> Odd:
    class Key:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return self.number

        def __repr__(self) -> str:
            log.append("repr")
            return "key"

    one, two = Key(1), Key(2)
    table = {one: 2, two: 3}
    return Odd(table, lambda it: it[one] + it[two], lambda it: it.__setitem__(one, it[one] + 1))


@_kind
def ctypes_number(log: Log) -> Odd:
    return Odd(ctypes.c_int(2), lambda it: it.value, lambda it: setattr(it, "value", 3))


@_kind
def ctypes_structure(log: Log) -> Odd:
    class Point(ctypes.Structure):
        _fields_ = (("v", ctypes.c_int), ("w", ctypes.c_int))

    return Odd(Point(2, 3), lambda it: it.v + it.w, lambda it: setattr(it, "v", 3))


@_kind
def thread_local(log: Log) -> Odd:
    class Local(threading.local):
        def __init__(self) -> None:
            log.append("init")
            self.v = 2

        def __setattr__(self, name: str, value: Any) -> None:
            log.append("set")
            super().__setattr__(name, value)

    return Odd(Local(), lambda it: it.v, lambda it: setattr(it, "v", 3))


@_kind
def partial_of_a_class(log: Log) -> Odd:
    class Bound(functools.partial):
        def __getattr__(self, name: str) -> Any:
            log.append(name)
            raise ValueError(name)

    values = [2]
    return Odd(
        Bound(lambda them: them[0], values),
        lambda it: it(),
        lambda it: values.append(values.pop(0) + 1),
    )


@_kind
def property_of_a_class_of_its_own(log: Log) -> Odd:
    class Tracked(property):
        @property
        def fget(self) -> Any:  # type: ignore[override]
            log.append("fget")
            return None

    class Holder:
        w = 2
        v = Tracked(lambda self: self.w)

    return Odd(Holder(), lambda it: it.v, lambda it: setattr(it, "w", 3))


@_kind
def array_with_attributes(log: Log) -> Odd:
    class Named(np.ndarray):
        gain = 2

    array = np.ones(2).view(Named)
    array.gain = 3
    return Odd(array, lambda it: it.gain, lambda it: setattr(it, "gain", 4))


@_kind
def masked_array(log: Log) -> Odd:
    array = np.ma.masked_array([1.0, 2.0, 4.0], mask=[False, True, False])
    return Odd(array, lambda it: float(it.sum()), lambda it: it.__setitem__(0, np.ma.masked))


@_kind
def bytes_that_change(log: Log) -> Odd:
    return Odd(bytearray(b"\x02"), lambda it: it[0], lambda it: it.__setitem__(0, 3))


@_kind
def exception(log: Log) -> Odd:
    class Failed(Exception):
        pass

    it: Any = Failed(2)
    return Odd(it, lambda it: it.args[0], lambda it: setattr(it, "args", (3,)))


@_kind
def int_with_attributes(log: Log) -> Odd:
    class Count(int):
        pass

    it: Any = Count(2)
    it.v = 3
    return Odd(it, lambda it: it + it.v, lambda it: setattr(it, "v", 4))


@_kind
def module_with_a_property(log: Log) -> Odd:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._v = 2

        @property
        def v(self) -> int:
            log.append("v")
            return self._v

        def __getattr__(self, name: str) -> Any:
            log.append(name)
            return super().__getattr__(name)

    return Odd(Gain(), lambda it: it.v, lambda it: setattr(it, "_v", 3))


@_kind
def tensor_in_a_slot(log: Log) -> Odd:
    class Cell:
        __slots__ = ("v",)

    class Fixed(Cell):
        @property
        def v(self) -> Any:  # type: ignore[override]
            log.append("v")
            return raw.__get__(self)

    raw = vars(Cell)["v"]
    it = Fixed()
    raw.__set__(it, torch.ones(()))
    return Odd(it, lambda it: it.v, lambda it: raw.__set__(it, torch.full((), 3.0)))
