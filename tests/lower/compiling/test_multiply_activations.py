"""Products of two quantised activations, and attention: integers are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.lower.compiling import multiply_activations, multiply_integers
from fxkit.lower.families.integer_attention import autotune as attentions
from fxkit.lower.families.integer_attention.custom_op import integer_attention, operator
from fxkit.torch_adapters.quantized_operators import quantized_operators
from tests.sampling import one_in

SPECS = {
    "affine": q.int8_static(),
    "symmetric": q.int8_static(scheme="symmetric"),
}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply integers also where floats are as fast."""
    for module in (multiply_activations, multiply_integers):
        monkeypatch.setattr(module, "reason_to_stay_float", lambda *_, **__: None)
    monkeypatch.setattr(attentions, "reason_to_stay_float", lambda *_: None)


def operators(compiled) -> list[str]:
    graph = compiled.compiled_modules[-1].graph_module.graph
    return [str(n.target) for n in graph.nodes if "integer_" in str(n.target)]


def checked(
    program: Callable[..., Tensor] | nn.Module, spec: q.QuantizationSpec, *args: Tensor
) -> list[str]:
    """Compile a quantised program; return which integers it multiplies.

    Of its results, seen as 8 bits, at most one in a thousand is off, and by a step.
    """
    quantized = fxkit.quantize(program, spec, [args])
    compiled = fxkit.compile(quantized)
    with torch.no_grad():
        compiled(*args)
        found, expected = compiled(*args), quantized(*args)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    step = float(expected.abs().max()) / 127
    off = ((found / step).round() - (expected / step).round()).abs()
    assert off.max() <= 1 and int(off.count_nonzero()) <= 1 + off.numel() // 500
    return operators(compiled)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((12, 40), (40, 70)),
        ((3, 12, 40), (3, 40, 70)),
        ((2, 3, 12, 40), (2, 3, 40, 70)),
        ((2, 3, 12, 40), (40, 70)),
        ((12, 40), (3, 40, 70)),
        ((2, 1, 12, 40), (1, 3, 40, 70)),
        ((1, 1), (1, 1)),
    ],
)
def test_products_of_two_activations(
    left: tuple[int, ...], right: tuple[int, ...], spec: str
) -> None:
    torch.manual_seed(0)
    found = checked(torch.matmul, SPECS[spec], torch.randn(left), torch.randn(right))
    assert found == ["fxkit.integer_product.default"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x @ y.mT,
        lambda x, y: torch.bmm(x.mT.contiguous().mT, y.transpose(-1, -2)),
        lambda x, y: x[:, ::2] @ y.permute(0, 2, 1)[..., 1:],
        lambda x, y: x.unsqueeze(1).expand(-1, 4, -1, -1) @ y.mT.unsqueeze(1),
        lambda x, y: x.reshape(3, 2, 10, 24).flatten(1, 2) @ y.reshape(3, 9, 24).mT,
    ],
)
def test_views_lie_between(program: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    found = checked(program, SPECS["affine"], torch.randn(3, 20, 24), torch.randn(3, 9, 24))
    assert found == ["fxkit.integer_product.default"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 20, 24).to(dtype), torch.randn(3, 24, 9).to(dtype)
    quantized = fxkit.quantize(torch.matmul, q.int8_static(), [(left, right)])
    compiled = fxkit.compile(quantized)
    with torch.no_grad():
        compiled(left, right)
        found, expected = compiled(left, right), quantized(left, right)
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.double().norm()
    assert error < torch.finfo(dtype).eps  # of floats that stand for integers, and of results
    assert operators(compiled) == ["fxkit.integer_product.default"]


class Heads(nn.Module):
    """Attention that is written out."""

    def __init__(self, scaled: Callable[[Tensor], Tensor], width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scaled, self.heads = scaled, heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        weights = torch.softmax(self.scaled(query @ key.mT), -1)
        return self.outer((weights @ value).transpose(1, 2).flatten(2))


BIAS = torch.randn(1, 1, 1, 70).where(torch.arange(70) < 50, -torch.inf)
SCORES = {
    "plain": lambda scores: scores,
    "divided": lambda scores: scores / 12**0.5,
    "times and masked": lambda scores: scores * 0.3 + BIAS,
    "mask first": lambda scores: BIAS + scores * 0.3,
    "triangle": lambda scores: scores * 0.3 + torch.full((70, 70), -torch.inf).triu(1),
}


@pytest.mark.parametrize(
    ("divides_last", "spec", "scores"), one_in(3, [False, True], SPECS, SCORES)
)
def test_attention_is_one_kernel(scores: str, spec: str, divides_last: bool) -> None:
    torch.manual_seed(0)
    model, x = Heads(SCORES[scores]).eval(), torch.randn(2, 70, 48)
    found = checked(q.decompose_attention(model, (x,)) if divides_last else model, SPECS[spec], x)
    assert "fxkit.integer_attention.default" in found
    assert found.count("fxkit.integer_product.default") == 2  # the layers


@pytest.mark.parametrize(
    "scores",
    [
        lambda scores: scores.relu(),
        lambda scores: scores + scores.mean(-1, True),
        lambda scores: (scores + BIAS) * 0.5,
    ],
)
def test_other_scores_are_two_products(scores: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    found = checked(Heads(scores).eval(), SPECS["affine"], torch.randn(2, 70, 48))
    assert found == ["fxkit.integer_product.default"] * 4


def test_weights_that_are_read_are_not_hidden() -> None:
    torch.manual_seed(0)

    def program(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(query @ key.mT, -1)
        return weights @ value, weights

    args = torch.randn(2, 9, 8), torch.randn(2, 30, 8), torch.randn(2, 30, 8)
    quantized = fxkit.quantize(program, q.int8_static(), [args])
    compiled = fxkit.compile(quantized)
    compiled(*args)
    assert operators(compiled) == ["fxkit.integer_product.default"] * 2
    for found, expected in zip(compiled(*args), quantized(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_sizes_of_other_calls() -> None:
    torch.manual_seed(0)
    model = Heads(lambda scores: scores * 0.3).eval()
    quantized = fxkit.quantize(model, q.int8_static(), [(torch.randn(2, 70, 48),)])
    compiled = fxkit.compile(quantized, dynamic=True)
    with torch.no_grad():
        for rows, tokens in [(2, 70), (2, 70), (1, 33), (3, 130), (3, 130), (0, 5), (2, 1), (2, 1)]:
            x = torch.randn(rows, tokens, 48)
            torch.testing.assert_close(compiled(x), quantized(x), rtol=0, atol=0.03)


def attended(
    dtype: torch.dtype,
    signed: bool,
    *sizes: int,
    mask: Tensor | None = None,
    divides_last: bool = False,
) -> tuple[Any, ...]:
    batch, heads, queries, keys, depth, width = sizes
    limits = torch.iinfo(dtype)
    query = torch.randint(limits.min, limits.max + 1, (batch, heads, queries, depth), dtype=dtype)
    key = torch.randint(-128, 128, (batch, heads, keys, depth), dtype=torch.int8)
    value = torch.randint(-128, 128, (batch, heads, keys, width), dtype=torch.int8)
    scale = 1.5 / (depth**0.5 * 74**2)
    kind, zero, bounds = (torch.int8, -128, [-128, 127]) if signed else (torch.uint8, 0, [0, 255])
    numbers = (scale, [7, -5, zero, 9], 0.004, bounds, kind, 0.01, divides_last)
    return query, key, value, mask, *numbers


@pytest.mark.one_in(6)
@pytest.mark.parametrize("divides_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1), (1, 2, 1, 300, 64, 64), (2, 3, 65, 64, 32, 32),
        (2, 1, 130, 129, 80, 70), (1, 2, 13, 520, 130, 33), (3, 2, 64, 17, 16, 128),
        (1, 1, 5, 2100, 63, 15),
    ],
)  # fmt: skip
def test_attention_of_any_sizes(sizes, signed, dtype, divides_last) -> None:
    torch.manual_seed(0)
    args = attended(dtype, signed, *sizes, divides_last=divides_last)
    compiled = fxkit.compile(lambda *given: operator()(*given))
    compiled(*args)
    found, expected = compiled(*args), integer_attention(*args)
    assert "fx_integer_scores" in compiled.compiled_modules[-1].source
    steps = (found - expected).abs() / (0.004 * 0.01 * 137)
    assert steps.max() <= 2 and steps.mean() < 0.01  # weights between two integers go to either


def test_rows_that_see_nothing_are_nan_where_weights_are_divided_last() -> None:
    torch.manual_seed(0)
    mask = torch.zeros(9, 30)
    mask[4] = -torch.inf
    mask[5, 3] = torch.nan
    args = attended(torch.int8, False, 1, 2, 9, 30, 16, 16, mask=mask, divides_last=True)
    compiled = fxkit.compile(lambda *given: operator()(*given))
    compiled(*args)
    found, expected = compiled(*args), integer_attention(*args)
    assert torch.equal(found.isnan(), expected.isnan()) and found[:, :, 4:6].isnan().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 20, 70), (1, 1, 20, 70), (1, 1, 1, 70), (2, 1, 20, 1), (20, 70), (70,)]
)
def test_masks_of_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mask = torch.randn(shape)
    mask = mask.masked_fill(mask > 1, -torch.inf) if dtype.is_floating_point else mask > -1
    args = attended(torch.int8, False, 2, 3, 20, 70, 24, 24, mask=mask)
    compiled = fxkit.compile(lambda *given: operator()(*given))
    compiled(*args)
    found, expected = compiled(*args), integer_attention(*args)
    steps = (found - expected).abs() / (0.004 * 0.01 * 137)
    assert steps.max() <= 2 and steps.mean() < 0.02


@pytest.mark.parametrize(("rows", "zero"), [(1, 0), (1, 3), (40, 0), (40, 3)])
def test_extremes_stay_within_32_bits(rows: int, zero: int) -> None:
    ops, depth = quantized_operators(), multiply_activations.MOST_TERMS
    left = torch.full((rows, depth), 255, dtype=torch.uint8)
    right = torch.full((depth, 3), 255, dtype=torch.uint8)

    def program(left: Tensor, right: Tensor) -> Tensor:
        bounds = (0, 255, torch.uint8)
        x, y = (ops.dequantize_per_tensor(one, 1.0, zero, *bounds) for one in (left, right))
        return x @ y

    compiled = fxkit.compile(program)
    compiled(left, right)
    found = compiled(left, right)
    assert operators(compiled) == ["fxkit.integer_product.default"]
    assert torch.equal(found, torch.full((rows, 3), float(depth * (255 - zero) ** 2)))


def test_more_terms_stay_in_float() -> None:
    ops, depth = quantized_operators(), multiply_activations.MOST_TERMS + 1

    def program(left: Tensor, right: Tensor) -> Tensor:
        bounds = (-128, 127, torch.int8)
        x, y = (ops.dequantize_per_tensor(one, 1.0, 0, *bounds) for one in (left, right))
        return x @ y

    compiled = fxkit.compile(program)
    args = torch.ones(2, depth, dtype=torch.int8), torch.ones(depth, 2, dtype=torch.int8)
    compiled(*args)
    compiled(*args)
    (reason,) = compiled.compiled_modules[-1].report().float_layers
    assert "may need more than 32 bits" in reason


def test_one_float_operand_is_told() -> None:
    ops = quantized_operators()

    def program(left: Tensor, right: Tensor) -> Tensor:
        return ops.dequantize_per_tensor(left, 1.0, 0, -128, 127, torch.int8) @ right

    compiled = fxkit.compile(program)
    args = torch.ones(2, 8, dtype=torch.int8), torch.ones(8, 2)
    compiled(*args)
    compiled(*args)
    (reason,) = compiled.compiled_modules[-1].report().float_layers
    assert "one of its operands is not quantised with one scale" in reason


def test_rows_that_see_nothing() -> None:
    """A row that sees nothing is NaN in softmax, which torch stores as 0."""
    torch.manual_seed(0)
    mask = torch.zeros(1, 1, 9, 30)
    mask[..., 4, :] = -torch.inf
    args = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)

    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.mT + mask, -1) @ value

    quantized = fxkit.quantize(program, q.int8_static(), [args])
    compiled = fxkit.compile(quantized)
    compiled(*args)
    found, expected = compiled(*args), quantized(*args)
    assert operators(compiled) == ["fxkit.integer_attention.default"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
