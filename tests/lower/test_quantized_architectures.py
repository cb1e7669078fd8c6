"""Real architectures, quantised and compiled: each layer is one of integers, or has its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import fxkit
from fxkit import quantization as q
from fxkit.ir.op import resolve
from fxkit.lower import CompiledModule
from fxkit.lower.compiling import convolve_integers, multiply_integers
from tests.architectures import CONVOLUTIONAL, HUGGING_FACE, Inputs, convolutional

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and pytorchcv warn at import

QUICK = ("bert",)

LAYERS = ("aten.linear", "aten.conv", "aten.addmm", "aten.mm")


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Compute with integers also where float32 is as fast."""
    for module in (multiply_integers, convolve_integers):
        monkeypatch.setattr(module, "reason_to_stay_float", lambda *_, **__: None)


def check(architecture: tuple[torch.nn.Module, Callable[[int], Inputs]]) -> None:
    """Quantise, compile and call a model; see that what is left in float is named."""
    net, make = architecture
    inputs = make(2)
    compiled = fxkit.compile(fxkit.quantize(net, q.int8_static(), [inputs]))
    for _ in range(2):
        compiled(**inputs)
    multiplied = 0
    for module in compiled.compiled_modules:
        assert isinstance(module, CompiledModule)
        notes = module.report().float_layers
        named = {note.partition(" ")[0].removeprefix("%") for note in notes}
        nodes = module.graph_module.graph.nodes
        left = [node.name for node in nodes if _name(node).startswith(LAYERS)]
        assert named.issuperset(left), (left, notes)
        multiplied += sum(_name(node).startswith("fxkit.integer_") for node in nodes)
    assert multiplied


def _name(node: fx.Node) -> str:
    call = resolve(node)
    return "" if call is None else call.name


@pytest.mark.parametrize("name", QUICK)
@torch.no_grad()
def test_transformers(name: str):
    torch.manual_seed(0)
    check(HUGGING_FACE[name]())


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in HUGGING_FACE if name not in QUICK])
@torch.no_grad()
def test_every_transformer(name: str):
    torch.manual_seed(0)
    check(HUGGING_FACE[name]())


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONVOLUTIONAL)
@torch.no_grad()
def test_every_convolutional_net(name: str):
    torch.manual_seed(0)
    check(convolutional(name))
