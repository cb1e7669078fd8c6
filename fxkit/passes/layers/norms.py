"""Batch norms outside of training: a scale and a shift of each channel, and where they can go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.layers.refused import Refused
from fxkit.passes.layers.weights import Weights


@dataclass(frozen=True)
class Affine:
    """`x * scale + shift`, one number for each channel: each place along axis 1.

    Attributes:
        scale: float64[channels]
        shift: float64[channels]
    """

    scale: torch.Tensor
    shift: torch.Tensor

    @property
    def has_shift(self) -> bool:
        """Whether any channel is shifted."""
        return bool((self.shift != 0).any())

    def part(self, start: int, size: int) -> Affine:
        """Return what it does to some of the channels."""
        return Affine(self.scale.narrow(0, start, size), self.shift.narrow(0, start, size))

    def repeated(self, times: int) -> Affine:
        """Return what it does when each channel becomes so many."""
        return Affine(self.scale.repeat_interleave(times), self.shift.repeat_interleave(times))

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for equal numbers."""
        return self.scale.cpu().numpy().tobytes(), self.shift.cpu().numpy().tobytes()


@dataclass(frozen=True)
class Norm:
    """A batch norm with constant statistics.

    Attributes:
        node: The call.
        result: The node of the normalised tensor: the call itself, or what is taken out of it.
        input: What is normalised.
        affine: What it does to each channel.
        rank: Rank of what is normalised; None when that is not known.
        operands: Its statistics, weight and bias, as the call takes them.
    """

    node: fx.Node
    result: fx.Node
    input: fx.Node
    affine: Affine
    rank: int | None
    operands: tuple[Any, ...]


# Each with the name of the argument for "takes the statistics of its operand".
NORMS = {
    "aten.batch_norm": "training",
    "aten.native_batch_norm": "training",
    "aten.cudnn_batch_norm": "training",
    "aten._native_batch_norm_legit_no_training": "",
    "aten.instance_norm": "use_input_stats",
}
_WITH_STATISTICS = frozenset(NORMS) - {"aten.batch_norm", "aten.instance_norm"}


def read_norm(node: fx.Node, call: Call, weights: Weights) -> Norm:
    """Read a call of one of `NORMS`.

    Raises:
        Refused: When its scale and shift are not the same at every call.
    """
    arguments, flag = call.arguments, NORMS[call.name]
    if flag and arguments[flag] is not False:
        raise Refused("it takes the statistics of its operand, as in training")
    operands = tuple(
        arguments.get(name) for name in ("running_mean", "running_var", "weight", "bias")
    )
    mean, variance, weight, bias = (weights.value(operand) for operand in operands)
    source = arguments["input"]
    if mean is None or variance is None or not isinstance(source, fx.Node):
        raise Refused("its statistics are no constants")
    if (operands[2] is not None and weight is None) or (operands[3] is not None and bias is None):
        raise Refused("its weight or bias is no constant")
    epsilon = arguments.get("eps", arguments.get("epsilon"))
    if not isinstance(epsilon, (int, float)) or not mean.dtype.is_floating_point:
        raise Refused("its eps is no number, or its statistics are not real")
    scale = (variance.double() + epsilon).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    if not scale.numel() or not bool((scale.isfinite() & shift.isfinite()).all()):
        raise Refused("its scale or shift is not finite, or it has no channels")
    affine = Affine(scale, shift)
    return Norm(node, _result_of(node, call), source, affine, _rank(node, source), operands)


def _rank(node: fx.Node, source: fx.Node) -> int | None:
    known = type_of(source)
    if isinstance(known, TensorType):
        return len(known.shape)
    if node.op != "call_module":
        return None
    root = node.graph.owning_module
    assert root is not None
    kind = type(root.get_submodule(str(node.target))).__name__
    return {"BatchNorm2d": 4, "BatchNorm3d": 5}.get(kind)


def _result_of(node: fx.Node, call: Call) -> fx.Node:
    if call.name not in _WITH_STATISTICS:
        return node
    users = list(node.users)
    taken = resolve(users[0]) if len(users) == 1 else None
    if taken is None or taken.name != "python.getitem" or taken.arguments["1"] != 0:
        raise Refused("more than its first result is used")
    return users[0]


# Operators that give channel by channel what they take, or averages or a choice of it.
_COPIES = "aten.alias aten.clone aten.contiguous python.identity"
_SAME = frozenset(f"aten.dropout aten.feature_dropout {_COPIES}".split())
_AVERAGES = frozenset(
    [f"aten.adaptive_avg_pool{axes}d" for axes in (1, 2, 3)]
    + [f"aten._adaptive_avg_pool{axes}d" for axes in (2, 3)]
)
_PADDED_AVERAGES = frozenset(f"aten.avg_pool{axes}d" for axes in (1, 2, 3))
_LARGEST_AND_WHERE = frozenset(f"aten.max_pool{axes}d_with_indices" for axes in (1, 2, 3))
_LARGEST = _LARGEST_AND_WHERE | frozenset(f"aten.max_pool{axes}d" for axes in (1, 2, 3))

