"""What is read of a function's instructions is what `dis` says, or is assumed to be the worst."""

from __future__ import annotations

import dis
import importlib
import itertools
from types import CodeType
from typing import Any

import pytest

from fxkit.tracing.bytecode import decoding
from fxkit.tracing.bytecode.code_names import names_in
from fxkit.tracing.bytecode.decoding import can_read, instructions, is_known, operations

pytestmark = pytest.mark.core

FACTOR, TABLE = 1.0, {}


def _pairs(first: Any, second: Any) -> Any:
    third, fourth = second, first
    return third.one(fourth), TABLE, (lambda: third)


def _codes(module: str) -> list[CodeType]:
    found = compile(_source(module), module, "exec")
    codes = [found]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return codes


def _source(module: str) -> str:
    loader = importlib.import_module(module).__loader__
    source = loader.get_source(module)  # type: ignore[union-attr]
    assert source is not None
    return source


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "asyncio.tasks", "typing"])
def test_operations_are_those_of_dis(module: str):
    assert is_known()
    for code in _codes(module):
        assert can_read(code)
        ours = [(name, value) for name, _, value in operations(code) if value is not None]
        theirs = [
            (it.opname, it.argval)
            for it in instructions(code)
            if it.opcode in dis.hasname or it.opcode in (*dis.haslocal, *dis.hasfree)
        ]
        assert ours == theirs
        assert all(isinstance(value, str) for _, value in theirs)


def test_both_of_two_variables_in_one_instruction_are_seen():
    def swapped(first: Any, second: Any) -> Any:
        return second, first

    assert {"first", "second"} <= names_in(swapped.__code__).values
    assert [it.argval for it in instructions(swapped.__code__) if it.opname == "LOAD_FAST"] == [
        "second",
        "first",
    ]


def test_an_instruction_that_is_not_known_makes_all_names_count(monkeypatch: pytest.MonkeyPatch):
    code = _pairs.__code__
    known = names_in(code)
    assert "one" not in known.globals and "TABLE" not in known.attributes
    names = {code: name for code, name in decoding._NAMES.items() if name != "BUILD_TUPLE"}
    monkeypatch.setattr(decoding, "_NAMES", names)
    names_in.cache_clear()
    try:
        assert not can_read(code)
        assumed = names_in(code)
    finally:
        names_in.cache_clear()
    everything = {"one", "TABLE"}
    for kind in (assumed.globals, assumed.attributes, assumed.stored, assumed.imports):
        assert everything <= kind
    assert everything | {"first", "second", "third", "fourth"} <= assumed.values


def test_names_that_are_assumed_include_those_that_are_read(monkeypatch: pytest.MonkeyPatch):
    codes = list(itertools.chain.from_iterable(map(_codes, ("argparse", "dataclasses", "copy"))))
    read = list(map(names_in, codes))
    monkeypatch.setattr("fxkit.tracing.bytecode.code_names.can_read", lambda code: False)
    names_in.cache_clear()
    try:
        assumed = list(map(names_in, codes))
    finally:
        names_in.cache_clear()
    for ours, theirs in zip(read, assumed, strict=True):
        for kind in ("globals", "attributes", "stored", "imports", "values", "asked"):
            assert getattr(ours, kind) <= getattr(theirs, kind), kind
        assert ours.reflected & theirs.values <= theirs.reflected
        assert "" in theirs.reflected or not ours.reflected
        assert theirs.is_reflective or not ours.is_reflective
