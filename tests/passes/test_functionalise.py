"""Programs that write, as programs that don't: values, inputs, buffers, sharing, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import fx, nn

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import PostconditionError
from fxkit.ir.printer import format_graph
from fxkit.ir.session import edit
from fxkit.passes import PassContext
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.functionalise import Functionalise
from fxkit.passes.manager import PassManager
from fxkit.passes.properties import property_named
from tests.passes.random_programs import check_passes_on
from tests.patterns.random_graphs import GRAPHS
from tests.patterns.test_random_graphs import _QUIET

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

ROWS = torch.tensor([0, 2])


def functional(program, *args):
    gm = fxkit.symbolic_trace(program)
    PassManager([DecomposeToAten(), Functionalise()], verify="numerics", args=args).run(gm)
    assert property_named("functional").check(gm) is None
    return gm


def targets(gm):
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def in_place(x):
    y = x.clone()
    y.add_(1).mul_(y)
    F.relu_(y)
    y *= 2
    return y


def through_views(x):
    y = x * 1
    row, column, corner = y[1], y[:, 2], y[:2, ::2]
    row.add_(1)
    column.fill_(3.0)
    corner.copy_(corner * -1)
    y.t()[0].neg_()
    y.view(2, 2, 6)[1].zero_()
    y.diagonal().mul_(5)
    return y, row, column, corner + row[0]


def through_parts(x):
    y = x.clone()
    a, b = y.chunk(2, 1)
    a.add_(b)
    parts = y.unbind(0)
    parts[0].mul_(0.5)
    parts[1].add_(parts[0])
    y.narrow(1, 1, 2).sub_(1)
    y.permute(1, 0)[3] = 7.0
    return y, a.sum(), b * 1


def out_variants(x):
    y = x.clone()
    torch.add(x, 1.0, out=y)
    torch.mul(y, y, out=y)
    z = torch.empty(4)
    torch.sum(y, 1, out=z)
    return y, z


def writes_inputs(x):
    x.mul_(2)
    x[0] = 1.0
    return x + 1, x[1], x


def with_dtypes(x):
    y = (x * 10).to(torch.int64)
    y.add_(1).bitwise_and_(3)
    z = x.half()
    z.add_(x)
    x2 = x.clone()
    x2.copy_(y)
    x2.gt_(1)
    return y, z, x2


def other_writes(x):
    y = x.clone()
    y.masked_fill_(y > 0, 0.5)
    y.index_add_(0, ROWS, x[:2])
    y[ROWS] = 4.0
    y.clamp_(-1, 1).scatter_(1, ROWS[:, None].repeat(2, 1), 2.0)
    return y


def transposed(x):
    y = x.t().clone(memory_format=torch.preserve_format)
    y.add_(torch.ones(6, 4))
    y.copy_(x.t().contiguous())
    return y, y.reshape(-1)


def noise(x):
    y = x.clone()
    y.bernoulli_(0.5)
    y.add_(torch.rand_like(y))
    return F.dropout(y, 0.5), y.uniform_()


PROGRAMS = (in_place, through_views, through_parts, out_variants, writes_inputs, with_dtypes,
            other_writes, transposed, noise)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_program_keeps_all_that_can_be_seen(program, wants_gradient):
    differentiable = program in (through_views, other_writes, transposed)
    functional(program, X.clone().requires_grad_(wants_gradient and differentiable))


def test_inputs_are_written_at_the_end_only():
    gm = functional(writes_inputs, X.clone())
    names = targets(gm)
    assert names.count("copy_.default") == 1
    assert names[-1] == "copy_.default"
    x = X.clone()
    _, row, same = gm(x)
    assert same is x
    assert row.data_ptr() == x[1].data_ptr()
    expected = X * 2
    expected[0] = 1.0
    torch.testing.assert_close(x, expected)


def test_a_view_is_put_into_its_base():
    def program(x):
        y = x + 0
        y[0].add_(1)
        return torch.relu(y)

    assert targets(functional(program, X)) == [
        "add.Scalar", "select.int", "add.Scalar", "select_scatter.default", "relu.default",
    ]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_buffers_keep_their_changes(training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    model.train(training)
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 6, 6)
    gm = functional(model, x)
    assert ("copy_.default" in targets(gm)) == training
    for _ in range(2):
        torch.testing.assert_close(gm(x), reference(x), rtol=0, atol=0)
    for ours, theirs in zip(gm.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class InstanceNorms(nn.Module):
    """The statistics of instances, from a module, a function, and one without weights."""

    def __init__(self):
        super().__init__()
        self.one = nn.InstanceNorm2d(3, track_running_stats=True, affine=True)
        self.other = nn.InstanceNorm2d(3, track_running_stats=True)

    def forward(self, x):
        mean, variance = self.other.running_mean, self.other.running_var
        y = F.instance_norm(self.one(x), mean, variance, None, None, True, 0.2)
        return y + self.other.running_var[:, None, None]


@pytest.mark.parametrize("spelling", ["traced", "captured", "exported"])
def test_statistics_of_instances_are_kept(spelling):
    model, x = InstanceNorms(), torch.randn(2, 3, 4, 4)
    if spelling == "traced":
        gm = fxkit.symbolic_trace(model)
    elif spelling == "captured":
        gm = fxkit.capture(model, (x,)).graph_module
    else:
        gm = torch.export.export(model, (x,)).module()
    reference = copy.deepcopy(model)
    PassManager([DecomposeToAten(), Functionalise()], verify="numerics", args=(x,)).run(gm)
    assert property_named("functional").check(gm) is None
    for _ in range(3):
        torch.testing.assert_close(gm(x), reference(x))


def test_statistics_of_a_batch_are_results_beside_the_buffers():
    def program(x, mean, variance):
        y, center, _ = torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)
        return y, center + mean

    gm = functional(program, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
    assert "_native_batch_norm_legit_functional.default" in targets(gm)


def test_statistics_that_are_taken_whole_are_left():
    def program(x, mean, variance):
        return torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)

    gm = fxkit.symbolic_trace(program)
    assert "taken whole" in notes_of(gm, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))[0]


def notes_of(gm: fx.GraphModule, *args) -> list[str]:
    PassManager([DecomposeToAten()], args=args).run(gm)
    propagate_types(gm, args)
    before = format_graph(gm)
    context = PassContext(args)
    with edit(gm) as session:
        Functionalise().apply(session, context)
    assert format_graph(gm) == before
    return context.notes


def test_what_changes_shape_in_place_is_left():
    def program(x):
        y = x.clone()
        y.transpose_(0, 1).add_(1)
        return y

    assert "changes the shape" in notes_of(fxkit.symbolic_trace(program), X)[0]


def test_a_captured_graph_writes_through_a_view_of_its_input():
    def program(x):
        return x.view(6, 4).add_(1) * 2

    gm = fxkit.capture(program, (X.clone(),)).graph_module
    passes = [DecomposeToAten(), Functionalise()]
    PassManager(passes, verify="numerics", args=(X.clone(),)).run(gm)
    x = X.clone()
    torch.testing.assert_close(gm(x), (X.view(6, 4) + 1) * 2)
    torch.testing.assert_close(x, X + 1)


def test_captured_inputs_that_share_memory_are_left():
    def program(x, row):
        row.add_(1)
        return x * 2

    x = X.clone()
    gm = fxkit.capture(program, (x, x[0])).graph_module
    assert "inputs share memory" in notes_of(gm, x, x[0])[0]


def test_a_parameter_that_wants_a_gradient_is_left():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return x * self.weight

    gm = fxkit.capture(Moves(), (X,)).graph_module
    assert "wants a gradient" in notes_of(gm, X)[0]


@settings(_QUIET, max_examples=200)
@given(gm=GRAPHS)
def test_random_programs(gm):
    check_passes_on(gm, [DecomposeToAten(), Functionalise()])


@pytest.mark.sweep
@settings(_QUIET, max_examples=3000)
@given(gm=GRAPHS)
def test_many_random_programs(gm):
    check_passes_on(gm, [DecomposeToAten(), Functionalise()])


def test_a_called_graph_stays_and_the_error_says_what_to_do():
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    gm, args = fxkit.symbolic_trace(network), (torch.randn(2, 8),)
    PassManager([fxkit.passes.SplitBySize(2)], args=args).run(gm)
    with pytest.raises(PostconditionError, match="%part_0 may write to anything") as caught:
        PassManager([Functionalise()], args=args).run(gm)
    assert caught.value.hint is not None
    assert "run functionalise before what split the graph" in caught.value.hint
    assert "fxkit.analysis.slices.inline" in caught.value.hint
