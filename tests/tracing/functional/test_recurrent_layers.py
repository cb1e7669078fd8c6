"""Recurrent layers that are trained: their dropout and their gradients are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decompositions

import fxkit
from fxkit.lower.training import training_module
from fxkit.tracing.functional.aot_autograd import trace_functional
from fxkit.tracing.functional.recurrent_layers import trained_layers

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "gru": lambda: nn.GRU(4, 5, 3, dropout=0.5, bidirectional=True, batch_first=True),
    "tanh": lambda: nn.RNN(4, 5, 2, dropout=0.5),
    "relu": lambda: nn.RNN(4, 5, 2, dropout=0.5, nonlinearity="relu"),
    "lstm": lambda: nn.LSTM(4, 5, 2, dropout=0.5),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_random_numbers_are_those_of_eager(make: Callable[[], nn.RNNBase]) -> None:
    net = make()
    names, weights = zip(*net.named_parameters(), strict=True)

    def fn(x: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        table = dict(zip(names, given, strict=True))
        return [torch.func.functional_call(net, table, (x,))[0]]

    x = torch.randn(3, 6, 4)
    with torch.no_grad():
        traced = trace_functional(fn, (x, *weights))
        for seed in range(2):
            torch.manual_seed(seed)
            (expected,), state = fn(x, *weights), torch.get_rng_state()
            torch.manual_seed(seed)
            torch.testing.assert_close(traced(x, *weights)[0], expected)
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("train", [False, True])
def test_last_states_are_shaped_as_in_eager(train: bool) -> None:
    net, x = nn.LSTM(4, 5, 2, bidirectional=True), torch.randn(3, 6, 4)
    names, weights = zip(*net.named_parameters(), strict=True)

    def fn(x: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        table = dict(zip(names, given, strict=True))
        out, (hidden, cell) = torch.func.functional_call(net, table, (x,))
        return [out, hidden, cell]

    with torch.set_grad_enabled(train):
        traced = trace_functional(fn, (x, *weights), train=train)
        expected = fn(x, *weights)
    returned: Any = traced.graph.output_node().args[0]
    assert [n.meta["val"].shape for n in returned[:3]] == [known.shape for known in expected]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_gradients_where_only_the_weights_ask_for_one(
    make: Callable[[], nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", 0.0)
    net = make()
    compiled = fxkit.compile(net)
    for length in (3, 3, 4):
        x, found = torch.randn(length, 6, 4), []
        for program in (net, compiled):
            torch.manual_seed(0)
            net.zero_grad()
            program(x)[0].square().sum().backward()
            found.append([weight.grad for weight in net.parameters()])
        torch.testing.assert_close(found[1], found[0])


def test_torchs_functions_are_put_back() -> None:
    names = ("_rnn_helper", "select_one_layer_lstm_function", "one_layer_lstm")
    before = [getattr(decompositions, name) for name in names]
    with trained_layers():
        assert all(getattr(decompositions, n) is not b for n, b in zip(names, before, strict=True))
    assert all(getattr(decompositions, n) is b for n, b in zip(names, before, strict=True))


def test_torch_loses_the_dropout() -> None:
    """Where it no longer does, `_with_dropout` is not needed."""
    given: list[float] = []

    def layer(x: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(x.count_nonzero().item())
        return x, x

    x = torch.ones(100)
    weights = [[torch.ones(1)]] * 2
    decompositions._rnn_helper(x, [x, x], weights, False, 2, 0.5, True, False, False, layer)
    assert given == [100, 100]
