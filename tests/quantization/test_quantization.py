"""From a model to its reference graph: observed, converted, reported and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import FxkitError, UnsupportedError
from fxkit.quantization.affine import signal_to_noise

of_nothing = pytest.mark.filterwarnings("ignore:expected operators to quantise")

SPECS = {
    "static": q.int8_static(),
    "static symmetric": q.int8_static(scheme="symmetric"),
    "static per tensor": q.int8_static(weights="per_tensor"),
    "static, mse": q.int8_static(observer="mse"),
    "dynamic": q.int8_dynamic(),
    "dynamic symmetric": q.int8_dynamic(scheme="symmetric"),
    "weight only": q.int8_weight_only(),
    "four bits": q.int4_weight_only(32),
    "four bits, symmetric": q.int4_weight_only(16, scheme="symmetric"),
}
LEAST_DB = {"four bits": 15, "four bits, symmetric": 13}


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(y.mean((2, 3)))


def batches(count: int = 4, *shape: int) -> list[tuple[Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(shape or (8, 64)),) for _ in range(count)]


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[-2] for node in gm.graph.nodes
            if "quantized_decomposed" in str(node.target)]  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_a_model_is_observed_and_converted(name: str) -> None:
    model, data = perceptron(), batches()
    before = copy.deepcopy(model.state_dict())
    prepared = q.prepare(model, data[0], SPECS[name])
    with torch.no_grad():
        for (x,) in data:
            assert torch.equal(prepared(x), model(x))
        quantized = q.convert(prepared)
        error = signal_to_noise(model(data[0][0]), quantized(*data[0]))
        assert LEAST_DB.get(name, 30) < error < 60
        for rows in (1, 8, 13):  # other sizes are the same program
            x = torch.randn(rows, 64)
            assert LEAST_DB.get(name, 28) - 4 < signal_to_noise(model(x), quantized(x))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SPECS)
def test_a_compiled_reference_graph_is_the_graph(name: str) -> None:
    model, data = perceptron(), batches()
    quantized = q.quantize(model, SPECS[name], data)
    fast = fxkit.compile(quantized)
    with torch.no_grad():
        for rows in (8, 3, 5):
            x = torch.randn(rows, 64)
            expected = quantized(x)
            torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-6)


def test_a_network_of_convolutions() -> None:
    torch.manual_seed(0)
    model, data = Convolutional().eval(), batches(3, 2, 3, 16, 16)
    quantized = q.quantize(model, q.int8_static(), data)
    with torch.no_grad():
        assert signal_to_noise(model(*data[0]), quantized(*data[0])) > 25
    assert targets(quantized.graph_module).count("dequantize_per_channel") == 3


def test_operands_are_quantised_once_for_all_their_users() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

    quantized = q.quantize(Three().eval(), q.int8_static(), batches())
    found = targets(quantized.graph_module)
    # x, both operands of the scores, and both of the sum
    assert found.count("quantize_per_tensor") == found.count("dequantize_per_tensor") == 5
    assert found.count("dequantize_per_channel") == 3


def test_layers_of_a_traced_graph_are_opened() -> None:
    torch.manual_seed(0)
    model, data = Convolutional().eval(), batches(3, 2, 3, 16, 16)
    quantized: Any = q.quantize(fxkit.symbolic_trace(model), q.int8_static(), data)
    assert targets(quantized).count("dequantize_per_channel") == 3
    with torch.no_grad():
        assert signal_to_noise(model(*data[0]), quantized(*data[0])) > 25


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export about itself
def test_exported_graphs_read_their_weights_before_their_inputs() -> None:
    model, data = perceptron(), batches()
    exported: Any = torch.export.export(model, data[0]).module()
    quantized = q.quantize(exported, q.int8_static(), data)
    with torch.no_grad():
        assert signal_to_noise(model(*data[0]), quantized(*data[0])) > 30


@of_nothing
def test_double_precision_stays_with_a_reason() -> None:
    model, x = nn.Linear(8, 4).double().eval(), torch.randn(3, 8).double()
    prepared = q.prepare(model, (x,), q.int8_static())
    assert repr(prepared) == "<PreparedProgram of Captured, 0 observers, 0 have seen values>"
    quantized = q.convert(prepared)
    assert torch.equal(quantized(x), model(x))
    (row,) = q.report(quantized, prepared).rows
    assert "float64" in row.reason


def test_tied_weights_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids), self.table.weight)

    data = [(torch.randint(20, (4, 5)),)]
    quantized = q.quantize(Tied().eval(), q.int8_static(), data)
    gm = quantized.graph_module
    assert sum(name.endswith("_quantized") for name, _ in gm.named_buffers()) == 1


def test_configs_say_what_holds_where() -> None:
    model, data = perceptron(), batches()
    config = q.QuantizationConfig(
        q.int8_static(),
        by_module={"2": None},
        by_operator={F.linear: q.int8_weight_only()},
    )
    prepared = q.prepare(model, data[0], config)
    assert not prepared.observers
    report = q.report(q.convert(prepared), prepared, data)
    first, second = report.rows
    assert first.how == "weight s8 symmetric per_channel"
    assert first.reason == "config: by_operator[aten.linear]"
    assert not second.is_quantized
    assert second.reason == "config: by_module['2'] keeps it in floating point"
    left = q.QuantizationConfig(q.int8_static(), where=lambda node: False)
    assert q.prepare(model, data[0], left).observers == {}


def test_a_report_has_a_row_for_each_operator() -> None:
    model, data = perceptron(), batches()
    prepared = q.prepare(model, data[0], q.int8_static())
    q.calibrate(prepared, data, progress=False)
    quantized = q.convert(prepared)
    report = q.report(quantized, prepared, data)
    assert [row.operator for row in report.rows] == ["aten.linear", "aten.linear"]
    for row in report.rows:
        assert row.weight_sqnr is not None and row.weight_sqnr > 35
        assert row.bytes_after < 0.3 * row.bytes_before
        assert row.activation.startswith("[") and row.notes == ()
        assert row.source is not None
    (error,) = report.sqnr
    with torch.no_grad():
        exact = torch.cat([model(x) for (x,) in data])
        found = torch.cat([quantized(x) for (x,) in data])
    assert error == pytest.approx(signal_to_noise(exact, found), abs=0.01)
    assert "2 of 2 operators quantised" in str(report)


def test_calibration_can_be_shared_out() -> None:
    model, data = perceptron(), batches(4)
    spec = q.int8_static(observer="mse")
    whole, *parts = (q.prepare(model, data[0], spec) for _ in range(3))
    assert q.calibrate(whole, data) == 4
    for part, share in zip(parts, (data[:1], data[1:]), strict=True):
        q.calibrate(part, share)
    parts[0].merge(parts[1])
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(q.convert(whole)(x), q.convert(parts[0])(x))
    with pytest.raises(UnsupportedError, match="same observers"):
        whole.merge(q.prepare(model, data[0], q.int8_weight_only()))


def test_a_graph_is_copied_and_keeps_its_parameters() -> None:
    model, data = perceptron(), batches()
    gm = fxkit.symbolic_trace(model)
    text = str(gm.graph)
    quantized: Any = q.quantize(gm, q.int8_static(), data)
    assert isinstance(quantized, fx.GraphModule)
    assert str(gm.graph) == text
    assert targets(quantized).count("dequantize_per_channel") == 2
    with torch.no_grad():
        assert torch.equal(gm(*data[0]), model(*data[0]))
        assert signal_to_noise(model(*data[0]), quantized(*data[0])) > 30


def test_half_precision_models_keep_their_type() -> None:
    model, data = perceptron().bfloat16(), [(x.bfloat16(),) for (x,) in batches()]
    for spec in (q.int8_static(), q.int8_weight_only(), q.int4_weight_only(32)):
        quantized = q.quantize(model, spec, data)
        with torch.no_grad():
            found, expected = quantized(*data[0]), model(*data[0])
        assert found.dtype == torch.bfloat16
        assert signal_to_noise(expected, found) > 13


@of_nothing
def test_what_can_not_be_quantised_stays_and_says_why() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines, self.windows = nn.Linear(64, 6), nn.Conv1d(1, 2, 3)

        def forward(self, x: Tensor) -> Any:
            return self.lines(x), self.windows(x[:, None])

    model, data = Odd().eval(), batches()

    def reasons(spec: q.QuantizationSpec) -> list[str]:
        prepared = q.prepare(model, data[0], spec)
        q.calibrate(prepared, data)
        return [row.reason for row in q.report(q.convert(prepared), prepared).rows]

    uneven = "its rows of 64 elements are not divided by groups of 48"
    groupless = "its weight has no groups: only rows of linear layers and embeddings have"
    assert reasons(q.int4_weight_only(48)) == [uneven, groupless]
    by_token = "a convolution sums over several tokens: scales per token do not fit"
    assert reasons(q.int8_dynamic()) == ["config: spec", by_token]
    with torch.no_grad():
        model.lines.weight[0, 0] = torch.nan
    assert reasons(q.int8_static()) == ["its weight is not finite", "config: spec"]


@of_nothing
def test_products_without_a_row_are_named_too() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x) + torch.einsum("bij,bkj->bik", x, x)

    x = torch.randn(2, 4, 4)
    prepared = q.prepare(Attending().eval(), (x,), q.int8_weight_only())
    rows = q.report(q.convert(prepared), prepared, [(x,)]).rows
    assert [row.how for row in rows] == ["float", "float"]
    assert "two products" in rows[0].reason


def test_what_calibration_met_is_noted() -> None:
    model, data = perceptron(), batches()
    prepared = q.prepare(model, data[0], q.int8_static())
    broken = data[0][0].clone()
    broken[0, 0] = torch.inf
    q.calibrate(prepared, [(broken,), (torch.zeros(2, 64),)])
    first, *_ = q.report(q.convert(prepared), prepared).rows
    assert first.notes == ("%input_1: 1 values are not finite",)


def test_faults_of_the_caller() -> None:
    model, data = perceptron(), batches()
    prepared = q.prepare(model, data[0], q.int8_static())
    with pytest.raises(UnsupportedError, match="observers have seen no values"):
        q.convert(prepared)
    with pytest.raises(UnsupportedError, match="expected a QuantizationConfig or"):
        q.prepare(model, data[0], None)
    with pytest.raises(UnsupportedError, match="expected a QuantizationSpec or None"):
        q.QuantizationConfig("int8")  # type: ignore[arg-type]
    with pytest.raises(FxkitError):
        q.QuantizationConfig(q.int8_static(), by_operator={"aten.lineer": None})
    with pytest.raises(UnsupportedError, match="eval mode"):
        q.prepare(perceptron().train(), data[0], q.int8_static())
    with pytest.raises(FxkitError, match=r"one of entropy, .* got 'best'"):
        q.prepare(model, data[0], q.int8_static(observer="best"))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"low": -200},
        {"low": 3, "high": 3},
        {"scheme": "odd"},
        {"granularity": "per_row"},
        {"granularity": "per_group"},
        {"group_size": 4},
        {"granularity": "per_group", "group_size": 0},
        {"is_dynamic": True},
        {"granularity": "per_token"},
    ],
)
def test_specs_that_contradict_themselves_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="expected "):
        q.TensorSpec(**options)


@pytest.mark.parametrize("mode", ["aten", "export"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export about itself
def test_programs_of_other_modes_are_refused(mode: str) -> None:
    x = torch.randn(2, 4)
    program = fxkit.capture(nn.Linear(4, 3).eval(), (x,), mode=mode)
    with pytest.raises(UnsupportedError, match="captured in mode 'whole'") as error:
        q.prepare(program, (x,), q.int8_static())
    assert "program.module()" in str(error.value)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.sin() if x.shape[0] > 3 else x)


def test_what_calibration_never_met_stays_in_float_with_a_warning() -> None:
    few, many = torch.randn(2, 4), torch.randn(5, 4)
    prepared = q.prepare(Branching().eval(), (few,), q.int8_static())
    q.calibrate(prepared, [(few,)])
    quantized = q.convert(prepared)
    quantized(few)
    with pytest.warns(UserWarning, match="hint: calibrate with such inputs"):
        found = quantized(many)
    torch.testing.assert_close(found, prepared(many))


def test_batches_are_tuples_or_dicts() -> None:
    model = nn.Linear(4, 3).eval()
    batches = [{"input": torch.randn(2, 4)} for _ in range(3)]
    prepared = q.prepare(model, (), q.int8_static(), kwargs=batches[0])
    q.calibrate(prepared, batches)
    quantized = q.convert(prepared)
    assert q.report(quantized, prepared, batches).sqnr[0] > 20
    with pytest.raises(UnsupportedError, match="a tuple or dict each, got a Tensor"):
        q.calibrate(prepared, [torch.randn(2, 4)])


def test_float_weights_that_nothing_reads_are_gone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    x = torch.randn(4, 64)
    quantized = q.quantize(model, q.int8_static(), [(x,)])
    graph = quantized.graph_module  # type: ignore[union-attr]
    kept = sum(value.nbytes for value in graph.state_dict().values())
    assert kept <= 0.3 * sum(value.nbytes for value in model.state_dict().values())
    assert [name for name, value in graph.named_parameters()] == ["0.bias", "2.bias"]
    exported = torch.export.export(graph, (x,))
    torch.testing.assert_close(exported.module()(x), quantized(x))
    torch.testing.assert_close(model(x), q.prepare(model, (x,), q.int8_static())(x))


@of_nothing
def test_what_is_quantised_already_stays() -> None:
    model, x = (
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.randn(8, 16),
    )
    for first, second in ((q.int8_static(), q.int8_static()), (q.int8_weight_only(),) * 2):
        quantized = fxkit.quantize(model, first, [(x,)])
        prepared = q.prepare(quantized, (x,), second)
        again = q.convert(prepared)
        rows = q.report(again, prepared, [(x,)]).rows
        assert not prepared.observers and len(rows) == 2
        assert all("is quantised already" in row.reason for row in rows)
        assert torch.equal(again(x), quantized(x))


def test_batches_and_programs_of_another_kind_are_told() -> None:
    model, x = nn.Linear(16, 4).eval(), torch.randn(8, 16)
    prepared = q.prepare(model, (x,), q.int8_static())
    told = r"a batch that the program takes, got \(f32\[8,15\]\): mat1 and mat2"
    with pytest.raises(UnsupportedError, match=told):
        q.calibrate(prepared, [(torch.randn(8, 15),)])
    with pytest.raises(UnsupportedError, match="takes 2 positional arguments"):
        fxkit.quantize(model, q.int8_static(), [(x, torch.zeros(8))])
    with pytest.raises(UnsupportedError, match="activations that are finite in calibration"):
        q.calibrate(prepared, [(x * torch.nan,)])
        q.convert(prepared)
    for use in (q.convert, lambda one: q.gptq(one, [(x,)]), lambda one: q.report(one, one)):
        with pytest.raises(UnsupportedError, match="expected what prepare returned"):
            use(model)
    q.calibrate(prepared, [(x,)])
    other = q.prepare(nn.Linear(16, 3).eval(), (x,), q.int8_weight_only())
    with pytest.raises(UnsupportedError, match="results of one shape"):
        q.report(q.convert(prepared), other, [(x,)])


def test_what_is_handed_over_in_another_place_is_told() -> None:
    model, x = nn.Linear(16, 4).eval(), torch.randn(8, 16)
    spec, data = q.int8_static(), [(x,)]
    quantized = fxkit.quantize(model, spec, data)
    with pytest.raises(UnsupportedError, match=r"QuantizationSpec, got builtins\.list"):
        fxkit.quantize(model, data, spec)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected batches, got QuantizationSpec"):
        fxkit.quantize(model, spec, spec)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"program with a graph, got .*\.Linear"):
        q.compare(model, quantized, data)  # type: ignore[arg-type]
    of_compiled = fxkit.quantize(fxkit.compile(model), spec, data)
    assert torch.equal(of_compiled(x), quantized(x))


def test_names_in_a_config_that_fit_nothing_are_warned_of() -> None:
    model, data = perceptron(), batches()
    for names in ({"by_module": {"tail": None}}, {"by_node": {"linear_7": None, "linear": None}}):
        config = q.QuantizationConfig(q.int8_static(), **names)
        with pytest.warns(UserWarning, match="'(tail|linear_7)', which fits none") as told:
            q.prepare(model, data[0], config)
        assert len(told) == 1


@pytest.mark.parametrize("spec", [q.int8_static(), q.int8_dynamic(), q.int4_weight_only(8)])
def test_each_node_of_a_reference_graph_has_a_type(spec: q.QuantizationSpec) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(4, 16)
    captured = fxkit.capture(model, (x,)).graph_module
    quantized = fxkit.quantize(model, spec, [(x,)]).graph_module
    assert all(node.type is not None for node in fxkit.graph(quantized) if node.op != "output")
    difference = fxkit.diff(captured, quantized)
    before, after = difference.cost_before.flops, difference.cost_after.flops
    assert before is not None and after is not None and after >= before > 0


class Tied(nn.Module):
    """An embedding and a layer that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@pytest.mark.parametrize(
    "config",
    [
        q.QuantizationConfig(q.int8_static()),
        q.QuantizationConfig(q.int8_static(), by_operator={F.embedding: None}),
        q.QuantizationConfig(q.int4_weight_only(32), by_module={"head": q.int8_weight_only()}),
    ],
)
def test_bytes_of_weights_that_are_shared_count_once(config: q.QuantizationConfig) -> None:
    ids = torch.randint(0, 50, (4, 16))
    prepared = q.prepare(Tied().eval(), (ids,), config)
    q.calibrate(prepared, [(ids,)])
    quantized = q.convert(prepared)
    found = q.report(quantized, prepared, [(ids,)])
    assert found.bytes_before == 50 * 64 * 4
    stored = quantized.graph_module.state_dict().values()
    assert found.bytes_after == sum(one.nbytes for one in stored)
    assert f"{found.bytes_before:,} -> {found.bytes_after:,} B" in str(found)


