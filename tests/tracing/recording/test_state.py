"""Python state: what is guarded, what explains a failure, what is written again."""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fxkit.errors import CaptureError
from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import Captured

GAIN = 1.0


def _amplify(a: torch.Tensor) -> torch.Tensor:
    return a * GAIN


def test_explain_names_the_line_that_reads_a_global(monkeypatch: pytest.MonkeyPatch):
    captured = capture(lambda a: _amplify(a) + 1, (torch.ones(2),))
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    text = captured.explain(torch.ones(2))
    line = _amplify.__code__.co_firstlineno + 1
    assert text.startswith("expected GAIN to be 1.0, got 3.0")
    assert f"test_state.py:{line} in _amplify" in text
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 4.0))


def test_attributes_that_no_code_reads_are_not_guarded():
    state = SimpleNamespace(gain=2.0, note="a", last=None)

    def fn(a: torch.Tensor) -> torch.Tensor:
        state.last = a.sum()
        return a * state.gain

    captured = Captured(fn)
    for number in range(4):
        state.note = str(number)
        captured(torch.full((2,), float(number)))
        assert torch.equal(state.last, torch.tensor(2.0 * number))
    assert len(captured.graphs) == 1


def test_a_buffer_that_is_assigned_becomes_an_input():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + a
            return self.mean * 2

    net, twin = Net(), Net()
    captured = Captured(net)
    for number in range(5):
        a = torch.full((2,), float(number))
        assert torch.equal(captured(a), twin(a))
        assert torch.equal(net.mean, twin.mean)
    assert len(captured.graphs) == 1
    names = [n.name for n in captured.graph_module.graph.nodes if n.op == "placeholder"]
    assert names == ["a", "mean_1"]


def test_an_input_from_the_state_is_guarded_by_its_type():
    state = SimpleNamespace(total=torch.zeros(2))

    def fn(a: torch.Tensor) -> torch.Tensor:
        state.total = state.total + a
        return state.total

    captured = Captured(fn)
    captured(torch.ones(2))
    state.total = torch.zeros(2, dtype=torch.float64)
    assert "f64[2]" in captured.explain(torch.ones(2))
    assert captured(torch.ones(2)).dtype is torch.float64


def test_context_variables_and_thread_locals():
    variable: ContextVar[float] = ContextVar("variable", default=1.0)
    local = threading.local()
    local.gain = 2.0
    captured = Captured(lambda a: a * variable.get() * local.gain)
    assert captured(torch.ones(1)).item() == 2.0
    token = variable.set(3.0)
    assert captured(torch.ones(1)).item() == 6.0
    variable.reset(token)
    local.gain = 5.0
    assert captured(torch.ones(1)).item() == 5.0
    assert captured.whole and len(captured.graphs) == 3


def test_memoised_tensors_stay_what_they_were():
    @functools.lru_cache
    def noise(size: int) -> torch.Tensor:
        return torch.randn(size)

    captured = Captured(lambda a: a + noise(2))
    first = captured(torch.zeros(2))
    for _ in range(3):
        assert torch.equal(captured(torch.zeros(2)), first)


def test_functions_made_by_a_call_are_no_results():
    def fn(a: torch.Tensor) -> Any:
        return lambda: a * 2

    captured = Captured(fn)
    for value in (1.0, 2.0):
        assert captured(torch.tensor(value))().item() == 2 * value
    with pytest.raises(CaptureError, match="function"):
        capture(fn, (torch.ones(1),))


def test_an_active_profiler_keeps_the_program_in_python():
    import sys

    captured = Captured(lambda a: a + 1)
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        captured(torch.ones(1))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert not captured.whole
    captured(torch.ones(1))
    assert captured.whole and sys.getprofile() is None


def test_nothing_is_left_behind_by_an_exception():
    import sys

    def fn(a: torch.Tensor) -> torch.Tensor:
        print("x", end="")
        raise KeyError(a.shape)

    stdout = sys.stdout
    with pytest.raises(KeyError):
        Captured(fn)(torch.ones(1))
    assert sys.stdout is stdout and sys.getprofile() is None
    assert torch._C._len_torch_function_stack() == 0


def _times(factor: list[float]) -> Any:
    def multiply(a: torch.Tensor) -> torch.Tensor:
        return a * factor[0]

    return multiply


def test_a_function_that_only_shows_when_it_runs_is_guarded():
    factor = [3.0]
    multiply = _times(factor)
    hidden = weakref.ref(multiply)

    def fn(a: torch.Tensor) -> torch.Tensor:
        found = hidden()
        return a if found is None else found(a)

    captured = capture(fn, (torch.ones(2),))
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 3.0))
    assert captured.recaptures == 0
    factor[0] = 5.0
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 5.0))


def test_two_closures_of_one_function_are_told_apart():
    factor = [3.0]
    plain, multiply = _times([2.0]), _times(factor)
    hidden = weakref.ref(multiply)

    def fn(a: torch.Tensor) -> torch.Tensor:
        found = hidden()
        return plain(a) if found is None else found(plain(a))

    captured = capture(fn, (torch.ones(2),))
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 6.0))
    assert captured.recaptures == 0
    factor[0] = 5.0
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 10.0))


