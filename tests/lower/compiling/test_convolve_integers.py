"""Quantised convolutions, compiled: their integers are convolved, and results are the graph's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import convolve_integers
from tests.sampling import one_in

SPECS = {
    "static": q.int8_static(),
    "symmetric": q.int8_static(scheme="symmetric"),
    "one scale": q.int8_static(weights="per_tensor"),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Convolve integers also where float32 is as fast."""
    monkeypatch.setattr(convolve_integers, "reason_to_stay_float", lambda _: None)


class Block(nn.Module):
    """A residual block, what follows it reads memory in order."""

    def __init__(self, channels: int = 20) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.second = nn.Conv2d(24, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(torch.relu_(self.norm(self.first(x))))
        return (inner + x).view(x.shape[0], -1)


LAYERS = {
    "windows": (nn.Conv2d(20, 33, 3, padding=1), (2, 20, 13, 11)),
    "steps and dilation": (
        nn.Conv2d(7, 10, (3, 5), (2, 1), (1, 3), dilation=(1, 2)),
        (1, 7, 15, 18),
    ),
    "single pixels": (nn.Conv2d(40, 30, 1, bias=False), (2, 40, 6, 7)),
    "single pixels apart": (nn.Conv2d(40, 30, 1, stride=2), (2, 40, 6, 7)),
    "each channel for itself": (nn.Conv2d(40, 40, 3, 2, padding=1, groups=40), (2, 40, 9, 10)),
    "each channel along one axis": (nn.Conv1d(24, 24, 7, groups=24), (2, 24, 50)),
    "groups of channels": (nn.Conv2d(24, 36, 3, 2, padding=1, groups=3), (2, 24, 9, 10)),
    "wide groups": (nn.Conv2d(130, 140, 3, padding=1, groups=2), (1, 130, 7, 5)),
    "groups of one channel": (nn.Conv2d(6, 12, 3, groups=6), (2, 6, 8, 9)),
    "groups along one axis": (nn.Conv1d(24, 16, 7, groups=4), (2, 24, 50)),
    "along columns": (nn.Conv2d(3, 16, (9, 1), (2, 1), padding=(4, 0)), (2, 3, 40, 1)),
    "along one axis": (nn.Conv1d(12, 30, 5, 2, padding=2, dilation=2), (3, 12, 40)),
    "one channel": (nn.Conv1d(1, 16, 64, 4), (2, 1, 512)),
}


def quantized(model: nn.Module, spec: q.QuantizationSpec, x: Tensor):
    return fxkit.quantize(model.eval(), spec, [(x,)])


def integers_convolved(compiled) -> int:
    graph = compiled.compiled_modules[-1].graph_module.graph
    return sum("integer_convolution" in str(node.target) for node in graph.nodes)


def steps_off(found: Tensor, expected: Tensor) -> Tensor:
    """Return how many steps apart results are, if they were quantised to 8 bits."""
    scale = float(expected.max() - expected.min()) / 255
    return ((found / scale).round() - (expected / scale).round()).abs()


@pytest.mark.parametrize(("spec", "name"), one_in(3, SPECS, LAYERS))
@torch.no_grad()
def test_a_layer_differs_by_a_step_at_most(name, spec):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    x = torch.randn(shape) + 0.3
    reference = quantized(layer, SPECS[spec], x)
    compiled = fxkit.compile(reference)
    compiled(x)  # the first call runs the program itself
    found, expected = compiled(x), reference(x)
    assert integers_convolved(compiled) == 1
    assert found.stride() == expected.stride() and found.dtype == expected.dtype
    steps = steps_off(found, expected)
    assert steps.max() <= 1 and float((steps != 0).double().mean()) <= 1e-3


@torch.no_grad()
def test_layers_hand_on_integers_with_channels_innermost():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 9, 10)
    model = Block()
    for _ in range(3):
        model(x)
    reference = quantized(model, q.int8_static(), x)
    compiled = fxkit.compile(reference)
    compiled(x)
    found, expected = compiled(x), reference(x)
    assert integers_convolved(compiled) == 2
    assert found.stride() == expected.stride()
    assert steps_off(found, expected).max() <= 1
    (module,) = compiled.compiled_modules
    kernel = next(k for k in module.kernels.values() if k.tensor_op and "3, 3" in str(k.tensor_op))
    assert [b.dtype for b in kernel.buffers if b.is_output] == [torch.uint8]


@torch.no_grad()
def test_weights_may_change():
    x = torch.randn(1, 20, 9, 10)
    reference = quantized(nn.Conv2d(20, 24, 3), q.int8_static(), x)
    compiled = fxkit.compile(reference)
    before = [compiled(x) for _ in range(2)][-1]
    (weight,) = [
        buffer
        for buffer in compiled.compiled_modules[-1].graph_module.buffers()
        if buffer.dtype == torch.int8
    ]
    bias = reference.graph_module.get_parameter("bias")[:, None, None]
    weight.neg_()
    assert steps_off(compiled(x), 2 * bias - before).max() <= 1


@torch.no_grad()
def test_weights_in_another_order_are_copied_once():
    x = torch.randn(1, 20, 9, 10)
    for order in (torch.contiguous_format, torch.channels_last):
        reference = quantized(nn.Conv2d(20, 24, 3), q.int8_static(), x).graph_module
        (stored,) = (b for b in reference.buffers() if b.dtype == torch.int8)
        (whole,) = fxkit.graph(reference).find(torch.clone)
        weight = stored.movedim(-1, 1).contiguous(memory_format=order)
        with fxkit.edit(reference) as edit:  # as other quantizers store it
            node = edit.add_attribute("weight_of_others", weight, before=whole.fx_node)
            edit.replace(whole.fx_node, node)
        compiled = fxkit.compile(reference)
        compiled(x)
        assert steps_off(compiled(x), reference(x)).max() <= 1
        is_copied = "innermost_weight" in str(compiled.compiled_modules[-1].graph_module.graph)
        assert is_copied == (order is torch.contiguous_format)


@torch.no_grad()
def test_what_can_not_be_convolved_stays():
    """Convolutions that turn a step around stay in float32, beside layers that don't."""
    x = torch.randn(2, 20, 9, 10)
    model = nn.Sequential(nn.Conv2d(20, 20, 3), nn.ReLU(), nn.ConvTranspose2d(20, 20, 3))
    reference = quantized(model, q.int8_static(), x)
    compiled = fxkit.compile(reference)
    compiled(x)
    found, expected = compiled(x), reference(x)
    assert integers_convolved(compiled) == 1
    assert found.stride() == expected.stride()
    assert steps_off(found, expected).max() <= 1
