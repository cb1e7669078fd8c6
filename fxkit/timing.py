"""Time callables against each other, in turn, so that a drifting machine favours none of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from fxkit import cpu_info


def in_turn(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 30, warmup: int = 3
) -> dict[str, float]:
    """Call the candidates A B C A B C ... and return the median seconds of each.

    Args:
        candidates: What to call, by name.
        rounds: How often each is timed.
        warmup: How often each is called beforehand.
    """
    for run in candidates.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """Name the CPU and the number of threads that torch uses on it."""
    threads = torch.get_num_threads()
    return f"{cpu_info.model_name()}, {threads} thread{'' if threads == 1 else 's'}"
