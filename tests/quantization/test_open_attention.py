"""Attention of torch's own modules: its projections are quantised as other layers are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxkit import quantization as q
from fxkit.quantization.preparation import graph_module_of

of_nothing = pytest.mark.filterwarnings("ignore:expected operators to quantise")


def _encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


@pytest.mark.parametrize("spec", [q.int8_static(), q.int8_dynamic(), q.int4_weight_only(16)])
def test_projections_are_quantised_and_observing_changes_no_bit(spec):
    model, x = _encoder().eval(), torch.randn(3, 5, 32)
    expected = model(x).detach()  # with gradients on: torch has another path without
    prepared = q.prepare(model, (x,), spec)
    q.calibrate(prepared, [(x,)])
    quantized = q.convert(prepared)

    with torch.no_grad():
        assert torch.equal(prepared(x), expected)
        torch.testing.assert_close(quantized(x), expected, atol=0.5, rtol=0.1)
    names = [row.operator for row in q.report(quantized, prepared).rows if row.is_quantized]
    assert names == ["aten.linear"] * 4
    called = graph_module_of(quantized).graph.nodes
    left = [node for node in called if "multi_head" in str(node.target)]
    assert not left


def test_a_program_that_is_a_graph_is_opened_too():
    model, x = nn.MultiheadAttention(32, 4).eval(), torch.randn(5, 2, 32)
    captured = q.prepare(model, (x, x, x), q.int8_static()).remake()
    prepared = q.prepare(captured, (x, x, x), q.int8_static())
    assert torch.equal(prepared(x, x, x)[0], model(x, x, x)[0])
    rows = q.report(q.convert(prepared), prepared).rows
    assert [row.operator for row in rows if row.is_quantized].count("aten.linear") == 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_they_are_trained_with_fake_quantisation(dropout):
    model, x = _encoder(dropout).train(), torch.randn(3, 5, 32)
    trained = q.prepare_qat(model, (x,), q.int8_static())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        trained(x).square().mean().backward()
        optimizer.step()
    trained.eval()

    quantized = q.convert(trained)
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), trained(x), atol=1e-5, rtol=1e-4)
    report = q.report(quantized, trained.prepared())
    assert sum(row.is_quantized for row in report.rows) == 4


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.cell = nn.Bilinear(8, 8, 4), nn.GRUCell(8, 8)
        self.bag, self.weight = nn.EmbeddingBag(10, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        results = (
            self.bilinear(x, x),
            self.cell(x, x),
            self.bag(torch.zeros(2, 3, dtype=torch.long)),
            torch.mv(w, x[0]),
            torch.addmv(x[0], w, x[0]),
            torch.tensordot(x, w, 1),
            torch.inner(x, w),
            torch.linalg.multi_dot([x, w, w]),
        )
        return torch.cat([result.reshape(-1) for result in results])


@of_nothing
def test_what_multiplies_and_stays_in_float_is_in_the_report_with_a_reason():
    x = torch.randn(3, 8)
    prepared = q.prepare(_Products().eval(), (x,), q.int8_static())
    q.calibrate(prepared, [(x,)])
    rows = q.report(q.convert(prepared), prepared).rows
    assert len(rows) == 8
    assert all(not row.is_quantized and row.reason for row in rows)


def test_a_masked_layer_says_how_it_can_be_quantised() -> None:
    model, x = _encoder().eval().requires_grad_(False), torch.randn(2, 5, 32)
    masked = {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}
    with pytest.warns(UserWarning, match="set_fastpath_enabled"):
        prepared = q.prepare(model, (x,), q.int8_static(), kwargs=masked)
    prepared(x, **masked)
    rows = q.report(q.convert(prepared), prepared).rows
    assert [row.operator for row in rows] == ["aten._transformer_encoder_layer_fwd"]
    assert "set_fastpath_enabled" in str(rows[0])
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        prepared = q.prepare(model, (x,), q.int8_static(), kwargs=masked)
        prepared(x, **masked)
        quantized = q.convert(prepared)
        expected = model(x, **masked)
        torch.testing.assert_close(quantized(x, **masked), expected, atol=0.1, rtol=0.1)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    rows = q.report(quantized, prepared).rows
    assert [row.operator for row in rows if row.is_quantized] == ["aten.linear"] * 4


def test_each_projection_is_quantised_where_one_weight_holds_those_of_several_inputs() -> None:
    model = nn.MultiheadAttention(32, 4).eval()
    inputs = torch.randn(5, 2, 32), torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    prepared = q.prepare(model, inputs, q.int8_static())
    assert torch.equal(prepared(*inputs)[0], model(*inputs)[0])
    quantized = q.convert(prepared)
    rows = q.report(quantized, prepared).rows
    assert [row.how.split()[0] for row in rows if row.operator == "aten.linear"] == ["weight"] * 4
    torch.testing.assert_close(quantized(*inputs)[0], model(*inputs)[0], atol=0.05, rtol=0.05)
