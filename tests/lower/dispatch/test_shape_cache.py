"""Graphs of symbolic sizes: right at each size, built at most once after the second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.lower.autotuning import times
from fxkit.lower.compiling import kernel_builds, whole_operators
from fxkit.lower.compiling.kernel_cache import KernelCache
from fxkit.lower.dispatch import shape_cache
from tests.lower.compiling.sized_programs import PROGRAMS, SIZES
from tests.sampling import one_in


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the texts that are built from now on, those found in the cache too."""
    texts: list[tuple[str, ...]] = []
    real = kernel_builds.build

    def build(*units: str) -> Any:
        texts.append(units)
        return real(*units)

    monkeypatch.setattr(kernel_builds, "build", build)
    return texts


def compare(compiled: Callable[..., Any], fn: Callable[..., Any], args: Any) -> None:
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dynamic", "name"), one_in(2, [None, True], PROGRAMS))
def test_no_build_after_the_second_size(
    name: str,
    dynamic: bool | None,
    built: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a trial, another size may be left to torch whole.
    monkeypatch.setattr(times, "slower", lambda *_: None)
    make, inputs = PROGRAMS[name]
    fn = make()
    compiled = fxkit.compile(fn, dynamic=dynamic)
    with torch.no_grad():
        for number, sizes in enumerate(SIZES):
            compare(compiled, fn, inputs(*sizes))
            if number == 1:
                assert built
                built.clear()
                builds = compiled.builds
    assert not built
    assert compiled.builds == builds
    assert len(compiled.compiled_modules) == len(SIZES)
    assert all(module.report().calls for module in compiled.compiled_modules)


def test_training_at_other_sizes(built: list[tuple[str, ...]]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.GELU())
    compiled = fxkit.compile(model, dynamic=True, train=True)
    for number, length in enumerate([70, 50, 90, 33]):
        x = torch.randn(length, 8)
        expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        found = torch.autograd.grad(compiled(x).square().sum(), [*model.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        if number == 1:
            built.clear()
    assert not built


def test_sizes_that_come_late_are_lowered_when_they_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shape_cache, "AT_ONCE", 2)
    compiled = fxkit.compile(lambda x: torch.softmax(x * 2, -1), dynamic=True)
    with torch.no_grad():
        for length in (5, 6, 7, 8, 7, 7):
            x = torch.randn(3, length)
            torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))
    assert len(compiled.compiled_modules) == 3


def test_a_static_graph_keeps_its_numbers_in_the_text() -> None:
    compiled = fxkit.compile(lambda x: torch.softmax(x * 2, -1), dynamic=False)
    with torch.no_grad():
        for length in (15, 26):
            compiled(torch.randn(3, length))
    assert compiled.builds == 0
    for module, length in zip(compiled.compiled_modules, (15, 26), strict=True):
        assert f"j < {length}" in module.source
        assert "numbers" not in module.source


def test_what_never_changes_stays_in_the_text() -> None:
    compiled = fxkit.compile(lambda x: torch.softmax(x * 2, -1), dynamic=True)
    with torch.no_grad():
        for batch in (3, 4, 5):
            compiled(torch.randn(batch, 300))
    assert compiled.builds == 2
    assert "tile < n0" in compiled.compiled_modules[-1].source
    assert "j < 300" in compiled.compiled_modules[-1].source


def test_a_stock_counts_what_was_not_in_it() -> None:
    kernel_cache = KernelCache()
    fn = fxkit.symbolic_trace(lambda x: torch.softmax(x * 2, -1))
    for length in (5, 6, 7):
        args = (torch.randn(3, length),)
        module = fxkit.lower.to_cpp(fn, args, kernel_cache=kernel_cache)
        with torch.no_grad():
            torch.testing.assert_close(module(*args), torch.softmax(args[0] * 2, -1))
    assert kernel_cache.builds == 2
    assert module.cache_hit
    assert module.build_seconds == 0


def test_a_product_may_change_hands_without_a_build(
    monkeypatch: pytest.MonkeyPatch, built: list[tuple[str, ...]]
) -> None:
    def objection(kernels: Any, found: Any) -> str | None:
        return "the library is faster" if found.product.rows > 40 else None

    monkeypatch.setattr(whole_operators, "objection_by_kind", objection)
    weight = torch.randn(16, 24)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.gelu(x @ weight) * 2).sum(-1)

    compiled = fxkit.compile(fn, dynamic=True)
    owners = []
    with torch.no_grad():
        for number, length in enumerate((5, 9, 70, 11, 90, 300)):
            compare(compiled, fn, (torch.randn(length, 16),))
            report = compiled.compiled_modules[-1].report()
            owners.append("the library is faster" in str(report))
            if number == 1:
                built.clear()
    assert owners == [False, False, True, False, True, True]
    assert not built
