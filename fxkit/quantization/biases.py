"""Biases of layers: numbers are added to them, or to results of layers that take none."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.quantization.operands import take_instead
from fxkit.torch_adapters.operators import OpOverload

_NAMES = {
    "aten.linear": "bias", "aten.addmm": "self",
    "aten.conv1d": "bias", "aten.conv2d": "bias", "aten.conv3d": "bias",
}  # fmt: skip


def correct_bias(edit: EditSession, layer: fx.Node, added: Tensor) -> None:
    """Let a layer's results be larger by so much.

    A bias that is stored is replaced by a new one; else one is given, or a sum put behind.

    Args:
        edit: The session.
        layer: A call of a linear layer, convolution or product of matrices.
        added: float64[channels].
    """
    call = resolve(layer)
    if call is None:
        return
    name = _NAMES.get(call.name)
    old = call.arguments.get(name) if name is not None else None
    known = type_of(layer)
    dtype = known.dtype if isinstance(known, TensorType) else torch.float32
    if isinstance(old, fx.Node) and old.op == "get_attr":
        value = find_attribute(edit.gm, str(old.target)).detach()
        if value.shape == added.shape:
            new = (value.double() + added.to(value.device)).to(value.dtype)
            read = edit.add_attribute(f"{layer.name}_bias", new, before=layer)
            take_instead(edit, layer, {old: read})
            if not old.users:
                edit.erase(old)
            return
    is_given = name == "bias" and old is None
    shape = (-1, *(1,) * int(call.name[-2])) if "conv" in call.name and not is_given else (-1,)
    read = edit.add_attribute(
        f"{layer.name}_bias", added.to(dtype).reshape(shape), before=layer if is_given else None
    )
    if is_given:
        args = list(layer.args)
        if len(args) > 2:
            args[2] = read
            edit.set_args(layer, tuple(args), dict(layer.kwargs))
        else:
            edit.set_args(layer, tuple(args), {**layer.kwargs, "bias": read})
        return
    add = torch.ops.aten.add.Tensor if isinstance(layer.target, OpOverload) else torch.add
    total = edit.call(add, layer, read, after=layer)
    edit.replace_uses(layer, total, where=lambda user: user is not total)
