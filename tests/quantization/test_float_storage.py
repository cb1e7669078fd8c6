"""Weights that are stored as float8 and bfloat16."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.passes import ConstantFolding
from fxkit.quantization.backends import BACKENDS, BackendDescription
from fxkit.quantization.stored_weight import StoredWeight

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
of_nothing = pytest.mark.filterwarnings("ignore:expected operators to quantise")

SPECS = {
    "e4m3 per_channel": q.float8_weight_only(),
    "e5m2 per_channel": q.float8_weight_only(E5M2),
    "e4m3 per_tensor": q.float8_weight_only(weights="per_tensor"),
    "bfloat16": q.bfloat16_weight_only(),
}
# The error of the nearest number is at most this share of a normal number.
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3, BF16: 2**-8}
EACH = pytest.mark.parametrize("name", SPECS)


class Layers(nn.Module):
    """An embedding, a convolution, a linear layer and a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.convolution = nn.Conv1d(32, 24, 3, padding=1)
        self.linear = nn.Linear(24, 16)
        self.matrix = nn.Parameter(torch.randn(16, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        moved = self.convolution(self.table(tokens).transpose(1, 2)).relu().transpose(1, 2)
        return self.linear(moved) @ self.matrix


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


def tokens(rows: int = 4) -> tuple[Tensor]:
    return (torch.randint(0, 40, (rows, 9), generator=torch.Generator().manual_seed(rows)),)


def graph_of(quantized: Any) -> torch.fx.GraphModule:
    return quantized.graph_module


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": torch.float16}, "dtype: one of .*float8_e4m3fn.*got torch.float16"),
        ({"dtype": E4M3, "scheme": "affine"}, "symmetric for torch.float8_e4m3fn, got 'affine'"),
        ({"dtype": E4M3, "low": -10, "high": 10}, r"which has its own, got \(-10, 10\)"),
        (
            {"dtype": E4M3, "granularity": "per_group", "group_size": 32},
            "per_tensor or per_channel for torch.float8_e4m3fn, got 'per_group'",
        ),
        ({"dtype": E5M2, "granularity": "per_token", "is_dynamic": True}, "got 'per_token'"),
        ({"dtype": BF16, "granularity": "per_channel"}, "as it has no scale.*got 'per_channel'"),
        ({"dtype": E5M2, "is_pair_safe": True}, "is_pair_safe: false"),
    ],
)
def test_specs_that_contradict_the_type_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(UnsupportedError, match=expected):
        q.TensorSpec(**given)


def test_functions_that_make_specs_check_what_they_are_given() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype: one of .*got torch\.bfloat16"):
        q.float8_weight_only(BF16)
    with pytest.raises(UnsupportedError, match="per_channel or per_tensor, got 'per_group'"):
        q.float8_weight_only(weights="per_group")


@EACH
def test_activations_are_not_stored_in_floating_point(name: str) -> None:
    weights = SPECS[name].weights
    with pytest.raises(UnsupportedError, match=f"got {name}\n.*storage of weights only"):
        q.QuantizationSpec(weights, weights)


@EACH
def test_specs_follow_their_type(name: str) -> None:
    spec = SPECS[name].weights
    assert SPECS[name].activations is None and str(spec) == name
    assert spec.high == -spec.low == torch.finfo(spec.dtype).max
    assert spec.bits == 8 * spec.dtype.itemsize
    assert q.TensorSpec(spec.dtype, spec.low, spec.high, granularity=spec.granularity) == spec


