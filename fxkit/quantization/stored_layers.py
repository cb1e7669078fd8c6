"""Layers with stored weights as products of matrices: what they multiply, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import resolve

_OPERANDS = {
    "aten.linear": ("input", "weight"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.mm": ("self", "mat2"),
    "aten.matmul": ("self", "other"),
    "aten.conv1d": ("input", "weight"),
    "aten.conv2d": ("input", "weight"),
    "aten.conv3d": ("input", "weight"),
}
_FLIPPED = ("aten.addmm", "aten.mm", "aten.matmul")


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer or convolution whose weight is a parameter or buffer.

    Its results are rows(input) @ matrix(weight).mT and a bias, for each group of a convolution.

    Attributes:
        node: Name of its node.
        input: Name of the node that makes its input.
        path: Qualified name of its weight.
        operator: Its operator's name.
        shape: The weight's shape.
        options: Stride, padding, dilation and groups of a convolution.
    """

    node: str
    input: str
    path: str
    operator: str
    shape: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def groups(self) -> int:
        """Groups of a convolution, which multiply matrices of their own."""
        return int(self.options.get("groups", 1))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight, or what has its shape, as [groups, out, in]."""
        if self.operator in _FLIPPED:
            return weight.mT[None]
        return weight.reshape(self.groups, self.shape[0] // self.groups, -1)

    def weight(self, matrix: Tensor) -> Tensor:
        """Return what `matrix` was given, in the shape of the weight."""
        return matrix[0].mT if self.operator in _FLIPPED else matrix.reshape(self.shape)

    def rows(self, values: Tensor) -> Tensor:
        """Return what each result multiplies the matrix by, [groups, n, in].

        Args:
            values: An input, [..., in] or, for a convolution, [N, C, ...] or [C, ...].
        """
        if "conv" not in self.operator:
            return values.reshape(1, -1, values.shape[-1])
        kernel = self.shape[2:]
        axes = len(kernel)
        values = values if values.ndim == axes + 2 else values[None]
        stride, dilation = (_each(self.options[o], axes) for o in ("stride", "dilation"))
        values = F.pad(values, _padding(self.options["padding"], kernel, dilation))
        for axis in range(axes):
            reach = (kernel[axis] - 1) * dilation[axis] + 1
            values = values.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
        batch, channels, places = values.shape[0], values.shape[1], values.shape[2 : 2 + axes]
        parts = values.reshape(batch, self.groups, channels // self.groups, *places, *kernel)
        order = (1, 0, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes))
        return parts.permute(order).reshape(self.groups, batch * math.prod(places), -1)


def stored_path(node: fx.Node) -> str | None:
    """Return the qualified name of the weight that a layer reads; None where it reads none."""
    call = resolve(node)
    if call is None or call.name not in _OPERANDS:
        return None
    weight = call.arguments.get(_OPERANDS[call.name][1])
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    return str(weight.target)


def stored_layers(gm: fx.GraphModule) -> tuple[StoredLayer, ...]:
    """Return the linear layers and convolutions of a graph whose weights are stored, in order."""
    found = []
    for node in gm.graph.nodes:
        call = resolve(node)
        if call is None or call.name not in _OPERANDS:
            continue
        operand, weight = (call.arguments.get(name) for name in _OPERANDS[call.name])
        if not isinstance(operand, fx.Node) or operand.op == "get_attr":
            continue
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            continue
        if any(call.arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
            continue
        value = find_attribute(gm, str(weight.target))
        is_linear = "conv" not in call.name
        if not isinstance(value, Tensor) or (is_linear and value.ndim != 2):
            continue
        names = () if is_linear else ("stride", "padding", "dilation", "groups")
        options = {name: call.arguments[name] for name in names}
        place = (node.name, operand.name, str(weight.target))
        found.append(StoredLayer(*place, call.name, tuple(value.shape), options))
    return tuple(found)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """Return an option of a convolution by axis; one number stands for all."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _padding(value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Return the zeros at both ends of each axis, last axis first, as `F.pad` takes them."""
    ends: list[int] = []
    for axis in reversed(range(len(kernel))):
        if value == "same":
            total = (kernel[axis] - 1) * dilation[axis]
            ends += [total // 2, total - total // 2]
        else:
            ends += [0 if value == "valid" else _each(value, len(kernel))[axis]] * 2
    return ends
