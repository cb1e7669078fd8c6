"""Graphs that torchao's quantizers made, read as they are: they lower and run as in eager."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import multiply_integers
from fxkit.quantization.affine import signal_to_noise


def part(name: str) -> Any:
    """Import a part of torchao, whose warnings about itself are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torchao.{name}")


pytest.importorskip("torchao", reason="torchao is not installed", exc_type=ImportError)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.export about itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(erase_node|Please use quant_min|must run observer)"),
]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        y = F.max_pool2d(F.relu(self.second(y) + y), 2)
        return self.head(y.mean((2, 3)))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1)
        self.narrow, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardtanh(self.deep(F.hardtanh(self.wide(x), 0, 6)), 0, 6)
        return self.head(F.adaptive_avg_pool2d(self.narrow(y), 1).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in self.projections)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(mixed))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(4, 8, 5, padding=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(torch.cat([self.short(x), self.long(x)], 1)).mean(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (16, 64)),
    "residual": (Residual, (2, 3, 16, 16)),
    "depthwise": (Depthwise, (2, 4, 16, 16)),
    "attention": (Attention, (2, 6, 32)),
    "joined": (Joined, (2, 4, 20)),
}


def x86(is_dynamic: bool = False) -> Any:
    kind = part("quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = kind.X86InductorQuantizer()
    return quantizer.set_global(
        kind.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    )


def xnnpack(is_dynamic: bool = False) -> Any:
    kind = part("testing.pt2e._xnnpack_quantizer")
    quantizer = kind.XNNPACKQuantizer()
    config = kind.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=is_dynamic)
    return quantizer.set_global(config)


def least_and_largest() -> Any:
    """Return the x86 quantizer with observers of the least and largest value."""
    kind = part("quantization.pt2e.quantizer.x86_inductor_quantizer")
    observers = part("quantization.pt2e.observer")
    given = kind.get_default_x86_inductor_quantization_config()
    spec = dataclasses.replace(
        given.input_activation, observer_or_fake_quant_ctr=observers.MinMaxObserver
    )
    config = dataclasses.replace(given, input_activation=spec, output_activation=spec)
    return kind.X86InductorQuantizer().set_global(config)


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "x86": x86,
    "x86, dynamic": lambda: x86(True),
    "xnnpack": xnnpack,
    "xnnpack, dynamic": lambda: xnnpack(True),
}


def converted(model: nn.Module, shape: tuple[int, ...], quantizer: Callable[[], Any]) -> Any:
    """Return the graph that torchao makes of a model."""
    steps = part("quantization.pt2e.quantize_pt2e")
    torch.manual_seed(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported: Any = torch.export.export(model, (torch.randn(shape),)).module()
        prepared = steps.prepare_pt2e(exported, quantizer())
        for _ in range(3):
            prepared(torch.randn(shape))
        return steps.convert_pt2e(prepared)


def model_named(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build().eval(), shape


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_torchao_run_as_in_eager(name: str, quantizer: str) -> None:
    model, shape = model_named(name)
    graph = converted(model, shape, QUANTIZERS[quantizer])
    fast = fxkit.compile(graph)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(shape)
            expected, found = graph(x), fast(x)
            step = (expected.amax() - expected.amin()) / 255
            assert bool(((found - expected).abs() <= step).all())
            assert float(((found - expected).abs() > 1e-4).double().mean()) < 0.05
            assert signal_to_noise(model(x), found) > 15


def test_linear_layers_of_torchao_multiply_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply_integers, "reason_to_stay_float", lambda *_, **__: None)
    model, shape = model_named("perceptron")
    for quantizer in QUANTIZERS.values():
        fast = fxkit.compile(converted(model, shape, quantizer))
        with torch.no_grad():
            for _ in range(2):
                fast(torch.randn(shape))
        nodes = fast.compiled_modules[-1].graph_module.graph.nodes
        assert sum("integer_product" in str(node.target) for node in nodes) == 2


def test_the_same_spec_gives_the_same_graph() -> None:
    """Observers of least and largest values on both sides; SQNR within 0.1 dB."""
    for name in ("perceptron", "attention"):
        model, shape = model_named(name)
        theirs = converted(model, shape, least_and_largest)
        torch.manual_seed(1)
        torch.randn(shape)
        batches = [(torch.randn(shape),) for _ in range(3)]
        weights = q.TensorSpec(torch.int8, -128, 127, "symmetric", "per_channel")
        spec = q.QuantizationSpec(q.int8_static(observer="min_max").activations, weights)
        config = q.QuantizationConfig(spec)
        ours = q.quantize(model, config, batches)
        with torch.no_grad():
            x = torch.randn(shape)
            expected = model(x)
            both = [signal_to_noise(expected, graph(x)) for graph in (ours, theirs)]
        assert abs(both[0] - both[1]) < 0.1


class Affine(nn.Module):
    """A layer of torchao's affine operators, with a weight in blocks, and tokens where dynamic."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, block: list[int], is_dynamic: bool) -> None:
        super().__init__()
        part("quantization.quant_primitives")
        self.block, self.is_dynamic = block, is_dynamic
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        parts = weight.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        scale = parts.abs().amax((1, 3)) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", torch.zeros_like(scale, dtype=torch.int64))
        limits = (torch.int8, -127, 127)
        quantise = torch.ops.torchao.quantize_affine
        stored = quantise(weight, block, scale, self.zero_point, *limits)
        self.register_buffer("weight", stored)

    def forward(self, x: Tensor) -> Tensor:
        ops, limits = torch.ops.torchao, (torch.int8, -128, 127)
        if self.is_dynamic:
            token = [1, x.shape[-1]]
            types = (None, torch.float32, torch.int64)
            found = ops.choose_qparams_affine(x, "ASYMMETRIC", token, *limits, *types)
            integers = ops.quantize_affine(x, token, *found, *limits)
            x = ops.dequantize_affine(integers, token, *found, *limits)
        weight = ops.dequantize_affine(
            self.weight, self.block, self.scale, self.zero_point, torch.int8, -127, 127
        )
        return F.linear(x, weight).relu()


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("block", [[1, 64], [1, 16], [32, 64]], ids=["rows", "groups", "whole"])
def test_affine_operators_of_torchao_lower_as_they_are(block: list[int], is_dynamic: bool) -> None:
    model = Affine(block, is_dynamic).eval()
    fast = fxkit.compile(model)
    with torch.no_grad():
        for rows in (3, 48):
            for _ in range(2):
                x = torch.randn(rows, 64)
                expected, found = model(x), fast(x)
                step = (expected.amax() - expected.amin()) / 255
                assert bool(((found - expected).abs() <= step).all())
    assert fast.compiled_modules
