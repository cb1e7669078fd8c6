"""Scales of whole tensors that are computed in each call, spelled in ATen: they fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.token_scales import NAMESPACE, Factor, aten, is_float32

_QUANTIZE = f"{NAMESPACE}quantize_per_tensor"
_DEQUANTIZE = f"{NAMESPACE}dequantize_per_tensor"


def spell_out_tensor_scales(edit: EditSession) -> dict[fx.Node, Factor]:
    """Write what quantises and dequantises by scales in tensors, of one element, in ATen.

    What chooses the scales stays as it is.

    Returns:
        For each dequantised tensor, what it is made of.
    """
    speller = _Speller(edit)
    for node in list(edit.graph.nodes):
        call = resolve(node)
        if call is None or call.name not in (_QUANTIZE, _DEQUANTIZE) or not _is_dynamic(call):
            continue
        with edit.on_behalf_of([node], "multiply_integers"):
            if call.name == _DEQUANTIZE and is_float32(node):
                speller.dequantise(node, call)
            elif call.name == _QUANTIZE and is_float32(call.arguments["input"]):
                speller.quantise(node, call)
    return speller.found


def _is_dynamic(call: Call) -> bool:
    """Tell whether scale and zero point are tensors of one element, of known types."""
    for name in ("scale", "zero_point"):
        value = call.arguments[name]
        known = type_of(value) if isinstance(value, fx.Node) else None
        if not isinstance(known, TensorType) or known.is_symbolic or known.numel != 1:
            return False
    known = type_of(call.arguments["input"])
    return isinstance(known, TensorType) and not known.is_symbolic and bool(known.numel)


class _Speller:
    def __init__(self, edit: EditSession) -> None:
        self.found: dict[fx.Node, Factor] = {}
        self._edit = edit
        self._place: fx.Node | None = None
        self._numbers: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def quantise(self, node: fx.Node, call: Call) -> None:
        """Replace `clamp(round(x / scale) + zero_point)`."""
        self._place = node
        scale = self._number(call.arguments["scale"], torch.float32)
        zero = self._number(call.arguments["zero_point"], torch.float32)
        inverse = self._call(aten.reciprocal.default, scale)
        value = self._call(aten.mul.Tensor, call.arguments["input"], inverse)
        value = self._call(aten.add.Tensor, self._call(aten.round.default, value), zero)
        low, high = call.arguments["quant_min"], call.arguments["quant_max"]
        value = self._call(aten.clamp.default, value, low, high)
        self._edit.replace(node, self._call(aten.to.dtype, value, call.arguments["dtype"]))

    def dequantise(self, node: fx.Node, call: Call) -> None:
        """Replace `(q - zero_point) * scale`, and note what it is made of."""
        self._place = node
        integers = call.arguments["input"]
        scale = self._number(call.arguments["scale"], torch.float32)
        zero = self._number(call.arguments["zero_point"], torch.float32)
        value = self._call(aten.to.dtype, integers, torch.float32)
        value = self._call(aten.sub.Tensor, value, zero)
        new = self._call(aten.mul.Tensor, value, scale)
        known = type_of(integers)
        assert isinstance(known, TensorType)
        if known.shape:
            whole = self._number(call.arguments["zero_point"], torch.int32)
            rows = [*(int(size) for size in known.shape[:-1]), 1]
            zeros = self._call(aten.clone.default, self._call(aten.expand.default, whole, rows))
            self.found[new] = Factor(integers, scale, zeros)
        self._edit.replace(node, new)

    def _number(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a tensor of one element as one without axes, of a type; made once."""
        key = (value, dtype)
        if key not in self._numbers:
            flat = self._call(aten.reshape.default, value, [])
            self._numbers[key] = self._call(aten.to.dtype, flat, dtype)
        return self._numbers[key]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._edit.call(target, *args, before=self._place)
