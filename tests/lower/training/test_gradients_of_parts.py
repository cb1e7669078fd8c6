"""Gradients of parts: zeros around them, in the kernels that compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests.sampling import one_in

PARTS: dict[str, Any] = {
    "slices": lambda x: torch.sigmoid(x[:, :3]) * x[:, 3:6] + x[:, -3:],
    "ends that are cut": lambda x: x[:, 2:100, 1:-1] * 2,
    "rows": lambda x: x[1:] * x[:-1],
    "steps": lambda x: x[:, ::2] * x[:, 1::2][:, :3].repeat(1, 2, 1)[:, :4],
    "selected": lambda x: torch.tanh(x[:, -1] * x[:, 0]),
    "selected twice": lambda x: x[1, :, 2] * 3,
    "nothing": lambda x: x[:, 3:3].sum() + x * 2,
    "turned": lambda x: x.transpose(0, 2)[1:3].relu() * 2,
    "channels last": lambda x: x[None].to(memory_format=torch.channels_last)[:, 1:] * 2,
    "log_sigmoid": lambda x: F.logsigmoid(x * 30),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.sign(x.detach() + 0.1)),
}


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)


def _step(run: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = run(x)
    weights = torch.linspace(1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    return result.detach(), torch.autograd.grad(result, x, weights)[0]


@pytest.mark.parametrize(
    ("name", "dtype"), one_in(3, PARTS, [torch.float32, torch.float64, torch.bfloat16])
)
def test_gradients_of_parts_are_eagers(name: str, dtype: torch.dtype) -> None:
    run, x = PARTS[name], torch.randn(4, 7, 6).to(dtype)
    fast = fxkit.compile(run)
    for _ in range(2):
        found = _step(fast, x)
    for ours, eagers in zip(found, _step(run, x), strict=True):
        torch.testing.assert_close(ours, eagers)
        assert ours.stride() == eagers.stride()


@pytest.mark.parametrize("name", ["slices", "rows", "selected", "log_sigmoid", "soft_margin_loss"])
def test_kernels_compute_them(name: str) -> None:
    fast = fxkit.compile(PARTS[name])
    _step(fast, torch.randn(40, 70, 60))
    module = fast.compiled_modules[-1]
    assert isinstance(module, TrainingModule) and module.reason is None
    assert not module.reasons
