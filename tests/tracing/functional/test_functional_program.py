"""Functional forms of captured programs: the same results, gradients, writes, views and state."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.errors import CaptureError, UnsupportedError
from fxkit.tracing.functional.aten_captured import AtenCaptured
from fxkit.tracing.functional.functional_program import FunctionalProgram
from tests.sampling import one_in

Program = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.batch = nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.batch(self.norm(F.gelu(self.linear(x)) + x)), 0.5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[None])[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(torch.arange(4)).tanh() + x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), self.second(x.detach()).detach(), self.second(x)


def _chunks(x: torch.Tensor) -> Any:
    y = x * 2
    a, b = y.chunk(2, 1)
    return a, b, y


def _branch(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() if (x > -100).all() else x.cos()
    return F.dropout(y)


def _cached(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(x.detach())
    return cache * x


def _followed_cache(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(x)
    return cache


def _part_of_cache(x: torch.Tensor, cache: torch.Tensor) -> Any:
    cache[1:] = x[1:]
    return cache.exp(), cache[0]


def _no_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = x.abs().max()
    return x / scale, scale


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y.float()


def _printing(x: torch.Tensor) -> torch.Tensor:
    print("rows", x.shape[0])
    return x.exp()


PROGRAMS: dict[str, Program] = {
    "module": Net(),
    "tied_weights": Tied(),
    "unused_results": Unused(),
    "view_of_a_value": lambda x: (x * 2).view(2, 16),
    "view_of_an_input": lambda x: x.view(2, 16),
    "input": lambda x: (x, x.t(), x * 2),
    "views_of_one_value": _chunks,
    "value_read": _branch,
    "no_grad": _no_grad,
    "autocast": _autocast,
    "in_place": lambda x: (x * 1).mul_(3).relu_(),
    "same_twice": lambda x: (x * 2, x * 2),
    "copies": lambda x: ((y := x * 2), y.clone(), x.clone()),
    "same_object_twice": lambda x: (y := x * 2, y),
    "matmul": lambda x: x.view(2, 2, 8) @ x.t(),
    "scatter": lambda x: torch.zeros(4, 8).index_add_(0, torch.tensor([0, 0, 1, 2]), x),
    "printing": _printing,
    "several_results": lambda x: (*(x * 2).max(0), x.sort(1).values[0]),
    "recurrent": Recurrent(),
    "attention": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "one_part": lambda x: (x * 2).split(4)[0],
}


def _inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 8, requires_grad=True),)


def _with_cache() -> tuple[torch.Tensor, ...]:
    return (*_inputs(), torch.zeros(4, 8))


CASES = [(fn, _inputs) for fn in PROGRAMS.values()] + [
    (fn, _with_cache) for fn in (_cached, _followed_cache, _part_of_cache)
]
NAMES = [*PROGRAMS, "cached", "followed_cache", "part_of_cache"]


@pytest.mark.parametrize(("train", "name"), one_in(2, [False, True], NAMES))
def test_results_gradients_and_writes_are_those_of_eager(
    name: str, train: bool, capsys: pytest.CaptureFixture[str]
):
    fn, make = CASES[NAMES.index(name)]
    program, ours_fn = copy.deepcopy(fn), copy.deepcopy(fn)
    captured = AtenCaptured(ours_fn, train=train)
    for seed in range(3):
        torch.manual_seed(seed)
        theirs, ours = make(), make()
        with torch.no_grad():
            for a, b in zip(ours, theirs, strict=True):
                a.copy_(b)
        expected, state, said = _run(program, theirs, capsys)
        found, our_state, our_said = _run(captured, ours, capsys)
        assert torch.equal(state, our_state) and said == our_said
        _assert_same(found, expected)
        _assert_same(ours, theirs)
        _backward(found)
        _backward(expected)
        _assert_same([t.grad for t in ours if t.is_leaf], [t.grad for t in theirs if t.is_leaf])
        _assert_same_state(ours_fn, program)
    assert captured.whole, captured.explain(*ours)
    assert captured.recaptures == 0
    has_gradient = any(t.requires_grad for t in pytree.tree_leaves(expected))
    is_input = fn is PROGRAMS["view_of_an_input"]
    assert (captured.backward_module is not None) is (train and has_gradient and not is_input)


def _run(fn: Program, args: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    torch.manual_seed(17)
    result = fn(*args)
    return result, torch.get_rng_state(), capsys.readouterr().out


def _backward(result: Any) -> None:
    followed = [t for t in pytree.tree_leaves(result) if t.requires_grad]
    if followed:
        sum(t.float().square().sum() for t in followed).backward()


def _assert_same(ours: Any, theirs: Any) -> None:
    left, right = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
            assert a.requires_grad == b.requires_grad and a.stride() == b.stride()
    for one, other in itertools.combinations(range(len(left)), 2):
        if left[one] is not None and left[other] is not None:
            assert _workshare(left[one], left[other]) == _workshare(right[one], right[other])


def _workshare(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _assert_same_state(ours: Any, theirs: Any) -> None:
    if not isinstance(theirs, nn.Module):
        return
    _assert_same(list(ours.buffers()), list(theirs.buffers()))
    _assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_graphs_are_functional():
    captured = fxkit.capture(Net(), (torch.randn(4, 8),), mode="aten", train=True)
    for gm in (captured.graph_module, captured.backward_module):
        assert gm is not None
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable
    names = [node.name for node in captured.graph_module.graph.find_nodes(op="placeholder")]
    assert names[0] == "x" and set(names[1:]) == {n.replace(".", "_") for n in captured.attributes}
    lines = [node.meta.get("stack_trace") or "" for node in captured.graph_module.graph.nodes]
    assert any("test_functional_program.py" in line for line in lines)


def test_gradients_of_gradients():
    captured = fxkit.capture(lambda x: torch.tanh(x) * x, _inputs(), mode="aten", train=True)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(captured, (x,))
    assert torch.autograd.gradgradcheck(captured, (x,))


def test_second_gradient_of_dropout_draws_the_same_numbers():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.square() * x)

    captured = fxkit.capture(fn, _inputs(), mode="aten", train=True)
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for program in (captured, fn):
        torch.manual_seed(3)
        first = torch.autograd.grad(program(x).sum(), x, create_graph=True)[0]
        torch.rand(5)
        found.append((*torch.autograd.grad(first.sum(), x), torch.get_rng_state()))
    torch.testing.assert_close(found[0], found[1])


def test_second_gradient_refuses_an_input_that_was_written_to():
    captured = fxkit.capture(lambda x, y: (x * y).tanh(), (*_inputs(), torch.randn(4, 8)),
                             mode="aten", train=True)  # fmt: skip
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    result = captured(x, y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result, x, create_graph=True)


def test_graph_can_be_walked_twice():
    captured = fxkit.capture(lambda x: x.exp() * x, _inputs(), mode="aten", train=True)
    (x,) = _inputs()
    result = captured(x).sum()
    first = torch.autograd.grad(result, x, retain_graph=True)
    again = torch.autograd.grad(result, x, create_graph=True)
    torch.testing.assert_close(first[0], again[0])


@pytest.mark.usefixtures("few_objects")
def test_inputs_are_let_go_after_the_backward():
    w = torch.randn(3, requires_grad=True)
    captured = AtenCaptured(lambda x, w: (x * w).tanh(), train=True)
    captured(torch.randn(3), w)
    x = torch.randn(3)
    alive = weakref.ref(x)
    loss = captured(x, w).sum()
    loss.backward()
    del x
    gc.collect()
    assert loss.grad_fn is not None and alive() is None


def test_results_can_be_written_to():
    captured = fxkit.capture(lambda x: (x * 2).view(2, 16), _inputs(), mode="aten", train=True)
    (x,) = _inputs()
    y = captured(x)
    y.add_(1)
    y.mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 4.0))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.mul_(2), "whose gradient is wanted is written to in place"),
        (lambda x: x[x > 0] * 2, "depends on the numbers in a tensor"),
        (fxkit.opaque(lambda x: x * 2), "which is not looked into"),
    ],
)
def test_what_has_no_functional_form_is_refused(fn: Program, reason: str):
    with pytest.raises(CaptureError, match=reason):
        fxkit.capture(fn, (torch.randn(4, 8, requires_grad=True) * 1,), mode="aten", train=True)


def test_train_is_for_aten():
    with pytest.raises(UnsupportedError, match="expected mode 'aten' with train=True, got 'whole'"):
        fxkit.capture(torch.sin, _inputs(), train=True)


def test_a_result_has_a_gradient_that_reaches_no_input():
    def program(a, tau):
        return torch.linalg.householder_product(a, tau)

    a, tau = torch.randn(5, 5, requires_grad=True), torch.randn(0, requires_grad=True)
    gm = fxkit.capture(program, (a, tau)).graph_module
    results = FunctionalProgram(gm, (a, tau), train=True)(a, tau), program(a, tau)
    assert results[0].requires_grad
    found, right = (torch.autograd.grad(r.sum(), (a, tau), allow_unused=True) for r in results)
    for ours, eager in zip(found, right, strict=True):
        is_empty = eager is None or not eager.any()
        assert is_empty and (ours is None or not ours.any())


class TestModuleForm:
    def test_parameters_are_attributes_and_writes_are_at_the_end(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        reference, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
        gm = fxkit.capture(model, (x,), mode="aten").module()
        reference(x)
        assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["input_1"]
        assert set(dict(gm.named_parameters())) == {
            name for name in gm.state_dict() if name.endswith(("weight", "bias"))
        }
        twin = copy.deepcopy(gm)
        for _ in range(2):
            torch.testing.assert_close(twin(x), reference(x), rtol=0, atol=0)
        ours, theirs = dict(twin.named_buffers()), dict(reference.named_buffers())
        for name, buffer in ours.items():
            same = theirs[f"1.{name.rpartition('.')[2]}"]
            torch.testing.assert_close(buffer, same, rtol=0, atol=0)
        assert len(ours) == len(theirs)

    def test_passes_take_it_as_any_module(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        x = torch.randn(2, 3, 6, 6)
        gm = fxkit.capture(model, (x,), mode="aten").module()
        fxkit.PassManager([fxkit.passes.FoldBatchNorm()], args=(x,), verify="numerics").run(gm)
        torch.testing.assert_close(gm(x), model(x))
        assert not fxkit.graph(gm).find(torch.batch_norm)

    def test_views_checks_and_written_inputs_are_as_in_the_program(self):
        def program(total, x):
            total.add_(x.sigmoid())
            if x.sum() > 0:
                total.mul_(2)
            return total.t(), total, x[0]

        args = torch.zeros(2, 3), torch.ones(2, 3)
        gm = fxkit.capture(program, args, mode="aten").module()
        total, twin = torch.zeros(2, 3), torch.zeros(2, 3)
        results, expected = gm(total, torch.ones(2, 3)), program(twin, torch.ones(2, 3))
        torch.testing.assert_close([total, *results], [twin, *expected], rtol=0, atol=0)
        assert results[1] is total
        assert results[0].data_ptr() == total.data_ptr()
        with pytest.raises(Exception, match="expected"):
            gm(total, -torch.ones(2, 3))

    def test_a_differentiated_program_is_one_module(self):
        def loss(x, weight):
            return torch.tanh(x @ weight).square().sum()

        args = torch.ones(4, 3), torch.ones(3, 2, requires_grad=True)
        gm = fxkit.capture(loss, args, mode="aten", train=True).module()
        got = torch.autograd.grad(gm(*args), args[1])
        torch.testing.assert_close(got, torch.autograd.grad(loss(*args), args[1]))

    def test_a_pass_manager_lifts_the_parameters_of_a_captured_program(self):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
        captured = fxkit.capture(model, (x,), mode="aten")
        passes = [Negate()]
        fxkit.PassManager(passes, args=(x,)).run(captured)
        with torch.no_grad():
            torch.testing.assert_close(captured.graph_module(*captured.graph_inputs((x,)))[0],
                                       -model(x))  # fmt: skip


@dataclass(frozen=True)
class Negate(fxkit.passes.Pass):
    numerics = "changed"
    is_idempotent = False

    def apply(self, edit, context):
        for found in fxkit.graph(edit.gm).find(torch.relu):
            node = found.fx_node
            edit.replace_uses(node, edit.call(torch.ops.aten.neg.default, node, after=node))
