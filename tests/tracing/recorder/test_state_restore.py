"""A value guard that fails leaves no trace: nothing is written twice and no number drawn twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.recorder.state_restore import (
    MemorySnapshot,
    Mutations,
    random_states,
    same_random_states,
)
from tests.tracing.faithful import assert_faithful

UP, DOWN = torch.ones(3), -torch.ones(3)


def _calls(*signs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(3), torch.full((3,), float(sign))) for sign in signs]


def test_write_to_an_argument_before_the_branch():
    def make():
        def fn(total, a):
            total.add_(a)
            total[0] = total[0] * 3
            return total * 2 if a.sum() > 0 else total - 1

        return fn, _calls(1, 1, -1, 1, -1, -1)

    captured = assert_faithful(make, graphs=2)
    assert captured.recaptures == 1


def test_write_through_a_view_and_through_data():
    def make():
        def fn(total, a):
            total.view(-1)[1:].mul_(2).add_(a[1:])
            total.data.add_(1)
            return total * 2 if a.sum() > 0 else total - 1

        return fn, _calls(1, -1, 1, -1)

    assert_faithful(make, graphs=2)


def test_write_to_a_buffer_and_a_parameter_before_the_branch():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            with torch.no_grad():
                self.weight.mul_(2)
            return a * self.weight if a.sum() > 0 else a - self.steps

    assert_faithful(lambda: (Net(), [(UP,), (UP,), (DOWN,), (UP,), (DOWN,)]), graphs=2)


def test_batch_statistics_before_the_branch():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            b = self.norm(a)
            return b * 2 if a.sum() > 0 else b - 1

    calls = [(torch.rand(4, 3) * sign,) for sign in (1, 1, -1, 1, -1)]
    assert_faithful(lambda: (Net().train(), calls), graphs=2)


def test_random_numbers_before_the_branch():
    def make():
        def fn(a, b):
            noise = torch.rand(3) + torch.nn.functional.dropout(b, 0.5)
            return noise * 2 if b.sum() > 0 else noise + torch.rand(3)

        return fn, _calls(1, -1, 1, 1, -1)

    assert_faithful(make, graphs=2)


def test_a_branch_on_a_random_number():
    def make():
        def fn(a, b):
            return a + 1 if torch.rand(()) > 0.5 else a - torch.rand(3)

        return fn, _calls(*[1] * 12)

    assert_faithful(make, graphs=2)


def test_write_after_the_last_branch_needs_no_copy():
    def fn(total, a):
        scale = 2 if a.sum() > 0 else 3
        total.add_(a * scale)

    captured = capture(fn, (torch.zeros(3), UP))
    assert captured.kept[0].undo == Mutations()
    assert captured.kept[0].changes == Mutations(leaves=(0,))


def test_containers_are_changed_once():
    def make():
        def fn(cache, a):
            cache.append(a * 2)
            return len(cache) if a.sum() > 0 else a

        return fn, [([], torch.full((3,), float(sign))) for sign in (1, -1, 1, -1)]

    assert_faithful(make, graphs=2)


def test_version_counters_are_put_back():
    def fn(total, a):
        total.add_(a)
        return total * 2 if a.sum() > 0 else a

    captured = capture(fn, (torch.zeros(3), UP))
    total = torch.zeros(3)
    captured(total, DOWN)
    assert total._version == 1
    assert torch.equal(total, DOWN)


def test_several_graphs_are_tried_and_each_is_taken_back():
    def make():
        def fn(total, a):
            total.add_(1)
            noise = torch.rand(3)
            level = int(a[0])
            total.mul_(level)
            return noise * level

        return fn, _calls(1, 2, 3, 4, 1, 2, 3, 4, 5)

    assert_faithful(make, graphs=5)


def test_write_that_autograd_follows_before_the_branch():
    def make():
        weight = nn.Parameter(torch.ones(3))

        def fn(total, a):
            total.add_(a * weight)
            return total * 2 if a.sum() > 0 else total - weight

        return fn, _calls(1, -1, 1, -1, 1)

    assert_faithful(make)


def test_write_through_one_of_two_overlapping_arguments():
    def make():
        def fn(a, b, sign):
            a.add_(1)
            b.mul_(2)
            return a + b if sign.sum() > 0 else a - b

        def calls():
            for sign in (1.0, 1.0, -1.0, 1.0, -1.0):
                base = torch.arange(6.0)
                yield base[:4], base[2:], torch.tensor([sign])
            base = torch.arange(8.0)
            yield base[:4], base[4:], torch.tensor([-1.0])

        return fn, list(calls())

    assert_faithful(make, graphs=2)


def test_inference_tensors():
    def make():
        def fn(total, a):
            total.add_(a)
            return total * 2 if a.sum() > 0 else total - 1

        with torch.inference_mode():
            calls = _calls(1, -1, 1, -1)
        return torch.inference_mode()(fn), calls

    assert_faithful(make)


@pytest.mark.parametrize("is_random", [True, False])
def test_snapshot_of_the_random_state(is_random: bool):
    before = random_states()
    snapshot = MemorySnapshot([], is_random)
    torch.rand(3)
    snapshot.restore()
    assert same_random_states(before, random_states()) is is_random


def test_snapshot_of_tensors_that_need_a_gradient():
    weight = nn.Parameter(torch.ones(3))
    snapshot = MemorySnapshot([weight], is_random=False)
    with torch.no_grad():
        weight.mul_(5)
    snapshot.restore()
    assert torch.equal(weight, torch.ones(3))
    assert weight._version == 0
    assert weight.is_leaf


def test_failing_call_that_the_program_handles():
    def make():
        def fn(total, matrix):
            total.add_(torch.rand(3))
            try:
                return total + torch.linalg.cholesky(matrix).sum()
            except RuntimeError:
                return total * 0

        good, bad = torch.eye(3), -torch.eye(3)
        return fn, [(torch.zeros(3), matrix) for matrix in (good, bad, good, bad)]

    assert_faithful(make, graphs=1)


def test_explain_changes_nothing():
    def fn(total, a):
        total.add_(torch.rand(3))
        return total * 2 if a.sum() > 0 else total

    captured = Captured(fn)
    captured(torch.zeros(3), UP)
    total, before = torch.zeros(3), torch.get_rng_state()
    assert "expected bool" in captured.explain(total, DOWN)
    assert "holds" in captured.explain(total, UP)
    assert torch.equal(total, torch.zeros(3)) and total._version == 0
    assert torch.equal(torch.get_rng_state(), before)
