"""Attention's operands: in float with a reason, and rounded where a config names the operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.quantization.affine import signal_to_noise

STATIC = q.int8_static()
BY_OPERATOR = {F.scaled_dot_product_attention: STATIC}


class Attention(nn.Module):
    """Heads of one operator, or of two products with a softmax between."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 96), nn.Linear(32, 32)
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts)
        if self.is_fused:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            y = torch.softmax(query @ key.mT / 8**0.5, -1) @ value
        return self.outer(y.transpose(1, 2).flatten(2))


def row_of(
    operator: str, config: q.QuantizationConfig | q.QuantizationSpec, *, is_fused: bool = True
) -> tuple[q.QuantizationRow, q.QuantizationReport]:
    torch.manual_seed(0)
    model, x = Attention(is_fused=is_fused).eval(), torch.randn(2, 10, 32)
    prepared = q.prepare(model, (x,), config)
    q.calibrate(prepared, [(x,)])
    quantized = q.convert(prepared)
    fast = fxkit.compile(quantized)
    with torch.no_grad():
        for _ in range(2):
            assert signal_to_noise(quantized(x), fast(x)) > 45
    found = q.report(quantized, prepared, [(x,)])
    return next(row for row in found.rows if row.operator == operator), found


def test_one_operator_stays_in_float_unless_it_is_named() -> None:
    row, before = row_of("aten.scaled_dot_product_attention", STATIC)
    assert not row.is_quantized and "by_operator or by_node" in row.reason
    config = q.QuantizationConfig(STATIC, by_operator=BY_OPERATOR)
    row, after = row_of("aten.scaled_dot_product_attention", config)
    assert row.how == ", ".join(["input u8 affine per_tensor"] * 3)
    assert before.sqnr[0] > after.sqnr[0] > 35
    config = q.QuantizationConfig(STATIC, by_node={row.node: STATIC})
    row, other = row_of("aten.scaled_dot_product_attention", config)
    assert row.is_quantized and other.sqnr == after.sqnr


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (q.int8_dynamic(), "its value is summed along tokens"),
        (q.int8_weight_only(), "its operands are activations"),
        (None, "keeps it in floating point"),
    ],
)
def test_what_it_cannot_take_is_told(spec: q.QuantizationSpec | None, reason: str) -> None:
    by_operator = {F.scaled_dot_product_attention: spec}
    config = q.QuantizationConfig(STATIC, by_operator=by_operator)
    row, _ = row_of("aten.scaled_dot_product_attention", config)
    assert not row.is_quantized and reason in row.reason


def test_both_products_of_an_attention_that_is_written_out_are_rounded() -> None:
    _, found = row_of("aten.matmul", STATIC, is_fused=False)
    products = [row for row in found.rows if row.operator == "aten.matmul"]
    assert [row.how for row in products] == [", ".join(["input u8 affine per_tensor"] * 2)] * 2
    assert found.sqnr[0] > 35
    _, found = row_of("aten.matmul", q.int8_dynamic(), is_fused=False)
    reasons = [row.reason for row in found.rows if row.operator == "aten.matmul"]
    assert all("summed along tokens" in reason for reason in reasons) and len(reasons) == 2


