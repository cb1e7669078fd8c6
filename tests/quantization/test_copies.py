"""Copies of programs that are calibrated or trained observe, learn and convert for themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxkit
from fxkit import quantization as q

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
COPIED: tuple[Callable[[Any], Any], ...] = (
    copy.deepcopy,
    lambda it: pickle.loads(pickle.dumps(it)),
)


def network() -> nn.Sequential:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    return nn.Sequential(*layers)


def as_given(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize(
    ("made_of", "copied"),
    [*((as_given, copied) for copied in COPIED), (fxkit.symbolic_trace, copy.deepcopy)],
    ids=["deepcopy", "pickle", "deepcopy of a graph"],
)
def test_a_copy_of_a_prepared_program_is_calibrated_alone(
    made_of: Callable[[nn.Module], Any], copied: Callable[[Any], Any]
) -> None:
    prepared = q.prepare(made_of(network().eval()), (IMAGES,), q.int8_static())
    twin = copied(prepared)
    q.calibrate(prepared, [(IMAGES,)])
    expected = q.convert(prepared)(IMAGES)
    with pytest.raises(fxkit.errors.UnsupportedError, match="a calibrated program"):
        q.convert(twin)
    q.calibrate(twin, [(IMAGES * 100,)])
    assert torch.equal(q.convert(prepared)(IMAGES), expected)
    assert not torch.equal(q.convert(twin)(IMAGES), expected)


def test_a_copy_of_a_prepared_program_has_its_own_weights() -> None:
    prepared = q.prepare(network().eval(), (IMAGES,), q.int8_static())
    q.calibrate(prepared, [(IMAGES,)])
    twin = copy.deepcopy(prepared)
    expected = q.convert(prepared)(IMAGES)
    assert torch.equal(q.convert(twin)(IMAGES), expected)
    with torch.no_grad():
        for parameter in twin.remake.model.parameters():
            parameter.zero_()
    assert not q.convert(twin)(IMAGES).any()
    assert torch.equal(q.convert(prepared)(IMAGES), expected)


@pytest.mark.parametrize("copied", COPIED, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("learns", [False, True], ids=["moving ranges", "learnt steps"])
def test_a_copy_in_training_is_trained_alone(learns: bool, copied: Callable[[Any], Any]) -> None:
    program = q.prepare_qat(network(), (IMAGES,), q.int8_static(), learn_steps=learns)
    program(IMAGES)
    twin = copied(program)
    before = {name: value.clone() for name, value in program.state_dict().items()}
    results = [twin(IMAGES * scale) for scale in (1.5, 3.0)]
    results[-1].sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    assert all(parameter.grad is None for parameter in program.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())
    for scale, result in zip((1.5, 3.0), results, strict=True):
        assert torch.equal(program(IMAGES * scale), result)
    after = twin.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in program.state_dict().items())
    twin.freeze()
    assert twin.frozen_scales and not program.frozen_scales


def test_averaged_weights_are_converted() -> None:
    program = q.prepare_qat(network(), (IMAGES,), q.int8_static())
    averaged = torch.optim.swa_utils.AveragedModel(program, use_buffers=True)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        program(IMAGES).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(program)
    averaged.eval()
    integers = q.convert(averaged.module)  # type: ignore[arg-type]
    error = (integers(IMAGES) - averaged(IMAGES)).abs().max()
    assert error < 0.1 * averaged(IMAGES).abs().max()
    assert (averaged(IMAGES) - program.eval()(IMAGES)).abs().max() > 0.01
