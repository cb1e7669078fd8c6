"""Pair-safe scales: sums of two products with bytes stay in 16 bits, provably."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit import cpu_info
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise
from fxkit.quantization.pair_safe import LARGEST_SUM, is_pair_safe, largest_pairs, made_pair_safe
from fxkit.quantization.qat.fake_quantizer import FakeQuantizer, FakeQuantizerOptions
from fxkit.quantization.stored_weight import StoredWeight, shared_axes

SPEC = q.int8_static(pair_safe=True).weights
PLAIN = q.int8_static(pair_safe=False).weights


def saturates(integers: Tensor) -> bool:
    """Tell whether any sum of two neighbouring products with 0 or 255 leaves 16 bits."""
    pairs = nn.functional.pad(integers.int(), (0, integers.shape[1] % 2)).unflatten(1, (-1, 2))
    sums = [255 * (a * pairs[..., 0] + b * pairs[..., 1]) for a in (0, 1) for b in (0, 1)]
    return any(bool(((one < -(2**15)) | (one >= 2**15)).any()) for one in sums)


@pytest.mark.parametrize("seed", range(8))
def test_no_sum_of_two_products_saturates(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(16, 33) ** 3 * 10.0 ** torch.randint(-6, 6, (16, 1))
    weight[3] = 0
    weight[4, :2] = 5.0
    assert saturates(StoredWeight.of(weight, 0, PLAIN).integers)
    stored = StoredWeight.of(weight, 0, SPEC)
    assert not saturates(stored.integers)
    assert is_pair_safe(stored.integers, 0)
    wanted = weight.abs().amax(1).double() / 127
    wanted = wanted.maximum(largest_pairs(weight, 0) / 127.5)
    torch.testing.assert_close(
        stored.parameters.scale[wanted > 0], wanted[wanted > 0].float(), rtol=1e-6, atol=1e-7
    )


def test_it_costs_less_than_a_bit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    seven = q.TensorSpec(torch.int8, -63, 63, "symmetric", "per_channel")
    plain, safe, narrow = (
        signal_to_noise(weight, StoredWeight.of(weight, 0, spec).restored())
        for spec in (PLAIN, SPEC, seven)
    )
    assert plain > safe > narrow + 2


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((6, 9), 0), ((9, 6), 1), ((8, 4, 3, 3), 0), ((8, 1, 1, 1), 0), ((6, 3, 5), 0)],
)
def test_integers_that_are_chosen_are_made_safe(shape: tuple[int, ...], axis: int) -> None:
    torch.manual_seed(0)
    integers = torch.randint(-127, 128, shape, dtype=torch.int8)
    found = made_pair_safe(integers, axis)
    assert is_pair_safe(found, axis)
    assert found.shape == integers.shape and found.dtype == integers.dtype
    assert bool((found.abs() <= integers.abs()).all()) and bool((found.int() * integers >= 0).all())
    assert torch.equal(made_pair_safe(found, axis), found)
    if len(shape) == 2:
        kept = made_pair_safe(torch.tensor([[100, 28, -3], [100, 100, 9]], dtype=torch.int8), 0)
        assert kept.tolist() == [[100, 28, -3], [28, 100, 9]]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_a_program_with_pair_safe_weights(kind: str, granularity: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(16, 8) if kind == "linear" else nn.Conv2d(4, 8, 3)
    data = [(torch.randn(32, 16),)] if kind == "linear" else [(torch.randn(4, 4, 9, 9),)]
    spec = q.int8_static(weights=granularity, pair_safe=True)
    prepared = q.prepare(model.eval(), data[0], spec)
    q.calibrate(prepared, data)
    q.gptq(prepared, data)
    quantized: Any = q.convert(prepared)
    (row,) = q.report(quantized, prepared, data).rows
    assert "pair-safe" in row.how
    buffers = dict(quantized.graph_module.named_buffers())
    (integers,) = [one for name, one in buffers.items() if name.endswith("_quantized")]
    assert int(largest_pairs(integers, 0).max()) <= LARGEST_SUM
    with torch.no_grad():
        assert signal_to_noise(model(*data[0]), quantized(*data[0])) > 30


def test_specs_that_have_no_such_scale_are_refused() -> None:
    for options in ({"low": -128}, {"scheme": "affine"}, {"dtype": torch.uint8, "low": 0}):
        with pytest.raises(UnsupportedError, match="is_pair_safe"):
            q.TensorSpec(**{"low": -127, "is_pair_safe": True, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize(("shape", "axis"), [((6, 9), 0), ((9, 6), 1), ((4, 3, 3, 3), 0)])
def test_fake_quantisers_round_weights_as_they_are_stored(
    shape: tuple[int, ...], axis: int, granularity: str
) -> None:
    spec = q.int8_static(weights=granularity, pair_safe=True).weights
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    axes = tuple(shared_axes(weight.ndim, axis, spec))
    found = FakeQuantizer(spec, axes, FakeQuantizerOptions(), axis=axis)(weight)
    stored = StoredWeight.of(weight, axis, spec).restored()
    torch.testing.assert_close(found, stored.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("make", [q.int8_static, q.int8_dynamic])
def test_weights_are_pair_safe_where_the_processor_adds_pairs_in_16_bits(
    make: Any, saturates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_info, "adds_pairs_in_16_bits", lambda: saturates)
    assert make().weights.is_pair_safe is saturates
    assert make(pair_safe=True).weights.is_pair_safe
    assert not make(pair_safe=False).weights.is_pair_safe
    assert not q.int8_weight_only().weights.is_pair_safe
