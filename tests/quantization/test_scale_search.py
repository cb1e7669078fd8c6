"""Scales by the error of what layers multiply: less is lost than with least and largest values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from tests.quantization.test_gptq import correlated, error


def spiked() -> nn.Sequential:
    """Return a model whose rows have a few weights far from the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[:, 3] *= 4
    return model


SPECS = {
    "groups": q.int4_weight_only(32),
    "symmetric groups": q.int4_weight_only(32, scheme="symmetric"),
    "channels": q.QuantizationSpec(
        None, q.TensorSpec(torch.int8, -7, 7, "symmetric", "per_channel")
    ),
    "whole": q.QuantizationSpec(None, q.TensorSpec(torch.int8, -7, 7, "symmetric", "per_tensor")),
}


@pytest.mark.parametrize("name", SPECS)
def test_scales_that_cut_off_lose_less(name: str) -> None:
    model, data = spiked(), correlated(6, 100, 64)
    prepared = q.prepare(model, data[0], SPECS[name])
    plain = error(model, prepared, data[4:])
    rows = q.fit_scales(prepared, data[:4])
    assert [row.path for row in rows] == ["0.weight", "2.weight"]
    assert all(row.after >= row.before for row in rows)
    assert error(model, prepared, data[4:]) > plain


def test_gptq_goes_on_from_the_scales() -> None:
    model, data = spiked(), correlated(6, 100, 64)
    both = q.prepare(model, data[0], q.int4_weight_only(32))
    fitted = [row.after for row in q.fit_scales(both, data[:4])]
    scales = {path: one.parameters.scale for path, one in both.choices.weights.items()}
    rows = q.gptq(both, data[:4])
    assert all(row.after > before for row, before in zip(rows, fitted, strict=True))
    for path, scale in scales.items():
        assert torch.equal(both.choices.weights[path].parameters.scale, scale)


def test_convolutions_and_pair_safe_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    data = [(torch.randn(4, 4, 12, 12),) for _ in range(3)]
    four = q.TensorSpec(torch.int8, -7, 7, "symmetric", "per_channel")
    prepared = q.prepare(model, data[0], q.QuantizationSpec(None, four))
    assert all(row.after >= row.before for row in q.fit_scales(prepared, data))
    safe = q.prepare(model, data[0], q.int8_static(pair_safe=True))
    assert all(row.after == row.before for row in q.fit_scales(safe, data))


def test_bad_shares_are_told() -> None:
    prepared = q.prepare(spiked(), (torch.randn(2, 64),), q.int4_weight_only(32))
    with pytest.raises(UnsupportedError, match="share above 0 and up to 1, got 24 and 0"):
        q.fit_scales(prepared, [(torch.randn(2, 64),)], least=0)
    with pytest.raises(UnsupportedError, match=r"batches"):
        q.fit_scales(prepared, [])
