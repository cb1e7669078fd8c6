"""Recurrent layers and cells as operators that write nothing: torch's loops over time, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters.decompositions import recurrent_loops
from fxkit.tracing.functional.recurrent_layers import with_states_alike


def recurrent_layers() -> dict[Any, Callable[..., Any]]:
    """Return what computes each operator for a recurrent layer or cell, step by step.

    The loops over time are those that torch keeps for export (`torch._decomp.decompositions`).
    """
    kept = recurrent_loops()
    aten = torch.ops.aten
    loops = {
        aten.gru: ("gru_impl", "gru_impl_data"),
        aten.rnn_tanh: ("rnn_tanh_input", "rnn_tanh_data"),
        aten.rnn_relu: ("rnn_relu_input", "rnn_relu_data"),
    }
    found: dict[Any, Callable[..., Any]] = {
        aten.lstm_cell.default: _lstm_cell,
        aten.gru_cell.default: _gru_cell,
    }
    for packet, (padded, packed) in loops.items():
        if hasattr(kept, padded):
            found[packet.input] = _padded(getattr(kept, padded))
        if hasattr(kept, packed):
            found[packet.data] = _packed(getattr(kept, packed))
    if all(hasattr(kept, name) for name in _OF_LSTM):
        found[aten.lstm.input] = _padded(_lstm_loop)
        found[aten.lstm.data] = _packed(kept.lstm_data_impl)
    return found


_OF_LSTM = ("_rnn_helper", "gather_params", "one_layer_lstm", "lstm_data_impl")


def _lstm_loop(x: Any, hx: Any, weights: Any, has_biases: bool, *options: Any) -> Any:
    """Do as torch's `lstm_impl`, which calls a library for whole layers where it can."""
    kept = recurrent_loops()
    hidden, cell = hx
    gathered = kept.gather_params(weights, has_biases, hidden.size(2) != cell.size(2))
    states = list(zip(hidden.unbind(0), cell.unbind(0), strict=True))
    out, ends = kept._rnn_helper(
        x,
        states,
        gathered,
        has_biases,
        *options,
        with_states_alike(kept.one_layer_lstm),  # pyright: ignore
    )
    hiddens, cells = zip(*ends, strict=True)
    return out, torch.stack(hiddens, 0), torch.stack(cells, 0)


def _padded(loop: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: Any, hx: Any, weights: Any, has_biases: bool, layers: int, dropout: float,
        train: bool, is_two_way: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not (train and dropout and layers > 1):
            return loop(x, hx, weights, has_biases, layers, 0.0, train, is_two_way, batch_first)
        x = x.transpose(0, 1) if batch_first else x
        one = (has_biases, 1, 0.0, train, is_two_way, False)
        x, *states = _with_dropout(loop, x, hx, weights, layers, dropout, one)
        return (x.transpose(0, 1) if batch_first else x, *states)

    return run


def _with_dropout(
    loop: Callable[..., Any], x: Any, hx: Any, weights: Any, layers: int, dropout: float, one: Any
) -> Any:
    """Run one layer after the other: torch's loops over several lose the dropout between them."""
    states = []
    for layer in range(layers):
        own = weights[len(weights) // layers * layer : len(weights) // layers * (layer + 1)]
        x, *state = loop(x, _of_layer(hx, layer, layers), own, *one)
        states.append(state)
        if layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x, *(torch.cat(parts, 0) for parts in zip(*states, strict=True)))


def _of_layer(hx: Any, layer: int, layers: int) -> Any:
    if isinstance(hx, (list, tuple)):
        return [_of_layer(state, layer, layers) for state in hx]
    ways = hx.shape[0] // layers
    return hx[layer * ways : (layer + 1) * ways]


def _packed(loop: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: Any, batch_sizes: Any, hx: Any, weights: Any, has_biases: bool, layers: int,
        dropout: float, train: bool, is_two_way: bool,
    ) -> Any:  # fmt: skip
        if train and dropout and layers > 1:
            raise Unrecordable("its dropout lies between packed sequences")
        return loop(x, batch_sizes, hx, weights, has_biases, layers, 0.0, train, is_two_way)

    return run


def _lstm_cell(x: Any, hx: Any, *weights: Any) -> Any:
    hidden, cell = hx
    of_x, of_hidden = _products(x, hidden, *weights)
    let_in, forget, new, out = (of_x + of_hidden).chunk(4, 1)
    cell = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru_cell(x: Any, hidden: Any, *weights: Any) -> Any:
    of_x, of_hidden = _products(x, hidden, *weights)
    reset, keep = (a + b for a, b in zip(of_x.chunk(3, 1)[:2], of_hidden.chunk(3, 1)[:2],
                                         strict=True))  # fmt: skip
    new = (of_x.chunk(3, 1)[2] + of_hidden.chunk(3, 1)[2] * reset.sigmoid()).tanh()
    return (hidden - new) * keep.sigmoid() + new


def _products(
    x: Any, hidden: Any, w: Any, w_hidden: Any, bias: Any = None, bias_hidden: Any = None
) -> tuple[Any, Any]:
    linear = torch.ops.aten.linear.default
    return linear(x, w, bias), linear(hidden, w_hidden, bias_hidden)
