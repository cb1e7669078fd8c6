"""How a run is timed: what clocks cost, what lies outside of nodes, what is noise."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxkit.view import Profile, profile
from fxkit.view.profiling import profiler, timed_runs
from fxkit.view.profiling.clocks import ClockReading, EventClock, HostClock
from fxkit.view.profiling.instrument import instrument
from fxkit.view.profiling.timed_runs import TimedRuns
from fxkit.view.texts.text_table import duration
from tests.view import models
from tests.view.models import quick


def test_the_nodes_add_up_to_the_run_that_was_timed() -> None:
    with torch.no_grad():
        found = profile(models.stack(3), models.stack_args(), warmup=1, iters=8)
    assert found.instrumented is not None
    quiet = [row for row in found.rows if row.seconds is None]
    assert not quiet
    assert 0.5 * found.instrumented < found.node_seconds <= found.instrumented * 1.001


class SlowClock:
    """Each reading takes 3 ns of the 10 ns that lie between two of them."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        self.now += 10
        return self.now

    def read(self, ticks: Any) -> ClockReading:
        return ClockReading(ticks, ticks)

    def wait(self) -> None:
        pass

    def cost(self) -> float:
        return 3.0


def test_what_the_clock_costs_is_taken_off_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "clock_for", lambda _: SlowClock())
    gm = models.stack(1)
    found = quick(gm, models.stack_args())
    assert {round((row.seconds or 0) * 1e9) for row in found.rows} == {7}
    assert found.clock_seconds == pytest.approx(3e-9 * len(gm.graph.nodes))
    assert Profile.from_dict(found.to_dict()).clock_seconds == found.clock_seconds


def test_a_reading_of_the_processors_clock_costs_what_lies_between_two() -> None:
    clock = HostClock()
    readings = iter(range(0, 10**6, 50))
    clock.tick = lambda: next(readings)
    assert clock.cost() == 50.0


def test_time_outside_of_nodes_is_told() -> None:
    found = quick(models.stack(1), models.stack_args())
    spent = found.node_seconds
    slow = replace(found, end_to_end=4 * spent, quartiles=(4 * spent, 4 * spent), noise=0.0)
    assert slow.outside_seconds == pytest.approx(3 * spent)
    assert "outside of nodes " in slow.table()
    assert " (75.0 %)" in next(line for line in slow.summary() if "outside of nodes" in line)
    uneven = replace(found, end_to_end=1.2 * spent, quartiles=(1.1 * spent, 1.4 * spent))
    assert uneven.is_steady
    assert "outside of nodes" not in uneven.table()
    quick_call = replace(found, end_to_end=spent, quartiles=(spent, spent))
    assert "outside of nodes" not in quick_call.table()


def test_differences_within_the_noise_are_no_finding() -> None:
    found = quick(models.stack(1), models.stack_args())
    spent = found.node_seconds
    apart: dict[str, Any] = {
        "end_to_end": 1.2 * spent,
        "quartiles": (1.2 * spent, 1.2 * spent),
        "instrumented": 2.0,
    }
    sure = replace(found, **apart, noise=0.0)
    assert "outside of nodes" in sure.table()
    assert f"timers add {duration(2.0 - 1.2 * spent)}" in sure.table()
    unsure = replace(found, **apart, noise=3.0)
    assert "outside of nodes" not in unsure.table()
    assert f"timers add {duration(unsure.clock_seconds)}" in unsure.table()
    assert Profile.from_dict(unsure.to_dict()).noise == 3.0


def test_noise_is_the_spread_between_a_call_and_the_timed_run_beside_it() -> None:
    readings = [ClockReading([0, taken], [0, taken]) for taken in (100, 200, 300, 400)]
    steady = TimedRuns(readings, [150e-9, 250e-9, 350e-9, 450e-9])
    assert steady.noise() == pytest.approx(0.0)
    shaken = TimedRuns(readings, [100e-9, 210e-9, 330e-9, 500e-9])
    assert shaken.noise() == pytest.approx(20e-9)
    assert TimedRuns([], []).noise() == 0.0


