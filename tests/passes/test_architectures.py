"""The inference pipeline on real architectures with random weights."""

from __future__ import annotations

import pytest
import torch

from tests.passes.architecture_table import NAMES, row

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import

# Layers that share an operand: queries, keys and values; gate and up; of two blocks each.
_MERGED = {"bert": (13, 9), "llama": (15, 9), "gpt2": (9, 9), "vit": (14, 10)}


def _check(name: str) -> None:
    found = row(name)
    assert all(one.is_within(torch.float32) for one in found.errors), found
    assert found.nodes[1] <= found.nodes[0], found
    assert found.norms[1] == 0, found
    assert found.layers == _MERGED.get(name, found.layers), found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet18"])
def test_architecture(name: str):
    _check(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str):
    _check(name)
