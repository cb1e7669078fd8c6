"""State in places that code reaches without naming them: a change is seen at the next call."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import operator
import string
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxkit.tracing.captured import Captured

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Named(type):
    size = 2


class Pair(tuple):
    gain = 2


def _pair(holder: Callable[[Box], Any]) -> tuple[Any, Box]:
    box = Box(2)
    return holder(box), box


def _module() -> types.ModuleType:
    module = types.ModuleType("settings")
    vars(module)["value"] = 2
    return module


PLACES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "UserDict": (
        lambda: collections.UserDict(a=2),
        lambda it: it["a"],
        lambda it: it.update(a=5),
    ),
    "UserList": (lambda: collections.UserList([2]), sum, lambda it: it.append(5)),
    "ChainMap": (
        lambda: collections.ChainMap({}, {"a": 2}),
        lambda it: it["a"],
        lambda it: it.maps[1].update(a=5),
    ),
    "Template": (
        lambda: string.Template("${a}"),
        lambda it: len(it.substitute(a="b")),
        lambda it: setattr(it, "template", "${a}${a}"),
    ),
    "WeakKeyDictionary": (
        lambda: _pair(lambda box: weakref.WeakKeyDictionary({box: 2})),
        lambda it: it[0][it[1]],
        lambda it: it[0].update({it[1]: 5}),
    ),
    "WeakSet": (
        lambda: _pair(lambda box: weakref.WeakSet([box])),
        lambda it: len(it[0]),
        lambda it: it[0].clear(),
    ),
    "behind a weak reference": (
        lambda: _pair(weakref.ref),
        lambda it: it[0]().value,
        lambda it: setattr(it[1], "value", 5),
    ),
    "attrgetter of a path": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(b=2)),
        lambda it: operator.attrgetter("a.b")(it),
        lambda it: setattr(it.a, "b", 5),
    ),
    "methodcaller": (
        lambda: Box(2),
        lambda it: operator.methodcaller("__getattribute__", "value")(it),
        lambda it: setattr(it, "value", 5),
    ),
    "a Python module in a variable": (
        _module,
        lambda it: it.value,
        lambda it: setattr(it, "value", 5),
    ),
    "a metaclass": (
        lambda: Named("Kind", (), {}),
        lambda it: it.size,
        lambda it: setattr(Named, "size", 5),
    ),
    "a tuple's attribute": (
        lambda: Pair((1, 2)),
        lambda it: it.gain,
        lambda it: setattr(it, "gain", 5),
    ),
}


def _is_seen(make: Any, read: Any, change: Any) -> None:
    """See that a program follows what it reads at a place, before and after a change."""
    place = make()
    captured = Captured(lambda a: a * read(place))
    for _ in range(2):
        assert torch.equal(captured(X), X * read(place))
    assert captured.whole and len(captured.graphs) == 1
    before = read(place)
    change(place)
    assert read(place) != before
    for _ in range(2):
        assert torch.equal(captured(X), X * read(place))


@pytest.mark.parametrize("name", PLACES)
def test_a_change_is_seen(name: str):
    _is_seen(*PLACES[name])
    Named.size = 2


class Mode(enum.Enum):
    FIRST = 1
    LISTED = [2]  # noqa: RUF012


class Looked(enum.Enum):
    FIRST = 1
    SECOND = 2


def _with_default(self: Any, gain: int = 2) -> int:
    return gain


class Dicts(dict):
    pass


class Lists(list):
    pass


def _dispatched() -> Any:
    @functools.singledispatch
    def gain(value: Any) -> int:
        return 2

    gain(3)  # which it notes
    return gain


@dataclasses.dataclass
class Given:
    gain: int = 2


class Patterned:
    __match_args__ = ("first", "second")
    first, second = 2, 5


def _matched(it: Any) -> int:
    match it:
        case Patterned(found, _):
            return found
    return 0


def _hiding(it: Any) -> Any:
    vars(it)["gain"] = 2
    return it


def _refused(it: Any) -> int:
    try:
        return 1 + it
    except TypeError:
        return 2


LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an attribute of a function": (
        lambda: lambda: None,
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(it, "gain", 5),
    ),
    "an attribute of a class": (
        lambda: type("Late", (), {}),
        lambda it: getattr(it(), "gain", 2),
        lambda it: setattr(it, "gain", 5),
    ),
    "an attribute of a metaclass": (
        lambda: type("Late", (type,), {})("Kind", (), {}),
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(type(it), "gain", 5),
    ),
    "an attribute that hides that of a base": (
        lambda: type("Late", (Pair,), {})(),
        lambda it: it.gain,
        lambda it: setattr(type(it), "gain", 5),
    ),
    "an attribute of an instance": (
        lambda: Box(2),
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(it, "gain", 5),
    ),
    "an attribute of a tensor": (
        lambda: torch.ones(2),
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(it, "gain", 5),
    ),
    "an attribute of a method": (
        lambda: type("Late", (), {"go": lambda self: None})(),
        lambda it: getattr(it.go, "gain", 2),
        lambda it: setattr(type(it).go, "gain", 5),
    ),
    "defaults of a method that are read": (
        lambda: type("Late", (), {"go": _with_default})(),
        lambda it: it.go.__defaults__[0],
        lambda it: setattr(_with_default, "__defaults__", (5,)),
    ),
    "a computed attribute of a class": (
        lambda: type("Late", (), {"gain_a": [2]}),
        lambda it: getattr(it, "gain_" + "a".lower())[0],
        lambda it: it.gain_a.append(it.gain_a.pop() + 3),
    ),
    "all attributes of a class": (
        lambda: type("Late", (), {}),
        lambda it: len(dir(it)),
        lambda it: setattr(it, "gain", 5),
    ),
    "a member that is looked up": (
        lambda: Looked,
        lambda it: it["FIRST"].value,
        lambda it: setattr(it.FIRST, "_value_", 5),
    ),
    "__getattr__": (
        lambda: type("Late", (), {})(),
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(type(it), "__getattr__", lambda self, name: 5),
    ),
    "__getattribute__": (
        lambda: type("Late", (), {"gain": 2})(),
        lambda it: it.gain,
        lambda it: setattr(type(it), "__getattribute__", lambda self, name: 5),
    ),
    "__bool__": (
        lambda: type("Late", (), {})(),
        lambda it: 2 if it else 5,
        lambda it: setattr(type(it), "__bool__", lambda self: False),
    ),
    "__len__": (
        lambda: type("Late", (), {})(),
        lambda it: 2 if it else 5,
        lambda it: setattr(type(it), "__len__", lambda self: 0),
    ),
    "__eq__": (
        lambda: type("Late", (), {})(),
        lambda it: 2 if it == 1 else 5,
        lambda it: setattr(type(it), "__eq__", lambda self, other: True),
    ),
    "__radd__": (
        lambda: type("Late", (), {})(),
        _refused,
        lambda it: setattr(type(it), "__radd__", lambda self, other: 5),
    ),
    "__call__ of another": (
        lambda: type("Late", (), {"__call__": lambda self: 2})(),
        lambda it: it(),
        lambda it: setattr(type(it), "__call__", lambda self: 5),
    ),
    "__set__ of a descriptor": (
        lambda: _hiding(type("Late", (), {"gain": type("Get", (), {"__get__": lambda *_: 5})()})()),
        lambda it: it.gain,
        lambda it: setattr(type(vars(type(it))["gain"]), "__set__", lambda *args: None),
    ),
    "__instancecheck__": (
        lambda: type("Late", (type,), {})("Kind", (), {}),
        lambda it: 5 if isinstance(2, it) else 2,
        lambda it: setattr(type(it), "__instancecheck__", lambda self, value: True),
    ),
    "__init__": (
        lambda: type("Late", (), {"gain": 2}),
        lambda it: it().gain,
        lambda it: setattr(it, "__init__", lambda self: setattr(self, "gain", 5)),
    ),
    "__match_args__": (
        lambda: Patterned(),
        _matched,
        lambda it: setattr(Patterned, "__match_args__", ("second", "first")),
    ),
    "__missing__ of a dict": (
        lambda: Dicts(a=1),
        lambda it: it.get("a") + len(it) if not hasattr(it, "__missing__") else it["b"],
        lambda it: setattr(Dicts, "__missing__", lambda self, key: 5),
    ),
    "__len__ of a list": (
        lambda: Lists([1]),
        len,
        lambda it: setattr(Lists, "__len__", lambda self: 5),
    ),
    "an attribute of a member": (
        lambda: Mode.FIRST,
        lambda it: getattr(it, "gain", 2),
        lambda it: setattr(it, "gain", 5),
    ),
    "the value of a member": (
        lambda: Mode.FIRST,
        lambda it: it.value,
        lambda it: setattr(it, "_value_", 5),
    ),
    "the list that is the value of a member": (
        lambda: Mode.LISTED,
        lambda it: it.value[0],
        lambda it: it.value.append(it.value.pop() + 3),
    ),
    "a function for another type": (
        _dispatched,
        lambda it: it(3),
        lambda it: it.register(int, lambda value: 5),
    ),
    "defaults of a data class": (
        lambda: Given,
        lambda it: it().gain,
        lambda it: setattr(it.__init__, "__defaults__", (5,)),
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_arrives_late_is_seen(name: str):
    _is_seen(*LATE[name])


def test_methods_that_torch_calls_are_guarded():
    class Layer(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * 2

    for program, owner, new in (
        (nn.Sequential(Layer()), Layer, lambda self, a: a * 3),
        (lambda a: Scale.apply(a), Scale, staticmethod(lambda ctx, a: a * 3)),
    ):
        captured = Captured(program)
        assert torch.equal(captured(X), X * 2) and torch.equal(captured(X), X * 2)
        owner.forward = new
        assert torch.equal(captured(X), X * 3) and torch.equal(captured(X), X * 3)


def test_what_a_weak_reference_leads_to_dies_at_once():
    box = Box(2)
    reference = weakref.ref(box)
    captured = Captured(lambda a: a * 2 if reference() is not None else a)
    for _ in range(2):
        assert torch.equal(captured(X), X * 2)
    del box
    assert reference() is None
    assert torch.equal(captured(X), X)


def test_a_class_is_looked_at_once():
    boxes = [Box(number) for number in range(4)]
    captured = Captured(lambda a: a * sum(box.value for box in boxes))
    assert torch.equal(captured(X), X * 6)
    held = [guard.holder.path for guard in captured.guards if hasattr(guard, "holder")]
    assert held.count("Box") == 2  # its attributes, and what it consists of


@pytest.mark.usefixtures("few_objects")
def test_a_weak_reference_is_not_made_a_strong_one():
    box = Box(2)
    reference = weakref.ref(box)

    def fn(a: torch.Tensor) -> torch.Tensor:
        kept = reference()
        return a if kept is None else a * kept.value

    captured = Captured(fn)
    for _ in range(2):
        assert torch.equal(captured(X), X * 2)
    assert captured.whole
    del box
    gc.collect()  # what a capture leaves behind lies in cycles
    assert reference() is None
    assert torch.equal(captured(X), X)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_on_all_modules_come_and_go(kind: str):
    register = getattr(nn.modules.module, f"register_module_{kind}")
    layer, factor = nn.Linear(3, 3), [2.0]
    captured = Captured(layer)

    def hook(module: nn.Module, *values: Any) -> Any:
        value = values[-1]
        return value[0] * factor[0] if isinstance(value, tuple) else value * factor[0]

    assert torch.equal(captured(X), layer(X)) and captured.whole
    handle = register(hook)
    try:
        for factor[0] in (2.0, 2.0, 3.0):
            assert torch.equal(captured(X), layer(X))
        assert captured.whole
    finally:
        handle.remove()
    assert torch.equal(captured(X), layer(X))


def test_settings_of_torch_are_not_constants(monkeypatch):
    # torch's own test helpers, which other tests import, freeze them.
    known = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(known, "__allow_nonbracketed_mutation_flag", True)

    def fn(a: torch.Tensor) -> Any:
        return a * 2, torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    captured = Captured(fn)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        for precision, benchmark in (("highest", False), ("highest", False), ("high", True)):
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.benchmark = benchmark
            assert captured(X)[1:] == (precision, benchmark)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]


def test_a_kernel_that_the_program_chooses_is_the_one_that_runs():
    def fn(a: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(a, a, a)

    a = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    captured = Captured(fn)
    for _ in range(3):
        assert torch.equal(captured(a), fn(a))


def test_outputs_of_transformers_keep_the_order_of_their_keys():
    from transformers.utils.generic import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        loss: Any = None
        logits: Any = None

    def fn(a: torch.Tensor) -> Any:
        output = Output(logits=a * 2)
        output.loss = a.sum()
        return output

    captured = Captured(fn)
    for _ in range(3):
        got = captured(X)
        assert list(got) == ["logits", "loss"] and got[0] is got.logits
    assert captured.whole
