"""Builds that are stopped when their time has come."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from fxkit.lower.autotuning import times
from fxkit.lower.building import build as build_module
from fxkit.lower.building import deadline
from fxkit.lower.building.build import build, is_built

SOURCE = 'extern "C" long answer() { return 42; }\n'
LONG = """
constexpr long sum() {
  long all = 0;
  for (long i = 0; i < 1000; ++i)
    for (long j = 0; j < 8000; ++j) all += i ^ j;
  return all;
}
extern "C" long answer() { constexpr long found = sum(); return found; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "_REPLACEMENTS", {})
    return tmp_path / "cache" / "kernels"


def test_nothing_is_begun_when_the_time_has_come():
    with pytest.raises(deadline.DeadlinePassed), deadline.until(time.monotonic() - 1):
        build(SOURCE)
    assert not is_built(SOURCE)
    assert deadline.remaining() is None
    assert build(SOURCE).handle.answer() == 42


def test_a_build_in_time_goes_on():
    with deadline.until(time.monotonic() + 600):
        assert build(SOURCE).handle.answer() == 42


def test_a_compiler_is_stopped_with_what_it_started(cache):
    started = []
    plain = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(plain(*args, **kwargs))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module.subprocess, "Popen", popen)
        with pytest.raises(deadline.DeadlinePassed), deadline.until(time.monotonic() + 0.3):
            build(LONG)
    assert all(process.returncode for process in started)
    assert not is_built(LONG)
    assert not list(cache.glob("build-*"))


def test_no_trial_is_begun_when_the_time_has_come():
    with pytest.raises(deadline.DeadlinePassed), deadline.until(time.monotonic() - 1):
        times.slower("adds", "a key", lambda: (1.0, 2.0), ())
    assert times.slower("adds", "a key", lambda: (1.0, 2.0), ()) is None


def test_what_handles_faults_lets_it_through():
    assert not issubclass(deadline.DeadlinePassed, Exception)
