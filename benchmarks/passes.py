"""What the pass manager itself costs, beside torch's: passes that do nothing on a large graph."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.passes.infra.pass_manager import PassManager as TorchPassManager

import fxkit
from fxkit.passes import pass_function
from fxkit.view.texts.text_table import duration, table

_NODES = 10_000
_PASSES = 20


def run(rounds: int, *, with_peer: bool) -> str:
    """Time runs of passes on a chain of nodes and return a table.

    Args:
        rounds: How often each is timed, in turn; torch's manager at most three times.
        with_peer: Whether torch's pass manager is timed too.
    """
    chain = _chain(_NODES)
    idle = [_idle] * _PASSES
    torch_idle: list[Any] = [_torch_idle] * _PASSES
    ways: dict[str, Callable[[], object]] = {
        "fxkit.PassManager, verify='each'": lambda: fxkit.PassManager(idle).run(chain),
        "fxkit.PassManager, verify='off'": lambda: fxkit.PassManager(idle, verify="off").run(chain),
        "the same, one rewrite in each pass": lambda: fxkit.PassManager(
            [_one_rewrite] * _PASSES, verify="structure"
        ).run(chain),
    }
    if with_peer:
        ways["torch.fx PassManager"] = lambda: TorchPassManager(torch_idle)(chain)
    seconds = _in_turn(ways, max(3, rounds // 4))
    rows = [[name, duration(wall), duration(cpu), _verdict(name, wall)]
            for name, (wall, cpu) in seconds.items()]  # fmt: skip
    headers = [f"{_PASSES} passes that do nothing, {_NODES:,} nodes", "wall", "CPU", "goal"]
    return table(headers, rows, align="<>><")


def _verdict(name: str, seconds: float) -> str:
    if "each" not in name.partition("=")[2]:
        return ""
    return f"≤ 50 ms: {'met' if seconds <= 50e-3 else 'not met'}"


def _in_turn(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of each, run A B C A B C; the first is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            if name.startswith("torch") and number > 3:
                continue
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: _medians(times[1:]) for name, times in taken.items()}


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (
        statistics.median(wall for wall, _ in times),
        statistics.median(cpu for _, cpu in times),
    )


def _chain(nodes: int) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for index in range(nodes - 2):
        value = graph.call_function((torch.relu, torch.tanh)[index % 2], (value,))
    graph.output(value)
    return fx.GraphModule(torch.nn.Module(), graph)


@pass_function
def _idle(edit: object, context: object) -> None:
    """Do nothing."""


@pass_function(numerics="changed", is_idempotent=False)
def _one_rewrite(edit: fxkit.ir.session.EditSession, context: object) -> None:
    """Replace the last operator."""
    node = next(iter(reversed(edit.graph.nodes))).all_input_nodes[0]
    edit.replace(node, edit.call(node.target, *node.args, before=node))


def _torch_idle(gm: fx.GraphModule) -> PassResult:
    return PassResult(gm, False)
