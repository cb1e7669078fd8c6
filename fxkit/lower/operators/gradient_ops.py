"""Gradients of activation functions: more rows of the table of pointwise operators."""

from __future__ import annotations

import math

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.activation_ops import probability_bounds
from fxkit.lower.operators.scalar_table import call, const_like, rounded_number, row, select


@row("aten.threshold_backward")
def _threshold(grad_output: Ref, self: Ref, *, threshold: Number) -> Ref:
    return select(self <= threshold, const_like(self, 0), grad_output)


@row("aten.sigmoid_backward", tolerance=2)
def _sigmoid(grad_output: Ref, output: Ref) -> Ref:
    return grad_output * (1.0 - output) * output


@row("aten.tanh_backward", tolerance=2)
def _tanh(grad_output: Ref, output: Ref) -> Ref:
    return grad_output * (1.0 - output * output)


@row("aten.gelu_backward", tolerance=6)
def _gelu(grad_output: Ref, self: Ref, *, approximate: str) -> Ref:
    if approximate == "tanh":
        return _gelu_by_tanh(grad_output, self)
    density = call("exp", self * self * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad_output * (call("normal_cdf", self) + self * density)


def _gelu_by_tanh(grad_output: Ref, self: Ref) -> Ref:
    """Write (1 + tanh(u)) / 2 as a sigmoid, whose slope does not cancel as 1 - tanh(u)^2 does."""
    if self.dtype == torch.float64:
        raise Unfusable("in float64 its error is a cancellation's, and eager's is another one")
    scale, kappa = math.sqrt(2 / math.pi), 0.044715
    square = self * self
    twice = (2 * scale) * (self + kappa * (square * self))
    share = call("sigmoid", twice)
    slope = (2 * scale) * (1.0 + (3 * kappa) * square)
    return grad_output * (share + self * (share * call("sigmoid", -twice) * slope))


@row("aten.silu_backward", tolerance=5)
def _silu(grad_output: Ref, self: Ref) -> Ref:
    share = call("sigmoid", self)
    return grad_output * share * (1.0 + self * (1.0 - share))


@row("aten.hardtanh_backward")
def _hardtanh(grad_output: Ref, self: Ref, *, min_val: Number, max_val: Number) -> Ref:
    is_steep = (self > min_val) & (self < max_val)
    return select(is_steep, grad_output, const_like(self, 0))


@row("aten.leaky_relu_backward")
def _leaky_relu(grad_output: Ref, self: Ref, *, negative_slope: Number) -> Ref:
    return select(self > 0, grad_output, grad_output * negative_slope)


@row("aten.elu_backward", tolerance=6)
def _elu(
    grad_output: Ref,
    self_or_result: Ref,
    *,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
) -> Ref:
    negative, steepness = grad_output * input_scale, alpha * scale
    if is_result:
        negative = negative * (self_or_result + steepness)
    else:
        negative = negative * steepness * call("exp", self_or_result * input_scale)
    return select(self_or_result > 0, grad_output * scale, negative)


# One sixth as float32 has it: eager multiplies float64 with it, too.
_SIXTH = 0.1666666716337204


@row("aten.hardsigmoid_backward", tolerance=1)
def _hardsigmoid(grad_output: Ref, self: Ref) -> Ref:
    is_steep = (self > -3.0) & (self < 3.0)
    return select(is_steep, grad_output * _SIXTH, const_like(self, 0))


@row("aten.hardswish_backward", tolerance=2)
def _hardswish(grad_output: Ref, self: Ref) -> Ref:
    middle = grad_output * (self / 3.0 + 0.5)
    above = select(self >= 3.0, grad_output, middle)
    return select(self <= -3.0, const_like(self, 0), above)


@row("aten.softplus_backward", tolerance=5)
def _softplus(grad_output: Ref, self: Ref, *, beta: Number, threshold: Number) -> Ref:
    scaled = self * beta
    z = call("exp", scaled)
    return select(scaled > threshold, grad_output, grad_output * z / (z + 1.0))


@row("aten.softshrink_backward")
def _softshrink(grad_output: Ref, self: Ref, *, lambd: Number, result_dtype: torch.dtype) -> Ref:
    low, high = (rounded_number(self, bound, result_dtype) for bound in (-lambd, lambd))
    return select((self < low) | (self > high), grad_output, const_like(self, 0))


@row("aten.hardshrink_backward")
def _hardshrink(grad_out: Ref, self: Ref, *, lambd: Number, result_dtype: torch.dtype) -> Ref:
    return _softshrink(grad_out, self, lambd=lambd, result_dtype=result_dtype)


@row("aten.mish_backward", tolerance=8)
def _mish(grad_output: Ref, self: Ref) -> Ref:
    t = call("tanh", call("log1p", call("exp", self)))
    return grad_output * (t + self * call("sigmoid", self) * (1.0 - t * t))


@row("aten.native_dropout_backward", tolerance=1)
def _dropout(grad_output: Ref, mask: Ref, *, scale: float) -> Ref:
    return grad_output * (mask.cast(grad_output.dtype) * scale)


@row("aten.logit_backward", tolerance=3)
def _logit(grad_output: Ref, self: Ref, *, eps: float | None, result_dtype: torch.dtype) -> Ref:
    slope = grad_output / (self * (1.0 - self))
    has_bounds = eps is not None and not eps < 0
    low, high = probability_bounds(self, eps if eps is not None and has_bounds else 0, result_dtype)
    outside = const_like(self, 0 if has_bounds else math.nan)
    return select((self >= low) & (self <= high), slope, outside)


@row("aten.mse_loss_backward", tolerance=2)
def _mse_loss(grad_output: Ref, self: Ref, target: Ref, *, reduction: int) -> Ref:
    if reduction:
        raise Unfusable("the gradient of a loss that reduces to a single number is eager's")
    return 2.0 * (self - target) * grad_output
