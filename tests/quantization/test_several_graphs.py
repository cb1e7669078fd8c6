"""Programs with several graphs: each is observed, converted, corrected, reported and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import CaptureError, FxkitError, UnsupportedError
from fxkit.quantization.affine import signal_to_noise


class Branches(nn.Module):
    """Two branches whose nodes have the same names and values of different size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.large = nn.Linear(16, 16)
        self.small = nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x * 1000) if x.sum() > 0 else self.small(x * 0.001)


class Longer(nn.Module):
    """One branch has a node that the other lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) if x.sum() > 0 else self.a(x)


def _batches() -> list[tuple[Tensor]]:
    torch.manual_seed(0)
    x = torch.rand(64, 16)
    return [(x,), (-x,)]


@torch.no_grad()
def _error(quantized: Any, model: nn.Module, batch: tuple[Tensor]) -> float:
    wanted = model(*batch)
    return float((quantized(*batch) - wanted).abs().max() / (wanted.abs().max() + 1e-12))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [Branches, Longer])
def test_each_graph_has_its_own_ranges(kind: type[nn.Module], first: int) -> None:
    batches = _batches()
    model = kind().eval()
    prepared = q.prepare(model, batches[first], q.int8_static())
    q.calibrate(prepared, batches)
    quantized = q.convert(prepared)
    for batch in batches:
        alone = _error(q.quantize(model, q.int8_static(), [batch]), model, batch)
        assert _error(quantized, model, batch) < 3 * alone < 0.03


def test_sizes_share_their_observers() -> None:
    prepared = q.prepare(Longer().eval(), (torch.rand(2, 16),), q.int8_static())
    names = list(prepared.observers)
    q.calibrate(prepared, [(torch.rand(size, 16),) for size in (2, 3, 5)])
    assert list(prepared.observers) == names


def test_halves_are_merged_whatever_graph_came_first() -> None:
    batches, model = _batches(), Branches().eval()
    halves = [q.prepare(model, batches[0], q.int8_static()) for _ in range(2)]
    q.calibrate(halves[0], batches)
    q.calibrate(halves[1], batches[::-1])
    halves[0].merge(halves[1])
    quantized = q.convert(halves[0])
    whole = q.prepare(model, batches[0], q.int8_static())
    q.calibrate(whole, batches)
    for batch in batches:
        assert torch.equal(quantized(*batch), q.convert(whole)(*batch))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [16, 5])
@pytest.mark.parametrize(
    "algorithm", [q.correct_biases, q.gptq, q.ada_round], ids=lambda one: one.__name__
)
def test_algorithms_learn_from_each_graph(algorithm: Any, width: int) -> None:
    batches, model = _batches(), Branches(width).eval()
    spec = q.int8_static()
    prepared = q.prepare(model, batches[0], spec)
    q.calibrate(prepared, batches)
    before = [_error(q.convert(prepared), model, batch) for batch in batches]
    assert len(algorithm(prepared, batches)) == 2
    after = [_error(q.convert(prepared), model, batch) for batch in batches]
    assert all(new < 2 * old + 1e-6 for new, old in zip(after, before, strict=True))


def test_rewritten_graphs_compute_what_they_did() -> None:
    batches, model = _batches(), Branches(5).eval()
    for program in (q.smooth_quant(model, batches), q.equalize(model, batches[0])):
        assert all(_error(program, model, batch) < 1e-5 for batch in batches)


def test_reports_and_comparisons_have_rows_of_each_graph() -> None:
    batches, model = _batches(), Branches().eval()
    prepared = q.prepare(model, batches[0], q.int8_static())
    q.calibrate(prepared, batches)
    quantized = q.convert(prepared)
    assert len(q.report(quantized, prepared, batches).rows) == 2
    compared = q.compare(prepared, quantized, batches).rows
    assert len(compared) == 2
    assert all(row.total > 30 for row in compared)


@pytest.mark.parametrize(
    "spec", [q.int8_weight_only(), q.int8_static(), q.int8_dynamic()], ids=["w", "s", "d"]
)
def test_a_weight_is_read_along_both_of_its_axes(spec: q.QuantizationSpec) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(x) @ self.tied.weight

    model, x = Tied().eval(), torch.randn(3, 8)
    assert _error(q.quantize(model, spec, [(x,)]), model, (x,)) < 0.05


def test_what_is_misspelt_is_told() -> None:
    layer, x = nn.Linear(4, 4).eval(), torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match=r"kwargs=batch"):
        q.prepare(layer, {"input": x}, q.int8_static())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="at least one batch, or args="):
        q.quantize(layer, q.int8_static(), [])
    with pytest.raises(UnsupportedError, match=r"one of .*min_max.*got 'minmax'"):
        q.int8_static(observer="minmax")
    config = q.QuantizationConfig(q.int8_static(), by_module={"typo": None})
    with pytest.warns(UserWarning, match="got 'typo', which fits none"):
        q.prepare(layer, (x,), config)
    with pytest.raises(FxkitError, match="the name of an observer"):
        q.OBSERVERS["minmax"]


class OnTheEdge(nn.Module):
    """Takes another way when its first layer is rounded, for one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x[0, 0] > 0:
            x = -x
        return self.last(x)


