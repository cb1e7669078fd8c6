"""Transposed convolutions: left in floating point unless a config names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.quantization.affine import signal_to_noise

of_nothing = pytest.mark.filterwarnings("ignore:expected operators to quantise")

_LAYERS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OPERATORS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def upsampler(rank: int, groups: int) -> nn.Module:
    layer = _LAYERS[rank - 1]
    wide = layer(8, 16, 3, stride=2, padding=1, output_padding=1, groups=groups)
    return nn.Sequential(wide, nn.ReLU(), layer(16, 4, 2, stride=2)).eval()


def batches_of(rank: int) -> list[tuple[Tensor]]:
    return [(torch.randn(2, 8, *(6,) * rank),) for _ in range(3)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        q.int8_static,
        q.int8_weight_only,
        lambda: q.int8_static(weights="per_tensor"),
        lambda: q.int8_static(activations="per_tensor", weights="per_channel"),
    ],
    ids=["static", "weight only", "per tensor", "per channel"],
)
@torch.no_grad()
def test_a_config_may_name_them(
    rank: int, groups: int, make: Callable[[], q.QuantizationSpec]
) -> None:
    model, batches = upsampler(rank, groups), batches_of(rank)
    config = q.QuantizationConfig(None, by_operator={_OPERATORS[rank - 1]: make()})
    prepared = q.prepare(model, batches[0], config)
    exact = model(*batches[0])
    assert torch.equal(prepared(*batches[0]), exact)
    q.calibrate(prepared, batches)
    quantized = q.convert(prepared)
    found = quantized(*batches[0])
    assert signal_to_noise(exact, found) > 35
    assert all(row.how.startswith("weight s8") for row in q.report(quantized, prepared).rows)
    compiled = fxkit.compile(quantized)
    compiled(*batches[0])
    torch.testing.assert_close(compiled(*batches[0]), found)


@of_nothing
def test_they_stay_in_float_with_a_reason() -> None:
    model, batches = upsampler(2, 1), batches_of(2)
    prepared = q.prepare(model, batches[0], q.int8_static())
    q.calibrate(prepared, batches)
    for row in q.report(q.convert(prepared), prepared).rows:
        assert row.how == "float"
        assert "no integer kernel computes transposed convolutions" in str(row.reason)


def test_they_are_trained_with_fake_quantisation() -> None:
    torch.manual_seed(0)
    model, batches = upsampler(2, 2).train(), batches_of(2)
    config = q.QuantizationConfig(None, by_operator={F.conv_transpose2d: q.int8_static()})
    trained = q.prepare_qat(model, batches[0], config)
    for batch in batches:
        trained(*batch).square().mean().backward()
    assert all(p.grad is not None for p in trained.parameters())
    found = q.convert(trained)(*batches[0])
    assert signal_to_noise(trained(*batches[0]).detach(), found.detach()) > 35
