"""Recurrent layers that are trained drop out between layers as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._decomp import decompositions

from fxkit.tracing.functional.aot_autograd import trace_functional
from fxkit.tracing.functional.recurrent_dropout import dropout_between_layers

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


def test_torchs_loop_is_put_back() -> None:
    before = decompositions._rnn_helper
    with dropout_between_layers():
        assert decompositions._rnn_helper is not before
    assert decompositions._rnn_helper is before


def test_torch_loses_the_dropout() -> None:
    """Where it no longer does, `recurrent_dropout` is not needed."""
    given: list[float] = []

    def layer(x: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(x.count_nonzero().item())
        return x, x

    x = torch.ones(100)
    weights = [[torch.ones(1)]] * 2
    decompositions._rnn_helper(x, [x, x], weights, False, 2, 0.5, True, False, False, layer)
    assert given == [100, 100]
