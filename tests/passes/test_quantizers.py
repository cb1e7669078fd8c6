"""Modules of torch that observe tensors or quantise them as if, in everything that runs passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

import fxkit
from fxkit.ir.types import TensorType, type_of
from fxkit.lower import to_cpp
from fxkit.passes.pipelines import SIMPLIFY

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def layers(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), middle, nn.ReLU(), nn.Linear(8, 3))


def per_channel() -> nn.Module:
    return quantization.FakeQuantize(
        quantization.PerChannelMinMaxObserver, -128, 127, dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=0,
    )  # fmt: skip


def prepared() -> nn.Module:
    """Return a model whose layers call observers in hooks."""
    model = nn.Sequential(quantization.QuantStub(), *layers(nn.Identity())).eval()
    model.qconfig = quantization.get_default_qconfig("x86")  # type: ignore[assignment]
    return quantization.prepare(model)


def prepared_for_training() -> nn.Module:
    """Return a model whose layers quantise their weights as if."""
    model = nn.Sequential(quantization.QuantStub(), *layers(nn.Identity())).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return quantization.prepare_qat(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fake": lambda: layers(quantization.FakeQuantize()),
    "fused": lambda: layers(quantization.FusedMovingAvgObsFakeQuantize()),
    "channels": lambda: layers(per_channel()),
    "observer": lambda: layers(quantization.MinMaxObserver()),
    "histogram": lambda: layers(quantization.HistogramObserver()),
    "prepared": prepared,
    "training": prepared_for_training,
}


def settled(name: str) -> nn.Module:
    """Return a model that has seen its input, and observes no more."""
    model = MODELS[name]()
    model(X)
    model.apply(quantization.disable_observer)
    return model


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_types_are_found_and_passes_run(name: str) -> None:
    model = settled(name)
    gm = fxkit.symbolic_trace(model)
    result = fxkit.PassManager(SIMPLIFY, args=(X,), verify="each").run(gm)
    known: Any = fxkit.propagate_types(result.graph_module, (X,))
    assert isinstance(known, TensorType) and known.shape == (4, 3)
    torch.testing.assert_close(result.graph_module(X), model(X))
    lowered = to_cpp(fxkit.symbolic_trace(model), (X,))
    torch.testing.assert_close(lowered(X), model(X))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_quantizer_is_one_call_and_as_it_was() -> None:
    model = layers(per_channel())
    before = [dict(part.__dict__) for part in model.modules()]
    gm = fxkit.symbolic_trace(model)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["0", "1", "2", "3"]
    fxkit.propagate_types(gm, (X,))
    assert [set(part.__dict__) for part in model.modules()] == [set(b) for b in before]
    assert not model[1].activation_post_process.min_val.numel()  # it has seen no tensor
    (node,) = (n for n in gm.graph.nodes if n.target == "1")
    expanded = fxkit.symbolic_trace(model[1:2])
    known: Any = fxkit.propagate_types(expanded, (X[:1].expand(4, 6),))
    assert known.stride == (6, 1)
    assert type_of(node) == TensorType((4, 8), torch.float32, (8, 1), X.device, True)
