"""How near all-MiniLM-L6-v2, quantised, stays to itself in float; judged on other sentences.

The bars are those that docs/quantization.md tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxkit import quantization as q
from fxkit.demo.judge import nearest, same_neighbours
from fxkit.demo.model import Demo, load
from fxkit.demo.sentences import ALL
from fxkit.quantization.affine import signal_to_noise
from tests.quantization.other_sentences import MORE_SENTENCES, SENTENCES

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def demo() -> Demo:
    return load()


@pytest.fixture(scope="module")
def batches(demo: Demo) -> list[Any]:
    return [demo.inputs(SENTENCES[at : at + 8]) for at in range(0, len(SENTENCES), 8)]


@dataclass(frozen=True)
class Judged:
    """Embeddings of a quantised encoder beside those of the float one.

    Attributes:
        noise: Signal to noise, dB.
        cosine: Mean over the sentences.
        neighbours: For how many of the 48 the nearest other sentence is the same.
    """

    noise: float
    cosine: float
    neighbours: int


def judged(demo: Demo, prepared: q.PreparedProgram) -> Judged:
    inputs = demo.inputs(ALL)
    with torch.no_grad():
        exact: Tensor = demo.encoder(*inputs)
        found: Tensor = q.convert(prepared)(*inputs)
    return Judged(
        signal_to_noise(exact, found),
        float(F.cosine_similarity(exact, found).mean()),
        same_neighbours(nearest(exact, 1), nearest(found, 1)),
    )


def of_layers(spec: q.QuantizationSpec) -> q.QuantizationConfig:
    return q.QuantizationConfig(spec, by_operator={F.embedding: None})


def test_static_int8(demo: Demo, batches: list[Any]) -> None:
    config = of_layers(q.int8_static())
    smooth = q.smooth_quant(demo.encoder, batches, alpha=0.75)
    prepared = q.prepare(smooth, batches[0], config)
    q.calibrate(prepared, batches, progress=False)
    found = judged(demo, prepared)
    assert found.noise >= 24 and found.cosine >= 0.995 and found.neighbours >= 46


def test_dynamic_int8(demo: Demo, batches: list[Any]) -> None:
    prepared = q.prepare(demo.encoder, batches[0], of_layers(q.int8_dynamic()))
    plain = judged(demo, prepared)
    smooth = q.smooth_quant(demo.encoder, batches, alpha=0.5)
    prepared = q.prepare(smooth, batches[0], of_layers(q.int8_dynamic()))
    q.correct_biases(prepared, batches)
    found = judged(demo, prepared)
    assert found.noise >= 26 and found.cosine >= 0.995 and found.neighbours >= 46
    assert found.noise > plain.noise + 1


def test_int4_weights(demo: Demo, batches: list[Any]) -> None:
    config = of_layers(q.int4_weight_only(32))
    prepared = q.prepare(demo.encoder, batches[0], config)
    plain = judged(demo, prepared)
    prepared = q.prepare(q.awq(demo.encoder, config, batches), batches[0], config)
    q.gptq(prepared, batches)
    found = judged(demo, prepared)
    assert found.cosine >= 0.99 > plain.cosine
    assert found.noise > plain.noise + 3


def test_int4_weights_in_groups_of_128(demo: Demo) -> None:
    sentences = MORE_SENTENCES
    batches = [demo.inputs(sentences[at : at + 16]) for at in range(0, len(sentences), 16)]
    config = of_layers(q.int4_weight_only(128))
    plain = judged(demo, q.prepare(demo.encoder, batches[0], config))
    prepared = q.prepare(q.awq(demo.encoder, config, batches), batches[0], config)
    q.fit_scales(prepared, batches)
    q.gptq(prepared, batches, in_turn=True)
    found = judged(demo, prepared)
    assert found.cosine >= 0.99 > plain.cosine
    assert found.noise > plain.noise + 5
