"""The ways to run a case: eager, torch.compile twice, fxkit with and without kept memory."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fxkit
from benchmarks.fusion.case import Work
from fxkit import config
from fxkit.lower.runtime import binding

EAGER, INDUCTOR, BEST, FRESH, KEPT, COPY = (
    *("eager", "Inductor", "best options", "fxkit, fresh memory", "fxkit", "copy"),
)

# What the CPU backend of torch.compile offers beyond its defaults. Weights can be frozen only
# where no gradients are asked for.
_BEST_OPTIONS: dict[str, Any] = {"max_autotune": True, "cpp_wrapper": True}

# Short calls are timed by the dozen, for so long together.
_BATCH_SECONDS = 300e-6

# How long one round over all ways, timed calls and untimed, may take before rounds become fewer.
_CASE_SECONDS = 20.0

_FEWEST_ROUNDS = 8


@dataclass(frozen=True)
class Way:
    """One way to run a case.

    Attributes:
        call: Runs it once; None where it could not be compiled.
        before: What is done before it is timed.
    """

    call: Callable[[], Any] | None
    before: Callable[[], object] = bool


def ways_of(work: Work, moved: int, *, with_peer: bool) -> dict[str, Way]:
    """Return the ways to run a case, all warm, and a copy that moves as many bytes.

    Args:
        work: The case.
        moved: Bytes that are read and written.
        with_peer: Whether torch.compile takes part, which takes long to compile.
    """
    fast = fxkit.compile(work.program)
    kept = config.current().pool_bytes
    ways = {EAGER: Way(_step(work, work.program))}
    if with_peer:
        torch.compiler.reset()
        best = _BEST_OPTIONS if work.wanted else _BEST_OPTIONS | {"freezing": True}
        for name, options in ((INDUCTOR, None), (BEST, best)):
            ways[name] = Way(_compiled(work, options))
    ways[FRESH] = Way(_step(work, fast), lambda: _keep(0))
    ways[KEPT] = Way(_step(work, fast), lambda: _keep(kept))
    source = torch.ones(max(moved // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    ways[COPY] = Way(lambda: target.copy_(source))
    for way in ways.values():
        for _ in range(3 if way.call else 0):
            assert way.call is not None
            way.call()
    return ways


def _step(work: Work, program: Callable[..., Any]) -> Callable[[], Any]:
    """Return a call: of the program alone, or with its backward where gradients are wanted."""
    args, wanted = work.args, work.wanted
    if not wanted:
        return lambda: program(*args)
    weights = torch.ones_like(work.program(*args))
    return lambda: torch.autograd.grad(program(*args), wanted, weights)


def _compiled(work: Work, options: dict[str, Any] | None) -> Callable[[], Any] | None:
    call = _step(work, torch.compile(work.program, options=options))
    try:
        call()
    except Exception as error:  # whatever torch.compile may raise is a result of the benchmark
        print(f"torch.compile failed: {type(error).__name__}", file=sys.stderr)
        return None
    return call


def _keep(limit: int) -> None:
    """Bound the memory that fxkit keeps for the next call, in bytes."""
    module = binding.load()
    if module is not None:
        module.limit_memory(limit)


def in_turn(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that a call takes each way, round by round, called A B C A B C.

    Each is called once untimed before it is timed. With one thread that is processor time, which
    other programs on the machine disturb less; with several it is time on the clock.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name, way in ways.items() if way.call}
    counts: dict[str, int] = {}
    spent = time.perf_counter()
    for number in range(rounds):
        for name, way in ways.items():
            if way.call is None:
                continue
            way.before()
            if name not in counts:
                start = clock()
                way.call()
                counts[name] = max(1, round(_BATCH_SECONDS / max(clock() - start, 1e-9)))
            way.call()
            calls = range(counts[name])
            start = clock()
            for _ in calls:
                way.call()
            taken[name].append((clock() - start) / len(calls))
        if number + 1 >= _FEWEST_ROUNDS and time.perf_counter() - spent > _CASE_SECONDS:
            break
    return taken


def medians(taken: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median seconds of each way."""
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def least(taken: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the least seconds of each way."""
    return {name: min(seconds) for name, seconds in taken.items()}


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def keep_freed_memory() -> bool:
    """Make the C library keep what is freed, for all sides; tell whether it could be done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_max = -1, -4
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))
