"""The inference pipeline on real architectures with random weights."""

from __future__ import annotations

import pytest
import torch

from tests.passes.architecture_table import NAMES, Row, row

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import

# Layers before and after: where they share an operand, as queries, keys and values do, or gate and
# up, they become one.
_LAYERS = {
    "bert": (13, 9), "roberta": (13, 9), "electra": (13, 9), "distilbert": (12, 8),
    "llama": (15, 9), "qwen3": (15, 9), "gpt2": (9, 9), "vit": (14, 10), "t5": (33, 22),
}  # fmt: skip
# Batch norms before; after there are none.
_NORMS = {
    "resnet18": 20, "mobilenetv2_w1": 53, "densenet121": 121, "shufflenetv2_w1": 56,
    "efficientnet_b0": 49, "seresnet18": 20, "mobilenet_w1": 27, "ghostnet": 81,
}  # fmt: skip


def _check(found: Row) -> None:
    assert all(one.is_within(torch.float32) for one in found.errors), found
    assert found.nodes[1] <= found.nodes[0], found
    assert found.norms == (_NORMS.get(found.name, 0), 0), found
    assert found.layers == _LAYERS.get(found.name, found.layers), found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet18"])
def test_architecture(name: str):
    _check(row(name))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attention_written_by_hand_is_recomposed(name: str):
    found = row(name, "eager")
    _check(found)
    assert found.attentions == (0, 2), found


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "opt", "vit", "gpt_neox"])
def test_attention_written_by_hand_is_recomposed_in_others(name: str):
    test_attention_written_by_hand_is_recomposed(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str):
    _check(row(name))
