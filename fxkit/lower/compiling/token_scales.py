"""Scales of tokens, spelled in ATen: what computes them in each call fuses with its neighbours."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of

NAMESPACE = "quantized_decomposed."
_CHOOSES = {
    f"{NAMESPACE}choose_qparams_per_token": "symmetric",
    f"{NAMESPACE}choose_qparams_per_token_asymmetric": "affine",
}
_PER_TOKEN = f"{NAMESPACE}quantize_per_token"
_FROM_TOKENS = f"{NAMESPACE}dequantize_per_token"

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What linear layers of integers take and return between them."""


@dataclass(frozen=True)
class Factor:
    """An operand of a product, apart from its scale and zero point.

    Attributes:
        node: int8 or uint8; float32 where an activation was not quantised.
        scale: A number, or float32 by row or column.
        zero: The zero point; or int32[..., 1] with one for each row of an activation, or integers
            with one for each row of a weight.
        is_float: Whether it was not quantised.
    """

    node: fx.Node
    scale: fx.Node | float
    zero: fx.Node | int
    is_float: bool = False


def spell_out_tokens(edit: EditSession) -> dict[fx.Node, Factor]:
    """Write what quantises tokens in ATen, so that it fuses; return what each dequantises from."""
    found: dict[fx.Node, Factor] = {}
    for node in list(edit.graph.nodes):
        call = resolve(node)
        if call is not None and call.name in _CHOOSES and is_float(call.arguments["input"]):
            users = _users_of_tokens(node, call.arguments["input"])
            if users is not None:
                with edit.on_behalf_of([node, *users], "multiply_integers"):
                    found |= _Tokens(edit, node).spell_out(_CHOOSES[call.name], users)
    return found


def _users_of_tokens(node: fx.Node, source: fx.Node) -> list[fx.Node] | None:
    """Return what quantises and dequantises by chosen scales; None where others read them."""
    taken = [user for user in node.users if user.target is operator.getitem]
    users = list(dict.fromkeys(user for one in taken for user in one.users))
    for user in users:
        call = resolve(user)
        if call is None or call.name not in (_PER_TOKEN, _FROM_TOKENS):
            return None
        if call.name == _PER_TOKEN and call.arguments["input"] is not source:
            return None
        if call.name == _FROM_TOKENS and call.arguments["output_dtype"] not in FLOATS:
            return None
    return users if len(taken) == len(node.users) else None


class _Tokens:
    """Spells out how the tokens of one tensor are quantised.

    Scales are chosen in the tensor's own dtype, as torch's operators do, and what follows is
    computed in theirs: float32 for float64, and else as it is.
    """

    def __init__(self, edit: EditSession, chosen: fx.Node) -> None:
        self._edit = edit
        self._place = chosen
        self._source: Any = chosen.args[0]
        self._dtype = type_of(self._source).dtype

    def spell_out(self, scheme: str, users: list[fx.Node]) -> dict[fx.Node, Factor]:
        """Replace the users of the scales; return what each of the dequantised ones is made of."""
        is_affine = scheme == "affine"
        own = torch.bfloat16 if self._dtype == torch.bfloat16 and not is_affine else torch.float32
        scale, zero = self._affine() if is_affine else (self._symmetric(), 0)
        whole: fx.Node | int = 0
        if isinstance(zero, fx.Node):
            whole = self._call(aten.to.dtype, zero, torch.int32)
            zero = self._as(zero, own)
        scale = self._as(scale, own)
        factor = self._as(scale, torch.float32)
        found: dict[fx.Node, Factor] = {}
        for user in sorted(users):
            call = resolve(user)
            assert call is not None
            self._place = user
            if call.name == _PER_TOKEN:
                self._edit.replace(user, self._quantized(call, own, scale, zero))
                continue
            integers = call.arguments["input"]
            moved = self._call(aten.to.dtype, integers, own)
            if isinstance(zero, fx.Node):
                moved = self._call(aten.sub.Tensor, moved, zero)
            new = self._call(aten.mul.Tensor, moved, scale)
            if call.arguments["output_dtype"] != own:
                new = self._call(aten.to.dtype, new, call.arguments["output_dtype"])
            self._edit.replace(user, new)
            found[new] = Factor(integers, factor, whole)
        return found

    def _as(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return what was computed from the tensor in another dtype, if that is another."""
        is_same = self._dtype == dtype == torch.float32
        return value if is_same else self._call(aten.to.dtype, value, dtype)

    def _symmetric(self) -> fx.Node:
        largest = self._call(
            aten.amax.default, self._call(aten.abs.default, self._source), [-1], True
        )
        if self._dtype == torch.float16:
            largest = self._call(aten.to.dtype, largest, torch.float32)
        return self._call(aten.div.Tensor, self._call(aten.clamp.default, largest, 1e-5), 127)

    def _affine(self) -> tuple[fx.Node, fx.Node]:
        low = self._call(aten.amin.default, self._source, [-1], True)
        high = self._call(aten.amax.default, self._source, [-1], True)
        low = self._call(aten.clamp.default, low, None, 0)
        high = self._call(aten.clamp.default, high, 0)
        scale = self._call(aten.div.Tensor, self._call(aten.sub.Tensor, high, low), 255.0)
        scale = self._call(aten.clamp.default, scale, torch.finfo(torch.float32).eps)
        low = self._call(aten.div.Tensor, low, scale)
        high = self._call(aten.div.Tensor, high, scale)
        from_low = self._call(aten.add.Tensor, low, -128)
        from_high = self._call(aten.add.Tensor, high, 127)
        is_low = self._call(aten.gt.Scalar, self._call(aten.add.Tensor, from_low, from_high), 0)
        of_low = self._call(aten.rsub.Scalar, low, -128)
        of_high = self._call(aten.rsub.Scalar, high, 127)
        zero = self._call(aten.where.self, is_low, of_low, of_high)
        zero = self._call(aten.clamp.default, zero, -128, 127)
        return scale, self._call(aten.round.default, zero)

    def _quantized(
        self, call: Call, own: torch.dtype, scale: fx.Node, zero: fx.Node | int
    ) -> fx.Node:
        inverse = self._call(aten.reciprocal.default, scale)
        value = self._call(aten.mul.Tensor, self._as(self._source, own), inverse)
        if isinstance(zero, fx.Node):
            value = self._call(aten.add.Tensor, value, zero)
        value = self._call(aten.round.default, value)
        low, high = call.arguments["quant_min"], call.arguments["quant_max"]
        value = self._call(aten.clamp.default, value, low, high)
        return self._call(aten.to.dtype, value, call.arguments["dtype"])

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._edit.call(target, *args, before=self._place)


def is_float32(value: Any) -> bool:
    """Tell whether a value is a tensor of float32."""
    return is_float(value, (torch.float32,))


def is_float(value: Any, dtypes: tuple[torch.dtype, ...] = FLOATS) -> bool:
    """Tell whether a value is a tensor of one of some dtypes."""
    known = type_of(value) if isinstance(value, fx.Node) else None
    return isinstance(known, TensorType) and known.dtype in dtypes
