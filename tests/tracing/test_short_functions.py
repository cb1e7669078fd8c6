"""Functions of a few lines: the graphs of a whole trace, while other threads go on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.errors import CaptureError
from fxkit.tracing.short_functions import trace_function

LINEAR, WEIGHT = nn.Linear(4, 4), torch.ones(4)


def swish(x: torch.Tensor, y: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
    x += y
    return torch.sigmoid(x.view(-1, 4)) * x[..., 0] * scale


PROGRAMS: dict[str, Callable[..., object]] = {
    "lines": swish,
    "lambda": lambda x: (x * 2, {"a": [x.T]}),
    "module": lambda x: LINEAR(x) + 1,
    "parameter": lambda x: F.linear(x, LINEAR.weight),
    "tensor": lambda x: x * WEIGHT,
    "math": lambda x: math.floor(x) + 1,
    "grad": lambda x: F.relu(x, inplace=True).to(torch.float64),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_that_of_a_whole_trace(name: str) -> None:
    short = trace_function(PROGRAMS[name])
    whole = fxkit.symbolic_trace(PROGRAMS[name]).graph
    found, expected = list(short.nodes), list(whole.nodes)
    assert [node.format_node() for node in found] == [node.format_node() for node in expected]
    assert [n.meta.get("stack_trace") for n in found] == [
        n.meta.get("stack_trace") for n in expected
    ]


def test_what_cannot_be_followed_says_why() -> None:
    with pytest.raises(CaptureError, match="an `if`"):
        trace_function(lambda x: x if x.sum() > 0 else -x)


def test_other_threads_call_modules_meanwhile() -> None:
    x, failed, done = torch.ones(2, 4), [], threading.Event()

    def call() -> None:
        while not done.is_set():
            try:
                if type(LINEAR(x)) is not torch.Tensor:
                    failed.append("a placeholder")
            except Exception as error:
                failed.append(error)

    other = threading.Thread(target=call)
    other.start()
    for _ in range(200):
        trace_function(swish)
    done.set()
    other.join()
    assert not failed
