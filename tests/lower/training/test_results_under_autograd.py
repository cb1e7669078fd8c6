"""What callers do with results of a trained program, and with its gradients, does what it does in
eager."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.stages import StagedModule


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)


class Classifier(nn.Module):
    """Features, and logits and a loss that are computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        logits = self.head(features).sigmoid()
        return features, logits, (logits * logits.detach()).sum()


def ways(make: Callable[[], nn.Module]) -> Iterator[tuple[Callable[..., Any], nn.Module]]:
    """Return the same module twice, run by eager and compiled, each to be called several times."""
    torch.manual_seed(1)
    net = make()
    twin = make()
    twin.load_state_dict(net.state_dict())
    fast = fxkit.compile(twin)
    torch.manual_seed(2)
    for _ in range(2):
        fast(torch.randn(5, 8, requires_grad=True))
    twin.load_state_dict(net.state_dict())
    return iter([(net, net), (fast, twin)])


def found_by(use: Callable[[Callable[..., Any], Tensor], Any]) -> list[Any]:
    """Return what a use of results gives in eager, and compiled."""
    found = []
    for program, net in ways(Classifier):
        rows = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(5, 8, requires_grad=True)
            rows.append((use(program, x), x.grad, *(p.grad for p in net.parameters())))
        found.append((rows, list(net.buffers()), torch.rand(2)))
    return found


def keep_gradient(program: Callable[..., Any], x: Tensor) -> Any:
    features, _, loss = program(x)
    features.retain_grad()
    loss.backward()
    return features.grad


def differentiate_by_result(program: Callable[..., Any], x: Tensor) -> Any:
    features, logits, loss = program(x)
    return torch.autograd.grad(loss, [logits, features])


def scale_by_hook(program: Callable[..., Any], x: Tensor) -> Any:
    features, _, loss = program(x)
    features.register_hook(lambda gradient: gradient * 10)
    loss.backward()


def both_have_gradients(program: Callable[..., Any], x: Tensor) -> Any:
    features, logits, loss = program(x)
    (features.sum() + logits.square().sum() + loss).backward()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "use", [keep_gradient, differentiate_by_result, scale_by_hook, both_have_gradients]
)
def test_results_hang_on_one_another(use: Callable[..., Any]) -> None:
    expected, found = found_by(use)
    torch.testing.assert_close(found, expected)


def test_a_graph_is_cut_where_results_are_used() -> None:
    fast = fxkit.compile(Classifier())
    for _ in range(2):
        fast(torch.randn(5, 8))
    (guarded,) = fast.captured.kept
    assert isinstance(guarded.run, StagedModule)
    assert [len(stage.outputs) for stage in guarded.run.stages] == [1, 1, 1]
    assert len(fast.compiled_modules) == 3 and fast.compiled_modules[0].report().forward


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (y := x.exp(), (y > 1).sum()),
        lambda x: (x.detach().exp(), x.tanh()),
    ],
)
def test_results_without_gradients_need_no_cut(program: Callable[..., Any]) -> None:
    fast = fxkit.compile(program)
    fast(torch.randn(5, 8, requires_grad=True))
    assert len(fast.compiled_modules) == 1


def test_inputs_and_parameters_are_results_too() -> None:
    net = nn.Linear(8, 8)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = net(x).tanh()
        return x, net.weight, y, y.exp()

    fast = fxkit.compile(program)
    for _ in range(3):
        x = torch.randn(5, 8, requires_grad=True)
        found, expected = fast(x), program(x)
        assert found[0] is x and found[1] is net.weight and len(fast.compiled_modules) == 2
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(last.sum(), y) for *_, y, last in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_what_can_not_be_cut_is_left_to_eager() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        with torch.no_grad():
            z = y * 2
        return y, y.sin() + z

    fast = fxkit.compile(program)
    for step in range(3):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        y, z = fast(x)
        (gradient,) = torch.autograd.grad(z.sum(), y)
        torch.testing.assert_close(gradient, y.cos(), msg=str(step))


LAYERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: nn.Linear(8, 6),
    "gru": lambda: nn.Sequential(nn.GRU(8, 6, batch_first=True), First()),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "pooling": lambda: nn.AdaptiveAvgPool1d(2),
    "einsum": lambda: lambda x: torch.einsum("bij,bkj->bki", x, x + 1),
}


class First(nn.Module):
    def forward(self, results: tuple[Tensor, ...]) -> Tensor:
        return results[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", ["add_", "row", "unsqueeze_"])
@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_written_to_in_place(layer: str, write: str) -> None:
    program = LAYERS[layer]()
    fast = fxkit.compile(program)
    for _ in range(3):
        gradients = []
        for run in (program, fast):
            torch.manual_seed(3)
            x = torch.randn(2, 5, 8, requires_grad=True)
            y = run(x)
            if write == "add_":
                y += 1
            elif write == "row":
                y[:, -1].mul_(2)
            else:
                y = y.unsqueeze_(0)
            gradients.append((y, *torch.autograd.grad(y.square().sum(), x)))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_a_gradient_kept_within_the_program() -> None:
    @fxkit.compile
    def program(x: Tensor) -> Tensor:
        y = x.exp()
        y.retain_grad()
        return y

    for _ in range(3):
        y = program(torch.ones(4, requires_grad=True))
        (y * 3).sum().backward()
        assert y.grad is not None and y.grad.eq(3).all()


def test_gradients_in_batches() -> None:
    fast = fxkit.compile(lambda x: (x.sin() * x).tanh())
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        y = fast(x)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        batched = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True, retain_graph=True)
        mapped = torch.func.vmap(lambda g, y=y: torch.autograd.grad(y, x, g, retain_graph=True)[0])
        expected = torch.autograd.functional.jacobian(lambda x: (x.sin() * x).tanh(), x)
        torch.testing.assert_close(batched[0], expected)
        torch.testing.assert_close(mapped(torch.eye(4)), expected)
        found = torch.autograd.functional.jacobian(fast, x, vectorize=True)
        torch.testing.assert_close(found, expected)


