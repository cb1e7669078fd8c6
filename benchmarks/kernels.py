"""Single kernels: eager, torch.compile and fxkit on the same inputs, in turn, beside the roofline.

fxkit is timed twice: with fresh memory for each result, as eager and torch.compile have it, and
with the memory that it keeps from results that nobody holds any more.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit import config
from fxkit.demo.judge import relative_error
from fxkit.lower.running import binding
from fxkit.view.text_table import duration, table

_BEST_OPTIONS: dict[str, Any] = {"max_autotune": True, "cpp_wrapper": True}


@dataclass(frozen=True)
class Case:
    """A program and what makes its inputs.

    Attributes:
        name: What is computed, with the shape; its first word chooses it.
        program: Computes it.
        make: Makes its inputs, all of float32.
        dtype: What the inputs are converted to.
    """

    name: str
    program: Callable[..., Tensor]
    make: Callable[[], tuple[Tensor, ...]]
    dtype: torch.dtype = torch.float32


def _normal(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    def make() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(*shape, generator=generator) for shape in shapes)

    return make


def _chain(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(x.abs())


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[-1:])


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _waves(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.cos(x) + torch.expm1(x)


def _column_sums(x: Tensor) -> Tensor:
    return (x * x).sum(0)


def _transposed_sum(x: Tensor, y: Tensor) -> Tensor:
    return x.t() * 2 + y


def _heads_first(x: Tensor, bias: Tensor) -> Tensor:
    return (x + bias).permute(0, 2, 1, 3).contiguous() * 0.125


_BF16 = torch.bfloat16
_WIDE = (4096, 2048)

CASES = (
    Case("chain 4096×2048", _chain, _normal(_WIDE, _WIDE)),
    Case("chain_bf16 4096×2048", _chain, _normal(_WIDE, _WIDE), _BF16),
    Case("softmax 4096×2048", _softmax, _normal(_WIDE)),
    Case("softmax_bf16 4096×2048", _softmax, _normal(_WIDE), _BF16),
    Case("layer_norm(x+y) 4096×1024", _layer_norm, _normal((4096, 1024), (4096, 1024))),
    Case("layer_norm_bf16 4096×1024", _layer_norm, _normal((4096, 1024), (4096, 1024)), _BF16),
    Case("rms_norm 4096×1024", _rms_norm, _normal((4096, 1024), (1024,))),
    Case("rotary 8×16×512×64", _rotary, _normal((8, 16, 512, 64), (512, 64), (512, 64))),
    Case("bias_gelu 4096×3072", _bias_gelu, _normal((4096, 3072), (3072,))),
    Case("bias_gelu_small 256×3072", _bias_gelu, _normal((256, 3072), (3072,))),
    Case("waves 2048×2048", _waves, _normal((2048, 2048))),
    Case("column_sums 4096×2048", _column_sums, _normal(_WIDE)),
    Case("column_sums_narrow 65536×32", _column_sums, _normal((65536, 32))),
    Case("transposed 2048×2048", _transposed_sum, _normal((2048, 2048), (2048, 2048))),
    Case("heads_first 8×512×12×64", _heads_first, _normal((8, 512, 12, 64), (64,))),
)


def run(rounds: int, *, with_peer: bool, only: str | None = None) -> str:
    """Time the cases and return a table.

    Args:
        rounds: How often each side is timed.
        with_peer: Whether to time torch.compile too, which takes long to compile.
        only: The first word of the only case to run; all when left out.
    """
    chosen = [case for case in CASES if only in (None, case.name.split()[0])]
    peers = ["torch.compile", "best options"] if with_peer else []
    headers = ["case", "eager", *peers, "fxkit", "fxkit, kept memory", "roofline"]
    headers += [
        "× eager",
        *(["× torch.compile"] if with_peer else []),
        "error eager",
        "error fxkit",
    ]
    bandwidth = _bandwidth()
    rows, ratios = [], []
    for case in chosen:
        args = tuple(x.to(case.dtype) for x in case.make())
        sides = _sides(case, args, with_peer)
        seconds = _in_turn(sides, rounds)
        result = case.program(*args)
        moved = sum(t.numel() * t.element_size() for t in (*args, result))
        shown = [duration(seconds[name]) for name in sides]
        gains = [seconds[name] / seconds["fxkit"] for name in ("eager", *peers[:1])]
        ratios.append(gains)
        exact = case.program(*(x.double() for x in args))
        errors = [f"{relative_error(sides[n].call(), exact):.1e}" for n in ("eager", "fxkit")]
        rows.append([case.name, *shown, duration(moved / bandwidth),
                     *(f"{gain:.2f}" for gain in gains), *errors])  # fmt: skip
    means = [math.prod(column) ** (1 / len(column)) for column in zip(*ratios, strict=True)]
    blank = [""] * (len(headers) - len(means) - 3)
    rows.append(["geometric mean", *blank, *(f"{mean:.2f}" for mean in means), "", ""])
    text = table(headers, rows, align="<" + ">" * (len(headers) - 1))
    return f"roofline at {bandwidth / 1e9:.0f} GB/s, that of copying 16 MB\n{text}"


@dataclass(frozen=True)
class _Side:
    """What is timed, and what is done before each call without being timed."""

    call: Callable[[], Tensor]
    before: Callable[[], object] = bool


def _sides(case: Case, args: tuple[Tensor, ...], with_peer: bool) -> Mapping[str, _Side]:
    fast = fxkit.compile(case.program)
    sides = {"eager": _Side(lambda: case.program(*args))}
    if with_peer:
        torch.compiler.reset()
        peer = torch.compile(case.program)
        best = torch.compile(case.program, options=_BEST_OPTIONS)
        sides["torch.compile"] = _Side(lambda: peer(*args))
        sides["best options"] = _Side(lambda: best(*args))
    sides["fxkit"] = _Side(lambda: fast(*args), lambda: _keep(0))
    kept = config.current().pool_bytes
    sides["fxkit, kept memory"] = _Side(lambda: fast(*args), lambda: _keep(kept))
    return sides


def _keep(limit: int) -> None:
    """Bound the memory that fxkit keeps for the next call, in bytes."""
    module = binding.load()
    if module is not None:
        module.limit_memory(limit)


def _in_turn(sides: Mapping[str, _Side], rounds: int) -> dict[str, float]:
    """Return the median seconds of each side, called A B C A B C; two calls a turn, one timed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        for side in sides.values():
            side.call()
        for _ in range(rounds):
            for name, side in sides.items():
                side.before()
                side.call()
                start = time.perf_counter()
                side.call()
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _bandwidth() -> float:
    """Return the bytes per second of a copy, read and written."""
    source = torch.ones(1 << 22)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / best