@EACH
@pytest.mark.parametrize("axis", [0, 1])
def test_values_are_the_nearest_ones(name: str, axis: int) -> None:
    torch.manual_seed(0)
    spec = SPECS[name].weights
    weight = torch.randn(12, 20) * torch.logspace(-3, 2, 12)[:, None]
    stored = StoredWeight.of(weight, axis, spec)
    largest = weight.abs().amax(1 - axis, keepdim=True)
    largest = largest if spec.granularity == "per_channel" else weight.abs().amax()
    scale = (largest.double() / spec.high).float() if spec.has_scale else torch.ones(())
    assert stored.integers.dtype == spec.dtype
    assert torch.equal(stored.over_parts().scale.expand(12, 20), scale.expand(12, 20))
    assert torch.equal(stored.integers.float(), (weight / scale).to(spec.dtype).float())
    step = torch.finfo(spec.dtype).tiny * scale
    off = (stored.restored() - weight).abs()
    assert bool((off <= ROUNDING[spec.dtype] * weight.abs().maximum(step) * 1.001).all())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16])
def test_the_largest_numbers_saturate(dtype: torch.dtype) -> None:
    spec = q.TensorSpec(dtype)
    weight = torch.tensor([[-3.4e38, 3.4e38, torch.finfo(torch.float32).max, 0.0]])
    stored = StoredWeight.of(weight, 0, spec)
    limit = torch.finfo(dtype).max
    assert stored.integers.double().abs().max() == limit
    assert bool(stored.restored().isfinite().all())
    small = StoredWeight.of(torch.tensor([[1e-37, -3e-38]]), 0, spec).restored()
    assert small[0, 0] == pytest.approx(1e-37, rel=0.07) and small[0, 1] < 0


def test_channels_of_zeros_have_a_safe_scale() -> None:
    weight = torch.randn(3, 5)
    weight[1] = 0
    stored = StoredWeight.of(weight, 0, SPECS["e4m3 per_channel"].weights)
    assert stored.parameters.scale[1] == torch.finfo(torch.float32).eps
    assert not stored.integers[1].float().any()


@EACH
def test_graphs_are_casts_and_products(name: str, model: nn.Module) -> None:
    spec = SPECS[name].weights
    gm = graph_of(fxkit.quantize(model, SPECS[name], [tokens()]))
    gm.graph.lint()
    added = [str(node.target) for node in gm.graph.nodes if str(node.target).startswith("aten.")]
    kinds = ["aten.to.dtype", "aten.mul.Tensor"] if spec.has_scale else ["aten.to.dtype"]
    assert [target for target in added if target in kinds] == kinds * 4
    state = gm.state_dict()
    stored = [one for path, one in state.items() if path.endswith("_quantized")]
    assert [one.dtype for one in stored] == [spec.dtype] * 4
    floats = [path for path, one in state.items() if one.dtype == torch.float32 and one.ndim > 1]
    assert all(path.endswith("_scale") for path in floats)
    weight = model.linear.weight.detach()
    restored = StoredWeight.of(weight, 0, spec).restored().float()
    used = next(node for node in gm.graph.nodes if "linear" in str(node.target) and node.args)
    made: dict[str, Tensor] = {}
    recorder = torch.fx.Interpreter(gm)
    run = recorder.run_node
    recorder.run_node = lambda n: made.setdefault(n.name, run(n))  # type: ignore[method-assign]
    recorder.run(*tokens())
    torch.testing.assert_close(made[used.args[1].name], restored, rtol=1e-6, atol=0)


@EACH
@torch.no_grad()
def test_reports_and_comparisons_tell_of_them(name: str, model: nn.Module) -> None:
    spec = SPECS[name].weights
    prepared = q.prepare(model, tokens(), SPECS[name])
    quantized = q.convert(prepared)
    report = q.report(quantized, prepared, [tokens()])
    assert [row.how for row in report.rows] == [f"weight {name}"] * 4
    least = {E4M3: 28, E5M2: 22, BF16: 52}[spec.dtype]
    assert all(least < (row.weight_sqnr or 0) < least + 12 for row in report.rows)
    row = next(one for one in report.rows if one.operator == "aten.linear")
    scales = {"per_channel": 16 * 4, "per_tensor": 4}[spec.granularity] if spec.has_scale else 0
    assert (row.bytes_before, row.bytes_after) == (1536, 384 * spec.dtype.itemsize + scales)
    found = q.compare(prepared, quantized, [tokens()])
    assert [one.operator for one in found.rows] == [one.operator for one in report.rows]
    assert all(one.by_activations == torch.inf for one in found.rows)
    assert all(one.by_weight == one.added > least - 8 for one in found.rows)


