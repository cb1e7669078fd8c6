"""Why torch computes a node that is no candidate for a kernel."""

from __future__ import annotations

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.fusion.candidates import is_candidate
from fxkit.lower.fusion.view_map import is_alias

# Beginnings of names, and whose work such an operator is.
_WHOLE = {
    ("conv", "convolution", "_conv", "mkldnn_conv"): "the library computes convolutions",
    ("linalg_", "cholesky", "svd", "qr", "lu_", "triangular_solve", "ormqr", "geqrf", "_linalg",
     "inverse", "pinverse", "logdet", "slogdet", "det", "matrix_exp", "lstsq", "eig"):
        "the library of linear algebra computes it",
    ("fft_", "_fft", "stft", "istft"): "the library computes Fourier transforms",
    ("lstm", "gru", "rnn_", "_thnn", "quantized"): "torch computes recurrent layers as a whole",
    ("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "msort", "quantile",
     "nanquantile", "unique", "searchsorted", "bucketize", "histc", "histogram", "bincount"):
        "torch computes what puts numbers into an order",
}  # fmt: skip

_BY_NUMBERS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def reason_in_aten(node: fx.Node) -> str | None:
    """Return why torch computes a node that belongs to no region, or None if it computes nothing.

    Inputs, attributes, views of one operand and the taking of one of several results compute
    nothing.
    """
    if node.op in COMPUTES_NOTHING or is_alias(node):
        return None
    call = resolve(node)
    if call is None:
        return f"nothing is known of %{node.name}, which is called as it is"
    if is_candidate(node):
        return "nothing reads what it computes"
    return _by_effects(node, call) or _by_results(node, call) or _by_operator(call)


def _by_effects(node: fx.Node, call: Call) -> str | None:
    effects = effects_of(node)
    if effects.is_opaque:
        return f"nothing is known of {call.name}, which is called as it is"
    if effects.is_random:
        return "it draws random numbers, which must be those of eager"
    if effects.is_global:
        return "it changes or reads a mode of torch"
    if effects.may_raise:
        return "it is there to raise when something does not hold"
    return None


def _by_results(node: fx.Node, call: Call) -> str | None:
    overload = call.operator.overload
    if overload is not None and _BY_NUMBERS & set(overload.tags):
        return "what it gives depends on the numbers in a tensor"
    known = type_of(node)
    parts = known if isinstance(known, tuple | list) else (known,)
    if known is not None and not any(isinstance(part, TensorType) for part in parts):
        return "it gives no tensor"
    return None


def _by_operator(call: Call) -> str:
    name = call.name.rpartition(".")[2]
    for beginnings, reason in _WHOLE.items():
        if name.startswith(beginnings):
            return reason
    if name.endswith("_"):
        return f"it changes its operand in place, and the table of operators has no row for {name}"
    return f"the table of operators has no row for {call.name}"
