"""Convolutions and linear layers with constant weights, in whatever spelling, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.layers.weights import Weights
from fxkit.torch_adapters.operators import OpOverload

_CONVOLUTIONS = {
    "aten.conv1d": 1, "aten.conv2d": 2, "aten.conv3d": 3,
    "aten.conv_transpose1d": 1, "aten.conv_transpose2d": 2, "aten.conv_transpose3d": 3,
}  # fmt: skip

# The operand, the weight and the bias of each form of a linear layer.
_LINEAR = {
    "aten.linear": ("input", "weight", "bias"),
    "aten.addmm": ("mat1", "mat2", "self"),
    "aten.mm": ("self", "mat2", ""),
    "aten.matmul": ("self", "other", ""),
}


@dataclass(frozen=True)
class Layer:
    """A call of a convolution or a linear layer whose weight and bias are constants.

    Attributes:
        node: The call.
        call: Its operator and arguments.
        input: What is convolved or multiplied.
        weight: The weight, as the call takes it.
        bias: The bias: a vector, or None.
        weight_operand: The argument that the weight was read from.
        bias_operand: The argument that the bias was read from.
        axes: How many axes are convolved; 0 for a linear layer.
        is_transposed: Whether it is a transposed convolution.
        is_flipped: Whether it is a linear layer whose weight is `[in, out]`.
        groups: Number of groups of a convolution.
    """

    node: fx.Node
    call: Call
    input: fx.Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_operand: Any
    bias_operand: Any
    axes: int
    is_transposed: bool = False
    is_flipped: bool = False
    groups: int = 1

    @property
    def out_channels(self) -> int:
        """Size of the result's axis of channels."""
        if self.axes == 0:
            return self.weight.shape[1 if self.is_flipped else 0]
        return self.weight.shape[1] * self.groups if self.is_transposed else self.weight.shape[0]

    @property
    def in_channels(self) -> int:
        """Size of the operand's axis of channels."""
        if self.axes == 0:
            return self.weight.shape[0 if self.is_flipped else 1]
        return self.weight.shape[0] if self.is_transposed else self.weight.shape[1] * self.groups

    @property
    def is_spelled_in_aten(self) -> bool:
        """Whether the call is one of an overload, as exported programs have it."""
        return isinstance(self.node.target, OpOverload)

    @property
    def touches_padding(self) -> bool:
        """Whether some results miss a part of the kernel, since it lies outside of the operand."""
        if self.axes == 0:
            return False
        arguments, kernel = self.call.arguments, self.weight.shape[2:]
        if _has_padding(arguments.get("padding"), kernel):
            return True
        if not self.is_transposed:
            return False
        is_pointwise = _all(arguments["stride"], 1) and _all(arguments["output_padding"], 0)
        return not is_pointwise or any(size != 1 for size in kernel)

    def over_outputs(self, scale: torch.Tensor) -> torch.Tensor:
        """Shape one number for each output channel so that it broadcasts over the weight.

        Args:
            scale: float[out]

        Returns:
            A tensor that `as_groups(weight)` can be multiplied with.
        """
        if self.axes == 0:
            return scale if self.is_flipped else scale[:, None]
        ones = (1,) * self.axes
        if self.is_transposed:
            return scale.reshape(self.groups, 1, -1, *ones)
        return scale.reshape(self.groups, -1, 1, *ones)

    def over_inputs(self, scale: torch.Tensor) -> torch.Tensor:
        """Shape one number for each input channel so that it broadcasts over `as_groups(weight)`.

        Args:
            scale: float[in]
        """
        if self.axes == 0:
            return scale[:, None] if self.is_flipped else scale
        ones = (1,) * self.axes
        if self.is_transposed:
            return scale.reshape(self.groups, -1, 1, *ones)
        return scale.reshape(self.groups, 1, -1, *ones)

    def as_groups(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight with an axis of groups in front, if it is one of a convolution."""
        return weight if self.axes == 0 else weight.unflatten(0, (self.groups, -1))

    def sum_over_inputs(self, weighted: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of the form of `as_groups(weight)` to one number an output channel.

        Args:
            weighted: float[groups, ..., kernel], or float[out, in] of a linear layer.

        Returns:
            float[out]
        """
        if self.axes == 0:
            return weighted.sum(0 if self.is_flipped else 1)
        inputs = 1 if self.is_transposed else 2
        return weighted.sum([inputs, *range(3, weighted.dim())]).flatten()

    def rebuild(
        self,
        edit: EditSession,
        weight: fx.Node,
        bias: Any,
        *,
        before: fx.Node,
        operand: fx.Node | None = None,
    ) -> fx.Node:
        """Insert the same call with another weight and bias, in the spelling of the old one.

        Args:
            edit: The session.
            weight: The new weight, in the form of the old one.
            bias: The new bias, or None.
            before: Where to insert it.
            operand: What it takes; the old call's when left out.
        """
        source = self.input if operand is None else operand
        if self.axes or self.call.name == "aten.linear":
            given = {"input": source, "weight": weight, "bias": bias}
            args, kwargs = _in_schema_order(self.call, {**self.call.arguments, **given})
            is_aten = self.is_spelled_in_aten
            target = self.node.target if is_aten else _function_of(self.call.name)
            return edit.insert("call_function", target, args, kwargs, before=before)
        return self._rebuild_product(edit, weight, bias, source, before)

    def _rebuild_product(
        self, edit: EditSession, weight: fx.Node, bias: Any, source: fx.Node, before: fx.Node
    ) -> fx.Node:
        aten = torch.ops.aten if self.is_spelled_in_aten else None
        if bias is None:
            target = self.node.target if callable(self.node.target) else torch.matmul
            return edit.call(target, source, weight, before=before)
        if self.call.name != "aten.matmul":
            addmm = aten.addmm.default if aten else torch.addmm
            return edit.call(addmm, bias, source, weight, before=before)
        turned = edit.call(aten.t.default if aten else torch.t, weight, before=before)
        linear = aten.linear.default if aten else F.linear
        return edit.call(linear, source, turned, bias, before=before)


def layer_of(node: fx.Node, weights: Weights) -> Layer | str:
    """Read a node as a convolution or a linear layer.

    Args:
        node: Any node.
        weights: The constants of its graph.

    Returns:
        The layer, or why it is none.
    """
    call = resolve(node)
    if call is None:
        return f"%{node.name} is no convolution or linear layer"
    if call.name == "aten.convolution" or call.name in _CONVOLUTIONS:
        return _convolution(node, call, weights)
    if call.name in _LINEAR:
        return _linear(node, call, weights)
    return f"%{node.name} is no convolution or linear layer"


def _convolution(node: fx.Node, call: Call, weights: Weights) -> Layer | str:
    arguments = call.arguments
    source, weight = arguments["input"], weights.value(arguments["weight"])
    bias = weights.value(arguments.get("bias"))
    if not isinstance(source, fx.Node) or weight is None:
        return f"the weight of %{node.name} is no constant"
    if arguments.get("bias") is not None and bias is None:
        return f"the bias of %{node.name} is no constant"
    axes = _CONVOLUTIONS.get(call.name, weight.dim() - 2)
    groups = arguments["groups"]
    if not isinstance(groups, int) or weight.dim() != axes + 2 or weight.shape[0] % groups:
        return f"%{node.name} has a weight of another form than its kind of convolution"
    return Layer(
        node, call, source, weight, bias, arguments["weight"], arguments.get("bias"), axes,
        is_transposed="transpose" in call.name or arguments.get("transposed") is True,
        groups=groups,
    )  # fmt: skip


def _linear(node: fx.Node, call: Call, weights: Weights) -> Layer | str:
    arguments = call.arguments
    source_name, weight_name, bias_name = _LINEAR[call.name]
    source, weight = arguments[source_name], weights.value(arguments[weight_name])
    bias_operand = arguments.get(bias_name) if bias_name else None
    bias = weights.value(bias_operand)
    if not isinstance(source, fx.Node) or weight is None or weight.dim() != 2:
        return f"the weight of %{node.name} is no constant matrix"
    if bias_operand is not None and bias is None:
        return f"the bias of %{node.name} is no constant"
    is_flipped = call.name != "aten.linear"
    out = weight.shape[1 if is_flipped else 0]
    if bias is not None and bias.shape != (out,):
        return f"the bias of %{node.name} is no vector of {out}"
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")) or "out_dtype" in arguments:
        return f"%{node.name} scales its operands"
    if call.name == "aten.matmul" and not _is_matrix_or_more(source):
        return f"the rank of %{source.name} is not known to be two or more"
    return Layer(
        node, call, source, weight, bias, arguments[weight_name], bias_operand, 0,
        is_flipped=is_flipped,
    )  # fmt: skip


def _is_matrix_or_more(node: fx.Node) -> bool:
    known = type_of(node)
    return isinstance(known, TensorType) and len(known.shape) >= 2


def _has_padding(padding: Any, kernel: Any) -> bool:
    if padding == "same":
        return any(size != 1 for size in kernel)
    return padding != "valid" and not _all(padding, 0)


def _all(values: Any, wanted: int) -> bool:
    listed = values if isinstance(values, (list, tuple)) else [values]
    return all(value == wanted for value in listed)


def _in_schema_order(
    call: Call, arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by position, without those at the end that have their default value."""
    positional, by_name = [], {}
    for argument in call.operator.schema.arguments:
        value = arguments[argument.name]
        is_default = argument.has_default_value() and value == argument.default_value
        if argument.kwarg_only:
            if not is_default:
                by_name[argument.name] = value
            continue
        positional.append((value, is_default))
    while positional and positional[-1][1]:
        positional.pop()
    return tuple(value for value, _ in positional), by_name


_HOMES: tuple[Any, ...] = (torch, F)


def _function_of(name: str) -> Callable[..., Any]:
    """Return torch's function with the parameters of an operator of ATen."""
    packet = name.removeprefix("aten.")
    return next(getattr(home, packet) for home in _HOMES if hasattr(home, packet))
