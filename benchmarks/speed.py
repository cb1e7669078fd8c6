"""How fast compiled code is: eager, fxkit and torch.compile on the same inputs, in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.demo.judge import reference, relative_error
from fxkit.demo.model import load
from fxkit.demo.sentences import ALL
from fxkit.demo.timing import in_turn
from fxkit.view.text_table import duration, table


@dataclass(frozen=True)
class Case:
    """A program and its inputs.

    Attributes:
        name: What is computed, with the shape.
        program: Computes it.
        args: Inputs.
    """

    name: str
    program: Callable[..., Tensor]
    args: tuple[Tensor, ...]


def _gelu_chain(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(x.abs())


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[-1:])


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def cases() -> list[Case]:
    """Make the cases; the inputs are the same in every run."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    demo = load()
    return [
        Case("gelu chain 4096×2048", _gelu_chain, (normal(4096, 2048), normal(4096, 2048))),
        Case("softmax 4096×2048", _softmax, (normal(4096, 2048),)),
        Case("layer_norm(x+y) 4096×1024", _layer_norm, (normal(4096, 1024), normal(4096, 1024))),
        Case("rms norm 4096×1024", _rms_norm, (normal(4096, 1024), normal(1024))),
        Case("bias+gelu 256×3072", _bias_gelu, (normal(256, 3072), normal(3072))),
        Case("MiniLM, 48 sentences", demo.encoder, demo.inputs(ALL)),
        Case("MiniLM, 1 sentence", demo.encoder, demo.inputs(ALL[:1])),
    ]


def run(rounds: int, *, with_peer: bool) -> str:
    """Time every case and return a table; errors are against float64, relative, by norm."""
    names = ["eager", "fxkit", *(["torch.compile"] if with_peer else [])]
    headers = ["case", *names, "eager / fxkit"]
    if with_peer:
        headers.append("torch.compile / fxkit")
    headers += ["error eager", "error fxkit"]
    rows, ratios = [], []
    for case in cases():
        times = _time(case, rounds, with_peer)
        rivals = [times[name] / times["fxkit"] for name in names if name != "fxkit"]
        ratios.append(rivals)
        cells = [duration(times[name]) for name in names]
        rows.append([case.name, *cells, *(f"{r:.2f} ×" for r in rivals), *_errors(case)])
    means = [math.prod(column) ** (1 / len(column)) for column in zip(*ratios, strict=True)]
    rows.append(["geometric mean", *("" for _ in names), *(f"{m:.2f} ×" for m in means), "", ""])
    return table(headers, rows, align="<" + ">" * (len(headers) - 1))


def _time(case: Case, rounds: int, with_peer: bool) -> dict[str, float]:
    fast = fxkit.compile(case.program)
    candidates: dict[str, Callable[[], object]] = {
        "eager": lambda: case.program(*case.args),
        "fxkit": lambda: fast(*case.args),
    }
    if with_peer:
        torch.compiler.reset()
        peer = torch.compile(case.program)
        candidates["torch.compile"] = lambda: peer(*case.args)
    return in_turn(candidates, rounds=rounds)


def _errors(case: Case) -> list[str]:
    exact = _in_float64(case)
    fast = fxkit.compile(case.program)
    fast(*case.args)  # the first call runs the program itself, to capture it
    results = (case.program(*case.args), fast(*case.args))
    return [f"{relative_error(result, exact):.1e}" for result in results]


def _in_float64(case: Case) -> Tensor:
    if isinstance(case.program, torch.nn.Module):
        return reference(case.program, case.args)
    wide: list[Any] = [t.double() if t.is_floating_point() else t for t in case.args]
    return case.program(*wide)
