"""Kernels on a GPU: their bandwidth over that of a copy, and what calls of small graphs cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.demo.judge import relative_error
from fxkit.lower import Policy, to_cuda
from fxkit.view.texts.text_table import table

# Calls that are timed together, where what counts is how fast they follow each other.
_CALLS = 200

# Bytes that are written between two calls, so that none finds its inputs in the cache.
_FLUSH = 256 << 20


@dataclass(frozen=True)
class Case:
    """A program and the shapes of its inputs.

    Attributes:
        name: What is computed.
        program: Computes it.
        shapes: Shapes of its inputs.
        dtype: Their dtype.
    """

    name: str
    program: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32


def _chain(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(1.5 * x + y) * torch.sigmoid(y) - torch.sqrt(x.abs())


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 0.125, -1)


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[-1:])


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _down(x: Tensor) -> Tensor:
    return (x * x).sum(0)


_HALF = torch.bfloat16
CASES = (
    Case("gelu chain 16384x4096", _chain, ((16384, 4096), (16384, 4096))),
    Case("gelu chain 16384x4096, bf16", _chain, ((16384, 4096), (16384, 4096)), _HALF),
    Case("softmax 65536x1024", _softmax, ((65536, 1024),)),
    Case("softmax 16384x4096", _softmax, ((16384, 4096),)),
    Case("softmax 2048x32768", _softmax, ((2048, 32768),)),
    Case("softmax 64x1048576", _softmax, ((64, 1 << 20),)),
    Case("layer_norm(x+y) 65536x1024", _layer_norm, ((65536, 1024), (65536, 1024))),
    Case("layer_norm(x+y) 16384x4096, bf16", _layer_norm, ((16384, 4096), (16384, 4096)), _HALF),
    Case("rms_norm 16384x4096", _rms_norm, ((16384, 4096), (4096,))),
    Case("rotary 8x32x4096x64", _rotary, ((8, 32, 4096, 64), (4096, 64), (4096, 64))),
    Case("sum of squares down 65536x1024", _down, ((65536, 1024),)),
)


def _one_kernel(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x * y + 1) * x


def _five_products(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(5):
        x = torch.softmax(torch.tanh(x * y + 1), -1) @ y
    return x


# Programs whose time is that of the calls, not of the kernels.
SMALL = (
    Case("four operators, 64x64", _one_kernel, ((64, 64), (64, 64))),
    Case("five times four and a product, 64x64", _five_products, ((64, 64), (64, 64))),
)


def run(rounds: int, *, with_peer: bool) -> str:
    """Time each case in turn and return two tables; without a GPU, say that there is none.

    Times are medians of calls, by events in the stream, with a cold cache. The bandwidth of a case
    is the bytes of its inputs and its result over its time; that of a copy is measured in the same
    turns, for as many bytes. Small programs are called again and again, and the GPU is waited for
    at the end; `recorded` is torch.compile that replays a recorded graph of launches.

    Args:
        rounds: Timed calls of each.
        with_peer: Whether torch.compile takes part.
    """
    if not torch.cuda.is_available():
        return "no GPU is at hand: nothing was timed"
    rows = [_row(case, rounds, with_peer) for case in CASES]
    title = f"{torch.cuda.get_device_name()}: GB/s, and their share of a copy's"
    headers = ["case", "copy", "eager", "torch.compile", "fxkit", "error over eager's"]
    wide = f"{title}\n{table(headers, rows, align='<>>>>>')}"
    rows = [_small_row(case, rounds, with_peer) for case in SMALL]
    headers = ["small program", "eager", "torch.compile", "recorded", "fxkit"]
    return f"{wide}\n\nmicroseconds a call\n{table(headers, rows, align='<>>>>')}"


def _small_row(case: Case, rounds: int, with_peer: bool) -> list[str]:
    args = tuple(torch.randn(*shape, device="cuda") for shape in case.shapes)
    ways: dict[str, Callable[..., Any]] = {
        "eager": case.program,
        "fxkit": fxkit.compile(case.program),
    }
    if with_peer:
        ways["torch.compile"] = torch.compile(case.program)
        ways["recorded"] = torch.compile(case.program, mode="reduce-overhead")
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for way in ways.values():
            seconds_a_call(way, args)
        for _ in range(rounds):
            for name, way in ways.items():
                times[name].append(seconds_a_call(way, args))
    names = ("eager", "torch.compile", "recorded", "fxkit")
    return [case.name, *(f"{statistics.median(times[n]) * 1e6:.1f}" if n in times else ""
                         for n in names)]  # fmt: skip


def seconds_a_call(way: Callable[..., Any], args: tuple[Tensor, ...], calls: int = _CALLS) -> float:
    """Return the seconds of a call, of many in a row that are waited for at the end."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        way(*args)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def _row(case: Case, rounds: int, with_peer: bool) -> list[str]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    args = tuple(
        torch.randn(*shape, generator=generator, device="cuda").to(case.dtype)
        for shape in case.shapes
    )
    gm = fxkit.capture(case.program, args).graph_module
    with torch.no_grad():
        module = to_cuda(gm, args, policy=Policy(min_members=1))
        ways: dict[str, Callable[[], Any]] = {
            "eager": lambda: case.program(*args),
            "fxkit": lambda: module(*args),
        }
        if with_peer:
            compiled = torch.compile(case.program)
            ways["torch.compile"] = lambda: compiled(*args)
        eager, ours = case.program(*args), module(*args)
        exact = case.program(*[arg.double() for arg in args])
        moved = sum(t.numel() * t.element_size() for t in (*args, eager))
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        ways["copy"] = lambda: target.copy_(source)
        errors = relative_error(ours, exact), relative_error(eager, exact)
        seconds = _in_turn(ways, rounds)
    copied = seconds["copy"]
    cells = [case.name, f"{moved / copied / 1e9:.0f}"]
    for way in ("eager", "torch.compile", "fxkit"):
        share = f" ({copied / seconds[way]:.0%})" if way in seconds else ""
        cells.append(f"{moved / seconds[way] / 1e9:.0f}{share}" if way in seconds else "")
    return [*cells, f"{errors[0] / errors[1]:.2f}" if errors[1] else f"{errors[0]:.1e}"]


def _in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way's calls."""
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}
