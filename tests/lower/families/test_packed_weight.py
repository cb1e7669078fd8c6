"""Weights of integers that are packed once."""

from __future__ import annotations

import pytest
import torch

from fxkit.lower.families.integer_products import packed_weight as packed
from fxkit.lower.families.integer_products.printer import COLUMNS


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("shape", [(1, 1), (65, 3), (64, 1030), (70, 5, 3, 2)])
def test_panels_hold_the_sums_of_their_columns(shape):
    weight = drawn(*shape)
    panels = packed.pack(weight)
    assert tuple(panels.shape) == packed.packed_shape(shape)
    totals = panels[:, : COLUMNS * 4].contiguous().view(torch.int32).flatten()
    assert torch.equal(totals[: shape[0]], weight.flatten(1).sum(1, dtype=torch.int32))
    assert not totals[shape[0] :].any()


def test_a_weight_is_packed_again_when_it_changes():
    weight, slot = drawn(20, 30), packed.new_slot()
    first = packed.packed_weight(weight, slot)
    assert packed.packed_weight(weight, slot) is first
    weight.neg_()
    second = packed.packed_weight(weight, slot)
    assert torch.equal(second, packed.pack(weight)) and not torch.equal(first, second)
    other = drawn(20, 30)
    assert torch.equal(packed.packed_weight(other, slot), packed.pack(other))


def test_what_is_packed_goes_with_its_weight():
    weight, slot = drawn(20, 30), packed.new_slot()
    packed.packed_weight(weight, slot)
    assert slot in packed._slots
    del weight
    assert slot not in packed._slots


def test_tensors_without_a_version_are_packed_at_each_call():
    with torch.inference_mode():
        weight = drawn(20, 30)
    slot = packed.new_slot()
    assert torch.equal(packed.packed_weight(weight, slot), packed.pack(weight))
    assert slot not in packed._slots
