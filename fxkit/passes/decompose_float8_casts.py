"""Compute casts of float8 to float32 by integers, which kernels take in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.stored_floats import CASTS, FLOAT8


@dataclass(frozen=True)
class DecomposeFloat8Casts(Pass):
    """Replace casts of float8 to float32 by arithmetic on their bits, which fuses.

    A number is its mantissa, shifted to the left by its exponent, times the least number of its
    type: exact, with zeros of both signs, infinities and NaN. On other devices than the CPU, and
    where gradients flow to float8, casts stay.

    Rewrites:
        %f = aten.to(%x, f32)
        →
        %b = aten._to_copy(aten.view(%x, i8), i32); %k = aten.bitwise_and(%b, 127)
        %e = aten.clamp_min(aten.sub(aten.bitwise_right_shift(%k, 3), 1), 0)
        %m = aten.bitwise_left_shift(aten.sub(%k, aten.mul(%e, 8)), %e)
        %p = aten.mul(aten._to_copy(%m, f32), 0.001953125)
        %s = aten.where(aten.lt(%b, 0), aten.neg(%p), %p)
        %f = aten.where(aten.eq(%k, 127), nan, %s)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the nodes."""
        for node in list(edit.graph.nodes):
            call = resolve(node)
            operand = _float8(call, type_of(node)) if call is not None else None
            if operand is not None:
                with edit.on_behalf_of([node], "decompose_float8_casts"):
                    edit.replace(node, _Arithmetic(edit, node).float32(operand))


def _float8(call: Call, made: Any) -> fx.Node | None:
    """Return what a call casts, if it is float8 and becomes float32."""
    if call.name not in CASTS:
        return None
    operand = call.arguments.get("self", call.arguments.get("a"))
    known = type_of(operand) if isinstance(operand, fx.Node) else None
    if not isinstance(known, TensorType) or not isinstance(made, TensorType):
        return None
    serves = known.dtype in FLOAT8 and made.dtype == torch.float32 and not known.requires_grad
    is_plain = call.arguments.get("memory_format") in (None, torch.preserve_format)
    is_on_cpu = known.device.type == made.device.type == "cpu"
    return operand if serves and is_plain and is_on_cpu else None


class _Arithmetic:
    """Puts the nodes before a node."""

    def __init__(self, edit: EditSession, place: fx.Node) -> None:
        self.edit = edit
        self.place = place

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.edit.call(target, *args, before=self.place, **kwargs)
        infer_type(new)
        return new

    def float32(self, operand: fx.Node) -> fx.Node:
        """Return float32 for float8."""
        aten = torch.ops.aten
        dtype = type_of(operand).dtype
        bits = self.call(
            aten._to_copy.default,
            self.call(aten.view.dtype, operand, torch.int8),
            dtype=torch.int32,
        )
        code = self.call(aten.bitwise_and.Scalar, bits, 127)
        make = self._e4m3 if dtype == torch.float8_e4m3fn else self._e5m2
        size, largest = make(code)
        is_below = self.call(aten.lt.Scalar, bits, 0)
        signed = self.call(aten.where.self, is_below, self.call(aten.neg.default, size), size)
        is_nan = self.call(aten.gt.Scalar, code, largest)
        return self.call(aten.where.ScalarSelf, is_nan, math.nan, signed)

    def _e4m3(self, code: fx.Node) -> tuple[fx.Node, int]:
        """Return the number without its sign, and the last code of one."""
        mantissa, exponent = self._parts(code, 3)
        shifted = self.call(torch.ops.aten.bitwise_left_shift.Tensor, mantissa, exponent)
        return self.call(torch.ops.aten.mul.Tensor, self._floats(shifted), 2.0**-9), 126

    def _e5m2(self, code: fx.Node) -> tuple[fx.Node, int]:
        """Return the same; the exponent's highest bit is a factor, as 32 bits don't hold all."""
        aten = torch.ops.aten
        mantissa, exponent = self._parts(code, 2)
        low = self.call(aten.bitwise_and.Scalar, exponent, 15)
        shifted = self._floats(self.call(aten.bitwise_left_shift.Tensor, mantissa, low))
        is_large = self.call(aten.gt.Scalar, exponent, 15)
        factor = self.call(aten.where.Scalar, is_large, 1.0, 2.0**-16)
        size = self.call(aten.mul.Tensor, shifted, factor)
        is_infinite = self.call(aten.eq.Scalar, code, 124)
        return self.call(aten.where.ScalarSelf, is_infinite, math.inf, size), 124

    def _parts(self, code: fx.Node, bits: int) -> tuple[fx.Node, fx.Node]:
        """Return the mantissa with its first bit, and the exponent, 0 below normal numbers."""
        aten = torch.ops.aten
        stored = self.call(aten.bitwise_right_shift.Tensor_Scalar, code, bits)
        exponent = self.call(aten.clamp_min.default, self.call(aten.sub.Tensor, stored, 1), 0)
        above = self.call(aten.mul.Tensor, exponent, 2**bits)
        return self.call(aten.sub.Tensor, code, above), exponent

    def _floats(self, integers: fx.Node) -> fx.Node:
        return self.call(torch.ops.aten._to_copy.default, integers, dtype=torch.float32)