@pytest.mark.one_in(4)
@EACH
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_compiled_graphs_are_their_reference_graph(
    name: str, dynamic: bool, model: nn.Module
) -> None:
    quantized: Any = fxkit.quantize(model, SPECS[name], [tokens()])
    compiled = fxkit.compile(graph_of(quantized), dynamic=dynamic)
    for rows in (4, 4, 7, 4, 7) if dynamic else (4, 4):
        torch.testing.assert_close(compiled(*tokens(rows)), quantized(*tokens(rows)))
    report = compiled.compiled_modules[-1].report()
    assert report.fused == report.candidates  # of ATen's casts none is left


@torch.no_grad()
def test_formats_mix_by_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 40), nn.Linear(40, 8)).eval()
    data = [(torch.randn(16, 32),) for _ in range(3)]
    float8 = SPECS["e4m3 per_channel"]
    mixed = q.QuantizationSpec(q.int8_static().activations, float8.weights)
    config = q.QuantizationConfig(q.int8_static(), by_module={"0": float8, "3": mixed})
    prepared = q.prepare(model, data[0], config)
    q.calibrate(prepared, data)
    rows = q.gptq(prepared, data)
    assert [row.path for row in rows] == ["2.weight"]  # of the others nothing is chosen
    q.correct_biases(prepared, data)
    quantized: Any = q.convert(prepared)
    how = [row.how.partition(",")[0] for row in q.report(quantized, prepared).rows]
    assert how[::2] == ["weight e4m3 per_channel"] * 2 and how[1].startswith("weight s8 symmetric")
    gm = graph_of(quantized)
    kinds = {one.dtype for path, one in gm.state_dict().items() if path.endswith("_quantized")}
    assert kinds == {E4M3, torch.int8}
    compiled = fxkit.compile(gm)
    for _ in range(2):
        torch.testing.assert_close(compiled(*data[0]), gm(*data[0]), atol=0.02, rtol=0)
    assert (gm(*data[0]) - model(*data[0])).abs().max() < 0.1


@EACH
def test_exported_programs_keep_them(name: str, model: nn.Module) -> None:
    gm = graph_of(fxkit.quantize(model, SPECS[name], [tokens()]))
    back: Any = torch.export.export(gm, tokens()).module()
    with torch.no_grad():
        assert torch.equal(back(*tokens()), gm(*tokens()))
    stored = {one.dtype for one in back.state_dict().values()}
    assert SPECS[name].weights.dtype in stored
    compiled = fxkit.compile(back)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*tokens()), gm(*tokens()))


@of_nothing
@EACH
def test_what_is_stored_so_is_quantised_already(name: str, model: nn.Module) -> None:
    quantized = fxkit.quantize(model, SPECS[name], [tokens()])
    again = q.prepare(quantized, tokens(), q.int8_static())
    again(*tokens())
    rows = q.report(q.convert(again), again).rows
    assert len(rows) == 4
    assert all("is quantised already" in row.reason for row in rows if not row.is_quantized)
    assert not any(row.is_quantized for row in rows)


@EACH
def test_folding_leaves_weights_as_they_are_stored(name: str, model: nn.Module) -> None:
    quantized = graph_of(fxkit.quantize(model, SPECS[name], [tokens()]))
    before = [node.name for node in quantized.graph.nodes]
    fxkit.PassManager([ConstantFolding()]).run(quantized)
    assert [node.name for node in quantized.graph.nodes] == before
    expected = quantized(*tokens())
    fxkit.PassManager([ConstantFolding(fold_dequantized=True)]).run(quantized)
    assert not any("aten.to" in str(node.target) for node in quantized.graph.nodes)
    assert torch.equal(quantized(*tokens()), expected)


