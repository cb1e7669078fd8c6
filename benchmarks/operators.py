"""What operators of one's own cost: long, short and first calls, and in a transformer's layer."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit.lower.runtime import autograd_node
from fxkit.timing import in_turn
from fxkit.view.texts.text_table import duration, table

_LONG, _SHORT = 1 << 23, 1 << 10

_NUMBA = importlib.util.find_spec("numba") is not None

# What torch has for operators defined here, with the numbers that are their defaults.
_THEIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "at_least": lambda x: torch.clamp(x, 0.0),
    "softplus": F.softplus,
}

# Short calls are timed so many at once.
_CALLS = 100


@fxkit.operator(namespace="benchmarks")
def relu(x):
    """max(x, 0)."""
    return max(x, 0.0)


@fxkit.operator(namespace="benchmarks")
def at_least(x, low=0.0):
    """max(x, low)."""
    return max(x, low)


@fxkit.operator(namespace="benchmarks")
def softplus(x, beta=1.0):
    """log(1 + e^(βx)) / β, without overflow."""
    return (max(x * beta, 0.0) + math.log1p(math.exp(-abs(x * beta)))) / beta


@fxkit.operator(namespace="benchmarks")
def mish(x):
    """x · tanh(softplus(x))."""
    return x * math.tanh(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


@fxkit.operator(namespace="benchmarks")
def snake(x):
    """x + sin²(x)."""
    s = math.sin(x)
    return x + s * s


@fxkit.operator(namespace="benchmarks")
def squareplus(x):
    """(x + √(x² + 4)) / 2."""
    return 0.5 * (x + math.sqrt(x * x + 4.0))


@fxkit.operator(namespace="benchmarks")
def log_cosh(x):
    """log cosh(x), without overflow."""
    return abs(x) + math.log1p(math.exp(-2.0 * abs(x))) - math.log(2.0)


@fxkit.operator(namespace="benchmarks")
def gelu(x):
    """The approximation of gelu by tanh."""
    return 0.5 * x * (1.0 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


@fxkit.operator(namespace="benchmarks")
def soft_shrink(x):
    """Shrink towards zero by one half, smoothly below it."""
    return x - math.copysign(0.5, x) if abs(x) > 0.5 else x * x * x * 2.0


@fxkit.operator(namespace="benchmarks")
def huber(x, y):
    """The loss of Huber, of width 1."""
    d = abs(x - y)
    return 0.5 * d * d if d <= 1.0 else d - 0.5


@fxkit.operator(namespace="benchmarks")
def serf(x):
    """x · erf(softplus(x))."""
    return x * math.erf(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


OPERATORS = (mish, snake, squareplus, log_cosh, huber, gelu, soft_shrink, serf)


class _Layer(nn.Module):
    """The feed-forward half of a transformer's layer, as wide as BERT's."""

    def __init__(self, activation: Callable[[Tensor], Tensor], width: int = 768) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(width), activation
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def run(rounds: int) -> str:
    """Time operators of one's own beside what they replace, in turn; return tables."""
    repetitions = max(3, rounds // 2)
    with torch.no_grad():
        tables = [_long(repetitions), _short(repetitions), _layer(repetitions), _first()]
    return "\n\n".join(tables)


def _long(repetitions: int) -> str:
    others = ("Inductor", "eager", *(("numba",) if _NUMBA else ()))
    rows: list[list[str]] = []
    for operator in OPERATORS:
        tensors = tuple(torch.randn(_LONG) for _ in operator.definition.tensors)
        ways = _long_calls(operator, tensors)
        calls = {way: functools.partial(call, *tensors) for way, call in ways.items()}
        pair = {way: calls[way] for way in ("operator", "composition")}
        # The two that are close are timed more often, and without the others between them.
        close = in_turn(pair, rounds=10 * repetitions, warmup=2)
        far = in_turn({way: calls[way] for way in others}, rounds=repetitions, warmup=2)
        seconds = close | far
        times = [duration(value) for value in seconds.values()]
        over = [f"{seconds['operator'] / seconds['composition']:.2f} ×"]
        over += [f"{far[way] / close['operator']:.1f} ×" for way in others]
        rows.append([operator.definition.name, *times, *over])
    ratios = ["of composition", *(f"{way} over it" for way in others)]
    head = ["8M float32", "operator", "composition, compiled", *others, *ratios]
    return table(head, rows, align="<" + ">" * (len(head) - 1))


def _long_calls(operator: Any, tensors: tuple[Tensor, ...]) -> dict[str, Callable[..., object]]:
    """Return an operator, and ways to compute the same; numba's has its threads, as torch has."""
    spelled_out = fxkit.capture(operator.composition, tensors).graph_module
    calls: dict[str, Callable[..., object]] = {
        "operator": operator,
        "composition": fxkit.compile(operator.composition),
        "Inductor": torch.compile(spelled_out),
        "eager": operator.composition,
    }
    if _NUMBA:
        numba = importlib.import_module("numba")
        numba.set_num_threads(torch.get_num_threads())
        signature = f"float32({', '.join(['float32'] * len(tensors))})"
        vectorized = numba.vectorize([signature], target="parallel")(operator.__wrapped__)
        calls["numba"] = lambda *given: vectorized(*(x.numpy() for x in given))
    return calls


def _short(repetitions: int) -> str:
    x, rows = torch.randn(_SHORT), []
    grown = x.clone().requires_grad_()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "relu(x)": (lambda: relu(x), lambda: torch.relu(x)),
        "clamp(x, 0.5)": (lambda: at_least(x, 0.5), lambda: torch.clamp(x, 0.5)),
        "clamp(x, min=0.5)": (lambda: at_least(x, low=0.5), lambda: torch.clamp(x, min=0.5)),
        "softplus(x, beta=2.0)": (
            lambda: softplus(x, beta=2.0),
            lambda: F.softplus(x, beta=2.0),
        ),
        "relu(x), x with gradient": (lambda: relu(grown), lambda: torch.relu(grown)),
        "clamp(x, 0.5), with gradient": (
            lambda: at_least(grown, 0.5),
            lambda: torch.clamp(grown, 0.5),
        ),
        "softplus(x, beta=2.0), with gradient": (
            lambda: softplus(grown, beta=2.0),
            lambda: F.softplus(grown, beta=2.0),
        ),
    }
    for own in (relu, at_least, softplus):
        pairs[f"{own.definition.name}, forward and backward"] = (
            lambda f=own: torch.autograd.grad(f(grown), grown, x),
            lambda f=_THEIRS[own.definition.name]: torch.autograd.grad(f(grown), grown, x),
        )
    relu(x)
    autograd_node.attach()
    with torch.enable_grad():
        for name, (own, theirs) in pairs.items():
            ways = {"operator": lambda f=own: _often(f), "torch": lambda f=theirs: _often(f)}
            seconds = in_turn(ways, rounds=20 * repetitions, warmup=2)
            per_call = {way: value / _CALLS for way, value in seconds.items()}
            rows.append(_row(name, per_call, "operator", "torch"))
    return table(["1,024 float32", "operator", "torch", "of torch"], rows, align="<>>>")


