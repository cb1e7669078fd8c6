"""Programs that write, as programs that don't: values, inputs, buffers, sharing, gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import fx, nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import PostconditionError, PreconditionError
from fxkit.ir.printer import format_graph
from fxkit.passes import PassContext
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.functionalise import Functionalise
from fxkit.passes.manager.manager import PassManager
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


def test_results_that_are_taken_whole_are_a_tuple():
    def program(x, mean, variance):
        return torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)

    gm = functional(program, torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
    assert len(gm(torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))) == 3


def test_results_that_others_take_whole_are_left():
    def program(x, mean, variance):
        results = torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)
        return results[1:]

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


def turned(x):
    y = x.clone()
    row = y[0]
    y.transpose_(0, 1).add_(1)
    y.unsqueeze_(0)
    y[0, 0] = 7.0
    return y, row, y.squeeze_().sum(0)


def as_strided_in_place(x):
    y = x + 1
    y.as_strided_((3, 2), (2, 1), 4)
    return y * 2


def sorted_into(x):
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.sort(x, out=(values, indices))
    return values * 2, indices


def many_at_once(x):
    a, b = x.clone(), x + 1
    torch._foreach_mul_([a, b], 2.0)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_add_([a, b], [b * 0 + 1, x])  # pyright: ignore[reportPrivateImportUsage]
    return a, b


NEW_MEMORY = {
    "out_of_no_size": lambda x: torch.mul(x, 2, out=torch.empty(0)).sum(),
    "transposed_in_place": lambda x: (x * 1).t_().sin(),
    "unsqueezed_input": lambda x: x.unsqueeze_(0) * 2,
    "returned_input": lambda x: (x.unsqueeze_(0), x.t().sum(0) if x.dim() < 3 else x[0]),
    "squeezed_input": lambda x: x.squeeze_() + 1,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "rrelu_": lambda x: F.rrelu_(x * 1, 0.1, 0.3, training=True),
    "turned": turned,
    "sorted_into": sorted_into,
    "returned_sort": lambda x: torch.sort(
        x, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))
    ),
    "many_at_once": many_at_once,
    "resized": lambda x: torch.tensordot(x, x, out=torch.empty(0)),
    "linspace": lambda x: torch.linspace(0, 1, 4, out=torch.empty(4)) + x[:, 0],
    "polygamma": lambda x: (x + 9).polygamma_(1),
}


@pytest.mark.parametrize("name", NEW_MEMORY)
def test_new_shapes_and_new_memory(name):
    gm = fxkit.capture(NEW_MEMORY[name], (X.clone(),)).graph_module
    passes = [DecomposeToAten(), Functionalise()]
    result = PassManager(passes, verify="numerics", args=(X.clone(),)).run(gm)
    assert property_named("functional").check(gm) is None
    assert not result.records[-1].notes


def _square():
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(3)


def _by_name(function, *dtypes):
    def program(x):
        outs = tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)
        function(x @ x.mT, out=outs)
        return outs[0] * 2, outs[1] + 0

    return program


# Torch's fake tensors tell other shapes or strides of these than the library gives.
NOT_TOLD = {
    "solve": lambda x: (torch.linalg.solve(x, x + 1, out=torch.empty(0)) * 2,),
    "geqrf": lambda x: (torch.geqrf(x, out=(torch.empty(0), torch.empty(0)))[0] * 2,),
    "inv_ex": _by_name(torch.linalg.inv_ex, torch.float32, torch.int32),
    "slogdet": _by_name(torch.linalg.slogdet, torch.float32, torch.float32),
    "eig": _by_name(torch.linalg.eig, torch.complex64, torch.complex64),
    "lu_factor": _by_name(torch.linalg.lu_factor, torch.float32, torch.int32),
    "qr": _by_name(torch.linalg.qr, torch.float32, torch.float32),
}


@pytest.mark.parametrize("name", NOT_TOLD)
def test_results_that_torch_does_not_tell_are_left_with_a_note(name):
    gm = fxkit.capture(NOT_TOLD[name], (_square(),)).graph_module
    result = PassManager([Functionalise()], verify="numerics", args=(_square(),)).run(gm)
    assert any("stay" in note for note in result.records[-1].notes)
    torch.testing.assert_close(tuple(gm(_square())), NOT_TOLD[name](_square()))


def test_an_input_has_its_new_shape_at_the_end():
    def program(x):
        x.mul_(2)
        x.t_()
        y = x.unsqueeze_(0)
        row = x[0]
        row.add_(1)
        return row, y, y.sum()

    gm = functional(program, X.clone())
    assert targets(gm)[-3:] == ["copy_.default", "t_.default", "unsqueeze_.default"]
    ours, theirs = X.clone(), X.clone()
    got, expected = gm(ours), program(theirs)
    assert got[1] is ours
    assert got[0].data_ptr() == ours.data_ptr()
    torch.testing.assert_close([ours, *got], [theirs, *expected], rtol=0, atol=0)
    fxkit.PassManager([fxkit.passes.DecomposeToCore()], args=(X.clone(),)).run(gm)
    assert gm(X.clone())[1].shape == (1, 6, 4)


@pytest.mark.parametrize("value", [1.0, X[:, :1]])
@pytest.mark.parametrize("index", [slice(1, 2), torch.tensor([1])])
def test_a_captured_program_needs_no_example_inputs(value, index):
    def program(x, y):
        x[:, index] = value if isinstance(value, float) else y
        return x + 1

    captured = fxkit.capture(program, (X.clone(), X[:, :1]))
    PassManager([Functionalise()]).run(captured)
    gm = captured.graph_module
    for name in ("functional", "shapes_known"):
        assert property_named(name).check(gm) is None
    ours, theirs = X.clone(), X.clone()
    torch.testing.assert_close(captured(ours, X[:, :1]), program(theirs, X[:, :1]))
    assert torch.equal(ours, theirs)


def shape_of_another(x):
    y = x * 1
    same = y.contiguous()
    y.t_()
    return same.sum(0)


def resized_under_a_view(x):
    y = x * 1
    row = y[0]
    y.resize_(2, 2).add_(1)
    return row


def memory_of_another(x):
    y = x + 1
    y.set_(x * 2)
    return y.mul_(2)


def reads_what_it_wrote(x):
    y = x + 1
    z = x + 2
    torch._foreach_add_([y, z], [x, y])  # pyright: ignore[reportPrivateImportUsage]
    return z


LEFT = {shape_of_another: "others may be", resized_under_a_view: "resizes memory",
        memory_of_another: "other memory", reads_what_it_wrote: "has written before"}  # fmt: skip


@pytest.mark.parametrize("program", LEFT, ids=lambda p: p.__name__)
def test_memory_that_is_not_understood_is_left(program):
    gm = fxkit.symbolic_trace(program)
    expected = program(X.clone())
    passes = [DecomposeToAten(), Functionalise()]
    result = PassManager(passes, verify="structure", args=(X.clone(),)).run(gm)
    assert LEFT[program] in result.records[-1].notes[0]
    torch.testing.assert_close(gm(X.clone()), expected, rtol=0, atol=0)


@torch.library.custom_op("fxkit_tests::add_one_", mutates_args={"x"})
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("fxkit_tests::twice_into", mutates_args={"outs"})
def twice_into(x: torch.Tensor, outs: list[torch.Tensor], p: float = 2.0) -> torch.Tensor:
    for out in outs:
        out.copy_(x * p)
    return x - 1


@twice_into.register_fake
def _(x, outs, p=2.0):
    return torch.empty_like(x)


def test_custom_operators_that_write():
    def program(x):
        y, z = x * 1, x + 0
        add_one_(y[0])
        below = twice_into(x, [z], p=3.0)
        add_one_(x)
        return y, z, below

    gm = functional(program, X.clone())
    assert sum(target == "auto_functionalized" for target in targets(gm)) == 3
    x = X.clone()
    y, z, below = gm(x)
    torch.testing.assert_close([x, z, below, y[0], y[1]], [X + 1, X * 3, X - 1, X[0] + 1, X[1]])


class Leaf(nn.Module):
    """A module that a tracer does not look into."""

    def forward(self, x):
        return x.add_(1)


class AroundLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x):
        y, z = x * 1, x * 2
        z.add_(1)
        return self.leaf(y) + y + z


class LeavesLeaf(fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Leaf)


def test_what_a_leaf_is_given_is_left_with_a_note():
    model = AroundLeaf()
    gm = fx.GraphModule(model, LeavesLeaf().trace(model))
    passes = [DecomposeToAten(), Functionalise()]
    result = PassManager(passes, verify="numerics", args=(X,)).run(gm)
    assert targets(gm) == ["mul.Scalar", "mul.Scalar", "add.Scalar", "add.Tensor", "add.Tensor"]
    assert "nothing is known of %leaf" in result.records[-1].notes[0]
    assert not PassManager([Functionalise()], args=(X,)).run(gm).modified
    with pytest.raises(
        PreconditionError, match="functional, which decompose_to_core requires"
    ) as e:
        PassManager([fxkit.passes.DecomposeToCore()], args=(X,)).run(gm)
    assert "nothing is known of %leaf" in (e.value.hint or "")


@dataclass(frozen=True)
class Forgetful(Functionalise):
    """Leaves a write without saying so."""

    def apply(self, edit, context):
        pass


def test_what_is_left_without_a_word_is_a_fault_of_the_pass():
    gm = fxkit.symbolic_trace(lambda x: (x + 1).mul_(2))
    with pytest.raises(PostconditionError, match="to ensure functional"):
        PassManager([DecomposeToAten(), Forgetful()], args=(X,)).run(gm)


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


@settings(_QUIET, max_examples=60)
@given(gm=GRAPHS)
def test_random_programs(gm):
    check_passes_on(gm, [DecomposeToAten(), Functionalise()])


@pytest.mark.sweep
@settings(_QUIET, max_examples=3000)
@given(gm=GRAPHS)
def test_many_random_programs(gm):
    check_passes_on(gm, [DecomposeToAten(), Functionalise()])


def test_a_called_graph_stays_and_a_note_says_what_to_do():
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    gm, args = fxkit.symbolic_trace(network), (torch.randn(2, 8),)
    PassManager([fxkit.passes.SplitBySize(2)], args=args).run(gm)
    notes = PassManager([Functionalise()], args=args).run(gm).records[-1].notes
    assert any("run functionalise before what split the graph" in note for note in notes)
    assert any("fxkit.analysis.slices.inline" in note for note in notes)
