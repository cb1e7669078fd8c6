"""What Python's collector is asked costs the same however many objects there are."""

from __future__ import annotations

import gc

import pytest

from fxkit import gc_pause


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Freeze all objects, and return a list that is added to whenever those are counted."""
    counted: list[int] = []
    real = gc.get_freeze_count

    def count() -> int:
        counted.append(real())
        return counted[-1]

    monkeypatch.setattr(gc, "get_freeze_count", count)
    monkeypatch.setattr(gc_pause, "_seen_frozen", False)
    gc.freeze()
    return counted


def test_frozen_objects_are_counted_once(counts: list[int]) -> None:
    for _ in range(100):
        with gc_pause.paused_collector():
            assert not gc.isenabled()
    assert gc_pause.has_frozen()
    assert len(counts) == 1


def test_a_pause_leaves_frozen_what_the_program_froze(counts: list[int]) -> None:
    for _ in range(2):
        with gc_pause.paused_collector():
            pass
    assert gc.get_freeze_count() > counts[0] * 0.9  # others may have been freed meanwhile
