"""What a capture leaves behind in the user's modules and in the interpreter: nothing."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
import threading

import pytest
import torch
from torch import nn

from fxkit.tracing.captured import Captured
from fxkit.tracing.recorder.recorder import active_recorder


class Noisy(nn.Module):
    """Scales its input by a random number; fails for negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        factor = 1 + random.random()
        if a.sum() < 0:
            raise KeyError("negative")
        return self.linear(a) * factor


def test_modules_can_be_copied_and_pickled_as_before():
    module = Noisy()
    captured = Captured(module)
    for _ in range(3):
        captured(torch.ones(1, 2))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        random.seed(0)
        expected = module(torch.ones(1, 2))
        random.seed(0)
        assert torch.equal(twin(torch.ones(1, 2)), expected)
        assert twin.linear.weight is not module.linear.weight


def test_no_state_is_left_after_an_exception():
    code, streams = Noisy.forward.__code__, (sys.stdout, sys.stderr)
    captured = Captured(Noisy())
    for _ in range(3):
        with pytest.raises(KeyError, match="negative"):
            captured(-torch.ones(1, 2))
        assert active_recorder() is None and sys.getprofile() is None
        assert Noisy.forward.__code__ is code and (sys.stdout, sys.stderr) == streams
    captured(torch.ones(1, 2))
    captured(torch.ones(1, 2))
    assert captured.whole and Noisy.forward.__code__ is code


def test_threads_that_capture_opaque_calls_at_once():
    module, errors = Noisy(), []
    code = Noisy.forward.__code__
    captured = Captured(module)

    def run(rows: int) -> None:
        try:
            for _ in range(5):
                a = torch.ones(rows, 2)
                ratio = captured(a) / module.linear(a)
                assert ratio.min() >= 1 - 1e-5 and ratio.max() <= 2 + 1e-5
        except Exception as error:  # is raised again in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rows,)) for rows in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert Noisy.forward.__code__ is code


def test_numbers_drawn_unseen_before_an_opaque_call():
    draw = functools.partial(random.getrandbits, 3)

    def fn(a: torch.Tensor) -> torch.Tensor:
        draw()
        return a * random.random()

    captured = Captured(fn)
    for seed in range(4):
        random.seed(seed)
        found = captured(torch.ones(2))
        random.seed(seed)
        assert torch.equal(found, fn(torch.ones(2)))
