"""Each library pass on real models: the difference tells what the journal tells."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import fx

from fxkit.passes import PASSES
from fxkit.passes.manager.manager import PassManager
from fxkit.tracing.capture_modes import capture
from tests.architectures import HUGGING_FACE, convolutional
from tests.view.differences.test_diffing import agree

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers warns at import

_MODELS = ("bert", "gpt2", "llama", "qwen3", "t5", "vit", "distilbert")
_CONVOLUTIONAL = ("resnet18", "mobilenetv2_w1", "squeezenet_v1_1")


@functools.lru_cache(maxsize=1)
def captured(name: str) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Capture a model with random weights at its second call: the first one imports."""
    torch.manual_seed(0)
    made = HUGGING_FACE[name]() if name in HUGGING_FACE else convolutional(name)
    model, inputs = made
    batch = inputs(2 if name in HUGGING_FACE else 1)
    with torch.no_grad():
        model(**batch)
        return capture(model, (), batch).graph_module, batch


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*_MODELS, *_CONVOLUTIONAL])
def test_the_difference_of_each_pass_on_a_real_model_is_what_its_journal_says(name: str) -> None:
    gm, batch = captured(name)
    for kind, make in sorted(PASSES.items()):
        before, after = copy.deepcopy(gm), copy.deepcopy(gm)
        with torch.no_grad():
            result = PassManager([make()], args=(), kwargs=batch).run(after)
        journal = [change for record in result.records for change in record.changes]
        try:
            agree(before, after, journal)
        except AssertionError as error:
            raise AssertionError(f"{kind} on {name}") from error
