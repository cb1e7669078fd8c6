"""`torch.compile(fn, backend="fxkit")`: static and dynamic shapes, graph breaks, training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxkit.compiling.compiler import dynamo_backend
from fxkit.errors import UnsupportedError
from fxkit.lower.training import stages, training_module
from fxkit.passes.dead_code_elimination import DeadCodeElimination

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo warns about its own dependencies


def _attend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a * 2 + b, -1) * a.relu()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_backend_is_registered():
    assert "fxkit" in torch.compiler.list_backends()


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_for_static_and_dynamic_shapes(dynamic: bool | None):
    compiled = torch.compile(_attend, backend="fxkit", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for rows in (4, 5, 7, 5):
            a, b = torch.randn(rows, 8), torch.randn(rows, 8)
            torch.testing.assert_close(compiled(a, b), _attend(a, b))


def test_graph_breaks(capsys: pytest.CaptureFixture[str]):
    def fn(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        print("between")
        return b.sin() + 1

    a = torch.randn(3)
    torch.testing.assert_close(torch.compile(fn, backend="fxkit")(a), fn(a))
    assert capsys.readouterr().out == "between\n" * 2


def test_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend="fxkit", options={"passes": ()})
    for _ in range(2):
        a = torch.randn(6, 4)
        compiled(a).square().sum().backward()
        twin(a).square().sum().backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_unknown_options():
    module = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(UnsupportedError, match="expected no option but passes and fast, got speed"):
        dynamo_backend(module, [], options={"speed": 1})


def test_training_runs_as_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)
    made = _count_training(monkeypatch)
    compiled = torch.compile(_attend, backend="fxkit", fullgraph=True)
    a, b = (torch.randn(16, 32, requires_grad=True) for _ in range(2))
    for _ in range(4):
        found = torch.autograd.grad(compiled(a, b).square().sum(), (a, b))
        torch.testing.assert_close(found, torch.autograd.grad(_attend(a, b).square().sum(), (a, b)))
    assert len(made) == 1 and made[0].reason is None
    assert made[0].report().backward.calls > 0


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_with_dynamic_shapes(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)
    made = _count_training(monkeypatch)
    compiled = torch.compile(_attend, backend="fxkit", dynamic=dynamic)
    for rows in (4, 5, 7, 5):
        a, b = (torch.randn(rows, 8, requires_grad=True) for _ in range(2))
        found = torch.autograd.grad(compiled(a, b).square().sum(), (a, b))
        torch.testing.assert_close(found, torch.autograd.grad(_attend(a, b).square().sum(), (a, b)))
    assert made


def test_training_in_pieces(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)

    def fn(a: torch.Tensor) -> torch.Tensor:
        b = a.exp() * 2
        print("between")
        return b.sin() * b

    a = torch.randn(8, requires_grad=True)
    compiled = torch.compile(fn, backend="fxkit")
    for _ in range(2):
        found = torch.autograd.grad(compiled(a).sum(), a)
        torch.testing.assert_close(found, torch.autograd.grad(fn(a).sum(), a))
    assert capsys.readouterr().out == "between\n" * 4


def test_passes_by_options(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    class Seen(DeadCodeElimination):
        def apply(self, edit: Any, context: Any) -> None:
            ran.append(self.name)
            super().apply(edit, context)

    compiled = torch.compile(_attend, backend="fxkit", options={"passes": (Seen(),)})
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(a, b), _attend(a, b))
    assert len(ran) == 1


def _count_training(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that training modules are added to as they are made."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(stages.to_cpp_in_stages(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("fxkit.compiling.graph_compiler.to_cpp_in_stages", make)
    return made


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(z: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(torch.tanh(self.linear(z)), 0.5)

        return checkpoint(part, x, use_reentrant=False) * 2


def test_a_checkpoint_with_dropout() -> None:
    net = _Checkpointed()
    compiled = torch.compile(net, backend="fxkit")
    for grad in (True, False, True):
        found = []
        for program in (net, compiled):
            net.zero_grad()
            torch.manual_seed(0)
            x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
            with torch.set_grad_enabled(grad):
                y = program(x)
            if grad:
                y.square().sum().backward()
            found.append((y.detach(), x.grad, *(p.grad for p in net.parameters())))
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> Any:
        y = x.exp()
        ctx.save_for_backward(x, y)
        ctx.gain, ctx.twice = gain, y * 2
        return y, y.argmax(-1), x.sin()

    @staticmethod
    def backward(ctx: Any, of_y: torch.Tensor, _: Any, of_sin: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return of_y * y * ctx.gain + of_sin * x + ctx.twice, None


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_custom_autograd_functions(dynamic: bool | None) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        y, place, z = _Gated.apply(x @ w, 3.0)
        return _Doubled.apply(y * z) + _Gated.apply(z, 0.5)[0], place

    compiled = torch.compile(fn, backend="fxkit", dynamic=dynamic)
    for rows in (8, 8, 8, 12, 20):
        x, w = (
            torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (rows, 16)
        )  # products need not be summed in eager's order
        found, expected = (
            (*results, *torch.autograd.grad(results[0].sin().sum(), (x, w)))
            for results in (compiled(x, w), fn(x, w))
        )
        assert all(type(it) is torch.Tensor for it in found)
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, w), fn(x, w))


def test_second_derivatives_of_custom_functions() -> None:
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                sign = x.sign()
            return gradient * x * x.abs() * sign * 3

    def fn(x: torch.Tensor) -> torch.Tensor:
        return Cubed.apply(torch.tanh(x)).sin()

    compiled = torch.compile(fn, backend="fxkit")
    for _ in range(3):
        x = torch.randn(8, requires_grad=True)
        both = []
        for call in (compiled, fn):
            (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            both.append(torch.autograd.grad(gradient.square().sum(), x))
        torch.testing.assert_close(*both)
