"""Opaque calls: one node each, run once a call, in order, with their gradients."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import fxkit
from fxkit.errors import CaptureError, UnsupportedError
from fxkit.tracing.captured import Captured
from fxkit.tracing.opaque_calls.opaque_calls import opaque


def _targets(captured: Captured) -> list[str]:
    return [node.name for node in captured.graph_module.graph.nodes if node.op == "call_function"]


def test_opaque_calls_run_once_even_when_a_guard_fails_behind_them():
    log: list[float] = []

    @opaque
    def note(a: torch.Tensor) -> None:
        log.append(a.sum().item())

    @opaque
    def through_numpy(a: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(a.numpy() + 1)

    def fn(a: torch.Tensor) -> torch.Tensor:
        note(a)
        b = through_numpy(a * 2).add_(1)
        return b * 3 if b.sum() > 0 else b - 1

    captured = Captured(fn)
    values = (1.0, 2.0, -5.0, 1.0, -5.0)
    for value in values:
        b = torch.full((2,), value) * 2 + 2
        expected = b * 3 if value > 0 else b - 1
        assert torch.equal(captured(torch.full((2,), value)), expected)
    assert log == [2 * value for value in values]
    assert len(captured.graphs) == 2
    assert _targets(captured)[:2] == ["note", "through_numpy"]


def test_what_an_opaque_function_writes_to_is_written_again():
    calls = []

    @opaque
    def fill(a: torch.Tensor) -> None:
        calls.append(1)
        a.fill_(3)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        fill(a)
        return a + 1 if b.item() > 0 else a - 1

    captured = Captured(fn)
    for value in (1.0, -1.0, 1.0, -1.0):
        a = torch.zeros(2)
        result = captured(a, torch.tensor(value))
        assert torch.equal(result, torch.full((2,), 3 + value))
        assert torch.equal(a, torch.full((2,), 3.0))
    assert len(calls) == 4


def test_clocks_and_texts_keep_their_order(capsys: pytest.CaptureFixture[str]):
    @opaque
    def tick() -> None:
        print("tick", time.time() > 0)

    def fn(a: torch.Tensor) -> torch.Tensor:
        print("before")
        tick()
        print("after")
        return a + 1

    captured = Captured(fn)
    for _ in range(3):
        captured(torch.ones(2))
    assert capsys.readouterr().out == "before\ntick True\nafter\n" * 3
    assert len(captured.graphs) == 1 and captured.whole


def test_gradients_flow_through_opaque_calls():
    @opaque
    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    captured = Captured(lambda a: double(a).square().sum())
    for _ in range(3):
        a = torch.tensor([1.0, 2.0], requires_grad=True)
        captured(a).backward()
        assert torch.equal(a.grad, torch.tensor([8.0, 16.0]))
    assert captured.whole


def test_a_program_that_reads_what_an_opaque_call_changes_runs_in_python():
    state = {"count": 0}

    @opaque
    def count() -> None:
        state["count"] += 1

    def fn(a: torch.Tensor) -> torch.Tensor:
        count()
        return a * state["count"]

    captured = Captured(fn)
    for expected in (1.0, 2.0, 3.0, 4.0):
        assert torch.equal(captured(torch.ones(1)), torch.tensor([expected]))
    assert not captured.whole
    with pytest.raises(CaptureError, match="an opaque call changes"):
        fxkit.capture(fn, (torch.ones(1),))


def test_errors_of_opaque_calls_are_raised_once():
    calls: list[int] = []

    @opaque
    def fail(a: torch.Tensor) -> None:
        calls.append(1)
        if a.sum() < 0:
            raise KeyError("negative")

    captured = Captured(lambda a: (fail(a), a + 1)[1])
    captured(torch.ones(1))
    with pytest.raises(KeyError, match="negative"):
        captured(-torch.ones(1))
    assert len(calls) == 2


def test_compiled_programs_keep_their_opaque_calls():
    seen: list[Any] = []

    @opaque
    def note(a: torch.Tensor) -> None:
        seen.append(a.shape)

    compiled = fxkit.compile(lambda a: (note(a), torch.softmax(a * 2, -1) + 1)[1])
    a = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(a), torch.softmax(a * 2, -1) + 1)
    assert len(seen) == 3
    assert len(compiled.compiled_modules) == 1


def test_something_else_than_a_function():
    with pytest.raises(UnsupportedError, match="expected a function, got int"):
        opaque(3)
