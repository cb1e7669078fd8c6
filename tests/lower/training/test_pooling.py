"""Max pooling in training: by torch's kernel for channels last, the same numbers and places."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower.training import pooling, training_module
from fxkit.lower.training.training_module import TrainingModule


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(pooling, "MIN_ELEMENTS", 1)


def _image(channels: int) -> torch.Tensor:
    """Return an image with equal neighbours, and with NaN and infinities beside each other."""
    torch.manual_seed(0)
    x = torch.randn(2, channels, 15, 13).mul(2).round()
    x[0, :, 3:9, 4:9] = -math.inf
    x[0, 1, 5, 6] = math.nan
    x[1, 2, 2:4, 2:4] = math.nan
    x[1, 3, 2, 2] = math.inf
    return x


def _trained(fn: Any, x: torch.Tensor) -> tuple[Any, Any, str]:
    """Return the results and the gradient, ours and eager's, and the code of our forward."""
    compiled = fxkit.compile(fn)
    found = []
    for program in (compiled, fn):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        results = program(given)
        weight = torch.arange(float(results[0].numel())).view(results[0].shape)
        found.append([*results, *torch.autograd.grad((results[0] * weight).sum(), given)])
    module = compiled.compiled_modules[-1]
    assert isinstance(module, TrainingModule) and module.program is not None, compiled.report()
    return found[0], found[1], module.program.forward.code


def _same(ours: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
    for a, b in zip(ours, eager, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a.stride() == b.stride() and a.dtype is b.dtype


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "ceil_mode": True},
        {"kernel_size": 3, "stride": 2, "dilation": 2},
    ],
    ids=str,
)
def test_numbers_places_and_gradients_are_those_of_eager(options: dict[str, Any]):
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, places = F.max_pool2d(x * 1, return_indices=True, **options)
        return top * 2, places

    ours, eager, code = _trained(fn, _image(16))
    _same(ours, eager)
    assert "memory_format = torch.channels_last" in code


@pytest.mark.parametrize(
    "x",
    [
        _image(4),
        _image(16).double(),
        _image(16).contiguous(memory_format=torch.channels_last),
        _image(16)[0],
    ],
    ids=["few channels", "float64", "channels last", "without a batch"],
)
def test_others_are_pooled_as_they_are(x: torch.Tensor):
    ours, eager, code = _trained(lambda x: (F.max_pool2d(x * 1, 3, 2, 1) * 2,), x)
    _same(ours, eager)
    assert "max_pool2d_with_indices" in code and "clone" not in code


def test_the_call_stays_one_of_torch():
    x = torch.randn(2, 16, 12, 12, requires_grad=True)
    compiled = fxkit.compile(lambda x: F.max_pool2d(F.relu(x * 2), 2).exp() * 2)
    compiled(x)
    reasons = [
        str(r.reason) for r in compiled.compiled_modules[-1].regions if "max_pool" in str(r.nodes)
    ]
    assert reasons == ["eager's kernel is faster, whatever is taken in with it"]
