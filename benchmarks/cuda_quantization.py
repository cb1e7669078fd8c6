"""Quantised programs on a GPU beside float32, and beside torchao where it is installed."""

from __future__ import annotations

import copy
import importlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import fxkit
from benchmarks.cuda import seconds_a_call
from fxkit import quantization as q
from fxkit.quantization.affine import signal_to_noise
from fxkit.view.texts.text_table import duration, table

Way = Callable[..., Any]

SPECS: Mapping[str, q.QuantizationSpec] = {
    "int8 static": q.int8_static(),
    "int8 dynamic": q.int8_dynamic(),
    "int8 weights only": q.int8_weight_only(),
}


def _mlp(width: int, inner: int) -> nn.Module:
    layers = (nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, inner), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(inner, width))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


CASES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 512-2048-2048-512, 128 rows": (lambda: _mlp(512, 2048), (128, 512)),
    "MLP 4096-4096-4096-4096, 4096 rows": (lambda: _mlp(4096, 4096), (4096, 4096)),
    "4 encoder layers of 1024, 32 × 128 tokens": (_encoder, (32, 128, 1024)),
}


def run(rounds: int, *, with_peer: bool) -> str:
    """Quantise each model in each way, and return a table; without a GPU, say that there is none.

    Args:
        rounds: How often each way is timed.
        with_peer: Whether torch.compile and torchao take part.
    """
    if not torch.cuda.is_available():
        return "no GPU is at hand: nothing was timed"
    rows = [row for name in CASES for row in _rows(name, rounds, with_peer)]
    headers = [torch.cuda.get_device_name(), "way", "median", "× eager float32", "dB"]
    return table(headers, rows, align="<<>>>")


@torch.no_grad()
def _rows(name: str, rounds: int, with_peer: bool) -> list[list[str]]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = make().eval().cuda().requires_grad_(False)
    batches = [(torch.randn(*shape, device="cuda"),) for _ in range(3)]
    inputs = (torch.randn(*shape, device="cuda"),)
    ways: dict[str, Way] = {"eager, float32": model, "fxkit, float32": fxkit.compile(model)}
    for spec, chosen in SPECS.items():
        ways[f"fxkit, {spec}"] = fxkit.compile(fxkit.quantize(model, chosen, batches))
    if with_peer:
        ways["torch.compile, float32"] = torch.compile(copy.deepcopy(model))
        ways |= _torchao(model, inputs)
    exact = model(*inputs)
    for way in ways.values():
        for _ in range(3):  # the first call runs the program itself
            way(*inputs)
    noise = {way: signal_to_noise(exact, call(*inputs)) for way, call in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            times[way].append(seconds_a_call(call, inputs, calls=20))
    seconds = {way: statistics.median(taken) for way, taken in times.items()}
    eager = seconds["eager, float32"]
    return [
        [name, way, duration(took), f"{eager / took:.2f}", f"{noise[way]:.1f}"]
        for way, took in seconds.items()
    ]


def _torchao(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Way]:
    """Return the model as torchao quantises it, compiled by Inductor, if it is installed."""
    try:
        ao = importlib.import_module("torchao.quantization")
        small = copy.deepcopy(model)
        ao.quantize_(small, ao.Int8DynamicActivationInt8WeightConfig())
        compiled = torch.compile(small)
        compiled(*inputs)
    except ImportError:
        return {}
    except Exception as error:
        print(f"torchao does not take this model: {str(error).splitlines()[0][:120]}")
        return {}
    return {"torchao, int8 dynamic, Inductor": compiled}
