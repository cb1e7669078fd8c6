"""`tune=True`: each kernel is timed against eager, alone and with threads, and the fastest stays.

Kernels are timed on made-up inputs of the types that they are called with, never on the caller's:
a graph that writes to its inputs or draws random numbers runs no more often than it is called. The
times are kept beside the built kernels, under the text of the kernel, so that the next process
finds them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

from fxkit.ir.types import TensorType
from fxkit.lower.autotuning.kept_times import read_times, times_path, write_times
from fxkit.lower.building import toolchain
from fxkit.lower.compiling.plan import Plan
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.fusion.group import FusionGroup
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall

Times = Mapping[str, float]

EAGER, ONE_THREAD, THREADS = "eager", "one thread", "threads"

# Turns in which the candidates are timed; the least time of each counts.
_TURNS = 5

# Seconds that a candidate is called for, together, in one turn: short calls are timed by the dozen.
_TURN_SECONDS = 200e-6


@dataclass(frozen=True)
class TunedPolicy(Policy):
    """A policy that knows what was measured.

    Attributes:
        refused: Names of a region's nodes → why eager computes them.
        parallel: Kernel → whether it is faster with several threads.
    """

    refused: Mapping[frozenset[str], str] = field(default_factory=dict)
    parallel: Mapping[Kernel, bool] = field(default_factory=dict)

    def objection(self, group: FusionGroup) -> str | None:
        """Return why eager is as fast for a region, or None when a kernel pays."""
        measured = self.refused.get(frozenset(m.node.name for m in group.members))
        return measured or super().objection(group)


def tuned(policy: Policy | None, plan: Plan) -> TunedPolicy:
    """Return a policy that keeps, of the kernels of a plan, those that are faster than eager.

    Args:
        policy: What it starts from.
        plan: The plan; its kernels are built.
    """
    start = policy or Policy()
    refused: dict[frozenset[str], str] = {}
    parallel: dict[Kernel, bool] = {}
    threads = torch.get_num_threads()
    for region in plan.regions:
        call = plan.calls.get(region.name)
        if call is None or call.address is None or call.kernel.tensor_op is not None:
            continue  # it has been timed before it was made a kernel
        times = times_of(call, threads)
        best = min(times, key=times.__getitem__)
        if best == EAGER:
            refused[frozenset(region.nodes)] = _reason(times)
        parallel[call.kernel] = times.get(THREADS, math.inf) < times[ONE_THREAD]
    settings = {setting.name: getattr(start, setting.name) for setting in fields(Policy)}
    return TunedPolicy(**settings, refused=refused, parallel=parallel)


def choose_thread_counts(plan: Plan, policy: Policy | None) -> None:
    """Give each kernel of a plan as many threads as were measured to pay."""
    if isinstance(policy, TunedPolicy):
        for call in plan.calls.values():
            call.is_parallel = policy.parallel.get(call.kernel, call.is_parallel)


def _reason(times: Times) -> str:
    kernel = min(seconds for name, seconds in times.items() if name != EAGER)
    return (
        f"timed: eager takes {times[EAGER] * 1e6:.1f} us, a kernel {kernel * 1e6:.1f} us "
        "with memory at hand"
    )


def times_of(call: KernelCall, threads: int) -> Times:
    """Return the seconds of eager and of a kernel, measured now or at an earlier time.

    Args:
        call: The kernel's call; it is built.
        threads: How many threads it may use.
    """
    key = _key(call, threads)
    known = _read()
    if key not in known:
        times = _measured(call, threads)
        known = {**_read(), key: times}
        write_times(_path(), known)
    return known[key]


def known_times(call: KernelCall, threads: int) -> Times | None:
    """Return the seconds of eager and of a kernel if they were measured before."""
    return _read().get(_key(call, threads))


def _measured(call: KernelCall, threads: int) -> Times:
    inputs = [_made_up(known, call.kernel.has_checks) for known in call.inputs]
    outputs = [
        torch.empty_strided(t.shape, t.stride or (), dtype=t.dtype).zero_() for t in call.outputs
    ]
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    candidates: dict[str, Callable[[], object]] = {
        EAGER: partial(call.in_eager, *inputs),
        ONE_THREAD: partial(call.on_pointers, pointers, 1),
    }
    if threads > 1:
        candidates[THREADS] = partial(call.on_pointers, pointers, threads)
    with torch.no_grad():
        return _least_times(candidates)


def _made_up(known: TensorType, is_checked: bool) -> torch.Tensor:
    """Return a tensor of a type: ones; noughts where they are indices, which are checked."""
    strides = known.stride or ()
    span = 1 + sum((n - 1) * s for n, s in zip(known.shape, strides, strict=True))
    is_index = is_checked and not known.dtype.is_floating_point
    memory = torch.full((max(span, 0),), 0 if is_index else 1, dtype=known.dtype)
    return memory.as_strided(known.shape, strides)


def _key(call: KernelCall, threads: int) -> str:
    types = [f"{t.dtype} {t.shape} {t.stride}" for t in (*call.inputs, *call.outputs)]
    text = print_unit({"kernel": call.kernel}, toolchain.vector_library())
    return hashlib.sha256("\0".join([text, *types, str(threads)]).encode()).hexdigest()[:32]


def _least_times(candidates: Mapping[str, Callable[[], object]]) -> Times:
    """Return the least seconds of each candidate, called in turn."""
    repeats = {name: _repeats(run) for name, run in candidates.items()}
    best = dict.fromkeys(candidates, math.inf)
    for _ in range(_TURNS):
        for name, run in candidates.items():
            best[name] = min(best[name], _seconds(run, repeats[name]))
    return best


def _repeats(run: Callable[[], object]) -> int:
    run()
    return max(1, min(100, int(_TURN_SECONDS / max(_seconds(run, 1), 1e-9))))


def _seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _read() -> dict[str, Times]:
    try:
        return {str(key): _checked(times) for key, times in read_times(_path()).items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        return {}


def _checked(times: Mapping[str, float]) -> Times:
    """Return times that were read, once they are known to be times."""
    names: Iterable[str] = (EAGER, ONE_THREAD, *([THREADS] if THREADS in times else []))
    return {name: float(times[name]) for name in names}


def _path() -> Path:
    return times_path("tuned")
