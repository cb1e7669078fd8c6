"""Layers whose weights have 4 bits, two to a byte: compiled, they are read as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import multiply_integers
from fxkit.passes import ConstantFolding

INT4 = q.int4_weight_only(32)
SPECS = {
    "floats": INT4,
    "floats, symmetric": q.int4_weight_only(32, scheme="symmetric"),
    "static": q.QuantizationSpec(q.int8_static().activations, INT4.weights),
    "dynamic": q.int4_dynamic(32),
    "dynamic, symmetric": q.int4_dynamic(32, scheme="symmetric"),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Multiply integers also where float32 is as fast."""
    monkeypatch.setattr(multiply_integers.groups, "reason_to_stay_float", lambda *_: None)


def quantized(model: nn.Module, spec: q.QuantizationSpec, x: Tensor):
    return fxkit.quantize(model.eval(), spec, [(x,)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", [(12, 96), (2, 5, 96), (1, 96), (96,)])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_results_are_those_of_the_graph(spec, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 40, bias=False))
    reference = quantized(model, SPECS[spec], x)
    compiled = fxkit.compile(reference)
    compiled(x)  # the first call runs the program itself
    found, expected = compiled(x), reference(x)
    nodes = compiled.compiled_modules[-1].graph_module.graph.nodes
    assert sum("int4_product" in str(node.target) for node in nodes) == 2
    assert not any("dequantize_per_channel_group" in str(node.target) for node in nodes)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 2e-3


@torch.no_grad()
def test_constants_are_not_unpacked():
    reference = quantized(nn.Linear(96, 64), INT4, torch.randn(3, 96)).graph_module
    before = {name: buffer.nbytes for name, buffer in reference.named_buffers()}
    manager = fxkit.PassManager([ConstantFolding(fold_parameters=True)])
    manager.run(reference)
    assert {name: buffer.nbytes for name, buffer in reference.named_buffers()} == before
    assert before["weight_quantized"] == 64 * 96 // 2


@torch.no_grad()
def test_weights_are_read_at_each_call():
    x = torch.randn(2, 96)
    reference = quantized(nn.Linear(96, 64), INT4, x).graph_module
    compiled = fxkit.compile(reference)
    compiled(x)
    before = compiled(x)
    reference.get_buffer("weight_quantized").bitwise_not_()
    assert not torch.allclose(before, compiled(x))
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [5, 15])
@torch.no_grad()
def test_groups_of_odd_sizes_take_a_byte_each(size):
    x = torch.randn(2, 45)
    reference = quantized(nn.Linear(45, 64), q.int4_weight_only(size), x).graph_module
    assert reference.get_buffer("weight_quantized").shape == (64, 45)
    compiled = fxkit.compile(reference)
    compiled(x)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)
