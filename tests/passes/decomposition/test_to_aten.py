"""Every call as an overload: torch's own samples of its operators, indexing, modules, effects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject
from torch import fx, nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.printer import format_graph
from fxkit.passes import Functionalise, PassContext
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.properties import property_named
from tests.operator_samples import Sample, is_same, samples
from tests.patterns.random_graphs import GRAPHS, SHAPE, difference, observe
from tests.patterns.test_random_graphs import _QUIET
from tests.sampling import one_in


def lowered(program: Any, *args: Any, whole: bool = True) -> fx.GraphModule:
    """Trace, decompose with numbers compared, and expect overloads only."""
    gm = fxkit.symbolic_trace(program)
    PassManager([DecomposeToAten()], verify="numerics", args=args).run(gm)
    violation = property_named("aten").check(gm)
    assert (violation is None) == whole, violation
    return gm


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


X = torch.randn(4, 5, 6)
ROWS = torch.tensor([2, 0, 3])
MASK = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    "index",
    [
        0, -1, slice(None), slice(1, None), slice(1, -1, 2), None, ..., (0, 1), (..., 0), (1, ...),
        (slice(None), None, 2), (None, 0, ..., None), [0, 2],
        (slice(None), [0, 1]), ([0, 1], slice(1), [2, 3]), (..., [0, 1]), (0, [1, 2]),
        ([0, 1], None, 2),
    ],
    ids=str,
)  # fmt: skip
def test_constant_indexing_is_that_of_python(index):
    lowered(lambda x: x[index], X)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "index",
    [[1, 0], [True, False, True, True], [[0, 1], [1, 1]], [slice(1), 1], (slice(None), [1, 0])],
)
def test_lists_are_positions_masks_or_tuples_as_torch_takes_them(index):
    lowered(lambda x: (x[index], x), X)


def test_indexing_by_tensors():
    assert "aten.index.Tensor" in targets(lowered(lambda x, i: x[i], X, ROWS))
    lowered(lambda x, i: x[:, 1:4, i], X, ROWS)
    lowered(lambda x, i: x[i, :, i], X, ROWS)
    lowered(lambda x, i: x[:, None, i[:, None], 1:], X, ROWS)


def test_assigning_to_an_index():
    def program(x, value, rows):
        x = x.clone()
        x[0] = value
        x[1, :2] = 2.5
        x[..., -1] = 3
        x[rows] = value[None]
        x[:, rows] = 0.5
        x[None] = x[None] * 2
        x[2] = value[None, None]
        return x

    gm = lowered(program, X, torch.randn(5, 6), ROWS)
    assert {"aten.copy_.default", "aten.fill_.Scalar", "aten.index_put_.default"} <= set(
        targets(gm)
    )


def test_indexing_alone_is_no_overload():
    gm = fxkit.symbolic_trace(lambda x: x[0])
    propagate_types(gm, (X,))
    violation = property_named("aten").check(gm)
    assert violation is not None
    assert violation.nodes == ("getitem",)


def test_a_computed_size_stays_one():
    """The graph of one example holds for others: no size is written into it."""
    gm = lowered(lambda x: x[:, : x.shape[1] // 2].reshape(x.size(0), -1), X)
    other = torch.randn(3, 8, 2)
    torch.testing.assert_close(gm(other), other[:, :4].reshape(3, -1))
    assert targets(gm).count("aten.sym_size.int") == 2


class Modules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding="same")
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.Hardswish(inplace=True)
        self.same = nn.Identity()
        self.pool = nn.AdaptiveMaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.fc = nn.Linear(16, 5, bias=False)

    def forward(self, x):
        y = self.same(self.act(self.norm(self.conv(x))))
        return self.fc(torch.flatten(self.pool(self.up(y)), 1))


@pytest.mark.parametrize("training", [False, True])
def test_modules_give_up_their_parameters(training):
    model = Modules().train(training)
    gm = lowered(model, torch.randn(2, 3, 6, 6, requires_grad=True))
    assert all(node.op != "call_module" for node in gm.graph.nodes)
    reads = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    assert {"conv.weight", "conv.bias", "norm.weight", "fc.weight"} <= reads


def test_normalisation_in_training_changes_its_buffers_as_before():
    model = Modules().train()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    gm = fxkit.symbolic_trace(model)
    PassManager([DecomposeToAten()], args=(x,)).run(gm)
    for _ in range(2):
        torch.testing.assert_close(gm(x), reference(x), rtol=0, atol=0)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(gm.get_buffer(name), buffer, rtol=0, atol=0)
    assert gm.get_buffer("norm.num_batches_tracked") == 2


def test_a_shared_module_is_read_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(x))

    gm = lowered(Twice(), torch.randn(2, 4))
    assert [n.name for n in gm.graph.nodes if n.op == "get_attr"] == ["fc_weight", "fc_bias"]


def test_recurrent_module_becomes_its_operators():
    gm = lowered(nn.Sequential(nn.LSTM(4, 3, batch_first=True)), torch.randn(2, 5, 4))
    assert any("lstm" in t or "mkldnn_rnn" in t or "addmm" in t or "linear" in t
               for t in targets(gm))  # fmt: skip


def test_functions_without_an_operator_become_several():
    image = torch.randn(1, 2, 4, 4)
    lowered(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), image)
    lowered(lambda x: F.normalize(torch.norm(x, dim=1), dim=-1), image)
    lowered(lambda x: F.local_response_norm(x, 2), image)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.max(0).values, lambda x: torch.topk(x, 2).indices, lambda x: x.sort(-1).values,
        lambda x: torch.linalg.qr(x).R, lambda x: torch.aminmax(x).max,
        lambda x: torch.linalg.svd(x).S, lambda x: torch.frexp(x).exponent,
        lambda x: torch.slogdet(x[:, :4]).logabsdet, lambda x: x.kthvalue(1).values.add_(1),
    ],
)  # fmt: skip
def test_results_read_by_name_are_taken_by_place(program):
    x = torch.randn(4, 5)
    gm = lowered(program, x)
    assert "python.getattr" not in str(fxkit.graph(gm))
    assert torch.equal(gm(x), program(x))
    passes = [DecomposeToAten(), Functionalise()]
    functional = fxkit.symbolic_trace(program)
    PassManager(passes, verify="numerics", args=(x,)).run(functional)


def test_effects_stay_in_order():
    def program(x):
        y = x.clone()
        F.relu_(y[0])
        torch.add(y, x, out=y)
        y += torch.rand_like(y)
        y[1:].mul_(2)
        return y, F.dropout(y, 0.5)

    gm = lowered(program, X)
    wanted = ["relu_", "add.out", "rand_like", "add_", "mul_", "dropout"]
    found = [w for t in targets(gm) for w in wanted if t.removeprefix("aten.").startswith(w)]
    assert found == wanted


def test_a_number_over_a_tensor_rounds_as_python_does():
    x = torch.rand(1000) + 0.5
    gm = lowered(lambda x: 3.0 / x, x)
    assert targets(gm) == ["aten.reciprocal.default", "aten.mul.Tensor"]


def test_what_nothing_is_known_of_stays_with_a_note():
    def mystery(x):
        return x + 1

    gm = fx.symbolic_trace(lambda x: x)
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        call = gm.graph.call_function(mystery, (next(iter(gm.graph.nodes)),))
    next(iter(reversed(gm.graph.nodes))).args = (call,)
    gm.recompile()
    propagate_types(gm, (X,))
    context = PassContext((X,))
    with edit(gm) as session:
        DecomposeToAten().apply(session, context)
    assert "nothing is known of it" in context.notes[0]
    assert call.target is mystery


def test_provenance_and_sources_are_kept():
    gm = fxkit.capture(Modules().eval(), (torch.randn(2, 3, 6, 6),)).graph_module
    PassManager([DecomposeToAten()], args=(torch.randn(2, 3, 6, 6),)).run(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta.get("stack_trace"), node.name


@_QUIET
@given(gm=GRAPHS)
def test_random_programs(gm):
    try:
        expected = observe(gm, transposed=False, same=False)
        propagate_types(gm, (torch.empty(SHAPE), torch.empty(SHAPE)))
    except (RuntimeError, InvalidGraphError):
        reject()
    PassManager([DecomposeToAten()], args=(torch.empty(SHAPE), torch.empty(SHAPE))).run(gm)
    differs = difference(expected, observe(gm, transposed=False, same=False))
    assert differs is None, f"{differs}\n{format_graph(gm)}"


PARTS = 8


def _graph_of(sample: Sample) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """A module of one sample that returns its result."""
    graph = sample.node.graph
    graph.output(sample.node)
    gm = fx.GraphModule(nn.Module(), graph)
    return gm, tuple(sample.tensors.values())


def _disagreement(sample: Sample) -> str | None:
    try:
        torch.manual_seed(1)
        expected, arguments = sample.run()
        gm, args = _graph_of(sample)
        propagate_types(gm, args)
    except (RuntimeError, InvalidGraphError, TypeError, AttributeError, UserWarning,
            SyntaxError):  # fmt: skip
        return None
    if not gm.code or sample.name == "norm.nuc":  # takes another way where a gradient is wanted
        return None
    with edit(gm) as session:
        DecomposeToAten().apply(session, PassContext(args))
    copies = sample.copies()
    torch.manual_seed(1)
    got = fx.Interpreter(gm).run(*copies.values(), enable_io_processing=False)
    text = f"{sample.name} {sample.node.target}\n{format_graph(gm)}"
    if "empty" in sample.name:
        return None
    if not is_same(expected, got) or not is_same(arguments, copies):
        return text
    return None


@pytest.mark.parametrize("part", one_in(3, range(3)))
def test_torchs_samples_keep_their_results(part):
    wrong = [told for sample in samples(part, PARTS * 8) if (told := _disagreement(sample))]
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_of_torchs_samples_keep_their_results(part):
    wrong = [told for sample in samples(part, PARTS) if (told := _disagreement(sample))]
    assert not wrong, "\n".join(wrong[:5])
