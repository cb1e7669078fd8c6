"""State in places that code reaches without naming them: a change is seen at the next call."""

from __future__ import annotations

import collections
import dataclasses
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


@pytest.mark.parametrize("name", PLACES)
def test_a_change_is_seen(name: str):
    make, read, change = PLACES[name]
    place = make()
    captured = Captured(lambda a: a * read(place))
    for _ in range(2):
        assert torch.equal(captured(X), X * read(place))
    assert captured.whole and len(captured.variants) == 1
    before = read(place)
    change(place)
    assert read(place) != before
    for _ in range(2):
        assert torch.equal(captured(X), X * read(place))
    Named.size = 2


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
