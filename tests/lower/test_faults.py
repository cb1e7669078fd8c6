"""Compiled programs where something breaks: killed builds, full disks, forks, threads."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.building import build as build_module
from fxkit.lower.compiling import kernel_builds

X = torch.randn(16, 32)


def program(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * 2 + 1) - torch.sigmoid(x)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "_REPLACEMENTS", {})
    return tmp_path / "cache"


SCRIPT = """
import os, resource, sys, time, warnings
import torch, torch.nn.functional as F
from torch import fx
from fxkit.lower import to_cpp
torch.set_num_threads(1)
x = torch.randn(16, 32)
def program(x): return F.gelu(x * 2 + 1) - torch.sigmoid(x)
def check():
    module = to_cpp(fx.symbolic_trace(program), (x,))
    torch.testing.assert_close(module(x), program(x))
    return module
"""


def run(code: str, python: Sequence[str] = (sys.executable,), **environment: str) -> str:
    """Run a program of its own, and return what it printed, its warnings with it."""
    done = subprocess.run(
        [*python, "-c", SCRIPT + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_build_that_is_killed_is_built_by_the_next(
    cache: Path, tmp_path: Path, python: list[str]
) -> None:
    compiler, slow, started = (tmp_path / name for name in ("compiler", "slow", "started"))
    compiler.write_text(
        f'#!/bin/sh\nif [ -e {slow} ]; then touch {started}; sleep 60; fi\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    slow.touch()
    environment = {**os.environ, "FXKIT_CXX": str(compiler)}
    builder = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + "check()"], env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(builder.pid, signal.SIGKILL)
    assert builder.wait() == -signal.SIGKILL
    slow.unlink()
    assert list((cache / "kernels").glob("build-*"))
    output = run("print(check().report())", python, FXKIT_CXX=str(compiler))
    assert "kernels built" in output and "calls: 1 fused" in output


def test_four_processes_that_compile_at_once_build_once(cache: Path) -> None:
    code = """
children = []
for number in range(4):
    child = os.fork()
    if not child:
        module = check()
        os.write(1, b"found\\n" if module.cache_hit else b"built\\n")
        is_native = module.native_program is not None  # built by now, by one of them
        os._exit(0 if is_native and module.report().calls == 1 else 1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""
    output = run(code, OMP_NUM_THREADS="1").splitlines()
    assert (output.count("built"), output.count("found")) == (1, 3)
    assert not list((cache / "kernels").glob("build-*"))


def test_a_folder_that_nobody_can_write_is_replaced(python: list[str]) -> None:
    output = run("assert check().report().calls == 1", python, FXKIT_CACHE_DIR="/proc/self/fxkit")
    assert "expected a cache folder" in output and "/proc/self/fxkit" in output


def test_where_no_file_can_be_written_the_graph_runs_in_eager(
    cache: Path, python: list[str]
) -> None:
    code = """
import signal
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
module = check()
assert module.report().calls == 0
print(module.regions[0].reason)
"""
    output = run(code, python)
    assert "The graph runs in eager" in output
    assert not list((cache / "kernels").glob("*.so"))


def test_a_foreign_folder_is_replaced(cache: Path, python: list[str]) -> None:
    (cache / "kernels").mkdir(parents=True, mode=0o700)
    code = """
user = os.getuid()
os.getuid = lambda: user + 1
import pathlib
check()
"""
    assert f"belongs to user {os.getuid()}" in run(code, python)


def test_a_compiler_that_refuses_one_kernel_costs_that_kernel_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kernel_builds.print_unit

    def spoilt(kernels: Any, glibc: Any) -> str:
        return real(kernels, glibc) + ("no C++" if "kernel_1" in kernels else "")

    monkeypatch.setattr(kernel_builds, "print_unit", spoilt)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) + 1
        return torch.exp(y.sort(0).values) * 2

    with pytest.warns(UserWarning, match="error:"):
        module = to_cpp(fx.symbolic_trace(fn), (X,))
    torch.testing.assert_close(module(X), fn(X))
    assert module.report().calls == 1
    fused = [region for region in module.regions if region.kernel is not None]
    lost = [region for region in module.regions if "compiler" in str(region.reason)]
    assert len(fused) == len(lost) == 1


def test_a_forked_process_runs_what_its_parent_compiled() -> None:
    x = torch.randn(300, 1024)
    module = to_cpp(fx.symbolic_trace(program), (x,))
    expected = module(x)
    kept = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, in Python 3.12
        child = os.fork()
    if not child:
        # The child has no threads for torch's own kernels: eager would wait for ever.
        before = expected.numpy().tobytes()
        good = all(module(x).numpy().tobytes() == before for _ in range(20))
        del kept
        os._exit(0 if good and fxkit.trim() >= 0 else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert torch.equal(module(x), expected)


def in_threads(count: int, work: Any) -> None:
    """Run `work(number)` in threads, and raise what one of them raised."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_four_threads_share_a_program() -> None:
    big = [torch.randn(512, 1024) for _ in range(4)]
    small = [torch.randn(16, 32) for _ in range(4)]
    compiled = fxkit.compile(program)
    for x in (big[0], small[0]) * 3:
        compiled(x)

    def work(number: int) -> None:
        kept = [compiled(big[number]) for _ in range(3)]
        for _ in range(60):
            torch.testing.assert_close(compiled(small[number]), program(small[number]))
            kept[1:] = [compiled(big[number]), compiled(big[number])]
        for result in kept:
            torch.testing.assert_close(result, program(big[number]))

    in_threads(4, work)


def test_four_threads_compile_at_once(cache: Path) -> None:
    compiled = fxkit.compile(program)
    in_threads(4, lambda number: torch.testing.assert_close(compiled(X), program(X)))
    torch.testing.assert_close(compiled(X), program(X))


def resident() -> int:
    """Return the memory of this process, in bytes."""
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_calls_take_no_more_memory() -> None:
    # In a process of its own: what other tests leave behind moves the memory of this one.
    run("from tests.lower.test_faults import call_often; call_often()")


def call_often() -> None:
    """Call two programs until memory that is not given back would show."""
    weight = torch.randn(32, 32)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x @ weight.cumsum(0)) + 1
        return y, (y.sort(0).values * 2).exp()

    compiled = fxkit.compile(fn)
    large = torch.randn(1024, 512)
    pooled = to_cpp(fx.symbolic_trace(program), (large,))
    for _ in range(1000):
        compiled(X)
    pooled(large)
    gc.collect()
    before, objects, used = resident(), len(gc.get_objects()), fxkit.memory_stats().used_bytes
    for number in range(10_000):
        compiled(X)
        if number % 100 == 0:
            pooled(large)
    gc.collect()
    assert resident() - before < 4 << 20
    assert len(gc.get_objects()) - objects < 50
    assert fxkit.memory_stats().used_bytes == used
