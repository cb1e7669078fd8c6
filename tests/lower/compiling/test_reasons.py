"""Why torch computes a node: for each that does, and for none that computes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests.lower.kernels import ALWAYS


def _program(x: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = torch.relu(F.conv1d(x, kernel)) + 1
    values, ids = torch.sort(found, -1)
    shown = values.transpose(1, 2)
    return shown, ids, torch.nonzero(found), torch.bernoulli(found.sigmoid()), torch.linalg.qr(x)


def _compiled() -> CompiledModule:
    inputs = (torch.randn(2, 3, 20), torch.randn(4, 3, 3))
    return to_cpp(fx.symbolic_trace(_program), inputs, policy=ALWAYS)


def test_each_node_in_aten_has_a_reason():
    reasons = _compiled().reasons
    assert reasons == {
        "conv1d": "the library computes convolutions",
        "sort": "torch computes what puts numbers into an order",
        "nonzero": "what it gives depends on the numbers in a tensor",
        "bernoulli": "it draws random numbers, which must be those of eager",
        "linalg_qr": "the library of linear algebra computes it",
    }


def test_a_node_is_explained():
    compiled = _compiled()
    assert compiled.explain("relu") == "%relu is computed by kernel_0, in region_0"
    assert compiled.explain("conv1d").endswith("the library computes convolutions")
    nodes = compiled.graph_module.graph.find_nodes(op="call_method", target="transpose")
    assert "computes nothing" in compiled.explain(nodes[0])
    with pytest.raises(UnsupportedError, match="expected a node of the compiled graph, got %none"):
        compiled.explain("none")


def test_without_kernels_all_nodes_have_the_same_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXKIT_BACKEND", "eager")
    reasons = _compiled().reasons
    assert set(reasons.values()) == {"FXKIT_BACKEND=eager turns kernels off"}
    assert {"conv1d", "relu", "sort"} <= set(reasons)


def test_forward_and_backward_have_reasons(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)
    x = torch.randn(64, 3, 200, requires_grad=True)
    compiled = fxkit.compile(lambda x, k: torch.relu(F.conv1d(x, k) + 1).sigmoid() * 2, train=True)
    compiled(x, torch.randn(8, 3, 5)).sum().backward()
    module = compiled.compiled_modules[-1]
    assert isinstance(module, TrainingModule) and module.reason is None
    whole = [n for n, why in module.reasons.items() if why == "the library computes convolutions"]
    assert {name.split(".")[0] for name in whole} == {"forward", "backward"}
