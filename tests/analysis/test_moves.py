"""Moving, merging and reusing: what is allowed, and the reason when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit


def _graph(program: Callable[..., Any] | nn.Module) -> Any:
    return fxkit.graph(fxkit.symbolic_trace(program))


def _program(x: Tensor, y: Tensor) -> Tensor:
    a = torch.sin(x)
    b = torch.cos(y)
    x.add_(1)
    c = torch.tan(b)
    return a + c


def _noisy(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    kept = torch.exp(x)
    dropped = torch.nn.functional.dropout(kept, 0.5)
    return noise + dropped


@pytest.mark.parametrize(
    ("node", "before", "reason"),
    [
        ("sin", "cos", None),
        ("cos", "sin", None),
        ("tan", "add_", None),
        ("sin", "tan", "%sin (pure) may not change places with %add_ (writes %x)"),
        ("add_", "sin", "%add_ (writes %x) may not change places with %sin (pure)"),
        ("tan", "sin", "%tan uses %cos"),
        ("cos", "add", "%tan uses %cos"),
        ("x", "add", "%x is an input, which has its place"),
        ("sin", "y", "%y is an input, and nothing goes before one"),
    ],
)
def test_moving(node: str, before: str, reason: str | None) -> None:
    g = _graph(_program)
    verdict = g.may_move(g[node], before=g[before])
    assert verdict.reason == reason
    assert bool(verdict) is (reason is None)


def test_random_numbers_keep_their_order() -> None:
    g = _graph(_noisy)
    assert g.may_move(g["exp"], before=g["rand_like"])
    assert "draws random numbers" in str(g.may_move(g["rand_like"], before=g["add"]))


def _twice(x: Tensor) -> tuple[Tensor, ...]:
    a = torch.sin(x)
    b = x.sin()
    c = torch.sin(x + 0)
    x.mul_(2)
    d = torch.sin(x)
    return a.sum(), b.sum(), c.sum(), d.sum()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("sin", "sin_1", None),
        ("sin_1", "sin", None),
        ("sin", "sin_2", "%sin and %sin_2 do not compute the same"),
        ("sin", "sin_3", "%mul_ may write to %x in between"),
        ("mul_", "sin", "%mul_ is not pure: writes %x"),
    ],
)
def test_merging(first: str, second: str, reason: str | None) -> None:
    g = _graph(_twice)
    assert g.may_merge(g[first], g[second]).reason == reason


def test_zeros_of_different_sign_are_not_merged() -> None:
    g = _graph(lambda x: (x * complex(1, 0.0) + x * complex(1, -0.0), x / 0.0 + x / -0.0))
    assert not g.may_merge(g["mul"], g["mul_1"])
    assert not g.may_merge(g["truediv"], g["truediv_1"])


def test_two_results_that_the_caller_sees_are_not_merged() -> None:
    g = _graph(lambda x: (torch.sin(x), torch.sin(x)))
    assert "the caller could see" in str(g.may_merge(g["sin"], g["sin_1"]))


def _views(x: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.sin(x)
    row = a[0]
    b = torch.cos(x)
    c = row + 1
    return b, torch.exp(c)


@pytest.mark.parametrize(
    ("value", "node", "reason"),
    [
        ("sin", "add", None),
        ("sin", "exp", None),
        ("sin", "cos", "%add reads it later"),
        ("getitem", "getitem", "%add reads it later"),
        ("add", "cos", "%add is not there yet"),
        ("x", "exp", "the caller may see the memory of %x"),
        ("cos", "exp", "the caller may see the memory of %cos"),
    ],
)
def test_dead_memory_counts_what_views_read(value: str, node: str, reason: str | None) -> None:
    g = _graph(_views)
    assert g.is_dead_after(g[value], g[node]).reason == reason
