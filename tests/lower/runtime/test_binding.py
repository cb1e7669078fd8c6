"""The binding is built while a program is captured."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fxkit
from fxkit.lower.building import build
from fxkit.lower.runtime import binding


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
    assert len(binding._started) == 1
    binding.finish()
    (library,) = cache.glob("*.so")
    path, was_there = build.library_path(binding._source(), linking=binding._linking())
    assert (path, was_there) == (library, True)


def test_a_second_thread_does_not_ask_for_the_tables_of_sysconfig(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 fills them without a lock, and an empty one stands for another library."""
    threads: list[threading.Thread] = []
    real = sysconfig.get_config_var

    def noted(name: str) -> object:
        threads.append(threading.current_thread())
        return real(name)

    monkeypatch.setattr(sysconfig, "get_config_var", noted)
    binding._linking_for.cache_clear()
    binding.start()
    binding.finish()
    assert threads == [threading.main_thread()]


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
    binding.finish()
    assert binding.load() is None


@pytest.fixture
def slow(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The event that the binding's compiler waits for."""
    let_go, real = threading.Event(), build._compile

    def compile(order: build.Order, name: str, workplace: Path) -> Path:
        if order.linking == binding._linking():
            assert let_go.wait(60)
        return real(order, name, workplace)

    monkeypatch.setattr(build, "_compile", compile)
    binding._load.cache_clear()
    yield let_go
    let_go.set()
    binding.finish()
    binding._load.cache_clear()


def test_first_calls_do_not_wait_for_it(slow: threading.Event) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3 + 1, -1)

    x = torch.randn(16, 64)
    compiled = fxkit.compile(program)
    for _ in range(5):  # more often than a way in is tried to be made
        torch.testing.assert_close(compiled(x), program(x))
    (module,) = compiled.compiled_modules
    assert binding.is_awaited() and binding.loaded() is None and not compiled._dispatch.paths
    assert module.report().calls == 4  # the first was the program itself, recorded
    slow.set()
    assert module.native_program is not None
    assert not binding.is_awaited()
    for calls in (5, 6):
        torch.testing.assert_close(compiled(x), program(x))
        assert module.report().calls == calls
    assert compiled._dispatch.paths and module.native_program.calls == 2


def test_a_call_takes_the_program_as_soon_as_it_can(slow: threading.Event) -> None:
    x = torch.randn(16, 64)
    module = fxkit.lower.to_cpp(fxkit.symbolic_trace(lambda x: (x * 3 + 1).exp()), (x,))
    module(x)
    slow.set()
    binding.finish()
    module(x)
    assert module._native_program is not None and module._native_program.calls == 1


def test_a_process_that_ends_first_leaves_it_built(tmp_path: Path) -> None:
    code = "from fxkit.lower.runtime import binding; binding.start()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FXKIT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    remarks = [line for line in done.stderr.splitlines() if "cpp_extension" not in line]  # torch's
    assert (done.returncode, done.stdout, remarks) == (0, "", [])
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()].count(".so") == 1


def test_what_is_built_is_awaited_by_nobody(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library_path(binding._source(), linking=binding._linking())
    monkeypatch.setattr(binding, "_started", [threading.current_thread()])
    assert not binding.is_awaited()
    for library in cache.glob("*.so"):
        library.unlink()
    assert binding.is_awaited()
