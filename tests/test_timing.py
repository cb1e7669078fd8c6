"""Candidates are called in turn, and each as often as was asked."""

from __future__ import annotations

from fxkit.timing import in_turn, machine


def test_candidates_take_turns_after_their_warmup() -> None:
    calls: list[str] = []
    medians = in_turn(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, warmup=1
    )
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert list(medians) == ["a", "b"]


def test_the_machine_has_a_name_and_threads() -> None:
    assert "thread" in machine()
