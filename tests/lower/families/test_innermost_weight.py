"""Weights of convolutions of integers that are copied once, each element with all its channels."""

from __future__ import annotations

import pytest
import torch

from fxkit.lower.families.integer_convolutions import innermost_weight as innermost


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 3, 5), (70, 5, 3, 2), (4, 1, 3, 3)])
def test_channels_lie_side_by_side(shape):
    weight = drawn(*shape)
    copy = innermost.with_channels_innermost(weight)
    assert torch.equal(copy, weight)
    assert copy.movedim(1, -1).is_contiguous()
    wanted = innermost.innermost_strides(shape)
    for size, stride, step in zip(shape, copy.stride(), wanted, strict=True):
        assert size == 1 or stride == step


def test_a_weight_is_copied_again_when_it_changes():
    weight, slot = drawn(20, 30, 2, 2), innermost.new_slot()
    first = innermost.innermost_weight(weight, slot)
    assert innermost.innermost_weight(weight, slot) is first
    before = first.clone()
    weight.neg_()
    second = innermost.innermost_weight(weight, slot)
    assert torch.equal(second, weight) and not torch.equal(before, second)
    other = drawn(20, 30, 2, 2)
    assert torch.equal(innermost.innermost_weight(other, slot), other)


def test_what_is_copied_goes_with_its_weight():
    weight, slot = drawn(20, 30, 2), innermost.new_slot()
    innermost.innermost_weight(weight, slot)
    assert slot in innermost._slots
    del weight
    assert slot not in innermost._slots


def test_tensors_without_a_version_are_copied_at_each_call():
    with torch.inference_mode():
        weight = drawn(20, 30, 2)
    slot = innermost.new_slot()
    assert torch.equal(innermost.innermost_weight(weight, slot), weight)
    assert slot not in innermost._slots
