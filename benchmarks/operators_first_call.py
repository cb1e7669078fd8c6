"""Times a definition, a first call and a first gradient in this process; prints seconds.

`--other` has another operator defined, called and differentiated before.
"""

from __future__ import annotations

import itertools
import math
import sys
import time

import torch

import fxkit


def other(x):
    """x · tanh(x)."""
    return x * math.tanh(x)


def mish(x):
    """x · tanh(softplus(x))."""
    return x * math.tanh(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


def _timed(function: object) -> list[float]:
    x, grown = torch.randn(1024), torch.randn(1024, requires_grad=True)
    marks = [time.perf_counter()]
    operator = fxkit.operator(namespace="first_call")(function)  # type: ignore[arg-type]
    marks.append(time.perf_counter())
    operator(x)
    marks.append(time.perf_counter())
    operator(grown).sum().backward()
    marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


if __name__ == "__main__":
    if "--other" in sys.argv:
        _timed(other)
    print(*_timed(mish))
