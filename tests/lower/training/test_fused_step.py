"""Fused steps of optimisers: the same numbers and state as torch's, or torch's own step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.lower.training.fused_step import FusedStep

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd_decay": (SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"lr": 0.01}),
    "adam_decay": (Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.3, 0.6)}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
}


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(45, 7), nn.LayerNorm(7), nn.Linear(7, 400)
    ).to(dtype)


def _fill(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch(name: str, dtype: torch.dtype):
    kind, options = CASES[name]
    ours, theirs = _net(dtype), _net(dtype)
    mine, torchs = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)
    step = fxkit.compile(mine.step)
    assert isinstance(step, FusedStep)
    for seed in range(5):
        _fill(ours, seed)
        _fill(theirs, seed)
        mine.param_groups[0]["lr"] = torchs.param_groups[0]["lr"] = 0.02 / (seed + 1)
        before = [p._version for p in ours.parameters()]
        step()
        torchs.step()
        assert all(p._version > v for p, v in zip(ours.parameters(), before, strict=True))
    tolerance = {"rtol": 4e-6, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), **tolerance)
    torch.testing.assert_close(
        mine.state_dict()["state"], torchs.state_dict()["state"], **tolerance
    )
    assert step.report().fused >= 4


@pytest.mark.parametrize("decay", [0.0, 0.1, 1e-60])
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_is_so_after_torchs_step(name: str, decay: float):
    kind, options = CASES[name]
    values = torch.tensor([0.0, -1.5, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan])
    start, slope = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    ours, theirs = (nn.Parameter(torch.ones_like(start)) for _ in range(2))
    mine, torchs = (kind([p], **options | {"weight_decay": decay}) for p in (ours, theirs))
    step = FusedStep(mine)
    for number in range(3):  # the first makes the state
        for parameter in (ours, theirs):
            parameter.grad = slope.clone() if number else torch.ones_like(slope)
        step()
        torchs.step()
        for parameter in (ours, theirs) if number == 0 else ():
            parameter.data.copy_(start)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert step.report().fused >= 2 and (decay or ours.isinf().any())


def test_schedulers_checkpoints_groups_and_missing_gradients():
    ours, theirs = _net(), _net()
    pairs = []
    for net in (ours, theirs):
        first, *rest = net.parameters()
        optimizer = AdamW([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    step = FusedStep(pairs[0][0])
    for seed in range(6):
        for net, (optimizer, scheduler), run in zip(
            (ours, theirs), pairs, (step, pairs[1][0].step), strict=True
        ):
            _fill(net, seed)
            if seed == 3:
                next(net.parameters()).grad = None
            run()
            scheduler.step()
            if seed == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=4e-6, atol=1e-7)
    assert step.report().fused == 5


def test_a_scheduler_that_is_made_after_the_step_knows_of_it():
    net = _net()
    optimizer = AdamW(net.parameters(), lr=0.1)
    step = fxkit.compile(optimizer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for seed in range(3):
        _fill(net, seed)
        step()
        scheduler.step()  # would warn, and warnings are errors
    assert step.report().fused == 2


def test_channels_last_parameters():
    ours, theirs = (_net().to(memory_format=torch.channels_last) for _ in range(2))
    mine, torchs = (SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    step = fxkit.compile(mine.step)
    for seed in range(3):
        _fill(ours, seed)
        _fill(theirs, seed)
        step()
        torchs.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert step.report().fused == 2


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Adam, {"amsgrad": True}, "amsgrad is on"),
        (SGD, {"lr": 0.1, "maximize": True}, "maximize is on"),
        (Adam, {"lr": torch.tensor(0.1)}, "an option is a tensor"),
    ],
)
def test_what_is_not_covered_torch_does(kind: Any, options: dict[str, Any], reason: str):
    ours, theirs = _net(), _net()
    mine, torchs = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)
    step = FusedStep(mine)
    for seed in range(3):
        _fill(ours, seed)
        _fill(theirs, seed)
        step()
        torchs.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert step.report().fused == 0 and reason in step.report().eager
    assert reason in str(step.report())


def test_hooks_and_closures_are_torchs():
    net = _net()
    optimizer = SGD(net.parameters(), lr=0.1)
    step = FusedStep(optimizer)
    _fill(net, 0)
    assert step(lambda: 17) == 17
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    step()
    assert seen == [1] and step.report().fused == 0


def test_parameters_that_overlap_are_left_to_torch():
    base = torch.randn(6)
    first, second = nn.Parameter(base[:4]), nn.Parameter(base[2:])
    step = FusedStep(SGD([first, second], lr=0.1))
    first.grad, second.grad = torch.ones(4), torch.ones(4)
    expected = base - torch.tensor([0.1, 0.1, 0.2, 0.2, 0.1, 0.1])
    step()
    torch.testing.assert_close(base, expected)
    assert "parameters share memory" in step.report().eager


def test_other_optimisers_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"expected a torch\.optim SGD, Adam or AdamW, got RMS"
    ):
        FusedStep(RMSprop(_net().parameters()))


def test_a_step_compiled_without_kernels_is_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    net = _net()
    step = FusedStep(SGD(net.parameters(), lr=0.1))
    _fill(net, 0)
    step()
    assert step.report().fused == 0