@pytest.mark.usefixtures("few_objects")
def test_a_function_that_is_never_found_runs_in_python():
    code = _amplify.__code__.replace(co_name="made")
    namespace = globals()

    def fn(a: torch.Tensor) -> torch.Tensor:
        return types.FunctionType(code, namespace)(a)

    captured = Captured(fn)
    for number in range(4):
        assert torch.equal(captured(torch.ones(2) * number), torch.ones(2) * number)
    with pytest.raises(CaptureError, match="made, which it keeps where it can't be found"):
        capture(fn, (torch.ones(2),))


class _Checked:
    """As strict data classes do, keeps functions in a list under a name like `__checks__`."""

    __checks__: ClassVar[list[Any]] = []
    __limit__ = 4.0

    def check(self) -> float:
        return sum(check(self) for check in type(self).__checks__)


def test_attributes_of_classes_in_double_underscores_are_guarded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Checked, "__checks__", [lambda it: it.__limit__ + 1])

    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * _Checked().check()

    captured = Captured(fn)
    captured(torch.ones(2))
    assert captured.whole
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 5.0))
    assert captured.recaptures == 0
    monkeypatch.setattr(_Checked, "__limit__", 7.0)
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 8.0))
    monkeypatch.setattr(_Checked, "__checks__", [])
    assert torch.equal(captured(torch.ones(2)), torch.zeros(2))


def test_a_program_that_warns_once_is_captured_at_the_second_run(caplog: pytest.LogCaptureFixture):
    @functools.lru_cache
    def warn_once(text: str) -> None:
        logging.getLogger("fxkit.tests").warning(text)

    def fn(a: torch.Tensor) -> torch.Tensor:
        warn_once("slow")
        return a + 1

    captured = capture(fn, (torch.ones(2),))
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0))
    assert captured.recaptures == 0
    assert [record.getMessage() for record in caplog.records] == ["slow"]
    warn_once.cache_clear()
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0))
    assert [record.getMessage() for record in caplog.records] == ["slow", "slow"]


class _Settings:
    gain = 2.0


def test_a_class_that_is_an_argument_is_guarded(monkeypatch: pytest.MonkeyPatch):
    captured = Captured(lambda a, settings: a * settings.gain)
    for gain in (2.0, 2.0, 5.0, 5.0):
        monkeypatch.setattr(_Settings, "gain", gain)
        assert torch.equal(captured(torch.ones(2), _Settings), torch.full((2,), gain))
    assert captured.whole and captured.recaptures == 1


def test_what_a_tensor_argument_has_been_given_is_not_a_constant():
    captured = Captured(lambda a: a * getattr(a, "gain", 1.0))
    for gain in (None, None, 2.0, 3.0, None):
        a = torch.ones(2)
        if gain is not None:
            a.gain = gain  # type: ignore[attr-defined]
        assert torch.equal(captured(a), torch.full((2,), gain or 1.0))
        assert captured.whole is (gain is None)
    a.gain = 2.0  # type: ignore[attr-defined]
    assert "one with .gain" in captured.explain(a)


def test_attributes_of_arguments_that_no_code_reads_are_not_guarded():
    captured = Captured(lambda a: a * 2)
    for number in range(3):
        a = torch.full((2,), float(number))
        a.note = number  # type: ignore[attr-defined]
        assert torch.equal(captured(a), a * 2)
    assert captured.whole and captured.recaptures == 0


def test_a_program_that_gives_its_argument_an_attribute_runs_in_python():
    def fn(a: Any) -> Any:
        a.total = a.sum()
        return a * 2

    captured = Captured(fn)
    for number in range(3):
        a = torch.full((2,), float(number))
        captured(a)
        assert a.total == 2 * number  # type: ignore[attr-defined]


def test_attributes_that_the_program_gives_to_its_tensors_are_written_again():
    table = torch.ones(2)

    def fn(a: Any) -> Any:
        table.last = a.sum()  # type: ignore[attr-defined]
        return a * table

    captured = Captured(fn)
    for number in range(4):
        captured(torch.full((2,), float(number)))
        assert table.last == 2 * number  # type: ignore[attr-defined]
    assert captured.whole


@pytest.mark.parametrize("switch", ["anomaly", "flash"])
def test_settings_that_the_program_asks_torch_for(switch: str):
    def fn(a: torch.Tensor) -> torch.Tensor:
        if switch == "anomaly":
            return a * 2 if torch.is_anomaly_enabled() else a * 3
        return a * 2 if torch.backends.cuda.flash_sdp_enabled() else a * 3

    captured, a = Captured(fn), torch.ones(2)
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        for is_on in (False, False, True, True, False):
            torch.backends.cuda.enable_flash_sdp(is_on)
            with torch.autograd.set_detect_anomaly(is_on):
                assert torch.equal(captured(a), fn(a))
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)
