"""Quantised graphs, compiled: their integers are multiplied, and results are the graph's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import multiply_integers
from fxkit.torch_adapters.quantized_operators import quantized_operators
from tests.sampling import one_in

SPECS = {
    "static": q.int8_static(),
    "static, symmetric": q.int8_static(scheme="symmetric"),
    "static, one scale": q.int8_static(weights="per_tensor"),
    "dynamic": q.int8_dynamic(),
    "dynamic, symmetric": q.int8_dynamic("per_tensor", scheme="symmetric"),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Multiply integers also where float32 is as fast."""
    monkeypatch.setattr(multiply_integers, "reason_to_stay_float", lambda *_, **__: None)


class Block(nn.Module):
    def __init__(self, width: int = 40, inner: int = 70, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def quantized(model: nn.Module, spec: q.QuantizationSpec, *batches: Tensor):
    return fxkit.quantize(model.eval(), spec, [(batch,) for batch in batches])


@pytest.mark.parametrize("scheme", ["affine", "symmetric"])
@torch.no_grad()
def test_scales_of_very_large_activations_make_no_infinity(scheme):
    torch.manual_seed(0)
    x = torch.randn(8, 40)
    model = quantized(Block(bias=False), q.int8_dynamic(scheme=scheme), x)
    compiled = fxkit.compile(model)
    x[1, 1] = 1e37
    for _ in range(2):
        found = compiled(x)
    expected = model(x)
    assert integers_multiplied(compiled) == 2 and expected.isfinite().all()
    assert noise(expected / 1e30, found / 1e30) < 0.02


def integers_multiplied(compiled) -> int:
    graph = compiled.compiled_modules[-1].graph_module.graph
    return sum("integer_product" in str(node.target) for node in graph.nodes)


def noise(expected: Tensor, found: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("shape", "spec"), one_in(5, [(12, 40), (2, 5, 40), (1, 40), (40,), (2, 3, 4, 40)], SPECS)
)
@torch.no_grad()
def test_results_are_those_of_the_graph(spec, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    reference = quantized(Block(), SPECS[spec], x)
    compiled = fxkit.compile(reference)
    compiled(x)  # the first call runs the program itself
    found, expected = compiled(x), reference(x)
    assert integers_multiplied(compiled) == 2
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert noise(expected, found) < 2e-3  # a few elements may be a step off


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_models_of_half_precision_multiply_integers(spec, dtype):
    torch.manual_seed(0)
    model, x = Block().to(dtype), torch.randn(12, 40).to(dtype)
    reference = quantized(model, SPECS[spec], x)
    compiled = fxkit.compile(reference)
    compiled(x)
    found, expected = compiled(x), reference(x)
    assert integers_multiplied(compiled) == 2
    assert not compiled.compiled_modules[-1].report().float_layers
    assert found.dtype == dtype and found.shape == expected.shape
    exact = model.double()(x.double())
    assert noise(expected, found) < 16 * torch.finfo(dtype).eps
    assert noise(exact, found) < 1.1 * noise(exact, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "chooses", ["choose_qparams_per_token", "choose_qparams_per_token_asymmetric"]
)
@torch.no_grad()
def test_scales_of_tokens_are_chosen_in_their_own_dtype(chooses, dtype):
    ops, bounds = torch.ops.quantized_decomposed, (-128, 127, torch.int8)
    weight = torch.randint(-127, 128, (30, 40), dtype=torch.int8)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = getattr(ops, chooses)(x, torch.int8)
        integers = ops.quantize_per_token(x, scale, zero, *bounds)
        y = ops.dequantize_per_token(integers, scale, zero, *bounds, dtype)
        w = ops.dequantize_per_tensor(weight, 0.02, 0, -127, 127, torch.int8, out_dtype=dtype)
        return F.linear(y, w), integers

    x = (torch.randn(50, 40) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    compiled = fxkit.compile(program)
    compiled(x)
    (found, integers), (expected, wanted) = compiled(x), program(x)
    assert integers_multiplied(compiled) == 1
    off = (integers.int() - wanted.int()).abs()  # by what float64 rounds otherwise
    assert off.max() <= 1 and off.double().mean() < 1e-3
    assert noise(expected.double(), found) < 8 * torch.finfo(dtype).eps


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_one_layer_differs_by_a_step_at_most(spec):
    torch.manual_seed(0)
    x = torch.randn(256, 96) * torch.rand(256, 1) * 10
    reference = quantized(nn.Linear(96, 80), SPECS[spec], x)
    compiled = fxkit.compile(reference)
    compiled(x)
    expected, found = reference(x), compiled(x)
    scale = float(expected.abs().max()) / 127

    def steps(value: Tensor) -> Tensor:
        return (value / scale).round()

    off = (steps(found) - steps(expected)).abs()
    assert off.max() <= 1 and off.count_nonzero() <= 0.001 * off.numel()


AFFINE = q.TensorSpec(torch.int8, -128, 127, "affine", "per_channel")


@pytest.mark.parametrize("activations", ["static", "static, symmetric", "dynamic"])
@torch.no_grad()
def test_weights_may_have_zero_points(activations):
    torch.manual_seed(0)
    model, x = nn.Linear(96, 80), torch.randn(2, 20, 96)
    model.weight += 0.3
    spec = q.QuantizationSpec(SPECS[activations].activations, AFFINE)
    reference = quantized(model, spec, x)
    compiled = fxkit.compile(reference)
    compiled(x)
    assert integers_multiplied(compiled) == 1
    assert noise(reference(x), compiled(x)) < 1e-3


class OneScale(nn.Module):
    """Quantises what it takes with one scale, chosen in each call, as torchao's quantizers do."""

    def __init__(self, dtype: torch.dtype, chooses: str) -> None:
        super().__init__()
        self.dtype, self.ops = dtype, quantized_operators()
        self.choose = getattr(self.ops, chooses).tensor
        self.register_buffer("weight", torch.randint(-128, 128, (30, 40), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(30) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        limits = torch.iinfo(self.dtype)
        bounds = (limits.min, limits.max, self.dtype)
        scale, zero = self.choose(x, limits.min, limits.max, 2**-12, self.dtype)
        integers = self.ops.quantize_per_tensor.tensor(x, scale, zero, *bounds)
        floats = self.ops.dequantize_per_tensor.tensor(integers, scale, zero, *bounds)
        weight = self.ops.dequantize_per_channel.default(
            self.weight, self.scales, None, 0, -128, 127, torch.int8
        )
        return F.linear(floats, weight)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(12, 40), (2, 5, 40), (40,), (1, 40)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("chooses", ["choose_qparams", "choose_qparams_symmetric"])
@torch.no_grad()
def test_one_scale_may_be_chosen_in_each_call(chooses, dtype, shape):
    torch.manual_seed(0)
    reference = OneScale(dtype, chooses).eval()
    compiled = fxkit.compile(reference)
    compiled(torch.randn(shape))
    for factor in (1.0, 30.0, 1e-3, 0.0):
        x = factor * torch.randn(shape) + factor
        assert noise(reference(x) + 1e-30, compiled(x) + 1e-30) < 2e-3
    assert integers_multiplied(compiled) == 1


@torch.no_grad()
def test_without_bias_and_other_batches():
    torch.manual_seed(0)
    reference = quantized(Block(bias=False), q.int8_dynamic(), torch.randn(6, 40))
    compiled = fxkit.compile(reference, dynamic=True)
    for rows in (6, 6, 1, 33, 33, 0, 0, 5):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(compiled(x), reference(x), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_weights_are_read_at_each_call():
    torch.manual_seed(0)
    x = torch.randn(8, 40)
    reference = quantized(nn.Linear(40, 30), q.int8_static(), x).graph_module
    compiled = fxkit.compile(reference)
    compiled(x)
    before = compiled(x)
    for buffer in reference.buffers():
        if buffer.dtype == torch.int8:
            buffer.neg_()
    assert not torch.allclose(before, compiled(x))
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_layer_that_does_not_gain_stays_in_float32(monkeypatch):
    monkeypatch.setattr(multiply_integers, "reason_to_stay_float", lambda *_, **__: "it is as fast")
    torch.manual_seed(0)
    x = torch.randn(8, 40)
    reference = quantized(Block(), q.int8_static(), x)
    compiled = fxkit.compile(reference)
    compiled(x)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)
    assert not integers_multiplied(compiled)


@pytest.mark.parametrize("rows", [1, 3, 4])
@torch.no_grad()
def test_few_rows_of_floats_read_the_integers_of_the_weight(rows, monkeypatch):
    monkeypatch.setattr(multiply_integers.weights, "reason_to_stay_float", lambda _: None)
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 300)
    reference = quantized(nn.Linear(300, 130), q.int8_weight_only(), x)
    compiled = fxkit.compile(reference)
    compiled(x)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-5, atol=1e-5)
    assert "fx_int8_weight_product(" in compiled.compiled_modules[-1].source


@pytest.mark.parametrize("spec", [q.int8_weight_only(), q.int4_weight_only(20)])
@torch.no_grad()
def test_many_rows_of_floats_are_multiplied_in_float(spec):
    torch.manual_seed(0)
    x = torch.randn(8, 40)
    reference = quantized(nn.Linear(40, 30), spec, x)
    compiled = fxkit.compile(reference)
    compiled(x)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-5, atol=1e-5)
    assert not integers_multiplied(compiled)


@torch.no_grad()
def test_sums_that_may_not_fit_into_32_bits_stay_in_float32():
    model = nn.Linear(70_000, 2)
    model.weight.fill_(1.0)
    x = torch.ones(3, 70_000)
    reference = quantized(model, q.int8_static(), x)
    compiled = fxkit.compile(reference)
    compiled(x)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)
    assert not integers_multiplied(compiled)


@torch.no_grad()
def test_scales_of_tokens_that_are_returned_stay_what_they_are():
    ops = torch.ops.quantized_decomposed
    weight = torch.randint(-127, 128, (30, 40), dtype=torch.int8)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        bounds = (-128, 127, torch.int8)
        integers = ops.quantize_per_token(x, scale, zero, *bounds)
        y = ops.dequantize_per_token(integers, scale, zero, *bounds, torch.float32)
        w = ops.dequantize_per_tensor(weight, 0.02, 0, -127, 127, torch.int8)
        return F.linear(y, w), scale

    x = torch.randn(6, 40)
    compiled = fxkit.compile(program)
    compiled(x)
    found, expected = compiled(x), program(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found[1].dtype == torch.float64


def of_weight(zeros: Tensor | None = None, zero: int = 3):
    ops = torch.ops.quantized_decomposed
    made = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (48, 64), dtype=torch.int8, generator=made)
    scales = torch.rand(48, generator=made) * 0.01 + 0.001

    def program(integers: Tensor) -> Tensor:
        x = ops.dequantize_per_tensor(integers, 0.02, zero, 0, 255, torch.uint8)
        w = ops.dequantize_per_channel(weight, scales, zeros, 0, -128, 127, torch.int8)
        return F.linear(x, w)

    return program


@pytest.mark.parametrize(
    ("program", "is_multiplied"),
    [
        (of_weight(torch.randint(-5, 6, (48,))), True),
        (of_weight(torch.full((48,), 1_000_000)), True),
        (of_weight(torch.rand(48)), False),
        (of_weight(zero=200_000), False),
        (of_weight(zero=-1), False),
    ],
    ids=["integers", "far away", "fractions", "a far zero point", "one out of range"],
)
@torch.no_grad()
def test_zero_points_of_any_size_and_type(program, is_multiplied):
    x = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    compiled = fxkit.compile(program)
    compiled(x)
    assert noise(program(x), compiled(x)) < 1e-5
    assert bool(integers_multiplied(compiled)) == is_multiplied


@torch.no_grad()
def test_tokens_of_16_bits_are_multiplied_in_float32():
    ops = torch.ops.quantized_decomposed
    weight = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    bounds = (-32768, 32767, torch.int16)

    def program(x: Tensor) -> Tensor:
        scale, zero = ops.choose_qparams_per_token(x, torch.int8)
        integers = ops.quantize_per_token(x, scale, zero, *bounds)
        y = ops.dequantize_per_token(integers, scale, zero, *bounds, torch.float32)
        return F.linear(y, ops.dequantize_per_tensor(weight, 0.02, 0, -127, 127, torch.int8))

    x = torch.randn(40, 64)
    compiled = fxkit.compile(program)
    compiled(x)
    torch.testing.assert_close(compiled(x), program(x), rtol=1e-4, atol=1e-4)
    assert not integers_multiplied(compiled)


GROUPS_OF_BYTES = q.TensorSpec(torch.int8, -127, 127, "symmetric", "per_group", 4)


class Mixed(nn.Module):
    """Layers that are quantised in several ways, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3)
        self.integers = nn.Linear(8, 20)
        self.groups = nn.Linear(20, 16)
        self.floats = nn.Linear(16, 12)
        self.by_column = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(x).mean((2, 3))
        return self.by_column(self.floats(self.groups(self.integers(x).relu())))


@torch.no_grad()
def test_each_layer_in_float_has_a_reason():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 9, 9)
    static, weights = q.int8_static(), q.int8_weight_only()
    config = q.QuantizationConfig(
        static,
        by_module={
            "image": None,
            "groups": q.QuantizationSpec(None, GROUPS_OF_BYTES),
            "floats": None,
            "by_column": q.QuantizationSpec(None, weights.weights),
        },
    )
    compiled = fxkit.compile(fxkit.quantize(Mixed().eval(), config, [(x,)]))
    compiled(x)
    compiled(x)
    report = compiled.compiled_modules[-1].report()
    assert [note.partition(" stays in floating point: ")[2] for note in report.float_layers] == [
        "its weight has a scale for each of several groups of a row",
        "neither of its operands is quantised",
        "its activations are floats, 6 rows of them",
        "neither of its operands is quantised",
    ]
    assert all(note in str(report) for note in report.float_layers)


@torch.no_grad()
def test_a_graph_without_integers_has_no_such_reasons():
    compiled = fxkit.compile(nn.Linear(8, 20))
    for _ in range(2):
        compiled(torch.randn(3, 8))
    assert compiled.compiled_modules[-1].report().float_layers == ()
