"""The node of autograd is built once many gradients were asked for, and nobody waits for it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from fxkit.lower.runtime import autograd_node, binding


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Nothing is attached or begun, and what is begun builds nothing."""
    if binding.load() is None:
        pytest.skip("no compiler")
    threads: list[threading.Thread] = []
    monkeypatch.setattr(autograd_node, "_attached", [])
    monkeypatch.setattr(autograd_node, "_started", threads)
    monkeypatch.setattr(autograd_node, "_asked", itertools.count(1))
    monkeypatch.setattr(autograd_node, "attach", lambda: True)
    return threads


def test_it_is_begun_after_many_backwards_and_once(begun: list[threading.Thread]) -> None:
    for _ in range(autograd_node.MANY - 1):
        autograd_node.note_backward()
    assert not begun
    autograd_node.note_backward()
    autograd_node.note_backward()
    assert len(begun) == 1
    autograd_node.finish()
    assert not begun[0].is_alive()


def test_nothing_is_begun_without_headers(
    begun: list[threading.Thread], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(autograd_node, "_include", lambda: tmp_path)
    autograd_node._has_headers.cache_clear()
    try:
        for _ in range(autograd_node.MANY + 1):
            autograd_node.note_backward()
        assert not begun
    finally:
        monkeypatch.undo()
        autograd_node._has_headers.cache_clear()


def test_what_was_not_built_is_not_waited_for(
    begun: list[threading.Thread], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    autograd_node.attach_if_built()
    assert not autograd_node._attached and not list(tmp_path.glob("**/*.so"))


def test_a_compiler_that_fails_leaves_gradients_to_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if binding.load() is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autograd_node, "_attached", [])
    monkeypatch.setattr(autograd_node, "_source", lambda: "#error none")
    assert not autograd_node.attach()
