"""Cross entropy in training: losses and gradients of eager, the gradient in kernels throughout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests.sampling import one_in

IGNORED = -100


@pytest.fixture(autouse=True)
def _every_kernel_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)


def _step(run: Any, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    loss = run(x, *others)
    scale = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * scale).sum(), x)]


def _check(fn: Any, x: torch.Tensor, *others: torch.Tensor) -> TrainingModule:
    compiled = fxkit.compile(fn)
    wide = [t.double() if t.is_floating_point() else t for t in (x, *others)]
    exact = _step(fn, wide[0], *wide[1:])
    for _ in range(2):
        ours = _step(compiled, x, *others)
    for found, plain, right in zip(ours, _step(fn, x, *others), exact, strict=True):
        assert (found.dtype, found.stride()) == (plain.dtype, plain.stride())
        assert torch.equal(found.isnan(), plain.isnan())
        errors = [float((t.double() - right).nan_to_num().norm()) for t in (found, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * float(right.nan_to_num().norm())
    module = compiled.compiled_modules[-1]
    assert isinstance(module, TrainingModule) and module.reason is None, compiled.report()
    return module


def _backward(module: TrainingModule) -> str:
    assert module.program is not None and module.program.backward is not None
    return module.program.backward.code


def _target(classes: int, *shape: int) -> torch.Tensor:
    target = torch.randint(classes, shape)
    target.view(-1)[1::3] = IGNORED
    return target


@pytest.mark.parametrize(
    ("reduction", "smoothing", "is_weighted"),
    one_in(2, ["mean", "sum", "none"], [0.0, 0.1], [False, True]),
)
def test_rows(reduction: str, smoothing: float, is_weighted: bool):
    torch.manual_seed(0)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}

    def fn(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        chosen = weight if is_weighted else None
        return F.cross_entropy(x * 0.5, target, chosen, **options)

    module = _check(fn, torch.randn(33, 21), _target(21, 33), torch.rand(21))
    assert "nll_loss" not in _backward(module)
    gradient = [r for r in module.regions if r.kernel and "exp" in r.nodes]
    assert len(gradient) == 1 and any(name.startswith("eq") for name in gradient[0].nodes)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 5, 6, 4), (2, 5, 2, 3, 4)], ids=str)
def test_other_ranks(shape: tuple[int, ...]):
    torch.manual_seed(0)
    target = _target(5, shape[0], *shape[2:])
    module = _check(lambda x, t: F.cross_entropy(torch.tanh(x), t), torch.randn(shape), target)
    assert "nll_loss" not in _backward(module)


@pytest.mark.parametrize("ignored", [IGNORED, 2, -1, 2**32 + 1])
def test_another_class_can_be_ignored(ignored: int):
    torch.manual_seed(0)
    target = torch.randint(5, (12,))
    target[3] = ignored
    _check(lambda x, t: F.cross_entropy(x * 2, t, ignore_index=ignored), torch.randn(12, 5), target)


def test_where_all_are_ignored_there_is_no_gradient():
    x, target = torch.randn(4, 5), torch.full((4,), IGNORED)
    fn = lambda x, t: F.cross_entropy(x * 2, t)  # noqa: E731
    _check(fn, x, target)
    assert torch.equal(_step(fxkit.compile(fn), x, target)[1], torch.zeros_like(x))


def test_scores_that_lie_across_memory_and_probabilities():
    torch.manual_seed(0)
    scores = torch.randn(5, 12).t()
    _check(lambda x, t: F.cross_entropy(x * 2, t), scores, _target(5, 12))
    _check(lambda x, t: F.cross_entropy(x * 2, t), torch.randn(12, 5), torch.rand(12, 5))
    _check(lambda x, t: F.nll_loss(x.log_softmax(1), t), torch.randn(12, 5), _target(5, 12))


def test_a_target_that_is_no_class_raises_as_eager():
    fn = lambda x, t: F.cross_entropy(x * 2, t)  # noqa: E731
    compiled = fxkit.compile(fn)
    x = torch.randn(4, 5)
    _step(compiled, x, torch.tensor([0, 1, 2, 3]))
    for run in (fn, compiled):
        with pytest.raises(IndexError, match="Target 5 is out of bounds"):
            _step(run, x, torch.tensor([0, 1, 2, 5]))
