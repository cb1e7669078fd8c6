"""What the first call costs: with empty caches, and in a new process that finds them filled.

Each figure is a process of its own, from before `import fxkit` or `torch.compile` to the end of the
first call; the import of torch and the making of the model are left out. Inductor is
called the same way, with caches of its own. CPU seconds are those of the process and of all that it
starts, and of use where the machine does other things too. The modules of fxkit are there as
bytecode, as those of torch are: an installation puts it there, a source tree may be without.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxkit
from fxkit.view.texts.text_table import duration, table

GOALS = {"one kernel": (0.8, None), "MiniLM": (3.0, 0.7)}
DEPTHS = (6, 12, 24, 48)
WIDTH = 64

_CHILD = """
import resource, sys, time
import torch

def spent():
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(part.ru_utime + part.ru_stime for part in parts)

name, tool = sys.argv[1:]
start = spent()
if tool == "fxkit":
    import fxkit
    compile = fxkit.compile
else:
    compile = torch.compile
imported = spent()
from benchmarks.compiling import case
fn, args = case(name)
with torch.no_grad():
    fn(*args)
    before = spent()
    compile(fn)(*args)
    after = spent()
    torch.compiler.reset() if tool != "fxkit" else None
print([imported[i] - start[i] + after[i] - before[i] for i in range(2)])
"""


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float[B, T, C] of float[B, T, C]."""
        shape = (*x.shape[:2], 4, WIDTH // 4)
        q, k, v = (
            part.reshape(shape).transpose(1, 2)
            for part in self.queries(self.first(x)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def one_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return what a single kernel computes."""
    return torch.softmax(nn.functional.gelu(x * 1.5 + y), dim=-1)


def case(name: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return a program and its inputs."""
    if name == "one kernel":
        return one_kernel, (torch.randn(64, 256), torch.randn(256))
    if name == "MiniLM":
        from fxkit.demo.model import load

        demo = load()
        return demo.encoder, demo.inputs(["A short sentence.", "And one that is a bit longer."])
    depth = int(name.split()[0])
    return nn.Sequential(*(Layer() for _ in range(depth))).eval(), (torch.randn(2, 16, WIDTH),)


def run(*, with_peer: bool = True) -> str:
    """Return a table of first calls, fxkit's and Inductor's."""
    compileall.compile_dir(Path(fxkit.__file__).parent, quiet=1)
    tools = ["fxkit", "Inductor"] if with_peer else ["fxkit"]
    heads = ["first call", *(f"{t}, {c}" for t in tools for c in ("empty caches", "filled caches"))]
    rows = []
    for name in (*GOALS, *(f"{depth} layers" for depth in DEPTHS)):
        goals = GOALS.get(name, (None, None))
        cells = []
        for tool in tools:
            for figures, goal in zip(_first_calls(name, tool), goals, strict=True):
                is_ours = tool == "fxkit" and goal is not None
                cells.append(_cell(figures, goal if is_ours else None))
        rows.append([name, *cells])
    return table(heads, rows, align="<" + ">" * (len(heads) - 1))


def _cell(figures: tuple[float, float], goal: float | None) -> str:
    seconds, cpu = figures
    bound = "" if goal is None else f" (at most {goal} s)"
    return f"{duration(seconds)}{bound}, CPU {duration(cpu)}"


def _first_calls(name: str, tool: str) -> list[tuple[float, float]]:
    """Return seconds and CPU seconds of a process with empty caches, then of one after it."""
    with tempfile.TemporaryDirectory(prefix="fxkit-benchmark-") as folder:
        caches = {"FXKIT_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        found = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CHILD, name, tool],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds, cpu = json.loads(done.stdout.splitlines()[-1])
            found.append((seconds, cpu))
        return found