def _first() -> str:
    """Time definitions and first calls, each in a process of its own."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for what in ("nothing built", "all built"):
            seconds = _first_in_process(Path(folder), has_other=False)
            rows.append([what, *map(duration, seconds)])
    with tempfile.TemporaryDirectory() as folder:
        seconds = _first_in_process(Path(folder), has_other=True)
        rows.insert(1, ["another operator built before", *map(duration, seconds)])
    return table(["first call", "definition", "call", "with gradient"], rows, align="<>>>")


def _first_in_process(folder: Path, *, has_other: bool) -> list[float]:
    environment = {**os.environ, "FXKIT_CACHE_DIR": str(folder / "cache")}
    options = ["--other"] if has_other else []
    command = [sys.executable, "-m", "benchmarks.operators_first_call", *options]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    return [float(value) for value in done.stdout.split()]


def _layer(repetitions: int) -> str:
    x = torch.randn(4, 128, 768)
    built_in = fxkit.compile(_Layer(lambda x: F.gelu(x, approximate="tanh")).eval())
    own = fxkit.compile(_Layer(gelu).eval())
    seconds = in_turn(
        {"operator": lambda: own(x), "built-in": lambda: built_in(x)},
        rounds=3 * repetitions,
        warmup=2,
    )
    rows = [_row("gelu", seconds, "operator", "built-in")]
    return table(["feed-forward layer", "operator", "built-in", "of built-in"], rows, align="<>>>")


def _often(call: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        call()


def _row(name: str, seconds: dict[str, float], *ways: str) -> list[str]:
    ratio = seconds[ways[0]] / seconds[ways[1]]
    return [name, *(duration(seconds[way]) for way in ways), f"{ratio:.2f} ×"]
