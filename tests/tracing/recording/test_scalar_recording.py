"""Numbers that were seen to change become inputs of the graph; what else they decide is guarded."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxkit import capture, graph
from fxkit.tracing.captured import Captured


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps = 0
        self.rate = 0.1
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.steps += 1
        self.rate *= 0.9
        scale = 1 - 0.9**self.steps
        if self.steps > 8:
            scale = scale * 2
        with torch.no_grad():
            self.mean.mul_(0.5).add_(a.mean(0) * self.rate)
        return self.linear(a) * scale + self.mean, self.steps * 2


def test_a_module_that_counts():
    ours = _Counting()
    theirs = copy.deepcopy(ours)
    captured = capture(ours, (torch.ones(2, 4),))
    theirs(torch.ones(2, 4))
    for _ in range(14):
        a = torch.randn(2, 4)
        (found, count), (expected, wanted) = captured(a), theirs(a)
        assert torch.equal(found, expected) and torch.equal(ours.mean, theirs.mean)
        assert type(count) is int and count == wanted
        assert (type(ours.steps), ours.steps) == (int, theirs.steps)
        assert (type(ours.rate), ours.rate) == (float, theirs.rate)
    assert captured.recaptures == 2  # for the second number, and where the branch turns
    assert "%steps, %rate" in str(graph(captured.graph_module))


def test_numbers_among_the_arguments():
    def fn(a: torch.Tensor, rate: float, steps: int, *, box: dict[str, Any]) -> torch.Tensor:
        return a * rate / (steps + box["offset"])

    captured = capture(fn, (torch.ones(3), 0.1, 1), {"box": {"offset": 1}})
    for rate, steps, offset in [(0.2, 2, 2), (0.3, 3, 3), (0.4, 9, -4), (0.5, 4, 7)]:
        found = captured(torch.ones(3), rate, steps, box={"offset": offset})
        assert torch.equal(found, fn(torch.ones(3), rate, steps, box={"offset": offset}))
    assert captured.recaptures == 1


@dataclass
class _Cache:
    seen: int = 0
    scale: float = 1.0
    total: torch.Tensor = field(default_factory=lambda: torch.ones(2))


def test_the_arguments_are_left_as_they_are():
    def fn(a: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.seen += 1
        cache.total = cache.total + a * cache.seen
        return cache.total * cache.scale

    captured = capture(fn, (torch.ones(2), _Cache()))
    ours, theirs = (_Cache(seen=3, scale=2.0) for _ in range(2))
    for _ in range(4):
        assert torch.equal(captured(torch.ones(2), ours), fn(torch.ones(2), theirs))
        assert (type(ours.seen), type(ours.scale)) == (int, float)
        assert ours.seen == theirs.seen and torch.equal(ours.total, theirs.total)
    assert captured.recaptures == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((1.0, 0.0, -0.0, math.nan, math.inf), id="floats"),
        pytest.param((1, 2, True, 3, 4.0, 5, False), id="types"),
        pytest.param((1, 2, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 70), id="large"),
        pytest.param((1, 2, 3, 2.5, -1, 0, -2.5, 0.0), id="signs"),
    ],
)
@pytest.mark.parametrize(
    "fn",
    [
        lambda a, n: a * n,
        lambda a, n: a + 1 / n,
        lambda a, n: a * 2 ** min(n, 30),
        lambda a, n: a * n**0.5,
        lambda a, n: torch.full((2,), n),
        lambda a, n: torch.arange(3) * n + a.dim(),
        lambda a, n: a[: abs(int(n)) % 4] * n,
        lambda a, n: torch.where(a > 0, n, a),
        lambda a, n: (a + n if n > 2 else a - n, [n, f"{n}", n * 2, type(n) is int]),
        lambda a, n: (a.clamp(max=n), {n % 3: a * max(n, 2)} if n else None),
    ],
)
def test_any_number_gives_what_eager_gives(fn: Callable[..., Any], numbers: tuple[Any, ...]):
    captured = Captured(fn)
    for number in (*numbers, *numbers):
        assert _same(_outcome(captured, number), _outcome(fn, number)), number


def _outcome(fn: Callable[..., Any], number: Any) -> Any:
    try:
        return fn(torch.arange(4.0), number)
    except Exception as error:
        return type(error)


def _same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, torch.Tensor):
        equal = torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))
        signs = not theirs.is_floating_point() or torch.equal(ours.signbit(), theirs.signbit())
        return ours.dtype is theirs.dtype and equal and signs
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(theirs, dict):
        return repr(list(ours)) == repr(list(theirs)) and all(
            map(_same, ours.values(), theirs.values())
        )
    return repr(ours) == repr(theirs)


def test_a_branch_on_a_number_is_a_guard_with_its_line():
    def fn(a: torch.Tensor, n: int) -> torch.Tensor:
        if n + 1 > 5:
            return a * n
        return a + n

    captured = capture(fn, (torch.ones(2), 1))
    captured(torch.ones(2), 2)
    text = captured.explain(torch.ones(2), 7)
    assert "expected (args[1] + 1) > 5 to be False, got True" in text
    assert "test_scalar_recording.py" in text
    assert torch.equal(captured(torch.ones(2), 7), torch.full((2,), 7.0))


def test_a_number_that_is_only_used_as_it_is_stays_a_constant():
    def fn(a: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            a = a * 2
        return a

    captured = capture(fn, (torch.ones(2), 1))
    for n in (2, 3, 2):
        assert torch.equal(captured(torch.ones(2), n), torch.full((2,), 2.0**n))
    assert captured.recaptures == 2
    assert not any(node.target == "n" for node in captured.nodes)


def test_an_error_of_a_number_is_eagers():
    state = SimpleNamespace(calls=0)

    def fn(a: torch.Tensor, n: int) -> torch.Tensor:
        state.calls += 1
        a = a + 1 / n
        state.calls += 10
        return a

    captured = capture(fn, (torch.ones(2), 1))
    captured(torch.ones(2), 2)
    captured(torch.ones(2), 3)
    before = state.calls
    with pytest.raises(ZeroDivisionError):
        captured(torch.ones(2), 0)
    assert state.calls == before + 1


def test_the_type_of_a_power_of_an_opaque_number():
    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * 2 ** random.randint(-2, 2)

    captured = capture(fn, (torch.arange(3),))
    for seed in range(8):
        random.seed(seed)
        found = captured(torch.arange(3))
        random.seed(seed)
        assert _same(found, fn(torch.arange(3)))


def test_an_opaque_number_as_a_size():
    def fn(a: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(random.randint(1, 4))
        return zeros + zeros.shape[0] + a.sum()

    captured = capture(fn, (torch.arange(3),))
    for seed in range(8):
        random.seed(seed)
        found = captured(torch.arange(3))
        random.seed(seed)
        assert _same(found, fn(torch.arange(3)))
