"""Backward of real architectures: compiled, and within twice eager's error against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests.architectures import HUGGING_FACE, convolutional
from tests.sampling import one_in

# transformers and pytorchcv warn of their own use of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("gpt2", "llama")
OTHERS = ("bert", "t5", "bart", "opt", "qwen3", "vit", "swin", "convnext", "whisper")
NETS = ("resnet18", "seresnet18")


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)


def _gradients(net: nn.Module, run: Callable[..., Any], inputs: dict[str, Any]) -> list[Any]:
    net.zero_grad()
    torch.manual_seed(3)
    result = run(**inputs)
    leaves = pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    followed = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    sum(t.square().mean() for t in followed).backward()
    return [*(t.detach() for t in followed), *(p.grad for p in net.parameters())]


# What one input errs by is a matter of luck: so many more decide by their means.
MORE = 8


def _check(net: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    wide = copy.deepcopy(net).double()
    twin = copy.deepcopy(net)
    compiled = fxkit.compile(net)
    _gradients(net, compiled, inputs)

    def errors_at(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the error of each gradient, eager's, and the most that both may be called one."""
        exact_inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        ours, eager = _gradients(net, compiled, inputs), _gradients(twin, twin, inputs)
        exact = _gradients(wide, wide, exact_inputs)
        assert [a is None for a in ours] == [b is None for b in eager]
        floor = 1e-6 * max(float(e.abs().max()) for e in exact if e is not None)
        return torch.tensor(
            [
                (*(float((found.double() - right).norm()) for found in (a, b)), floor)
                for a, b, right in zip(ours, eager, exact, strict=True)
                if right is not None
            ]
        )

    errors = errors_at(inputs)
    modules = compiled.compiled_modules
    assert all(isinstance(m, TrainingModule) for m in modules), compiled.report()
    assert modules[0].reason is None, compiled.report()
    backwards = [report.backward for m in modules if (report := m.report()).backward is not None]
    assert sum(report.fused for report in backwards) > 10
    if not _are_near(errors):
        assert _are_near(errors, 4), errors.max(0)
        varied = [_varied(inputs, position) for position in range(1, MORE + 1)]
        errors = torch.stack([errors, *map(errors_at, varied)]).mean(0)
        assert _are_near(errors), errors.max(0)


def _are_near(errors: torch.Tensor, times: float = 1) -> bool:
    found, plain, floor = errors.unbind(1)
    return bool((found <= times * (2 * plain + floor)).all())


def _varied(inputs: dict[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
    """Return other inputs like these: numbers by 1.6 % at most, words in another order."""
    return {
        k: v * (1 + 0.002 * position) if v.is_floating_point() else v.roll(position, -1)
        for k, v in inputs.items()
    }


@pytest.mark.parametrize("name", one_in(2, QUICK))
def test_language_models(name: str):
    torch.manual_seed(0)
    net, make = HUGGING_FACE[name]()
    _check(net, make(2))


@pytest.mark.sweep
@pytest.mark.parametrize("name", OTHERS)
def test_more_transformers(name: str):
    test_language_models(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NETS)
def test_convolutional_nets_in_training(name: str):
    torch.manual_seed(0)
    net, make = convolutional(name)
    _check(net.train(), make(2))
