"""A step of a quantised decoder whose cache is floats, or int8, between calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fxkit
from benchmarks.decoder import CachedDecoder, step_inputs
from fxkit import quantization as q
from fxkit.quantization.affine import signal_to_noise
from fxkit.view.texts.text_table import duration, table

STATE = {"keys": 1, "values": 2}
TOKENS = (128, 1024)


def run(rounds: int) -> str:
    """Time steps after few and many tokens, and return a table; one thread.

    Args:
        rounds: How often each way is timed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for tokens in TOKENS for row in _rows(tokens, rounds)]
    finally:
        torch.set_num_threads(threads)
    headers = ["tokens before", "way", "least", "median", "dB", "MiB of cache"]
    return table(headers, rows, align="><>>>>")


@torch.no_grad()
def _rows(tokens: int, rounds: int) -> list[list[str]]:
    torch.manual_seed(0)
    model = CachedDecoder().eval().requires_grad_(False)
    batches = [step_inputs(tokens=tokens) for _ in range(4)]
    x, *past = step_inputs(tokens=tokens)
    spec = q.int8_static()
    program = fxkit.quantize(model, q.QuantizationConfig(spec, state=STATE), batches)
    held, states = q.hold_in_integers(program, STATE)
    integers = [states[name].quantize(one) for name, one in zip(STATE, past, strict=True)]
    ways: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "eager, float32": (model, past),
        "int8 static, floats": (fxkit.compile(fxkit.quantize(model, spec, batches)), past),
        "int8 static, int8": (fxkit.compile(held), integers),
    }
    exact = model(x, *past)[0]
    for way, cache in ways.values():
        for _ in range(3):  # the first call runs the program itself
            way(x, *cache)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, cache) in ways.items():
            start = time.perf_counter()
            way(x, *cache)
            seconds[name].append(time.perf_counter() - start)
    return [
        [
            str(tokens),
            name,
            duration(min(seconds[name])),
            duration(statistics.median(seconds[name])),
            f"{signal_to_noise(exact, way(x, *cache)[0]):.1f}",
            f"{sum(one.nbytes for one in cache) / 2**20:.1f}",
        ]
        for name, (way, cache) in ways.items()
    ]
