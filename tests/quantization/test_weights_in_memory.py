"""How many bytes the weights of a compiled quantised graph take, in memory and in a file."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import nn

import fxkit
from fxkit import quantization as q

pytestmark = pytest.mark.usefixtures("few_objects")

LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(1024, 768), nn.Linear(768, 512)), (40, 1024)),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(512, 768, 1), nn.Conv2d(768, 512, 1)),
        (1, 512, 9, 9),
    ),
    "windows": (
        lambda: nn.Sequential(nn.Conv2d(128, 160, 3, padding=1), nn.ReLU(), nn.Conv2d(160, 96, 5)),
        (1, 128, 14, 14),
    ),
    "steps": (
        lambda: nn.Sequential(nn.Conv2d(96, 160, 3, 2), nn.Conv2d(160, 160, (3, 2), (1, 2))),
        (1, 96, 29, 29),
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(256, 256, 3, groups=4), nn.Conv2d(256, 256, 3, groups=2)),
        (1, 256, 14, 14),
    ),
    "each channel": (
        lambda: nn.Sequential(
            nn.Conv2d(4096, 4096, 5, groups=4096), nn.Conv2d(4096, 4096, 3, 2, groups=4096)
        ),
        (1, 4096, 14, 14),
    ),
    "samples": (
        lambda: nn.Sequential(nn.Conv1d(256, 256, 9), nn.Conv1d(256, 96, 5, 2)),
        (2, 256, 99),
    ),
}
SPECS = {
    "static": (q.int8_static(), 0.30),
    "weights": (q.int8_weight_only(), 0.30),
    "int4": (q.int4_weight_only(128), 0.17),
    "int4 and bytes": (q.int4_dynamic(128), 0.17),
    "float8": (q.float8_weight_only(), 0.27),
    "bfloat16": (q.bfloat16_weight_only(), 0.51),
}


def storages(*dtypes: torch.dtype) -> dict[int, int]:
    """Return the bytes of all memory that tensors of some types, or all, hold, by address."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter)  # no fake tensors
    found = (one for one in gc.get_objects() if type(one) in kinds)
    dense = (one for one in found if one.layout is torch.strided and one.device.type == "cpu")
    held = [one.untyped_storage() for one in dense if not dtypes or one.dtype in dtypes]
    return {one.data_ptr(): one.nbytes() for one in held}


def float_bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if one.ndim > 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layers", "spec"),
    [
        *(("linear", spec) for spec in SPECS),
        *((layers, "static") for layers in LAYERS if layers != "linear"),
        *(("windows", spec) for spec in ("weights", "float8", "bfloat16")),
    ],
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
    integers = {at: size for at, size in storages(torch.int8).items() if at not in before}
    assert sum(integers.values()) <= bytes_as_floats / 4
    if layers == "each channel":  # a scale and a bias take as much as some elements of a window
        return
    held = {place: size for place, size in storages().items() if place not in before}
    assert sum(held.values()) <= most * bytes_as_floats
    file = io.BytesIO()
    torch.export.save(torch.export.export(quantized, (x,)), file)
    assert len(file.getvalue()) <= most * bytes_as_floats + x.nbytes + 60_000


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_w1"])
@torch.no_grad()
def test_a_compiled_network_takes_less_than_a_third(name):
    from pytorchcv.model_provider import get_model

    before = storages()
    model, x = get_model(name).eval(), torch.randn(1, 3, 224, 224)
    bytes_as_floats = float_bytes(model)
    before |= dict.fromkeys([x.untyped_storage().data_ptr()], 0)
    quantized = fxkit.quantize(model, q.int8_static(), [(x,)]).graph_module
    del model
    compiled = fxkit.compile(quantized)
    for _ in range(2):
        compiled(x)
    held = {place: size for place, size in storages().items() if place not in before}
    assert sum(held.values()) <= 0.30 * bytes_as_floats
