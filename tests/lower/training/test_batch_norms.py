"""Batch norms in training: running statistics, results and gradients, all in kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)


class _Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(x) + 0.1)


def _norm(cls: type[nn.Module], channels: int, **options: Any) -> nn.Module:
    norm = cls(channels, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def _step(net: nn.Module, run: Any, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):  # running statistics run on
        result = run(x)
        gradients = torch.autograd.grad(result, [x, *net.parameters()], gradient)
    return [result.detach(), *gradients, *(b.clone() for b in net.buffers())]


def _check(norm: nn.Module, x: torch.Tensor, *, train: bool = True) -> TrainingModule:
    net = _Block(norm).train(train)
    twin, wide = copy.deepcopy(net), copy.deepcopy(net).double()
    x.requires_grad_()
    gradient = torch.randn_like(x)
    compiled = fxkit.compile(net)
    exact = _step(wide, wide, x.detach().double().requires_grad_(), gradient.double())
    eager, ours = _step(twin, twin, x, gradient), _step(net, compiled, x, gradient)
    for found, plain, right in zip(ours, eager, exact, strict=True):
        assert (found.dtype, found.stride()) == (plain.dtype, plain.stride())
        scale = max(1e-2, float(right.double().norm()))
        error, allowed = (float((t.double() - right.double()).norm()) for t in (found, plain))
        assert error <= 2 * allowed + 2e-7 * scale
    module = compiled.compiled_modules[-1]
    assert isinstance(module, TrainingModule) and module.reason is None, compiled.report()
    return module


def _operators(module: TrainingModule) -> str:
    program = module.program
    assert program is not None and program.backward is not None
    return program.forward.code + program.backward.code


@pytest.mark.one_in(2)
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.37, "eps": 1e-3}],
    ids=str,
)
def test_images(options: dict[str, Any], offset: float):
    torch.manual_seed(0)
    module = _check(_norm(nn.BatchNorm2d, 8, **options), torch.randn(8, 8, 28, 28) + offset)
    assert "batch_norm" not in _operators(module)
    backward = module.report().backward
    assert backward is not None and backward.fused == backward.candidates


@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        (nn.BatchNorm1d, (4096, 32)),
        (nn.BatchNorm1d, (64, 5, 133)),
        (nn.BatchNorm3d, (2, 4, 8, 16, 17)),
    ],
    ids=["rows", "lines", "volumes"],
)
def test_other_ranks(cls: type[nn.Module], shape: tuple[int, ...]):
    torch.manual_seed(0)
    assert "batch_norm" not in _operators(_check(_norm(cls, shape[1]), torch.randn(shape)))


def test_channels_last():
    torch.manual_seed(0)
    x = torch.randn(4, 16, 30, 30).contiguous(memory_format=torch.channels_last)
    assert "batch_norm" not in _operators(_check(_norm(nn.BatchNorm2d, 16), x))


def test_frozen_statistics():
    torch.manual_seed(0)
    norm = _norm(nn.BatchNorm2d, 8)
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None
    norm.running_var.uniform_(0.5, 2)
    assert "batch_norm" not in _operators(_check(norm, torch.randn(8, 8, 28, 28), train=False))


def test_mixed_types_stay_with_torch():
    torch.manual_seed(0)
    net = _Block(_norm(nn.BatchNorm2d, 8))
    twin = copy.deepcopy(net)
    x = torch.randn(8, 8, 28, 28, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    ours, eager = (_step(n, r, x, gradient) for n, r in ((net, fxkit.compile(net)), (twin, twin)))
    for found, right in zip(ours, eager, strict=True):
        assert torch.allclose(found, right, rtol=2e-2, atol=2e-2)
        assert found.dtype is right.dtype


def test_a_single_element_a_channel_raises_as_eager():
    net = _Block(nn.BatchNorm1d(4))
    x = torch.randn(1, 4, requires_grad=True)
    for run in (net, fxkit.compile(net)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(x)


@pytest.mark.parametrize("shape", [(64, 16), (33, 16)])
def test_two_batches_before_one_backward(shape: tuple[int, int]):
    """Torch's own gradient refuses statistics of which it was told that they are others now."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))
    twin = copy.deepcopy(net)
    run = fxkit.compile(net)
    for _ in range(3):
        x, y, z = torch.randn(64, 16), torch.randn(shape), torch.randn(64, 16)
        for model, own in ((net, run), (twin, twin)):
            (own(x) - own(y)[:1] + model(z)).square().mean().backward()
    for ours, right in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, right.grad, rtol=1e-4, atol=1e-6)
    for ours, right in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(ours, right) and ours._version == right._version