def test_the_calmer_half_of_runs_and_of_calls_is_taken_together() -> None:
    readings = [ClockReading([0, 0, taken], [0, 0, taken]) for taken in (100, 900, 100, 120)]
    runs = TimedRuns(readings, [100e-9, 100e-9, 700e-9, 120e-9])
    assert runs.end_to_end() == pytest.approx(110e-9)
    assert runs.instrumented() == pytest.approx(110e-9)
    assert runs.typical((1, 2)) == pytest.approx(110e-9)
    assert runs.agree()


def test_runs_agree_where_they_are_near_or_differ_steadily() -> None:
    readings = [ClockReading([0, taken], [0, taken]) for taken in (100, 110, 120, 130)]
    assert TimedRuns(readings, [taken * 1e-9 for taken in (102, 112, 118, 128)]).agree()
    assert TimedRuns(readings, [taken * 1e-9 for taken in (200, 210, 220, 230)]).agree()
    assert not TimedRuns(readings, [taken * 1e-9 for taken in (200, 300, 180, 400)]).agree()
    assert TimedRuns([], []).agree()


@pytest.mark.parametrize(("agrees", "rounds"), [(True, 1), (False, 4)])
def test_runs_are_repeated_until_they_agree(
    monkeypatch: pytest.MonkeyPatch, agrees: bool, rounds: int
) -> None:
    monkeypatch.setattr(TimedRuns, "agree", lambda self: agrees)
    monkeypatch.setattr(timed_runs, "_MORE_SECONDS", 1e6)
    found = profile(models.stack(1), models.stack_args(), warmup=0, iters=3)
    assert found.iters == 3 * rounds
    monkeypatch.setattr(timed_runs, "_MORE_SECONDS", -1.0)
    found = profile(models.stack(1), models.stack_args(), warmup=0, iters=3)
    assert found.iters == (3 if agrees else 4)


def test_a_difference_that_nothing_explains_is_told() -> None:
    found = quick(models.stack(1), models.stack_args())
    spent = found.node_seconds
    alike = replace(found, end_to_end=1.01 * spent, noise=spent)
    steady = replace(found, end_to_end=2 * spent, noise=0.0)
    for calm in (alike, steady):
        assert calm.disagreement == 0.0
        assert "no steady difference" not in calm.table()
    more = replace(found, end_to_end=spent / 1.25, noise=0.0)
    assert more.disagreement == pytest.approx(0.25)
    assert "the nodes take 25.0 % more than a call" in more.table()
    less = replace(found, end_to_end=2 * spent, noise=spent)
    assert "the nodes take 50.0 % less than a call" in less.table()
    assert less.to_dict()["disagreement"] == pytest.approx(-0.5)


def test_no_garbage_is_collected_while_it_is_timed() -> None:
    states: list[bool] = []

    def look(x: Tensor) -> Tensor:
        states.append(gc.isenabled())
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(look, (graph.placeholder("x"),)))
    quick(fx.GraphModule(nn.Module(), graph), (torch.ones(2),), metrics=("time",))
    assert states[-4:] == [False] * 4
    assert gc.isenabled()


def test_timed_code_reads_the_clock_around_the_wanted_nodes_only() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()))
    readings = iter(range(100))
    code = instrument(gm, clock=lambda: next(readings), only=[2])
    _, stamps = code.timed(torch.ones(2))
    assert stamps == (0, 1, 2, 3)
    assert code.spans == {2: (1, 2)}


class Event:
    """Stands for an event of a device on which each piece of work takes a microsecond."""

    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.reached += 1
        self.at = Event.reached

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e-3


def test_work_on_a_device_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    events = SimpleNamespace(Event=Event, synchronize=waits.append)
    device = torch.device("cpu")
    monkeypatch.setattr(profiler, "clock_for", lambda where: EventClock(where, events))
    found = quick(models.stack(1), models.stack_args(), device=device)
    assert {round((row.seconds or 0) * 1e9) for row in found.rows} == {1000}
    assert waits
    assert all(row.is_launch_bound for row in found.rows)
    assert "bound by their launch" in found.table()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_measured() -> None:
    gm = models.stack(2).cuda()
    found = quick(gm, tuple(arg.cuda() for arg in models.stack_args()))
    assert found.device.startswith("cuda")
    assert all(row.seconds is not None for row in found.rows)
    assert found.allocator_peak