def test_both_ways_of_a_branch_are_quantised_where_the_graph_has_both() -> None:
    torch.manual_seed(0)
    model, x = OnTheEdge().eval().requires_grad_(False), torch.randn(1, 8)
    model.first.bias[0] -= model.first(x)[0, 0] - 1e-4
    batches = [(torch.randn(4, 8),) for _ in range(8)]
    with pytest.raises(CaptureError, match=r"another way once it is changed.*expected bool_1") as e:
        fxkit.quantize(model, q.int8_static(), batches)(x)
    assert e.value.hint is not None and "control_flow=True" in e.value.hint
    both = fxkit.capture(model, batches[0], control_flow=True)
    quantized: Any = fxkit.quantize(both, q.int8_static(), batches)
    assert any(node.name == "cond" for node in quantized.nodes)
    assert (quantized(batches[0][0]) - model(batches[0][0])).abs().max() < 0.05
    ways = [model.last(sign * model.first(x)) for sign in (1, -1)]  # rounding may choose either
    assert min((quantized(x) - way).abs().max() for way in ways) < 0.05


def test_options_of_a_captured_program_stay() -> None:
    model = nn.Linear(8, 4).eval()
    captured = fxkit.capture(model, (torch.randn(4, 8),), dynamic=True)
    quantized: Any = fxkit.quantize(captured, q.int8_static(), [(torch.randn(4, 8),)])
    for rows in (4, 5, 6):
        quantized(torch.randn(rows, 8))
    assert len(quantized.graphs) == 1


def test_layers_that_no_batch_has_run_are_reported() -> None:
    batches, model = _batches(), Branches().eval()
    prepared = q.prepare(model, batches[0], q.int8_static())
    q.calibrate(prepared, batches[:1])
    quantized = q.convert(prepared)
    *rows, unseen = q.report(quantized, prepared).rows
    assert [row.is_quantized for row in rows] == [True] and not unseen.is_quantized
    assert (unseen.node, unseen.operator) == ("small", "Linear") and "no batch" in unseen.reason
    with pytest.warns(UserWarning, match="calibrate with such inputs"):
        quantized(*batches[1])
    assert q.report(quantized, prepared).rows[-1] == unseen
    q.calibrate(prepared, batches)
    assert "no batch" not in str(q.report(q.convert(prepared), prepared))


