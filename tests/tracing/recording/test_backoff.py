"""Programs that no graph can hold: tried again, less and less often."""

from __future__ import annotations

import functools

import torch

from fxkit.tracing.captured import Captured
from fxkit.tracing.recorder.recorder import active_recorder
from fxkit.tracing.recording.backoff import FIRST_PAUSE, LONGEST_PAUSE, TRIES, ExponentialBackoff


def _program(x: torch.Tensor, foreign: bool) -> torch.Tensor:
    y = x * 2
    if foreign:
        _recorded.append(active_recorder() is not None)
        y.grad = torch.ones_like(y)  # which no graph holds
    return y + 1


_recorded: list[bool] = []


def _recordings(captured: Captured, calls: int, *, foreign: bool = True) -> int:
    _recorded.clear()
    for _ in range(calls):
        assert torch.equal(captured(torch.ones(2), foreign), torch.full((2,), 3.0))
    return sum(_recorded)


def test_recordings_become_rare():
    captured = Captured(_program)
    assert _recordings(captured, TRIES) == TRIES
    assert _recordings(captured, FIRST_PAUSE) == 0
    assert 1 <= _recordings(captured, 20 * FIRST_PAUSE) <= 5
    assert "ran in Python" in captured.explain(torch.ones(2), True)


def test_what_can_be_held_is_still_found():
    captured = Captured(_program)
    _recordings(captured, TRIES)
    _recordings(captured, FIRST_PAUSE + 1, foreign=False)
    assert captured.whole
    _recordings(captured, 2)
    _recorded.clear()
    assert "holds" in captured.explain(torch.ones(2), False)


def test_a_recording_that_succeeds_begins_anew():
    pauses = ExponentialBackoff()
    for _ in range(TRIES):
        assert not pauses.skips_call()
        pauses.note(failed=True)
    assert [pauses.skips_call() for _ in range(FIRST_PAUSE + 1)] == [True] * FIRST_PAUSE + [False]
    pauses.note(failed=False)
    pauses.note(failed=True)
    assert not pauses.skips_call()


def test_pauses_have_a_limit():
    pauses = ExponentialBackoff()
    for _ in range(64):
        pauses.note(failed=True)
    assert sum(iter(pauses.skips_call, False)) == LONGEST_PAUSE


@functools.cache
def _kept_for(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def test_functions_that_memoise_each_tensor_are_not_recorded_for_ever():
    _kept_for.cache_clear()

    def program(x: torch.Tensor) -> torch.Tensor:
        _recorded.append(active_recorder() is not None)
        return _kept_for(x * 2) + 1

    captured = Captured(program)
    _recorded.clear()
    for _ in range(TRIES + FIRST_PAUSE):
        x = torch.randn(3)
        assert torch.equal(captured(x), (x * 2).exp() + 1)
    assert sum(_recorded) == TRIES
    assert _kept_for.cache_info().misses == TRIES + FIRST_PAUSE
