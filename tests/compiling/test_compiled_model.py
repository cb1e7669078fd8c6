"""A compiled module stands in for the module: the same state, methods and owners."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import ClassVar

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.compiling.compiled_model import CompiledModel
from fxkit.compiling.compiler import Compiled
from fxkit.errors import CaptureError

pytestmark = pytest.mark.core

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.5), 2.0
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x, *, shift=0.0):
        return self.drop(torch.relu(self.first(x))) * self.scale + self.offset + shift

    def twice(self, x):
        return self(self(x))


class Announcing(nn.Module):
    subclasses: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Announcing.subclasses.append(cls)


class WithReport(Announcing):
    def forward(self, x):
        return x + 1

    def report(self):
        return "its own"


class Slotted(nn.Module):
    __slots__ = ("kept",)

    def forward(self, x):
        return x * 2


def _agree(found, expected) -> bool:
    """Tell whether the two differ by rounding alone: kernels add products up in their own order."""
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.fixture
def net() -> Net:
    return Net().eval()


@torch.no_grad()
def test_it_is_the_module_but_for_its_calls(net):
    fast = fxkit.compile(net)
    assert isinstance(fast, Net) and isinstance(fast, CompiledModel)
    assert type(fast).__name__ == "Net" and repr(fast).startswith("CompiledNet(")
    assert fast.first is net.first and fast.state_dict().keys() == net.state_dict().keys()
    assert _agree(fast(X), net(X)) and _agree(fast(X, shift=1.0), net(X, shift=1.0))
    assert _agree(fast.twice(X), net.twice(X))
    assert inspect.signature(fast) == inspect.signature(net.forward)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        fast.nothing_like_it  # noqa: B018


@torch.no_grad()
def test_what_either_sets_both_have(net):
    fast = fxkit.compile(net)
    fast(X)
    fast.scale = 3.0
    net.offset = torch.zeros(8)
    fast.first.weight.mul_(2)
    assert net.scale == 3.0 and _agree(fast(X), net(X))
    assert _agree(fast.double()(X.double()), net(X.double())) and not fast.train(False).training
    assert fast.train() is fast and net.drop.training
    fast.eval().load_state_dict(Net().double().state_dict())
    assert _agree(fast(X.double()), net(X.double()))
    fast.drop = nn.Identity()
    assert _agree(fast(X.double()), net(X.double()))


def test_hooks_are_the_modules(net):
    seen = []
    fast = fxkit.compile(net)
    handle = fast.register_forward_hook(lambda module, args, out: seen.append(1) or out * 2)
    assert _agree(fast(X), net(X)) and len(seen) == 2
    handle.remove()
    assert _agree(fast(X), net(X)) and len(seen) == 2


def test_it_trains_as_the_module_does(net):
    other = copy.deepcopy(net)
    fast = fxkit.compile(net)
    for model in (fast, other):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    for found, expected in zip(fast.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_it_stands_in_other_modules(net):
    fast = fxkit.compile(net)
    fast(X)
    outer = nn.Sequential(fast, nn.ReLU())
    expected = net(X).relu()
    assert [name for name, _ in outer.named_parameters()] == ["0.first.weight", "0.first.bias"]
    assert _agree(outer(X), expected)
    assert _agree(fx.symbolic_trace(outer)(X), expected)
    gm = fxkit.capture(outer, (X,)).graph_module
    assert _agree(gm(X), expected)
    paths = {path for node in gm.graph.nodes for path in node.meta.get("nn_module_stack") or ()}
    assert "0" in paths
    assert _agree(fxkit.compile(outer)(X), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "follow",
    [
        lambda fast: torch.jit.trace(fast, X)(X),
        lambda fast: torch.export.export(fast, (X,)).module()(X),
        lambda fast: torch.func.functional_call(fast, dict(fast.named_parameters()), (X,)),
        lambda fast: torch.func.vmap(fast)(X),
        lambda fast: fxkit.compile(fast)(X),
    ],
)
def test_others_follow_it(net, follow):
    fast = fxkit.compile(net)
    fast(X)
    torch.testing.assert_close(follow(fast), net(X))


@torch.no_grad()
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_are_compiled_again(net, copied):
    fast = fxkit.compile(net, dynamic=True)
    again = copied(fast)
    assert isinstance(again, CompiledModel) and _agree(again(X), fast(X))
    assert again.program is not fast.program and again.program._options == fast.program._options
    again.scale = 5.0
    assert net.scale == 2.0


def test_it_is_saved_whole(net):
    file = io.BytesIO()
    torch.save(fxkit.compile(net), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert isinstance(again, CompiledModel) and _agree(again(X), net(X))


@torch.no_grad()
def test_a_graph_module_is_edited_through_it(net):
    fast = fxkit.compile(fxkit.symbolic_trace(net))
    before = fast(X)
    with fxkit.edit(fast) as e:
        relu = fxkit.graph(fast).find(torch.relu)[0].fx_node
        e.replace(relu, e.call(torch.tanh, *relu.args, before=relu))
    assert not torch.equal(fast(X), before)
    torch.testing.assert_close(fast(X), torch.tanh(net.first(X)) * 2 + 1)


@torch.no_grad()
def test_names_of_the_program(net):
    fast = fxkit.compile(net)
    assert fast.report().startswith("nothing has been compiled")
    fast(X)
    assert (
        fast.compiled_modules is fast.program.compiled_modules and len(fast.compiled_modules) == 1
    )
    assert fast.captured.fn is net and fast.builds == 0 and "graph" in fast.explain(X)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda net: net, lambda net: net.forward])
def test_views_look_at_what_was_compiled(net, make):
    fast = fxkit.compile(make(net))
    with pytest.raises(CaptureError, match="call the program first"):
        fxkit.tree(fast)
    x = torch.randn(512, 8)
    fast(x)
    assert "region_0" in str(fxkit.profile(fast, (x,), iters=1))
    assert any(node.name == "relu" for node in fast.graph_module.graph.nodes)
    assert str(fxkit.tree(fast)) == str(fxkit.tree(fast.compiled_modules[-1]))


def test_names_of_the_module_come_first():
    fast = fxkit.compile(WithReport())
    assert fast.report() == "its own" and "nothing has been compiled" in fast.program.report()
    assert Announcing.subclasses == [WithReport], "classes made for objects are not announced"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [lambda: torch.jit.script(nn.ReLU()), Slotted])
def test_no_other_object_can_stand_for_it(make):
    module = make()
    fast = fxkit.compile(module)
    assert type(fast) is Compiled and torch.equal(fast(X), module(X))


class Twinned(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width, self.layer = width, nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x))

    def twin(self):
        made = type(self)(self.width)
        made.load_state_dict(self.state_dict())
        return made


@torch.no_grad()
def test_modules_of_its_class_are_plain():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = fxkit.compile(layers)
    compiled(X)
    for part in (compiled[:2], compiled + nn.Sequential(nn.ReLU()), type(compiled)(nn.Tanh())):
        assert type(part) is nn.Sequential and part(X).shape[0] == 4
    assert _agree(compiled[:2](X), layers[:2](X))
    net = Twinned()
    twin = fxkit.compile(net).twin()
    assert type(twin) is Twinned and torch.equal(twin(X), net(X))
    traced = fxkit.compile(fx.symbolic_trace(net))
    assert isinstance(type(traced)(net, traced.graph), fx.GraphModule)
