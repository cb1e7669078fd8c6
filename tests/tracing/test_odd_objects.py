"""State in odd objects is read where it lies, guarded and written again, or runs in Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxkit.tracing.captured import Captured
from tests.tracing.odd_objects import KINDS, Log, Odd

SIZES = (4, 4, 6, 6, 3)


class Shelf:
    def __init__(self, item: Any) -> None:
        self.item = item


def _through_a_table(odd: Odd) -> Callable[..., torch.Tensor]:
    table = {"k": odd.value}
    return lambda x: x * odd.read(table["k"]) + x.shape[0]


def _through_an_attribute(odd: Odd) -> Callable[..., torch.Tensor]:
    shelf = Shelf(odd.value)
    return lambda x: x * odd.read(shelf.item) + x.shape[0]


def _through_a_list(odd: Odd) -> Callable[..., torch.Tensor]:
    items = [None, odd.value]
    return lambda x: x * odd.read(items[1]) + x.shape[0]


def _through_a_default(odd: Odd) -> Callable[..., torch.Tensor]:
    return lambda x, it=odd.value: x * odd.read(it) + x.shape[0]


def _beside_it(odd: Odd) -> Callable[..., torch.Tensor]:
    table = {"k": odd.value, "n": 2}
    return lambda x: x * table["n"] + x.shape[0]


def _by_computed_names(odd: Odd) -> Callable[..., torch.Tensor]:
    table = {"k": odd.value, "n": 2}

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(table["k"], "no such" + " thing", 2) + x.shape[0]

    return program


def _as_an_argument(odd: Odd) -> Callable[..., Any]:
    def program(x: torch.Tensor, it: Any) -> torch.Tensor:
        return x * odd.read(it) + x.shape[0]

    program.more = (odd.value,)  # type: ignore[attr-defined]
    return program


def _returned(odd: Odd) -> Callable[..., Any]:
    table = {"k": odd.value}
    return lambda x: (x + x.shape[0], odd.read(table["k"]))


PLACES: dict[str, Callable[[Odd], Callable[..., Any]]] = {
    make.__name__.strip("_"): make
    for make in (
        _through_a_table,
        _through_an_attribute,
        _through_a_list,
        _through_a_default,
        _beside_it,
        _as_an_argument,
        _returned,
        _by_computed_names,
    )
}


def _observed(make: Callable[[Log], Odd], place: str, changes: str, compiled: Any) -> list[Any]:
    """Run the calls of one case, and return what each gave, raised and logged."""
    log: Log = []
    odd = make(log)
    program = PLACES[place](odd)
    more = getattr(program, "more", ())
    run = compiled(_changing(program, odd) if changes == "program" else program)
    seen = []
    for number, size in enumerate(SIZES):
        if number == 3 and changes == "between" and odd.change is not None:
            odd.change(odd.value)
        try:
            result: Any = run(torch.arange(float(size)), *more)
        except Exception as error:
            result = (type(error), str(error))
        seen.append((result, list(log)))
    return seen


def _changing(program: Callable[..., Any], odd: Odd) -> Callable[..., Any]:
    def changing(x: torch.Tensor, *more: Any) -> Any:
        result = program(x, *more)
        if odd.change is not None:
            odd.change(odd.value)
        return result

    return changing


def check(name: str, place: str, changes: str, compiled: Any = Captured) -> None:
    """Compare a program over an odd object with itself in eager, call by call."""
    expected = _observed(KINDS[name], place, changes, lambda fn: fn)
    got = _observed(KINDS[name], place, changes, compiled)
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert str(ours[0]) == str(theirs[0]), f"call {number}: {ours[0]} for {theirs[0]}"
        assert ours[1] == theirs[1], f"effects of call {number}: {ours[1]} for {theirs[1]}"


class Cell:
    __slots__ = ("v",)


class Fixed(Cell):
    v = property(lambda self: tuple(range(2)))  # type: ignore[assignment]


def test_a_property_over_a_slot_is_no_state() -> None:
    table = {"k": Fixed()}
    captured = Captured(lambda x: x * len(table["k"].v) + x.shape[0])
    for size in (4, 4, 6):
        assert captured(torch.ones(size, 3)).equal(torch.full((size, 3), 2.0 + size))
    assert captured.whole


def test_stand_ins_for_numbers_are_taken_out_of_what_is_found_while_the_program_runs() -> None:
    class Settings:
        def __init__(self) -> None:
            self.gain = 2

    settings = Settings()
    shelf = [settings]

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * shelf[0].gain

    def program(x: torch.Tensor, given: Settings) -> torch.Tensor:
        result = other(x) + given.gain
        given.gain = 3
        return result

    captured = Captured(program)
    for size, gain in ((4, 2), (4, 3), (6, 3), (3, 3)):
        assert captured(torch.ones(size), settings).equal(torch.full((size,), 2.0 * gain))
        assert type(settings.gain) is int


@pytest.mark.parametrize("name", KINDS)
def test_a_program_over_an_odd_object_does_what_it_does_in_python(name: str) -> None:
    draw = random.Random(name)
    check(name, draw.choice(list(PLACES)), draw.choice(["never", "between", "program"]))


@pytest.mark.sweep
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("changes", ["never", "between", "program"])
@pytest.mark.parametrize("name", KINDS)
def test_odd_objects_in_all_places(name: str, place: str, changes: str) -> None:
    check(name, place, changes)