def attended(model_args: dict[str, object], *sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return what attention gives by itself and written out, for random operands."""
    torch.manual_seed(0)
    operands = [torch.randn(size) for size in sizes]

    def program(*args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, **model_args)  # type: ignore[arg-type]

    written = q.decompose_attention(program, tuple(operands))
    names = [node.operator for node in fxkit.graph(written.graph_module)]
    assert "aten.scaled_dot_product_attention" not in names and names.count("aten.matmul") == 2
    return program(*operands), written(*operands)


MASKS = {
    "none": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "added": {"attn_mask": torch.randn(1, 1, 10, 12)},
    "chosen": {"attn_mask": torch.arange(120).view(10, 12) % 3 > 0},
    "chosen, some see nothing": {"attn_mask": (torch.arange(10) != 4)[:, None].expand(10, 12)},
    "added, some see nothing": {
        "attn_mask": torch.zeros(10, 12).index_fill(0, torch.tensor(3), -torch.inf)
    },
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_written_out_is_attention(mask: str) -> None:
    expected, found = attended(MASKS[mask], (2, 3, 10, 8), (2, 3, 12, 8), (2, 3, 12, 5))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_are_shared_are_written_out() -> None:
    shapes = (2, 6, 10, 8), (2, 3, 12, 8), (2, 3, 12, 5)
    expected, found = attended({"enable_gqa": True}, *shapes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_spec_for_all_quantises_attention_that_is_written_out(is_dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = Attention(is_fused=True).eval(), torch.randn(2, 10, 32)
    written = q.decompose_attention(model, (x,))
    prepared = q.prepare(written, (x,), STATIC)
    q.calibrate(prepared, [(x,)])
    quantized = q.convert(prepared)
    found = q.report(quantized, prepared, [(x,)])
    assert [row.is_quantized for row in found.rows] == [True] * 4
    fast = fxkit.compile(quantized, dynamic=is_dynamic)
    with torch.no_grad():
        for size in (10, 10, 7, 7, 23):
            x = torch.randn(2, size, 32)
            assert signal_to_noise(quantized(x), fast(x)) > 45
            assert signal_to_noise(model(x), fast(x)) > 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(20, 16), (2, 3, 20, 16)])
def test_sizes_that_no_parameter_tells_may_vary(shape: tuple[int, ...], is_causal: bool) -> None:
    torch.manual_seed(0)

    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    x = torch.randn(shape)
    quantized = fxkit.quantize(q.decompose_attention(program, (x,)), STATIC, [(x,)])
    compiled = fxkit.compile(quantized, dynamic=True)
    for tokens in (20, 20, 7, 33, 33):
        x = torch.randn(*shape[:-2], tokens, 16)
        assert not torch.equal(compiled(x), program(x))
        assert signal_to_noise(quantized(x), compiled(x)) > 60


def test_rows_of_many_keys_keep_their_accuracy() -> None:
    """Weights of late rows of causal attention are small beside that of the first row, 1."""
    torch.manual_seed(0)
    args = torch.randn(1, 1, 1000, 16), torch.randn(1, 1, 1000, 16), torch.randn(1, 1, 1000, 16)

    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    expected = program(*args)
    quantized = fxkit.quantize(q.decompose_attention(program, args), STATIC, [args])
    for found in (quantized(*args), fxkit.compile(quantized)(*args)):
        assert signal_to_noise(expected, found) > 34
        assert signal_to_noise(expected[:, :, -100:], found[:, :, -100:]) > 32


def test_a_softmax_before_a_product_is_written_out_too() -> None:
    model, x = Attention(is_fused=False).eval(), torch.randn(2, 10, 32)
    written = q.decompose_attention(model, (x,))
    names = [node.operator for node in fxkit.graph(written.graph_module)]
    assert "aten.softmax" not in names and "aten.exp" in names
    torch.testing.assert_close(written(x), model(x))


def test_scores_of_float16_do_not_overflow() -> None:
    query = torch.full((1, 1, 4, 64), 33.0, dtype=torch.float16)
    value = torch.randn(1, 1, 4, 64).half()
    program = F.scaled_dot_product_attention
    written = q.decompose_attention(program, (query, query, value))
    expected, found = program(query, query, value), written(query, query, value)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def test_sums_of_float16_do_not_overflow() -> None:
    query, value = torch.zeros(1, 1, 2, 8).half(), torch.full((1, 1, 3000, 8), 100.0).half()
    key = torch.randn(1, 1, 3000, 8).half()

    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.mT, -1) @ value

    for model in (program, F.scaled_dot_product_attention):
        found = q.decompose_attention(model, (query, key, value))(query, key, value)
        torch.testing.assert_close(found, torch.full_like(found, 100.0), rtol=0.01, atol=0.01)


def test_attention_that_drops_out_stays() -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    written = q.decompose_attention(program, tuple(torch.randn(3, 2, 5, 4)))
    assert fxkit.graph(written.graph_module).find("scaled_dot_product_attention")
