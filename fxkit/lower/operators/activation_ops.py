"""Activation functions: more rows of the table of pointwise operators, see `scalar_ops`."""

from __future__ import annotations

import math

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.scalar_table import (
    call,
    const_like,
    needs_full_width,
    rounded_number,
    row,
    select,
)


@row("aten.relu")
def _relu(self: Ref) -> Ref:
    return call("max", self, 0)


@row("aten.relu6")
def _relu6(self: Ref) -> Ref:
    return call("min", call("max", self, 0), 6)


@row("aten.hardtanh")
def _hardtanh(self: Ref, *, min_val: Number, max_val: Number) -> Ref:
    return call("min", call("max", self, min_val), max_val)


@row("aten.leaky_relu")
def _leaky_relu(self: Ref, *, negative_slope: Number) -> Ref:
    return select(self > 0, self, self * negative_slope)


@row("aten.rrelu", tolerance=1)
def _rrelu(self: Ref, *, lower: Number, upper: Number, training: bool) -> Ref:
    if training:
        raise Unfusable("in training its slopes are random numbers, which eager draws")
    return _leaky_relu(self, negative_slope=(lower + upper) / 2)


@row("aten._prelu_kernel")
def _prelu(self: Ref, weight: Ref) -> Ref:
    return select(self > 0, self, weight * self)


@row("aten.threshold")
def _threshold(self: Ref, *, threshold: Number, value: Number) -> Ref:
    return select(self <= threshold, const_like(self, value), self)


@row("aten.hardshrink")
def _hardshrink(self: Ref, *, lambd: Number, result_dtype: torch.dtype) -> Ref:
    low, high = (rounded_number(self, bound, result_dtype) for bound in (-lambd, lambd))
    return select((self >= low) & (self <= high), const_like(self, 0), self)


# Since torch 2.14 eager rounds the bound of softshrink to the dtype of the tensor first.
_ROUNDS_SHRINKAGE = torch.__version__ >= "2.14"


@row("aten.softshrink")
def _softshrink(self: Ref, *, lambd: Number, result_dtype: torch.dtype) -> Ref:
    bound: Ref | Number = lambd
    if _ROUNDS_SHRINKAGE:
        bound = rounded_number(self, lambd, result_dtype)
    shrunk = select(self > bound, self - bound, select(self < -bound, self + bound, self * 0))
    return select(self.differs(self), self, shrunk)


@row("aten.elu", tolerance=6)
def _elu(self: Ref, *, alpha: Number, scale: Number, input_scale: Number) -> Ref:
    negative = call("expm1", self * input_scale) * (alpha * scale)
    return select(self < 0, negative, self * scale)


@row("aten.celu", tolerance=6)
def _celu(self: Ref, *, alpha: Number) -> Ref:
    return select(self < 0, call("expm1", self * (1.0 / alpha)) * alpha, self)


@row("aten.selu", tolerance=6)
def _selu(self: Ref) -> Ref:
    return _elu(
        self, alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946,
        input_scale=1,
    )  # fmt: skip


@row("aten.hardsigmoid", tolerance=1)
def _hardsigmoid(self: Ref) -> Ref:
    return _relu6(self + 3.0) / 6.0


@row("aten.hardswish", tolerance=1)
def _hardswish(self: Ref) -> Ref:
    return self * _relu6(self + 3.0) / 6.0


@row("aten.silu", tolerance=4)
def _silu(self: Ref) -> Ref:
    return self / (1.0 + call("exp", -self))


@row("aten.gelu", tolerance=4)
def _gelu(self: Ref, *, approximate: str) -> Ref:
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (self + 0.044715 * (self * self * self))
        return 0.5 * self * (1.0 + call("tanh", inner))
    return self * call("normal_cdf", self)


@row("aten.softplus", tolerance=5)
def _softplus(self: Ref, *, beta: Number, threshold: Number) -> Ref:
    is_plain = isinstance(beta, (int, float)) and beta == 1
    scaled = self if is_plain else self * beta
    below = call("log1p", call("exp", scaled))
    return select(scaled > threshold, self, below if is_plain else below / beta)


@row("aten.log_sigmoid", tolerance=5)
def _log_sigmoid(self: Ref) -> Ref:
    return call("min", self, 0.0) - call("log1p", call("exp", -call("abs", self)))


@row("aten.mish", tolerance=6)
def _mish(self: Ref) -> Ref:
    return self * call("tanh", call("log1p", call("exp", self)))


@row("aten.logaddexp", tolerance=6)
def _logaddexp(self: Ref, other: Ref) -> Ref:
    largest = call("max", self, other)
    sum_ = largest + call("log1p", call("exp", -call("abs", self - other)))
    return select(call("abs", self).equals(math.inf) & self.equals(other), self, sum_)


@row("aten.xlogy", tolerance=5)
def _xlogy(self: Ref, other: Ref) -> Ref:
    product = select(self.equals(0), const_like(self, 0), self * call("log", other))
    return select(other.differs(other), other, product)


@row("aten.logit", tolerance=6)
def _logit(self: Ref, *, eps: float | None, result_dtype: torch.dtype) -> Ref:
    x = self
    if eps is not None and not eps < 0:
        low, high = probability_bounds(self, eps, result_dtype)
        x = select(self < low, low, select(self > high, high, self))
    return call("log", x / (1.0 - x))


def probability_bounds(x: Ref, eps: float, dtype: torch.dtype) -> tuple[Ref, Ref]:
    """Return the least and the largest probability for `x`; with `eps` above 1/2, they cross."""
    low = rounded_number(x, eps, dtype)
    return low, (1.0 - low).cast(dtype)


@row("torch.nn.functional.softsign", tolerance=1)
def _softsign(self: Ref, *, result_dtype: torch.dtype) -> Ref:
    needs_full_width(self, result_dtype)
    return self / (1.0 + call("abs", self))


@row("torch.nn.functional.tanhshrink", tolerance=3)
def _tanhshrink(self: Ref, *, result_dtype: torch.dtype) -> Ref:
    needs_full_width(self, result_dtype)
    return self - call("tanh", self)