class Functional(nn.Module):
    """Weights whose modules are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.read = nn.Linear(16, 16)
        self.table = nn.Embedding(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x)[0]
        return nn.functional.linear(x, self.read.weight) @ self.table.weight.T


def test_weights_that_are_read_without_their_module_are_no_such_layers() -> None:
    x = torch.rand(2, 3, 16)
    for spec in (q.int8_static(), q.int8_weight_only()):
        prepared = q.prepare(Functional().eval(), (x,), spec)
        q.calibrate(prepared, [(x,)])
        assert "no batch" not in str(q.report(q.convert(prepared), prepared))


class Attending(nn.Module):
    """Without gradients, torch computes its attention in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x)[0])


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_what_gradients_change_in_a_graph_is_quantised_alike(trains: bool, converts: bool) -> None:
    model, x = Attending(), torch.rand(2, 3, 16)
    if trains:
        prepared = q.prepare_qat(model, (x,), q.int8_static())
        prepared(x).square().mean().backward()
    else:
        prepared = q.prepare(model.eval(), (x,), q.int8_static())
        prepared(x)
    with torch.set_grad_enabled(converts):
        quantized: Any = q.convert(prepared)
    for calls in (True, False):
        with torch.set_grad_enabled(calls):
            found = quantized(x)  # a warning would be an error
            (linear,) = [n for n in quantized.graph_module.graph.nodes if n.name == "linear"]
        assert "dequantize" in str(linear.args[0])
        torch.testing.assert_close(found, model.eval()(x), atol=0.02, rtol=0)


class Masked(nn.Module):
    """Of a mask, torch's one call computes what fxkit does not take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


def _masked() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, 16), torch.tensor([[0, 0, 0, 0, 1, 1]] * 2).bool()


def test_ranges_of_masked_attention_begin_with_the_first_batch_of_training() -> None:
    torch.manual_seed(0)
    model, args = Masked(), _masked()
    trained = q.prepare_qat(model, args, q.int8_static())
    found, exact = trained(*args).detach(), model(*args).detach()
    assert signal_to_noise(exact, found) > 25


def test_a_graph_where_torch_computes_attention_in_one_call_is_told_of() -> None:
    model, args = Masked().eval(), _masked()
    with pytest.warns(UserWarning, match="(?s)fast path.*set_fastpath_enabled"):
        prepared = q.prepare(model, args, q.int8_dynamic())
    assert all(not row.is_quantized for row in q.report(q.convert(prepared), prepared).rows[:1])


def test_parameters_that_are_replaced_are_quantised_at_the_next_call() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), torch.randn(4, 16)
    quantized: Any = q.quantize(model, q.int8_static(), [(x,)])
    quantized(x)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 1.5)
    found = quantized(x)
    assert "dequantize_per_channel" in str(quantized.graph_module.graph)
    torch.testing.assert_close(quantized.graph_module(x), found)
    torch.testing.assert_close(fxkit.compile(quantized)(x), found)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_only_calls_write_buffers() -> None:
    model, x = Counting().eval(), torch.randn(4, 8)
    prepared = q.prepare(model, (x,), q.int8_static())
    assert int(model.calls) == 0
    q.calibrate(prepared, [(x,)] * 3)
    assert int(model.calls) == 3
    quantized = q.convert(prepared)
    q.report(quantized, prepared, [(x,)])
    assert int(model.calls) == 3


def test_buffers_without_a_version_are_left_alone() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(8).eval()
    whole, x = nn.Sequential(nn.Linear(8, 8), model).eval(), torch.randn(4, 8)
    with torch.no_grad():
        assert q.quantize(whole, q.int8_static(), [(x,)])(x).shape == (4, 8)


def test_parameters_without_an_address_are_none_that_no_batch_has_run() -> None:
    model = nn.Linear(8, 8).eval()
    model.extra = nn.Module()
    model.extra.weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    prepared, x = q.prepare(model, (torch.randn(2, 8),), q.int8_static()), torch.randn(2, 8)
    q.calibrate(prepared, [(x,)])
    assert len(q.report(q.convert(prepared), prepared).rows) == 1
