"""Quantised programs beside float32 and torch's dynamic quantisation: speed and noise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from benchmarks import crepe
from benchmarks.decoder import Decoder, step_inputs
from benchmarks.quantization_peers import peers
from fxkit import quantization as q
from fxkit.demo.model import load
from fxkit.demo.sentences import ALL
from fxkit.quantization.affine import signal_to_noise
from fxkit.timing import in_turn
from fxkit.view.texts.text_table import duration, table

Inputs = tuple[torch.Tensor, ...]

SPECS: Mapping[str, q.QuantizationSpec] = {
    "int8 static": q.int8_static(),
    "int8 dynamic": q.int8_dynamic(),
    "int8 weights only": q.int8_weight_only(),
    "int4 weights, int8 dynamic": q.int4_dynamic(),
    "int4 weights only": q.int4_weight_only(),
    "e4m3 weights only": q.float8_weight_only(),
    "e5m2 weights only": q.float8_weight_only(torch.float8_e5m2),
    "bfloat16 weights only": q.bfloat16_weight_only(),
}


_FLOATS = ("e4m3 weights only", "e5m2 weights only", "bfloat16 weights only")


@dataclass(frozen=True)
class Case:
    """A model, and what it is calibrated with and judged by.

    Attributes:
        name: What it is called.
        make: Returns the model, the batches to calibrate with, and the inputs to time and judge.
        specs: Names of the specs that suit it.
        judge: Returns, of a result, what else tells how good it is, if anything.
    """

    name: str
    make: Callable[[], tuple[nn.Module, list[Inputs], Inputs]]
    specs: tuple[str, ...] = ("int8 static", "int8 dynamic")
    judge: Callable[[torch.Tensor], str] | None = None


def run(rounds: int, *, with_peer: bool, case: str | None = None) -> str:
    """Quantise each model in each way that suits it, and return a table; one thread.

    Args:
        rounds: How often each way is timed.
        with_peer: Whether other quantisers are timed, too.
        case: The only one to run, by the beginning of its name.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [one for one in CASES if one.name.startswith(case or "")]
        cases = [one for one in cases if one is not _CREPE or crepe.tiny() is not None]
        rows = [row for one in cases for row in _rows(one, rounds, with_peer)]
    finally:
        torch.set_num_threads(threads)
    headers = ["one thread", "way", "median", "× eager float32", "dB", "error"]
    return table(headers, rows, align="<<>>>>")


@torch.no_grad()
def _rows(case: Case, rounds: int, with_peer: bool) -> list[list[str]]:
    torch.manual_seed(0)
    model, batches, inputs = case.make()
    ways: dict[str, Callable[..., Any]] = {"eager, float32": model}
    ways["fxkit, float32"] = fxkit.compile(model)
    for name in case.specs:
        config = q.QuantizationConfig(SPECS[name], by_operator={F.embedding: None})
        ways[f"fxkit, {name}"] = fxkit.compile(fxkit.quantize(model, config, batches))
    if with_peer and (peer := _torchs_own(model)) is not None:
        ways["torch quantize_dynamic"] = peer
    if with_peer:
        ways |= peers(copy.deepcopy(model), batches, inputs)  # some change what they are given
    exact = model(*inputs)
    for way in ways.values():
        for _ in range(2):  # the first call runs the program itself
            way(*inputs)
    results = {name: way(*inputs) for name, way in ways.items()}
    noise = {name: signal_to_noise(exact, found) for name, found in results.items()}
    judged = {name: case.judge(found) if case.judge else "" for name, found in results.items()}
    seconds = in_turn({n: _called(way, inputs) for n, way in ways.items()}, rounds=rounds)
    eager = seconds["eager, float32"]
    return [
        [case.name, name, duration(took), f"{eager / took:.2f}", f"{noise[name]:.1f}", judged[name]]
        for name, took in seconds.items()
    ]