# Functions with f(x * scale) == f(x) * scale for every positive scale.
_HOMOGENEOUS = frozenset("aten.relu aten.relu_ aten.leaky_relu aten.leaky_relu_".split())
_RESHAPES = frozenset("aten.view aten.reshape aten.flatten".split())


def before(value: fx.Node, call: Call, affine: Affine) -> fx.Node | None:
    """Return the operand of an operator whose result is normalised, if it can be instead.

    Args:
        value: What is normalised.
        call: The operator that computes it.
        affine: The norm.

    Returns:
        The operand; None when the operator does not let the norm through.
    """
    operand = only_operand(value, call)
    return operand if operand is not None and _lets_through(call, affine) else None


def turned(call: Call, axis: int, rank: int) -> int | None:
    """Return where the operand of a transpose or permutation has an axis of its result.

    Args:
        call: An operator.
        axis: An axis of its result.
        rank: Rank of both.

    Returns:
        The axis; None when the operator is another one, or its axes are not known.
    """
    arguments = call.arguments
    order = list(range(rank))
    if call.name == "aten.permute":
        dims = arguments["dims"]
    elif call.name == "aten.t":
        dims = reversed(order)
    elif call.name == "aten.transpose":
        first, second = arguments["dim0"], arguments["dim1"]
        if not (isinstance(first, int) and isinstance(second, int)):
            return None
        order[first], order[second] = order[second], order[first]
        dims = order
    else:
        return None
    listed = list(dims)
    is_known = len(listed) == rank and all(isinstance(dim, int) for dim in listed)
    return listed[axis] % rank if is_known else None


def behind(user: fx.Node, call: Call, affine: Affine) -> Affine | None:
    """Move a norm from the operand of an operator to its result.

    Args:
        user: The operator's node.
        call: Its operator and arguments.
        affine: The norm of its operand.

    Returns:
        The norm of the result; None when the operator does not let it through.
    """
    operand = only_operand(user, call)
    if operand is None:
        return None
    is_pure_scale = not affine.has_shift and bool((affine.scale > 0).all())
    if _lets_through(call, affine) or (is_pure_scale and call.name in _HOMOGENEOUS):
        return affine
    if call.name not in _RESHAPES:
        return None
    held, made = type_of(operand), type_of(user)
    if not isinstance(held, TensorType) or not isinstance(made, TensorType):
        return None
    if len(held.shape) < 2 or len(made.shape) != 2 or held.shape[0] != made.shape[0]:
        return None
    if held.shape[1] == 0 or made.shape[1] % held.shape[1]:
        return None
    return affine.repeated(made.shape[1] // held.shape[1])


def only_operand(node: fx.Node, call: Call) -> fx.Node | None:
    """Return what an operator takes, if that is one tensor; None for dropout in training."""
    arguments = call.arguments
    operand = arguments.get("self", arguments.get("input", arguments.get("0")))
    is_alone = isinstance(operand, fx.Node) and node.all_input_nodes == [operand]
    return operand if is_alone and arguments.get("train", False) is False else None


def _lets_through(call: Call, affine: Affine) -> bool:
    """Tell whether an operator may change places with a norm."""
    if call.name in _SAME or call.name in _AVERAGES or _is_mean_of_channels(call):
        return True
    if call.name in _PADDED_AVERAGES:
        return not affine.has_shift or _averages_alone(call.arguments)
    if call.name == "python.getitem":
        taken_from = resolve(call.arguments["0"])
        is_largest = taken_from is not None and taken_from.name in _LARGEST_AND_WHERE
        return is_largest and call.arguments.get("1") == 0
    return call.name in _LARGEST and not bool((affine.scale < 0).any())


def _averages_alone(arguments: Any) -> bool:
    """Tell whether an average pooling gives averages of what lies inside of its operand."""
    padding = arguments.get("padding", 0)
    listed = padding if isinstance(padding, (list, tuple)) else [padding]
    is_padded = any(size != 0 for size in listed) and arguments.get("count_include_pad") is True
    return not is_padded and arguments.get("divisor_override") is None


def _is_mean_of_channels(call: Call) -> bool:
    """Tell whether a call averages over axes that come after batch and channels."""
    dims = call.arguments.get("dim") if call.name == "aten.mean" else None
    dims = [dims] if isinstance(dims, int) else dims
    operand = call.arguments.get("self")
    known = type_of(operand) if isinstance(operand, fx.Node) else None
    if not isinstance(known, TensorType) or not dims or call.arguments.get("dtype") is not None:
        return False
    return all(isinstance(dim, int) and dim % len(known.shape) >= 2 for dim in dims)
