"""The binding is built while a program is captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxkit.lower.cpp import build
from fxkit.lower.running import binding


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded or begun."""
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_REPLACEMENTS", {})
    monkeypatch.setattr(binding, "_loaded", [])
    monkeypatch.setattr(binding, "_started", [])
    return tmp_path / "kernels"


def test_it_is_built_ahead_once(cache: Path) -> None:
    binding.start()
    binding.start()
    (thread,) = binding._started
    thread.join()
    (library,) = cache.glob("*.so")
    path, was_there = build.library_path(binding._source(), linking=binding._linking())
    assert (path, was_there) == (library, True)


def test_nothing_is_built_where_kernels_are_off(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    binding.start()
    assert not binding._started and not cache.exists()


def test_a_compiler_that_fails_is_left_to_loading(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CXX", "false")
    binding.start()
    (thread,) = binding._started
    thread.join()
    assert binding.load() is None