def test_what_is_given_in_a_wrong_way_is_told() -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(2, 8)
    with pytest.raises(UnsupportedError, match="whole number of at least 2"):
        q.int4_weight_only(1)
    with pytest.raises(UnsupportedError, match="whole number of at least 2"):
        q.int4_dynamic(3.5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="scheme='symmetric'"):
        q.int8_static("assym")
    with pytest.raises(UnsupportedError, match="where to be a function"):
        q.QuantizationConfig(q.int8_static(), where="x")  # type: ignore[arg-type]
    for prepare in (q.prepare, q.prepare_qat):
        with pytest.raises(UnsupportedError, match="one input is"):
            prepare(model, x, q.int8_static())
        with pytest.raises(UnsupportedError, match="kwargs=batch"):
            prepare(model, {"input": x}, q.int8_static())
    with pytest.raises(UnsupportedError, match="kwargs=batch"):
        q.decompose_attention(model, {"input": x})
    captured = q.decompose_attention(model, (x,))
    with pytest.raises(UnsupportedError, match=r"program\.graph_module"):
        q.prepare_qat(captured, (x,), q.int8_static())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: q.QuantizationSpec(None, None),  # type: ignore[arg-type]
        lambda: q.QuantizationSpec(q.TensorSpec(granularity="per_channel"), q.TensorSpec()),
        lambda: q.QuantizationSpec(
            q.TensorSpec(granularity="per_group", group_size=4), q.TensorSpec()
        ),
    ],
)
def test_specs_that_nothing_computes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedError, match="hint"):
        make()


def test_a_spec_that_quantises_nothing_warns_and_says_why() -> None:
    model, x = nn.Linear(96, 8).eval(), torch.randn(2, 96)
    with pytest.warns(UserWarning, match="operators to quantise, got none: .*128"):
        q.quantize(model, q.int4_weight_only(), [(x,)])


def test_zeros_of_relu_do_not_draw_the_range_of_entropy_to_them() -> None:
    x, model = torch.randn(20000, 16).relu(), nn.Linear(16, 8).eval()
    found = q.quantize(model, q.int8_static(observer="entropy"), [(x,)])
    with torch.no_grad():
        assert signal_to_noise(model(x[:500]), found(x[:500])) > 38
