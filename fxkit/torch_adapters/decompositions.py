"""torch's tables of decompositions, and the loops over time of its recurrent layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxkit.torch_adapters.private_names import find, private

_ROOM = "torch._decomp"
_FEWER = "fewer operators are taken apart, and stay torch's"
_CORE = private(f"{_ROOM}.core_aten_decompositions", "core operators", "those of torch.export")
_ALL = private(f"{_ROOM}.global_decomposition_table", "operators beyond core", _FEWER)
_REFERENCES = private("torch._refs", "operators beyond core", _FEWER)
_SOME = private(f"{_ROOM}.get_decompositions", "backward graphs of kernels", _FEWER)
_LOOPS = private(f"{_ROOM}.decompositions", "recurrent layers", "they stay torch's")
_TRAINED = tuple(
    private(f"{_LOOPS.path}.{name}", "training recurrent layers", "what is trained runs in eager")
    for name in ("_rnn_helper", "select_one_layer_lstm_function", "one_layer_lstm")
)

Table = dict[Any, Callable[..., Any]]


def core_table() -> Table:
    """Return the decompositions that lead to core operators."""
    table = _CORE.get(torch.export.default_decompositions)
    return dict(table())


def whole_table() -> Table:
    """Return every decomposition, also those that torch's own core set does not ask for."""
    if _REFERENCES.get() is not None:
        importlib.import_module(_REFERENCES.path)  # adds to the table
    return dict(_ALL.get({}).get("post_autograd", {}))


def decompositions_of(packets: Iterable[Any]) -> Table:
    """Return torch's decompositions of some operators."""
    table = _SOME.get()
    return {} if table is None else table(list(packets))


def declare_decomposition(
    overload: Any, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Put an operator into torch's tables, which ONNX export and DTensor look into.

    Args:
        overload: The operator.
        function: Computes it by others.
        fake: Returns what it does without its numbers. Fake tensors of symbolic sizes would take
            the decomposition for that, were there none in the table.
    """
    tables = _ALL.get({})
    for name, found in (("post_autograd", function), ("meta", fake)):
        if name in tables:
            tables[name][overload] = found


def withdraw_decomposition(overload: Any) -> None:
    """Take an operator out of torch's tables."""
    tables = _ALL.get({})
    for name in ("post_autograd", "meta"):
        if name in tables:
            tables[name].pop(overload, None)


def recurrent_loops() -> Any:
    """Return the module with torch's loops over time, or None."""
    return None if _LOOPS.get() is None else find(_LOOPS.path)


def has_trained_loops() -> bool:
    """Tell whether torch's loops over time can be exchanged for those of layers in training."""
    return all(name.get() is not None for name in _TRAINED)
