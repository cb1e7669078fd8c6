"""Recurrent layers as core operators: the same numbers, gradients and noise as torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.passes import DecomposeToCore
from fxkit.passes.decomposition.core_operators import CORE_OPERATORS
from fxkit.passes.manager.manager import PassManager

LAYERS = {
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.5),
    "lstm, batch first": lambda: nn.LSTM(4, 5, num_layers=2, dropout=0.3, batch_first=True),
    "lstm with projections": lambda: nn.LSTM(4, 5, proj_size=3),
    "lstm without biases": lambda: nn.LSTM(4, 5, bias=False),
    "gru": lambda: nn.GRU(4, 5, num_layers=3, dropout=0.5, batch_first=True),
    "gru without biases": lambda: nn.GRU(4, 5, bias=False, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 5, num_layers=2, dropout=0.5),
    "rnn with relu": lambda: nn.RNN(4, 5, nonlinearity="relu"),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(4, 5),
    "lstm cell without biases": lambda: nn.LSTMCell(4, 5, bias=False),
    "gru cell": lambda: nn.GRUCell(4, 5),
    "rnn cell": lambda: nn.RNNCell(4, 5),
}


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_numbers_gradients_and_noise(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = ({**LAYERS, **CELLS})[name]().train(training)
    x = torch.randn(2, 4) if name in CELLS else torch.randn(3, 2, 4)
    program = fxkit.capture(model, (x,))
    PassManager([DecomposeToCore()], args=(x,)).run(program)
    called = {str(node.target) for node in program.graph_module.graph.nodes
              if isinstance(node.target, torch._ops.OpOverload)}  # fmt: skip
    assert called <= CORE_OPERATORS
    expected, got = (_results_and_gradients(call, model, x) for call in (model, program))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def _results_and_gradients(call: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    results = pytree.tree_leaves(call(x))
    weights = list(model.parameters())
    return [*results, *torch.autograd.grad(sum(r.square().sum() for r in results), weights)]
