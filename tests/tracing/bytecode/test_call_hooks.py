"""Code whose calls go through a hook does what it did before, and the hook sees each call."""

from __future__ import annotations

import contextlib
import random
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fxkit
from fxkit.errors import CaptureError
from fxkit.tracing.bytecode import call_hooks, hooked_code
from fxkit.tracing.bytecode.call_hooks import can_hook, has_hooks, with_call_hooks
from fxkit.tracing.bytecode.value_flow import Flow

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("few_objects")]


class Ledger:
    """What programs below call, with what they were given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.bias = 1

    def note(self, *values: Any, **named: Any) -> int:
        self.calls.append((values, tuple(sorted(named.items()))))
        return sum(values) % 97 + sum(named.values()) + self.bias

    @contextlib.contextmanager
    def scope(self, value: int) -> Iterator[int]:
        self.calls.append(("enter", value))
        try:
            yield value + 1
        except ZeroDivisionError:
            self.calls.append("handled")
        finally:
            self.calls.append("exit")


# So many names and constants that instructions take arguments of more than a byte.
MANY = f"""
if b == "never":
    a = {", ".join(f"ledger.name{number}" for number in range(300))}, [
        {", ".join(f"{number}.5 + b" for number in range(300))}]
"""


class Program:
    """A random function, as text.

    Args:
        seed: Decides what is in it.
        prologue: Lines that stand before all else.
    """

    def __init__(self, seed: int, prologue: str = "") -> None:
        self._prologue = prologue
        self._draw = random.Random(seed)
        self._names = ["a", "b"]
        self._depth = 0

    def text(self) -> str:
        body = f"{self._prologue}\n{self._block(4)}"
        last = f"return a, b, {self._value()}"
        return f"def program(ledger, a, b):\n{textwrap.indent(body, '    ')}\n    {last}\n"

    def _block(self, count: int) -> str:
        self._depth += 1
        found = "\n".join(self._statement() for _ in range(count))
        self._depth -= 1
        return found

    def _statement(self) -> str:
        plain = [self._assign, self._assign, self._expression, self._inner, self._unpack]
        nested = [self._if, self._for, self._with, self._try, self._while]
        return self._draw.choice(plain if self._depth > 2 else plain + nested)()

    def _assign(self) -> str:
        return f"{self._draw.choice('ab')} = {self._value()}"

    def _expression(self) -> str:
        return self._call()

    def _unpack(self) -> str:
        return f"a, b = {self._value()}, {self._value()}"

    def _inner(self) -> str:
        name = f"inner{self._draw.randrange(10**6)}"
        return (
            f"def {name}(c, *, d=2):\n    return ledger.note(c, {self._value()}, key=d)\n"
            f"b = {name}({self._value()}, d={self._value()}) + {name}(a)"
        )

    def _if(self) -> str:
        return (
            f"if {self._value()} % 2 and not {self._value()} > 5:\n"
            f"{textwrap.indent(self._block(2), '    ')}\nelse:\n"
            f"{textwrap.indent(self._block(1), '    ')}"
        )

    def _for(self) -> str:
        return f"for b in range({self._value()} % 3):\n{textwrap.indent(self._block(2), '    ')}"

    def _while(self) -> str:
        return (
            "for _ in [1, 2]:\n"
            f"    while ledger.note({self._value()}) % 3:\n        a = a + 1\n        break"
        )

    def _with(self) -> str:
        inner = textwrap.indent(self._block(2), "    ")
        return f"with ledger.scope({self._value()}) as b, ledger.scope(a):\n{inner}"

    def _try(self) -> str:
        inner = textwrap.indent(self._block(1), "    ")
        last = textwrap.indent(self._block(1), "    ")
        return (
            f"try:\n{inner}\n    a = {self._value()} // (({self._value()}) % 3)\n"
            f"except ZeroDivisionError as error:\n    b = len(str(error)) + {self._value()}\n"
            f"finally:\n{last}"
        )

    def _value(self) -> str:
        if self._depth > 3 or self._draw.random() < 0.4:
            return self._draw.choice(["a", "b", "3", "a + b", "(a if b % 2 else b)"])
        self._depth += 1
        found = self._draw.choice([self._call, self._call, self._text, self._list, self._maximum])()
        self._depth -= 1
        return found

    def _call(self) -> str:
        given = ", ".join(self._value() for _ in range(self._draw.randrange(3)))
        return self._draw.choice(
            [
                f"ledger.note({given})",
                f"ledger.note({given or 'a'}, key={self._value()}, other={self._value()})",
                f"ledger.note(*[{given}])",
                f"ledger.note(*[{given}], **{{'key': {self._value()}}})",
                f"getattr(ledger, 'note')({given})",
                f"(lambda c: ledger.note(c, {self._value()}))({self._value()})",
            ]
        )

    def _text(self) -> str:
        kept, self._depth = self._depth, 9  # no texts within texts before Python 3.12
        found = f'len(f"{{{self._value()}}} {{{self._value()}!r:>6}}".replace(" ", "b"))'
        self._depth = kept
        return found

    def _list(self) -> str:
        item = self._draw.choice(["ledger.note(c, a)", "c", "len(str(c))"])
        return f"sum([{item} for c in [{self._value()}, {self._value()}] if ledger.note(c) % 2])"

    def _maximum(self) -> str:
        return f"max([{self._value()}, {self._value()}], key=lambda c: c % 7)"


def _run(program: Callable[..., Any]) -> tuple[Any, list[Any]]:
    ledger = Ledger()
    try:
        found = program(ledger, 5, 8)
    except ZeroDivisionError as error:
        found = str(error)
    return found, ledger.calls


def _codes(program: types.FunctionType) -> frozenset[types.CodeType]:
    codes = [program.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(codes)


def _check(seed: int, prologue: str = "") -> None:
    text = Program(seed, prologue).text()
    scope: dict[str, Any] = {}
    exec(text, scope)
    program = scope["program"]
    expected = _run(program)
    seen: list[Any] = []

    def hook(function: Any, args: Any, kwargs: Any, flow: Flow) -> Any:
        if getattr(function, "__name__", "") == "note":
            seen.append((args, tuple(sorted(kwargs.items()))))
        return function, args, kwargs

    codes = _codes(program)
    assert all(map(can_hook, codes)), text
    with with_call_hooks(codes, hook, codes):
        assert has_hooks(program.__code__), text
        assert _run(program) == expected, text
    assert seen == [call for call in expected[1] if isinstance(call, tuple) and call[0] != "enter"]
    assert _run(program) == expected, text


@pytest.mark.parametrize("seed", range(15))
def test_a_random_program_does_the_same(seed: int):
    _check(seed)


# Of these, jumps of more than a byte lead to where something is handled, or from there.
@pytest.mark.parametrize("seed", [1208, 1242, 1599, 1782, 1811, 1951])
def test_a_program_with_far_jumps_does_the_same(seed: int):
    _check(seed)


@pytest.mark.parametrize("seed", range(100, 110))
def test_a_program_with_many_names_does_the_same(seed: int):
    _check(seed, MANY)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_many_random_programs_do_the_same(part: int):
    for seed in range(1000 + 50 * part, 1050 + 50 * part):
        _check(seed)
        _check(seed, MANY)


def test_a_hook_may_say_what_to_call_instead():
    def program(items: list[int], **options: Any) -> Any:
        return sorted(items, **options), len(items), max(*items)

    def hook(function: Any, args: Any, kwargs: Any, flow: Flow) -> Any:
        return (sum, ([4, 5],), {}) if function is max else (function, args, kwargs)

    with with_call_hooks(frozenset({program.__code__}), hook):
        assert program([1, 3, 2], reverse=True) == ([3, 2, 1], 3, 9)
    assert program([1, 3, 2]) == ([1, 2, 3], 3, 3)


def test_a_generator_is_no_constant_where_calls_cannot_be_hooked(monkeypatch: pytest.MonkeyPatch):
    assembler = call_hooks.find_assembler()

    def refuse(code: types.CodeType, change: Callable[..., Any]) -> Any:
        if code.co_name == "program":
            raise AssertionError("an instruction that is not known")
        return assembler.transform_code_object(code, change)

    partial = types.SimpleNamespace(**{**vars(assembler), "transform_code_object": refuse})
    for module in (call_hooks, hooked_code):
        monkeypatch.setattr(module, "find_assembler", lambda: partial)
    generator = np.random.default_rng(0)

    def program(x: torch.Tensor) -> torch.Tensor:
        def wait() -> None:
            time.sleep(0)

        wait()
        return x * generator.normal()

    x = torch.ones(2)
    with pytest.raises(CaptureError, match="a Generator, whose state can't be told"):
        fxkit.capture(program, (x,))
    fast, results = fxkit.compile(program), set()
    for _ in range(4):
        results.add(fast(x)[0].item())
    assert len(results) == 4
