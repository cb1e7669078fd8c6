"""What functions, classes and objects consist of can be exchanged: the next call sees it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxkit.tracing.captured import Captured
from fxkit.tracing.guarding.parts import CLASS, FUNCTION, OBJECT, PartsHolder, PartsWatch, kind_of

X = torch.linspace(-1, 1, 6).reshape(2, 3)

Case = tuple[Callable[..., Any], Callable[[], Any]]


def _other(a: Any, k: float = 7.0) -> Any:
    return a + k


def _code() -> Case:
    def fn(a: Any, k: float = 2.0) -> Any:
        return a * k

    return fn, lambda: setattr(fn, "__code__", _other.__code__)


def _code_of_another() -> Case:
    def inner(a: Any, k: float = 2.0) -> Any:
        return a * k

    return lambda a: inner(a) + 1, lambda: setattr(inner, "__code__", _other.__code__)


def _defaults() -> Case:
    def inner(a: Any, k: float = 2.0) -> Any:
        return a * k

    return lambda a: inner(a) + 1, lambda: setattr(inner, "__defaults__", (5.0,))


def _keyword_defaults() -> Case:
    def inner(a: Any, *, k: float = 2.0) -> Any:
        return a * k

    return lambda a: inner(a) + 1, lambda: setattr(inner, "__kwdefaults__", {"k": 5.0})


def _defaults_that_arrive() -> Case:
    def inner(a: Any, k: float) -> Any:
        return a * k

    def fn(a: Any) -> Any:
        try:
            return inner(a)  # type: ignore[call-arg]
        except TypeError:
            return a

    return fn, lambda: setattr(inner, "__defaults__", (5.0,))


def _name() -> Case:
    def inner() -> None:
        pass

    return lambda a: a * len(inner.__name__), lambda: setattr(inner, "__name__", "a")


class Twice:
    gain = 2.0

    def go(self, a: Any) -> Any:
        return a * 2


class Thrice:
    gain = 3.0

    def go(self, a: Any) -> Any:
        return a * 3


def _class() -> Case:
    it = Twice()
    return lambda a: it.go(a), lambda: setattr(it, "__class__", Thrice)


def _class_that_is_asked() -> Case:
    it = Twice()
    return lambda a: a * (2 if isinstance(it, Twice) else 3), lambda: setattr(
        it, "__class__", Thrice
    )


def _class_of_a_module() -> Case:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    return model, lambda: setattr(model[1], "__class__", nn.Sigmoid)


def _class_of_a_python_module() -> Case:
    class Late(types.ModuleType):
        gain = 3.0

    module = types.ModuleType("late")
    return lambda a: a * getattr(module, "gain", 1.0), lambda: setattr(module, "__class__", Late)


def _bases() -> Case:
    kind = type("Kind", (Twice,), {})
    it = kind()
    return lambda a: it.go(a) * it.gain, lambda: setattr(kind, "__bases__", (Thrice,))


def _bases_of_a_base() -> Case:
    base = type("Base", (Twice,), {})
    it = type("Kind", (base,), {})()
    return lambda a: it.go(a), lambda: setattr(base, "__bases__", (Thrice,))


def _bases_of_an_exception() -> Case:
    kind = type("Kind", (KeyError,), {})

    def fn(a: Any) -> Any:
        try:
            raise kind
        except KeyError:
            return a * 2
        except ValueError:
            return a * 3

    return fn, lambda: setattr(kind, "__bases__", (ValueError,))


def _dict() -> Case:
    it = Twice()
    it.gain = 4.0
    return lambda a: a * it.gain, lambda: setattr(it, "__dict__", {"gain": 5.0})


def _dict_of_a_module() -> Case:
    layer = nn.LeakyReLU(0.5)
    return layer, lambda: setattr(layer, "__dict__", {**vars(layer), "negative_slope": 0.1})


CASES = [
    *(_code, _code_of_another, _defaults, _keyword_defaults, _defaults_that_arrive, _name, _class),
    *(_class_that_is_asked, _class_of_a_module, _class_of_a_python_module, _bases),
    *(_bases_of_a_base, _bases_of_an_exception, _dict, _dict_of_a_module),
]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__.strip("_"))
def test_what_is_exchanged_is_seen(make: Callable[[], Case]):
    fn, change = make()
    captured = Captured(fn)
    before = fn(X)
    for _ in range(3):
        assert torch.equal(captured(X), before)
    assert captured.whole and captured.recaptures == 0
    change()
    assert not torch.equal(fn(X), before)
    for _ in range(3):
        assert torch.equal(captured(X), fn(X))
    assert captured.whole


def test_the_message_names_what_was_exchanged():
    fn, change = _code_of_another()
    captured = Captured(fn)
    captured(X)
    change()
    assert captured.explain(X).startswith("expected inner.__code__ to be <code object inner")


def test_a_program_that_exchanges_classes_runs_in_python():
    it = Twice()

    def fn(a: Any) -> Any:
        result = it.go(a)
        it.__class__ = Thrice if type(it) is Twice else Twice
        return result

    captured = Captured(fn)
    for factor in (2, 3, 2, 3):
        assert torch.equal(captured(X), X * factor)
    assert "exchanges" in captured.explain(X)


@pytest.mark.parametrize(
    ("value", "kind"), [(_code, FUNCTION), (Twice, CLASS), (Twice(), OBJECT), (torch, OBJECT)]
)
def test_a_watch_holds_until_something_is_exchanged(value: Any, kind: int):
    assert kind_of(value) == kind
    watch = PartsWatch([PartsHolder(value, "it")])
    assert watch.holds() and watch.state[0][:2] == (value, kind)
    (holder,) = watch.holders
    holder.entries = {**holder.entries, "__class__" if kind != FUNCTION else "__code__": None}
    assert not PartsWatch([holder]).holds()


def test_parts_are_guarded_for_each_kind_of_object():
    class Slotted:
        __slots__ = ("gain",)

    it = Slotted()
    it.gain = 2.0
    named = Twice()
    captured = Captured(lambda a: a * it.gain * named.gain)
    captured(X)
    holders = [guard.holder for guard in captured.guards if hasattr(guard, "holder")]
    held = [holder.value for holder in holders if isinstance(holder, PartsHolder)]
    assert it in held and named in held and Slotted in held and captured.fn in held
