import ctypes
import gc
import sys
import threading
import time

import pytest
import torch

import fxkit
from fxkit.tracing.environment.call_watch import Watcher
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.interpreter import no_collection, settle
from fxkit.tracing.recorder.recorder import Recorder

pytestmark = pytest.mark.core

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Cyclic:
    """Garbage that only a collection frees, and whose end a profiler would see."""

    def __init__(self, ends: list[float]):
        self.me, self.ends = self, ends

    def __del__(self):
        self.ends.append(time.perf_counter())


def makes_garbage(x):
    for number in range(200):
        x = x + [[number, []] for _ in range(30)][-1][0] * 0
    return x.relu()


@pytest.fixture
def eager_collector():
    """Collect at every few allocations, and call a clock then, as Hypothesis does."""
    calls: list[float] = []

    def note(phase, info):
        calls.append(time.perf_counter())

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(5)
    yield calls
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_a_collection_does_not_count_as_a_call_of_the_program(eager_collector):
    ends: list[float] = []
    for _ in range(3):
        Cyclic(ends)
        captured = fxkit.capture(makes_garbage, (X,))
        assert torch.equal(captured(X), X.relu())
    assert eager_collector and gc.isenabled()


def test_the_collector_is_as_it_was_after_a_program_that_raises():
    def fails(x):
        raise KeyError("no")

    for is_on in (True, False):
        (gc.enable if is_on else gc.disable)()
        try:
            with pytest.raises(KeyError):
                fxkit.capture(fails, (X,))
            assert gc.isenabled() is is_on
        finally:
            gc.enable()


def test_the_collector_waits_for_all_threads():
    leave = threading.Event()
    inside = threading.Event()

    def other():
        with no_collection():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with no_collection():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_the_profiler_stays_one_object():
    # CPython 3.11 does not hold on to it while it prepares a call, and would call a freed one.
    watcher = Watcher(EnvironmentWalk(), Recorder([], EnvironmentWalk(), sys._getframe()))
    watcher.start()
    first = sys.getprofile()
    watcher.pause()
    watcher.resume()
    second = sys.getprofile()
    watcher.stop()
    assert first is not None and first is second and sys.getprofile() is None


def take_back():
    """Leave in this thread what a request to raise leaves that was taken back."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)


def test_a_request_to_raise_that_was_taken_back_does_not_hang():
    take_back()
    captured = fxkit.capture(torch.nn.ReLU(), (X,))
    assert torch.equal(captured(X), X.relu())


def test_settling_raises_nothing():
    for _ in range(100):
        settle()
    take_back()
    settle()
    assert sum(range(10)) == 45
