"""Compiled training: results, gradients and state are those of eager, and kernels do the work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.compiling.compiler import Compiled
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule, TrainingReport
from tests.sampling import one_in


def _block(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, 64)
    return F.gelu(F.layer_norm(x + y, (64,), weight, weight - 1))


def _attention(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ y.t() / 8, -1) @ y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm, self.batch = nn.LayerNorm(64), nn.BatchNorm1d(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.batch(F.silu(self.up(self.norm(x)))), 0.25, self.training)
        return x + self.down(hidden)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = torch.arange(x.shape[0]) % 5
        return F.cross_entropy(self.layers(x), target)


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)


def _training(compiled: Compiled) -> TrainingModule:
    module = compiled.compiled_modules[-1]
    assert isinstance(module, TrainingModule)
    return module


FUNCTIONS = {
    "block": _block,
    "attention": _attention,
    "pointwise": lambda x, y: torch.tanh(x * y) * torch.sigmoid(x) + y,
    "rms_norm": lambda x, y: F.rms_norm(x * y, (64,)),
    "broadcast": lambda x, y: (x.exp() * y[0] + y[:, :1]).relu(),
    "losses": lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y),
    "log_softmax": lambda x, y: F.log_softmax(x - y, -1) * y,
    "sums": lambda x, y: (x * y).sum(0) + (x / (y.square() + 1)).mean(1).sum(),
    "glu": lambda x, y: F.glu(torch.cat([x, y], -1)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_as_good_as_those_of_eager(name: str):
    fn = FUNCTIONS[name]
    compiled = fxkit.compile(fn)
    torch.manual_seed(0)
    x, y, weight = (torch.randn(48, 64) for _ in range(3))
    for _ in range(2):
        ours = _with_gradients(compiled, x, y, weight)
    eager = _with_gradients(fn, x, y, weight)
    exact = _with_gradients(fn, x.double(), y.double(), weight.double())
    for found, plain, right in zip(ours, eager, exact, strict=True):
        bound = 2 * (plain - right).abs().max() + 1e-6 * right.abs().max()
        assert (found - right).abs().max() <= bound
    module = _training(compiled)
    assert module.reason is None
    report = module.report()
    assert report.forward is not None and report.backward is not None
    assert report.forward.fused + report.backward.fused > 1
    assert report.backward.calls > 0 and not report.backward.eager_calls


def test_gradients_of_attention_all_of_whose_keys_are_masked():
    mask = torch.zeros(8, 1, 1, 32)
    mask[:, :, :, 20:] = mask[5] = torch.finfo(torch.float32).min

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = ((q @ k.mT) * 0.25 + mask.to(q.dtype)).softmax(-1)
        return F.gelu(weights @ v * 2).square()

    def gradients(program: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return list(torch.autograd.grad(program(*leaves).sum(), leaves))

    for options in ({}, {"fast": True}):
        compiled = fxkit.compile(attention, **options)
        for seed in range(3):
            torch.manual_seed(seed)
            inputs = [torch.randn(8, 4, 32, 16) for _ in range(3)]
            found, eager = gradients(compiled, torch.float32), gradients(attention, torch.float32)
            for ours, plain, true in zip(
                found, eager, gradients(attention, torch.float64), strict=True
            ):
                bound = 2 * (plain.double() - true).norm() + 1e-7 * true.norm()
                assert (ours.double() - true).norm() <= bound
        report = _training(compiled).report()
        assert report.backward is not None and report.backward.calls > 0


def _with_gradients(fn: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    x, y = (t.clone().requires_grad_() for t in tensors[:2])
    if tensors[0].dtype == torch.float64 and fn is _block:
        fn = _block_in_double
    result = fn(x, y)
    weight = tensors[2].flatten()[: result.numel()].view(result.shape)
    return [result.detach(), *torch.autograd.grad((result * weight).sum(), (x, y))]


def _block_in_double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, 64).double()
    return F.gelu(F.layer_norm(x + y, (64,), weight, weight - 1))


@pytest.mark.parametrize(
    ("make", "shape"), [(Net, (12, 64)), (Convolutional, (4, 3, 12, 12))], ids=["net", "conv"]
)
def test_training_steps_are_those_of_eager(make: Callable[[], nn.Module], shape: Any):
    torch.manual_seed(0)
    net = make()
    twin = copy.deepcopy(net)
    compiled = fxkit.compile(net, train=True)
    for seed in range(3):
        inputs = torch.randn(*shape)
        for program, module in ((compiled, net), (twin, twin)):
            torch.manual_seed(seed)
            module.zero_grad()
            program(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
        _assert_same_state(net, twin)
    assert _training(compiled).reason is None and compiled.captured.recaptures == 0


def _assert_same_state(net: nn.Module, twin: nn.Module) -> None:
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_without_gradients_the_same_program_runs_as_inference():
    net = Net().eval()
    compiled = fxkit.compile(net)
    x = torch.randn(12, 64)
    compiled(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    torch.testing.assert_close(compiled(x), net(x))
    assert [type(m).__name__ for m in compiled.compiled_modules] == [
        "TrainingModule",
        "CompiledModule",
    ]


def test_train_false_leaves_gradients_to_eager():
    compiled = fxkit.compile(lambda x: torch.tanh(x) * 2, train=False)
    x = torch.randn(8, 8, requires_grad=True)
    compiled(x).sum().backward()
    assert not isinstance(compiled.compiled_modules[-1], TrainingModule)
    assert x.grad is not None


def test_train_true_warns_where_a_graph_is_left_to_eager():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y[y > 0].exp()

    compiled = fxkit.compile(fn, train=True)
    x = torch.randn(8, 8, requires_grad=True)
    with pytest.warns(
        UserWarning, match="trained in eager: the shape of .* depends on the numbers"
    ):
        result = compiled(x)
    torch.testing.assert_close(result, fn(x))
    assert "left to eager" in compiled.report()
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(fn(x).sum(), x)
    )


def test_second_gradients_come_from_eager_and_are_counted():
    compiled = fxkit.compile(lambda x: torch.tanh(x) * x)
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(compiled, (x,))
    assert torch.autograd.gradgradcheck(compiled, (x,))
    report = _training(compiled).report()
    assert isinstance(report, TrainingReport) and report.differentiated_again > 0
    assert "differentiated again, in eager" in str(report)


def test_parameters_that_change_are_seen():
    net = Net().eval()
    compiled = fxkit.compile(net)
    x = torch.randn(12, 64)
    compiled(x)
    with torch.no_grad():
        net.up.weight.mul_(0.5)
    torch.testing.assert_close(compiled(x), net(x))


def test_small_programs_are_left_to_eager(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled = fxkit.compile(net)
    compiled(torch.randn(2, 4)).sum().backward()
    assert _training(compiled).reason == "its kernels save less than a call under autograd costs"
    large = fxkit.compile(lambda x: torch.tanh(x * 2).exp() + x)
    large(torch.randn(1024, 1024, requires_grad=True)).sum().backward()
    assert _training(large).reason is None


@pytest.mark.parametrize("is_faster", [False, True])
def test_small_programs_are_tried_and_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
):
    monkeypatch.undo()
    monkeypatch.setattr(training_module, "AROUND_SECONDS", -1e9 if is_faster else 1e9)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.GELU()).train()
    twin, x = copy.deepcopy(net), torch.randn(64, 64)
    compiled = fxkit.compile(net)
    for program, module in ((compiled, net), (twin, twin)):
        torch.manual_seed(3)
        for _ in range(2):
            program(x).square().sum().backward()
        assert module[0].weight.grad is not None
    _assert_same_state(net, twin)
    torch.testing.assert_close(net[0].weight.grad, twin[0].weight.grad, rtol=1e-4, atol=1e-4)
    reason = None if is_faster else "tried against each other, eager was faster"
    assert _training(compiled).reason == reason


def test_frozen_parameters_have_no_gradient():
    net = Net().eval()
    net.up.requires_grad_(False)
    compiled = fxkit.compile(net)
    compiled(torch.randn(12, 64)).sum().backward()
    assert net.up.weight.grad is None and net.down.weight.grad is not None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("turn", [
    lambda y: y.transpose(0, 1), lambda y: y.permute(1, 2, 0), lambda y: y[:, :, ::2],
    lambda y: y.transpose(0, 2)[:, 1:], lambda y: y[:1].expand(4, 6, 8), lambda y: y[:, :1].mT,
])  # fmt: skip
def test_dropout_draws_as_eager_whatever_the_strides(turn: Callable[..., torch.Tensor]):
    weight = torch.randn(8, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(turn(torch.tanh(x @ weight)), 0.4) * 2 + 1

    x = torch.randn(4, 6, 8, requires_grad=True)
    fast = fxkit.compile(program)
    results = []
    for fn in (fast, fast, program):
        torch.manual_seed(1)
        result = fn(x)
        (gradient,) = torch.autograd.grad(result.square().mean(), x)
        results.append([result, gradient, torch.get_rng_state()])
    assert _training(fast).reason is None
    for found, expected in zip(results[1], results[2], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "function"), one_in(
    3,
    [torch.float32, torch.bfloat16, torch.float16],
    [torch.mul, torch.copysign, torch.logaddexp, torch.xlogy, torch.maximum, torch.pow],
))  # fmt: skip
def test_results_are_laid_out_as_eager(function: Callable[..., torch.Tensor], dtype: torch.dtype):
    row = torch.rand(1, 33, dtype=dtype).expand(17, 33).requires_grad_()
    turned = torch.rand(33, 17, dtype=dtype).t().requires_grad_()
    for x, y in ((row, turned), (turned, row)):
        compiled = fxkit.compile(lambda x, y: function(x, y).exp())
        for _ in range(2):
            assert compiled(x, y).stride() == function(x, y).exp().stride() == (1, 17)
        assert _training(compiled).reason is None


def test_gradients_accumulate():
    net = Net().eval()
    compiled = fxkit.compile(net)
    x = torch.randn(12, 64)
    for _ in range(2):
        compiled(x).sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    for _ in range(2):
        net(x).sum().backward()
    expected = [p.grad for p in net.parameters() if p.grad is not None]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_checkpointed_parts_keep_their_meaning():
    from torch.utils.checkpoint import checkpoint

    compiled = fxkit.compile(lambda x: torch.tanh(x * 2).exp())
    x = torch.randn(4, 8, requires_grad=True)
    found = torch.autograd.grad(checkpoint(compiled, x, use_reentrant=False).sum(), x)
    expected = torch.autograd.grad(torch.tanh(x * 2).exp().sum(), x)
    torch.testing.assert_close(found, expected)


def test_under_autocast():
    net = Net().eval()
    compiled = fxkit.compile(net)
    x = torch.randn(12, 64)
    grads = []
    for program in (net, compiled, compiled):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = program(x)
        result.float().square().mean().backward()
        grads.append((result.detach(), net.up.weight.grad.clone()))
    for found in grads[1:]:
        assert found[0].dtype == grads[0][0].dtype
        torch.testing.assert_close(found, grads[0], rtol=0.05, atol=0.02)
    assert torch._C._is_any_autocast_enabled() is False


def test_what_is_computed_without_autocast_stays_so_under_it():
    def apart(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x @ weight)

    compiled = fxkit.compile(apart)
    x, weight = torch.randn(64, 48), torch.randn(48, 32, requires_grad=True)
    expected = apart(x, weight)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled(x, weight)
            assert torch.is_autocast_enabled("cpu")
        found.sum().backward()
        torch.testing.assert_close(found, expected)
    assert _calls(_training(compiled)) == (2, 2)


def test_module_can_be_copied():
    module = copy.deepcopy(_trained_module())
    x = torch.randn(12, 64)
    before = module(x)
    with torch.no_grad():
        for parameter in module.graph_module.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(module(x), before)


def _trained_module() -> TrainingModule:
    compiled = fxkit.compile(Net().eval())
    compiled(torch.randn(12, 64))
    return _training(compiled)


def test_calls_are_counted_where_they_ran():
    module = _trained_module()
    twin = copy.deepcopy(module)
    for program, count in ((module, 2), (twin, 3)):
        for rows in [12] * count + [24]:  # kernels are built anew for other sizes
            program(torch.randn(rows, 64)).sum().backward()
    assert _calls(module) == (3, 3)
    assert _calls(twin) == (4, 4)


def test_trials_are_no_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 1e-9)
    monkeypatch.setattr(training_module, "AROUND_SECONDS", -1e9)  # so that kernels win
    x = torch.randn(64, 64, requires_grad=True)
    gm = fxkit.capture(lambda x: torch.tanh(x).exp() + x.sigmoid(), (x,)).graph_module
    module = training_module.to_cpp_training(gm, (x,))
    assert module.reason is None
    assert _calls(module) == (0, 0)
    module(x).sum().backward()
    assert _calls(module) == (1, 1)


def _calls(module: TrainingModule) -> tuple[int, int]:
    report = module.report()
    assert report.forward is not None and report.backward is not None
    return report.forward.calls, report.backward.calls


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.last = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        self.last = self.last * 0.9 + y.detach().mean(0) * 0.1
        return torch.tanh(y - self.mean) * self.last


def _hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, result: result * 2)
    return net


def _parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Tanh())


@pytest.mark.parametrize("make", [RunningMean, _hooked, _parametrised])
def test_state_hooks_and_parametrisations_keep_their_meaning(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    net = make()
    twin = copy.deepcopy(net)
    compiled = fxkit.compile(net)
    for _ in range(3):
        x = torch.randn(12, 64)
        for program, module in ((compiled, net), (twin, twin)):
            module.zero_grad()
            program(x).square().sum().backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        _assert_same_state(net, twin)
        if isinstance(net, RunningMean):
            torch.testing.assert_close(net.last, twin.last)  # type: ignore[arg-type]
    assert _training(compiled).reason is None


def test_a_sparse_input_is_trained_in_eager():
    weight = torch.randn(4, 3, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    compiled = fxkit.compile(lambda s, w: torch.tanh(torch.sparse.mm(s, w)) * 2)
    (ours,) = torch.autograd.grad(compiled(sparse, weight).sum(), weight)
    (theirs,) = torch.autograd.grad((torch.tanh(sparse.mm(weight)) * 2).sum(), weight)
    torch.testing.assert_close(ours, theirs)
    assert _training(compiled).reason == "an input is not dense"


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_what_checks_its_results_is_trained_in_eager(function: Callable[..., Any]):
    x = (torch.eye(4) * 2).requires_grad_()
    compiled = fxkit.compile(lambda x: torch.tanh(function(x)) * 3)
    for program in (compiled, compiled, lambda x: torch.tanh(function(x)) * 3):
        x.grad = None
        program(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(program(x).sum(), x)[0])
    assert "tokens" in str(_training(compiled).reason)
    with pytest.raises(RuntimeError, match=r"singular|positive-definite"):
        compiled(torch.zeros(4, 4, requires_grad=True))


def test_norms_of_turned_signals_around_a_convolution():
    torch.manual_seed(0)
    kernel = torch.randn(8, 8, 1)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.permute(0, 2, 1), (8,), weight, bias).permute(0, 2, 1)

    def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = norm(x.tanh(), weight, bias)
        return norm(F.conv1d(y, kernel.to(x.dtype)) + y, weight, bias)

    compiled = fxkit.compile(fn)
    args = torch.randn(4, 8, 5), torch.rand(8), torch.randn(8)
    found: list[tuple[torch.Tensor, ...]] = []
    for run, dtype in [(compiled, torch.float32), (fn, torch.float32), (fn, torch.float64)]:
        given = [arg.to(dtype).requires_grad_() for arg in args]
        found.append(torch.autograd.grad(run(*given).square().mean(), given))
    assert _training(compiled).reason is None
    for ours, eager, exact in zip(*found, strict=True):
        errors = [float((one - exact).norm()) for one in (ours, eager)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * float(exact.norm())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pick", [
    lambda y: y.amin(0, keepdim=True), lambda y: y.amax(-1, keepdim=True), torch.max,
    lambda y: y.view(-1).amax(0), lambda y: y.norm(float("inf"), dim=0, keepdim=True),
])  # fmt: skip
def test_gradients_go_to_what_was_picked(pick: Callable[..., torch.Tensor]):
    """Computed again by another kernel, no element need be equal to what the forward picked."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().sigmoid() * F.gelu(x)
        return pick(y) * y.sigmoid()

    compiled = fxkit.compile(fn)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(8, 6)
        weights = torch.rand(8, 6)
        found: list[torch.Tensor] = []
        for run, dtype in [(compiled, torch.float32), (fn, torch.float32), (fn, torch.float64)]:
            given = x.to(dtype).requires_grad_()
            found += torch.autograd.grad(run(given), given, weights.to(dtype))
        ours, eager = ((it - found[2]).norm() for it in found[:2])
        assert ours <= 2 * eager + 1e-6
    assert _training(compiled).reason is None
