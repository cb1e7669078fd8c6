import sys

import pytest

from fxkit.passes.manager.watchdog import OutOfTime, time_limit


def double(number):
    return number * 2


def loop():
    while True:
        pass


def test_code_that_loops_is_stopped():
    with pytest.raises(OutOfTime), time_limit(0.05):
        loop()


def test_nothing_is_left_pending_behind_a_limit():
    # A profiled function of CPython 3.11 does not begin while something is.
    with pytest.raises(OutOfTime), time_limit(0.05):
        loop()
    seen = []
    sys.setprofile(lambda frame, event, value: seen.append(frame.f_code))
    result = double(4)
    sys.setprofile(None)
    assert result == 8 and double.__code__ in seen


def test_other_errors_pass_through():
    with pytest.raises(KeyError), time_limit(10):
        raise KeyError("own")