def _called(way: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return way(*inputs)

    return call


def _torchs_own(model: nn.Module) -> nn.Module | None:
    """Return the model with torch's dynamically quantised layers; None where torch has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    except (AttributeError, RuntimeError):
        return None


def _mlp() -> tuple[nn.Module, list[Inputs], Inputs]:
    first, middle, last = nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 512)
    model = nn.Sequential(first, nn.GELU(), middle, nn.GELU(), last).eval()
    batches: list[Inputs] = [(torch.randn(128, 512),) for _ in range(4)]
    return model, batches, (torch.randn(128, 512),)


def _layer(rows: int, width: int) -> Callable[[], tuple[nn.Module, list[Inputs], Inputs]]:
    def make() -> tuple[nn.Module, list[Inputs], Inputs]:
        batches: list[Inputs] = [(torch.randn(rows, width),) for _ in range(4)]
        return nn.Sequential(nn.Linear(width, width)).eval(), batches, (torch.randn(rows, width),)

    return make


def _sentences() -> tuple[nn.Module, list[Inputs], Inputs]:
    """Calibrate with every other sentence of the demo, and judge by the others, twice each."""
    demo = load()
    seen, judged = ALL[::2], ALL[1::2] * 2
    batches: list[Inputs] = [demo.inputs(seen[at : at + 8]) for at in range(0, len(seen), 8)]
    return demo.encoder, batches, demo.inputs(judged)


def _decode_step() -> tuple[nn.Module, list[Inputs], Inputs]:
    model = Decoder().eval().requires_grad_(False)
    return model, [step_inputs() for _ in range(4)], step_inputs()


def _network(name: str) -> Callable[[], tuple[nn.Module, list[Inputs], Inputs]]:
    """Return what makes a network with random weights; batch norms have seen some images."""

    def make() -> tuple[nn.Module, list[Inputs], Inputs]:
        from pytorchcv.model_provider import get_model

        model = get_model(name).train()
        for _ in range(2):
            model(torch.randn(8, 3, 224, 224))
        batches: list[Inputs] = [(torch.randn(1, 3, 224, 224),) for _ in range(4)]
        return model.eval().requires_grad_(False), batches, (torch.randn(1, 3, 224, 224),)

    return make


def _pitches() -> tuple[nn.Module, list[Inputs], Inputs]:
    """Calibrate with some tones, and judge by others."""
    model = crepe.tiny()
    assert model is not None
    batches: list[Inputs] = [(crepe.tones(_FRAMES, seed)[0],) for seed in range(1, 5)]
    return model.requires_grad_(False), batches, (crepe.tones(_FRAMES, 0)[0],)


def _cents_off(likely: torch.Tensor) -> str:
    errors = (crepe.pitch_of(likely) - crepe.tones(_FRAMES, 0)[1]).abs()
    return f"{float(errors.median()):.1f} cents"


_FRAMES = 100
_CREPE = Case(f"CREPE tiny, {_FRAMES} tones", _pitches, ("int8 static",), _cents_off)

CASES = (
    Case(
        "MLP 512-2048-2048-512, 128 rows",
        _mlp,
        ("int8 static", "int8 dynamic", *_FLOATS),
    ),
    Case("linear 1024 × 1024, 32 rows", _layer(32, 1024)),
    Case(
        "linear 4096 × 4096, 1 row",
        _layer(1, 4096),
        tuple(name for name in SPECS if name not in _FLOATS),
    ),
    Case("all-MiniLM-L6-v2, 48 sentences", _sentences),
    Case(
        "decoder of 4 layers of 1024, 1 token after 128",
        _decode_step,
        ("int8 static", "int8 dynamic", "int8 weights only", "int4 weights, int8 dynamic"),
    ),
    Case("resnet18, 1 image", _network("resnet18"), ("int8 static",)),
    Case("mobilenetv2, 1 image", _network("mobilenetv2_w1"), ("int8 static",)),
    _CREPE,
)
