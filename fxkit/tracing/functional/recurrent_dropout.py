"""The dropout between recurrent layers, which torch loses where it spells them out while it traces.

Source: torch/_decomp/decompositions.py, `_rnn_helper`, torch 2.13: its condition
`num_layers < i - 1` holds for no layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Let torch's loops over recurrent layers drop out what goes from one layer to the next."""
    from torch._decomp import decompositions

    kept: Any = decompositions
    loop = getattr(kept, "_rnn_helper", None)
    if loop is None:
        yield
        return
    kept._rnn_helper = _with_dropout(loop)
    try:
        yield
    finally:
        kept._rnn_helper = loop


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