def test_threads_leave_the_search_for_anomalies_as_it_was() -> None:
    def train(factor: float) -> None:
        fast = fxkit.compile(lambda x: (x * factor).exp().tanh())
        for _ in range(2):
            fast(torch.randn(4, 4, requires_grad=True)).sum().backward()

    threads = [threading.Thread(target=train, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.is_anomaly_enabled()


def test_labels_end_at_the_first_negative_one() -> None:
    fast = fxkit.compile(lambda x, y: F.multilabel_margin_loss(x * 2, y))
    labels = torch.tensor([[3, 0, -1, 1], [-1, 2, 2, 2], [1, -1, -1, -1]])
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        found, expected = fast(x, labels), F.multilabel_margin_loss(x * 2, labels)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, x) for y in (found, expected)))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout_draws_as_eager_does(p: float) -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x * 2, p).exp()

    fast = fxkit.compile(program)
    for _ in range(3):
        drawn = []
        for run in (program, fast):
            torch.manual_seed(4)
            drawn.append((run(torch.ones(4, 8, requires_grad=True)), torch.rand(2)))
        torch.testing.assert_close(drawn[1], drawn[0])


class Zeros(TorchDispatchMode):
    """Counts operators, and makes zeros ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.zeros.default else result


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_mode_sees_the_program(is_warm: bool) -> None:
    def program(x: Tensor) -> Tensor:
        return (x * 2).tanh() + torch.zeros(3)

    fast = fxkit.compile(program)
    for _ in range(3 * is_warm):
        fast(torch.zeros(3))
    for _ in range(2):
        with Zeros() as expected:
            wanted = program(torch.zeros(3))
        with Zeros() as seen:
            found = fast(torch.zeros(3))
        assert seen.names == expected.names and torch.equal(found, wanted)


def test_a_result_outside_of_the_loss_has_no_gradient() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y.sin(), y.abs().sqrt()

    fast = fxkit.compile(program)
    for _ in range(3):
        x = torch.zeros(4, requires_grad=True)
        fast(x)[0].sum().backward()
        assert x.grad is not None and x.grad.eq(2).all()


class Doubled(torch.autograd.Function):
    """Counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Doubled.calls += 1
        return gradients[0] * 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (x.exp(), (w * 3).sigmoid()),
        lambda x, w: (x.exp(), (w * 3).sigmoid().detach()),
        lambda x, w: x.exp() * w.detach().sigmoid(),
    ],
)
def test_what_no_loss_is_computed_from_is_not_visited(program: Callable[..., Any]) -> None:
    fast = fxkit.compile(program)
    for _ in range(3):
        Doubled.calls = 0
        seen: list[Any] = []
        x, w = (torch.ones(4, requires_grad=True) for _ in range(2))
        w.register_hook(seen.append)
        result = fast(x, Doubled.apply(w))
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        assert x.grad is not None and w.grad is None
        assert Doubled.calls == 0 and seen == []


def test_hooks_are_given_gradients_alone() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin() + 2
        return y.exp(), (y * w).tanh()

    fast = fxkit.compile(program)
    for _ in range(3):
        seen: list[Tensor | None] = []
        x, w = (torch.ones(4, requires_grad=True) for _ in range(2))
        first, second = fast(x, w)
        for tensor in (x, w, first, second):
            tensor.register_hook(seen.append)
        second.retain_grad()
        first.sum().backward()
        assert len(seen) == 2 and None not in seen
        assert second.grad is None and w.grad is None


def test_results_that_share_no_work_have_a_backward_each() -> None:
    fast = fxkit.compile(lambda x, w: (x.sin().exp(), (w * 2).sigmoid().tanh(), x.cos()))
    for _ in range(3):
        x, w = (torch.ones(4, requires_grad=True) for _ in range(2))
        for result in fast(x, w):
            result.sum().backward()
        assert x.grad is not None and w.grad is not None


def test_hooks_do_not_see_what_a_second_derivative_runs_again() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.exp()

    found = []
    for run in (program, fxkit.compile(program)):
        for _ in range(3):
            x = torch.linspace(-1, 1, 4, requires_grad=True)
            factors = torch.ones(4, requires_grad=True)
            given = x * factors
            seen: list[Tensor] = []
            given.register_hook(seen.append)
            _, last = run(given)
            (first,) = torch.autograd.grad(last.sum(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), [x, factors])
        found.append((first, *second, seen))
    torch.testing.assert_close(found[1], found[0])


def test_copies_of_stages_train_by_themselves() -> None:
    fast = fxkit.compile(Classifier().eval())
    x = torch.randn(5, 8)
    for _ in range(2):
        fast(x)
    (guarded,) = fast.captured.kept
    twin = copy.deepcopy(guarded.run)
    assert isinstance(twin, StagedModule)
    twin(x)[1].sum().backward()
    assert all(parameter.grad is None for parameter in guarded.run.graph_module.parameters())
    assert all(parameter.grad is not None for parameter in twin.graph_module.parameters())


def test_gradients_that_are_constants_are_given() -> None:
    fast = fxkit.compile(lambda x: (x.sign() * 2, x.exp()))
    for _ in range(3):
        x = torch.ones(4, requires_grad=True)
        fast(x)[0].sum().backward()
        assert x.grad is not None and x.grad.eq(0).all()
