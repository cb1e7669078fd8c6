"""Weights with a scale for each group of a row, dequantised by calls of ATen: they fuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.token_scales import NAMESPACE, aten
from fxkit.passes.base import Pass, PassContext

_NAME = f"{NAMESPACE}dequantize_per_channel_group"


@dataclass(frozen=True)
class SpellOutGroups(Pass):
    """Write what dequantises groups in ATen, as the operator does itself: one kernel computes it.

    Serves weights that are multiplied as floats.

    Rewrites:
        return quantized_decomposed.dequantize_per_channel_group(%q, %s, %z, -8, 7, torch.int8, 32)
        →
        %g = aten.reshape(%q, [64, 4, 32])
        %d = aten.mul(aten.sub(%g, aten.unsqueeze(%z, -1)), aten.unsqueeze(%s, -1))
        return aten.reshape(%d, [64, 128])
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Replace each call. Cost: linear in the nodes."""
        for node in list(edit.graph.nodes):
            call = resolve(node)
            if call is None or call.name != _NAME:
                continue
            shape = _shape(call.arguments["input"])
            if shape is None or not _has_scale_by_group(call, shape):
                continue
            with edit.on_behalf_of([node], "spell_out_groups"):
                edit.replace(node, _spelled(edit, node, call, shape))


def _spelled(edit: EditSession, node: fx.Node, call: Call, shape: tuple[int, ...]) -> fx.Node:
    def put(target: Any, *args: Any) -> fx.Node:
        made = edit.call(target, *args, before=node)
        infer_type(made)
        return made

    arguments, group = call.arguments, call.arguments["group_size"]
    value = put(aten.reshape.default, arguments["input"], [shape[0], shape[1] // group, group])
    if arguments["zero_points"] is not None:
        zeros = put(aten.unsqueeze.default, arguments["zero_points"], -1)
        value = put(aten.sub.Tensor, value, zeros)
    value = put(aten.mul.Tensor, value, put(aten.unsqueeze.default, arguments["scales"], -1))
    value = put(aten.reshape.default, value, list(shape))
    return put(aten.to.dtype, value, arguments["output_dtype"])


def _has_scale_by_group(call: Call, shape: tuple[int, ...]) -> bool:
    """Tell whether scales and zero points have one number for each group of each row."""
    group = call.arguments["group_size"]
    if len(shape) != 2 or not isinstance(group, int) or shape[1] % group:
        return False
    given = [call.arguments["scales"]]
    if call.arguments["zero_points"] is not None:
        given.append(call.arguments["zero_points"])
    return all(_shape(one) == (shape[0], shape[1] // group) for one in given)


def _shape(value: Any) -> tuple[int, ...] | None:
    known = type_of(value) if isinstance(value, fx.Node) else None
    if not isinstance(known, TensorType) or known.is_symbolic:
        return None
    return tuple(map(int, known.shape))
