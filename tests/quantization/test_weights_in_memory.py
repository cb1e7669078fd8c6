"""How many bytes the weights of a compiled quantised graph take, in memory and in a file."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import nn

import fxkit
from fxkit import quantization as q

LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(1024, 768), nn.Linear(768, 512)), (40, 1024)),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(512, 768, 1), nn.Conv2d(768, 512, 1)),
        (1, 512, 9, 9),
    ),
}
SPECS = {
    "static": (q.int8_static(), 0.30),
    "weights": (q.int8_weight_only(), 0.30),
    "int4": (q.int4_weight_only(128), 0.17),
    "int4 and bytes": (q.int4_dynamic(128), 0.17),
}


def storages() -> dict[int, int]:
    """Return the bytes of all memory that tensors hold, by address."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter)  # no fake tensors
    found = (one for one in gc.get_objects() if type(one) in kinds)
    dense = (one for one in found if one.layout is torch.strided and one.device.type == "cpu")
    held = [one.untyped_storage() for one in dense]
    return {one.data_ptr(): one.nbytes() for one in held}


def float_bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if one.ndim > 1)


@pytest.mark.parametrize(
    ("layers", "spec"), [*(("linear", spec) for spec in SPECS), ("pixels", "static")]
)
@torch.no_grad()
def test_compiled_graphs_hold_weights_once(layers, spec):
    make, shape = LAYERS[layers]
    model, x = make().eval(), torch.randn(shape)
    before, bytes_as_floats = storages(), float_bytes(model)
    weights, most = SPECS[spec]
    quantized = fxkit.quantize(model, weights, [(x,)]).graph_module
    del model
    compiled = fxkit.compile(quantized)
    for _ in range(3):
        compiled(x)
    held = {place: size for place, size in storages().items() if place not in before}
    assert sum(held.values()) <= most * bytes_as_floats
    file = io.BytesIO()
    torch.export.save(torch.export.export(quantized, (x,)), file)
    assert file.tell() <= most * bytes_as_floats + 60_000
