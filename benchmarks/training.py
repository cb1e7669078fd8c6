"""Training steps, forward and backward, and steps of optimisers, in turn with torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from benchmarks.fusion.models import Classifier, FeedForward
from fxkit.timing import in_turn
from fxkit.view.texts.text_table import duration, table


@dataclass(frozen=True)
class Case:
    """One training step.

    Attributes:
        program: What is trained.
        inputs: Its arguments.
        wanted: What gradients are asked for.
        goal: How many times as fast as Inductor it is meant to be.
    """

    program: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    goal: float | None


def _norm_and_gelu() -> Case:
    norm = nn.LayerNorm(1024)
    x, y = (torch.randn(4096, 1024, requires_grad=True) for _ in range(2))
    return Case(lambda x, y: F.gelu(norm(x + y)), (x, y), (x, y, *norm.parameters()), 2.3)


def _pointwise() -> Case:
    x, y = (torch.randn(2048, 1024, requires_grad=True) for _ in range(2))
    return Case(lambda x, y: torch.tanh(x * y) * torch.sigmoid(x) + y, (x, y), (x, y), 2.3)


def _softmax() -> Case:
    x, y = (torch.randn(4096, 512, requires_grad=True) for _ in range(2))
    return Case(lambda x, y: torch.softmax(x * 0.125 + y, -1), (x, y), (x, y), 2.3)


def _mlp() -> Case:
    block = FeedForward(512, 2048)
    x = torch.randn(512, 512, requires_grad=True)
    return Case(block, (x,), (x, *block.parameters()), 1.15)


def _small_mlp() -> Case:
    net = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )
    x = torch.randn(8, 32)
    return Case(net, (x,), tuple(net.parameters()), 1.15)


def _resnet() -> Case:
    from pytorchcv.model_provider import get_model

    net = Classifier(get_model("resnet18").train())
    inputs = (torch.randn(4, 3, 224, 224), torch.randint(1000, (4,)))
    return Case(net, inputs, tuple(net.parameters()), None)


CASES: dict[str, Callable[[], Case]] = {
    "gelu(LN(x + y)) 4096 × 1024": _norm_and_gelu,
    "pointwise 2048 × 1024": _pointwise,
    "softmax 4096 × 512": _softmax,
    "MLP block 512 × 512": _mlp,
    "small MLP, batch 8": _small_mlp,
    "resnet18, batch 4": _resnet,
}


def run(rounds: int, *, with_peer: bool) -> str:
    """Time each case with each way, in turn; return the tables."""
    return "\n\n".join([_steps(rounds, with_peer), _optimisers(rounds)])


def _steps(rounds: int, with_peer: bool) -> str:
    rows = []
    for name, make in CASES.items():
        torch.manual_seed(0)
        case = make()
        ways = {"eager": case.program}
        if with_peer:
            torch.compiler.reset()
            ways["Inductor"] = torch.compile(case.program)
        ways["fxkit"] = fxkit.compile(case.program)
        seconds = in_turn({k: _step(case, way) for k, way in ways.items()}, rounds=rounds)
        rows.append([name, *_columns(seconds, case.goal)])
    head = ["forward and backward", "eager", "Inductor", "fxkit", "over eager", "over Inductor", ""]
    return table(head, rows, align="<>>>>><")


def _step(case: Case, program: Callable[..., Tensor]) -> Callable[[], object]:
    gradient = torch.randn_like(case.program(*case.inputs))
    return lambda: torch.autograd.grad(program(*case.inputs), case.wanted, gradient)


def _columns(seconds: dict[str, float], goal: float | None) -> list[str]:
    eager, peer, ours = seconds["eager"], seconds.get("Inductor"), seconds["fxkit"]
    ratio = None if peer is None else peer / ours
    met = ""
    if goal is not None and ratio is not None:
        met = f"≥ {goal:g} ×: {'met' if ratio >= goal else 'not met'}"
    return [
        duration(eager),
        "" if peer is None else duration(peer),
        duration(ours),
        f"{eager / ours:.2f} ×",
        "" if ratio is None else f"{ratio:.2f} ×",
        met,
    ]


def _optimisers(rounds: int) -> str:
    rows = []
    net = nn.Sequential(*[FeedForward(256, 1024) for _ in range(6)])
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    kinds: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
    )
    for kind, options in kinds:
        ways: dict[str, Callable[[], object]] = {}
        for name, extra in (("single", {"foreach": False}), ("foreach", {"foreach": True}),
                            ("fused", {"fused": True})):  # fmt: skip
            chosen: dict[str, Any] = {**options, **extra}
            ways[name] = kind(_like(net), lr=1e-3, **chosen).step
        ways["fxkit"] = fxkit.compile(kind(_like(net), lr=1e-3, **options).step)
        seconds = in_turn(ways, rounds=rounds)
        best = min(seconds[name] for name in ("single", "foreach", "fused"))
        times = [duration(value) for value in seconds.values()]
        rows.append([kind.__name__, *times, f"{best / seconds['fxkit']:.2f} ×"])
    head = ["step, 3 million parameters", "torch", "foreach", "fused", "fxkit", "over torch's best"]
    return table(head, rows, align="<>>>>>")


def _like(net: nn.Module) -> list[Tensor]:
    """Return copies of the parameters, with gradients."""
    parameters = list(copy.deepcopy(net).parameters())
    for ours, theirs in zip(parameters, net.parameters(), strict=True):
        assert theirs.grad is not None
        ours.grad = theirs.grad.clone()
    return list(parameters)
