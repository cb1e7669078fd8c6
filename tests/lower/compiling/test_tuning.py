"""Kernels that are timed: the faster of kernel and eager stays, and what was measured is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit import config
from fxkit.lower import to_cpp
from fxkit.lower.compiling import tuning


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    with config.using_cache_dir(tmp_path):
        yield tmp_path / "kernels"


def measured(times: dict[str, float], calls: list[Any]) -> Any:
    def least(candidates: Any) -> dict[str, float]:
        for run in candidates.values():
            run()
        calls.append(candidates)
        return {name: times.get(name, 1.0) for name in candidates}

    return least


def two_regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.exp(torch.tanh(x * 2) @ w) * 3


ARGS = (torch.randn(64, 64), torch.randn(64, 64))


def test_what_is_slower_than_eager_is_left_to_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        tuning, "_least_times", measured({"eager": 0.5e-6, "one thread": 2e-6}, calls)
    )
    compiled = to_cpp(fx.symbolic_trace(lambda x: torch.tanh(x * 2) + 1), ARGS[:1], tune=True)
    (region, *_) = compiled.regions
    assert len(calls) == 1
    assert region.kernel is None
    assert region.reason == "timed: eager takes 0.5 us, a kernel 2.0 us with memory at hand"
    assert torch.equal(compiled(ARGS[0]), torch.tanh(ARGS[0] * 2) + 1)


@pytest.mark.parametrize(("threads", "is_parallel"), [(1e-6, True), (3e-6, False)])
def test_threads_are_used_where_they_pay(
    cache: Path, monkeypatch: pytest.MonkeyPatch, threads: float, is_parallel: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    times = {"eager": 9e-6, "one thread": 2e-6, "threads": threads}
    monkeypatch.setattr(tuning, "_least_times", measured(times, []))
    compiled = to_cpp(fx.symbolic_trace(two_regions), ARGS, tune=True)
    calls = [n.target for n in compiled.lowered.graph.nodes if hasattr(n.target, "is_parallel")]
    assert calls
    assert {call.is_parallel for call in calls if "product" not in str(call.kernel)} == {
        is_parallel
    }


def test_times_are_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(tuning, "_least_times", measured({"eager": 1.0, "one thread": 0.5}, calls))
    fn = fx.symbolic_trace(lambda x: torch.tanh(x * 2) + 1)
    to_cpp(fn, ARGS[:1], tune=True)
    to_cpp(fn, ARGS[:1], tune=True)
    assert len(calls) == 1
    to_cpp(fn, (torch.randn(3, 5),), tune=True)
    assert len(calls) == 2
    (file,) = cache.glob("tuned-*.json")
    assert len(json.loads(file.read_text())) == 2
    file.write_text("[not times")
    assert to_cpp(fn, ARGS[:1], tune=True).regions
    assert len(calls) == 3


def test_the_callers_tensors_and_random_numbers_are_left_alone(cache: Path) -> None:
    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.exp(x * 2) + torch.rand_like(x) * 0 + x[at].sum()

    fast = fxkit.compile(fn, tune=True)
    x, at = torch.zeros(30, 40), torch.tensor([3, 29])
    with torch.no_grad():
        torch.manual_seed(0)
        fast(x, at)
        y = fast(x, at)
    drawn = torch.rand(1)
    assert torch.equal(x, torch.full((30, 40), 2.0))
    expected = torch.zeros(30, 40)
    torch.manual_seed(0)
    fn(expected, at)
    assert torch.allclose(y, fn(expected, at))
    assert torch.equal(drawn, torch.rand(1))
