"""Recurrent layers in training, where torch spells them out while it traces.

It loses the dropout between layers, for its condition `num_layers < i - 1` holds for none. And it
takes oneDNN's layer, which keeps nothing for a backward, unless the input requires a gradient;
weights may without it. torch 2.11 also leaves an axis of time, of length 1, in the last states.

Source: torch/_decomp/decompositions.py, `_rnn_helper`, `select_one_layer_lstm_function` and
`one_layer_lstm`, torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxkit.torch_adapters.decompositions import recurrent_loops


@contextlib.contextmanager
def trained_layers() -> Iterator[None]:
    """Let torch spell out recurrent layers as they are trained: with dropout, and a backward."""
    decompositions = recurrent_loops()
    changes = {
        "_rnn_helper": _with_dropout,
        "select_one_layer_lstm_function": _with_backward,
        "one_layer_lstm": with_states_alike,
    }
    before = {name: getattr(decompositions, name, None) for name in changes}
    known = {name: function for name, function in before.items() if function is not None}
    for name, function in known.items():
        setattr(decompositions, name, changes[name](function))
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(decompositions, name, function)


def with_states_alike(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs a layer, and gives its last states the axes of the first ones."""

    def run(x: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        out, ends = layer(x, states, *args, **kwargs)
        pairs = zip(ends, states, strict=True)
        return out, tuple(end.squeeze(0) if end.dim() > state.dim() else end
                          for end, state in pairs)  # fmt: skip

    return run


def _with_backward(choose: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, hidden: Any, params: Any) -> Any:
        tensors = [*hidden, *itertools.chain.from_iterable(params)]
        if any(tensor.requires_grad for tensor in tensors):
            return recurrent_loops().one_layer_lstm
        return choose(x, hidden, params)

    return run


def _with_dropout(loop: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: Any, hidden: Any, params: Any, has_biases: bool, layers: int, dropout: float,
        train: bool, is_two_way: bool, batch_first: bool, layer: Callable[..., Any],
    ) -> Any:  # fmt: skip
        if train and dropout:
            layer = _Dropped(layer, dropout)
        return loop(
            x, hidden, params, has_biases, layers, 0.0, train, is_two_way, batch_first, layer
        )

    return run


class _Dropped:
    """A recurrent layer whose input is dropped out, except that of the first one.

    Both ways of a layer are given the same input, which is dropped out once.
    """

    def __init__(self, layer: Callable[..., Any], dropout: float) -> None:
        self._layer = layer
        self._dropout = dropout
        self._given: Any = None
        self._used: Any = None

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x is not self._given:
            is_first = self._given is None
            self._given = x
            self._used = x if is_first else torch.dropout(x, self._dropout, True)
        return self._layer(self._used, *args, **kwargs)