@of_nothing
def test_weights_without_a_shorter_form_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
        model[1].weight[2, 3] = -torch.inf
    x = (torch.randn(2, 8),)
    for name, half in itertools.product(SPECS, (torch.float32, torch.bfloat16, torch.float16)):
        inputs = (x[0].to(half),)
        prepared = q.prepare(model.to(half), inputs, SPECS[name])
        *broken, whole = q.report(q.convert(prepared), prepared).rows
        stays = "is not finite"
        if name == "bfloat16" and half != torch.float32:
            stays = f"{str(half).removeprefix('torch.')}, which takes no more than bfloat16"
            assert stays in whole.reason
        else:
            assert whole.is_quantized
        assert all(stays in row.reason for row in broken)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_stays_the_type_of_results(half: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 24), nn.GELU()).eval().to(half), torch.randn(5, 32)
    quantized: Any = fxkit.quantize(model, q.float8_weight_only(), [(x.to(half),)])
    result = quantized(x.to(half))
    assert result.dtype == half and (result - model(x.to(half))).abs().max() < 0.1
    assert not any(one.numel() > 24 and one.dtype == half for one in graph_of(quantized).buffers())
    compiled = fxkit.compile(graph_of(quantized))
    for _ in range(2):
        torch.testing.assert_close(compiled(x.to(half)), result)


@EACH
def test_training_with_them_is_refused(name: str) -> None:
    config = q.QuantizationConfig(q.int8_static(), by_module={"0": SPECS[name]})
    with pytest.raises(UnsupportedError, match=f"weights to train as integers, got {name}"):
        q.prepare_qat(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), config)


@EACH
def test_nothing_is_chosen_for_them(name: str) -> None:
    model, data = nn.Sequential(nn.Linear(8, 4)).eval(), [(torch.randn(6, 8),)]
    prepared = q.prepare(model, data[0], SPECS[name])
    for algorithm in (q.gptq, q.ada_round, q.fit_scales):
        with pytest.raises(UnsupportedError, match=f"got 0.weight stored as {name}"):
            algorithm(prepared, data)
    with pytest.raises(UnsupportedError, match="stored as integers"):
        q.gptq(prepared, data, in_turn=True)
    assert not prepared.choices.weights and not prepared.choices.scales


@EACH
@torch.no_grad()
def test_algorithms_of_float_programs_go_with_them(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    data, spec = [(torch.randn(20, 32),) for _ in range(2)], SPECS[name]
    programs: list[Any] = [
        q.awq(model, spec, data),
        q.smooth_quant(model, data),
        q.smooth_for(model, spec, data),
        q.equalize(model, data[0]),
        q.rotate_inputs(model, data[0]),
    ]
    for program in programs:
        quantized: Any = fxkit.quantize(program, spec, data)
        assert (quantized(*data[0]) - model(*data[0])).abs().max() < 0.25
        assert any(one.dtype == spec.weights.dtype for one in graph_of(quantized).buffers())


def test_descriptions_of_accelerators_take_none() -> None:
    specs = {"aten.linear": (q.int8_static(), q.float8_weight_only())}
    with pytest.raises(UnsupportedError, match="as integers, got e4m3 per_channel"):
        BackendDescription("mine", specs=specs)
    quantized = fxkit.quantize(nn.Linear(4, 4).eval(), SPECS["bfloat16"], [(torch.randn(2, 4),)])
    partition = fxkit.passes.Partition(BACKENDS["xnnpack"])
    result = fxkit.PassManager([partition]).run(quantized)
    assert any("multiplies no float, float" in note for note in result.records[0].notes)


@of_nothing
@pytest.mark.parametrize(
    "spec", [q.float8_weight_only(), q.int8_weight_only(), q.int8_static(), q.int4_weight_only(4)]
)
@torch.no_grad()
def test_products_with_a_vector_stay_in_float(spec) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.v) + (x @ self.v).softmax(-1)

    model, x = Scores().eval(), torch.randn(3, 8)
    quantized = fxkit.quantize(model, spec, [(x,)])
    torch.testing.assert_close(quantized(x), model(x))
