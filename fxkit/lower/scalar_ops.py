"""Pointwise operators: operator identity → scalar expression. One function is one row of the table.

A row's positional parameters are operands, tensors or numbers, already converted to the dtype in
which the operator computes; its keyword-only parameters are plain attributes. Both have the names
of ATen's schema. The row says what eager computes for one element, in loop IR; the printers, the
fuser, the tests and the docs read nothing else. bf16 and f16 are computed in float32 and rounded
once, at the end of the operator, as eager does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fxkit.lower.loop_ir import Number, Operand, Ref, Unfusable


class Computes(Enum):
    """In which dtype an operator computes."""

    RESULT = "the dtype of its result"
    COMMON = "the dtype that its operands promote to"
    BOOL = "bool: each operand is compared with zero"
    OWN = "the dtype of each operand"


@dataclass(frozen=True)
class ScalarOp:
    """A row of the table.

    Attributes:
        name: Operator identity.
        build: Makes the scalar expression.
        computes: In which dtype.
        tolerance: Largest difference from eager in units of the result dtype's epsilon, relative
            to max(1, |result|). 0: equal bits.
        heavy: Whether a kernel for it alone is faster than eager's.
        exact_numbers: Whether Python numbers stay unrounded when the tensors are bf16 or f16.
        operands: Names of its operands.
        attributes: Names of its attributes.
    """

    name: str
    build: Callable[..., Ref]
    computes: Computes
    tolerance: float
    heavy: bool
    exact_numbers: bool
    operands: tuple[str, ...]
    attributes: tuple[str, ...]


TABLE: dict[str, ScalarOp] = {}


def _row(
    *names: str,
    computes: Computes = Computes.RESULT,
    tolerance: float = 0,
    heavy: bool = False,
    exact_numbers: bool = False,
) -> Callable[[Callable[..., Ref]], Callable[..., Ref]]:
    def add_row(build: Callable[..., Ref]) -> Callable[..., Ref]:
        parameters = inspect.signature(build).parameters.values()
        attributes = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        operands = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        for name in names:
            TABLE[name] = ScalarOp(
                name, build, computes, tolerance, heavy, exact_numbers, operands, attributes
            )
        return build

    return add_row


def _number(x: Ref) -> Number | None:
    """Return the number that `x` is, if it is a constant."""
    instruction = x.builder.body[x.position]
    return instruction.detail.value if instruction.op == "const" else None


def _floats_only(x: Ref, what: str) -> None:
    if not x.is_float:
        raise Unfusable(f"{what} of integers is left to eager, which raises where it has no result")


def _call(function: str, *operands: Operand) -> Ref:
    first = next(operand for operand in operands if isinstance(operand, Ref))
    return first.builder.scalar(function, *operands)


def select(condition: Ref, then: Operand, otherwise: Operand) -> Ref:
    """Return `then` where the condition holds, else `otherwise`."""
    model = then if isinstance(then, Ref) else otherwise
    if not isinstance(model, Ref):
        raise TypeError("expected a value on at least one side of a select, got two numbers")
    a = then if isinstance(then, Ref) else model.builder.const(then, model.dtype)
    b = otherwise if isinstance(otherwise, Ref) else model.builder.const(otherwise, model.dtype)
    return model.builder.scalar("select", condition, a, b, dtype=model.dtype)


def _const_like(x: Ref, value: Number) -> Ref:
    return x.builder.const(value, x.dtype)


def _multiply_add(a: Ref, b: Operand, c: Ref) -> Ref:
    """Return a * b + c, rounded once where eager's vector code does."""
    return _call("fma", a, b, c) if a.is_float else a * b + c


# --- arithmetic


@_row("aten.add", exact_numbers=True, tolerance=1)
def _add(self: Ref, other: Ref, *, alpha: Number) -> Ref:
    if self.dtype == torch.bool:
        return self | other if alpha else self
    return self + other if alpha == 1 else _multiply_add(other, alpha, self)


@_row("aten.sub", exact_numbers=True, tolerance=1)
def _sub(self: Ref, other: Ref, *, alpha: Number) -> Ref:
    return self - other if alpha == 1 else _multiply_add(other, -alpha, self)


@_row("aten.rsub", exact_numbers=True, tolerance=1)
def _rsub(self: Ref, other: Ref, *, alpha: Number) -> Ref:
    return _sub(other, self, alpha=alpha)


@_row("aten.mul", exact_numbers=True)
def _mul(self: Ref, other: Ref) -> Ref:
    return self & other if self.dtype == torch.bool else self * other


@_row("aten.div", exact_numbers=True, tolerance=1)
def _div(self: Ref, other: Ref, *, rounding_mode: str | None = None) -> Ref:
    if rounding_mode is None:
        return self / other
    _floats_only(self, "division with rounding")
    if rounding_mode == "trunc":
        return _call("trunc", self / other)
    return _floor_divide(self, other)


@_row("aten.floor_divide", tolerance=1)
def _floor_divide(self: Ref, other: Ref) -> Ref:
    _floats_only(self, "floor division")
    rest = _call("fmod", self, other)
    ratio = (self - rest) / other
    is_below = rest.differs(0) & ((other < 0) ^ (rest < 0))
    ratio = select(is_below, ratio - 1, ratio)
    floor = _call("floor", ratio)
    floor = select(ratio - floor > 0.5, floor + 1, floor)
    zero = _call("copysign", _const_like(self, 0.0), self / other)
    floor = select(ratio.differs(0), floor, zero)
    return select(other.equals(0), self / other, floor)


@_row("aten.fmod")
def _fmod(self: Ref, other: Ref) -> Ref:
    _floats_only(self, "fmod")
    return _call("fmod", self, other)


@_row("aten.remainder")
def _remainder(self: Ref, other: Ref) -> Ref:
    _floats_only(self, "remainder")
    rest = _call("fmod", self, other)
    return select(rest.differs(0) & ((other < 0) ^ (rest < 0)), rest + other, rest)


@_row("aten.neg")
def _neg(self: Ref) -> Ref:
    return -self


@_row("aten.positive", "aten.to", "aten._to_copy", "aten.clone")
def _same(self: Ref) -> Ref:
    return self


@_row("aten.type_as")
def _type_as(self: Ref, other: Ref) -> Ref:
    return self


@_row("aten.abs")
def _abs(self: Ref) -> Ref:
    return self if self.dtype in (torch.bool, torch.uint8) else _call("abs", self)


@_row("aten.sign", "aten.sgn")
def _sign(self: Ref) -> Ref:
    if self.dtype == torch.bool:
        return self
    return (self > 0).cast(self.dtype) - (self < 0).cast(self.dtype)


@_row("aten.square")
def _square(self: Ref) -> Ref:
    return self * self


@_row("aten.reciprocal", tolerance=1)
def _reciprocal(self: Ref) -> Ref:
    return 1.0 / self


@_row("aten.pow", tolerance=4, heavy=True)
def _pow(self: Ref, exponent: Ref) -> Ref:
    power = _number(exponent)
    if not self.is_float:
        return _integer_power(self, power)
    if power in _POWERS:
        return _POWERS[power](self)
    return _call("pow", self, exponent)


_POWERS: dict[Any, Callable[[Ref], Ref]] = {
    0: lambda x: _const_like(x, 1.0),
    0.5: lambda x: _call("sqrt", x),
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    -0.5: lambda x: 1.0 / _call("sqrt", x),
    -1: lambda x: 1.0 / x,
    -2: lambda x: 1.0 / (x * x),
}


def _integer_power(base: Ref, power: Number | None) -> Ref:
    if power is None or not 0 <= power <= 8 or base.dtype == torch.bool:
        raise Unfusable("an integer power is fused for a constant exponent from 0 to 8")
    result = _const_like(base, 1)
    for _ in range(int(power)):
        result = result * base
    return result


@_row("aten.addcmul", tolerance=2)
def _addcmul(self: Ref, tensor1: Ref, tensor2: Ref, *, value: Number) -> Ref:
    scaled = tensor1 if value == 1 else tensor1 * value
    return _multiply_add(scaled, tensor2, self)


@_row("aten.addcdiv", tolerance=2)
def _addcdiv(self: Ref, tensor1: Ref, tensor2: Ref, *, value: Number) -> Ref:
    return self + (tensor1 / tensor2 if value == 1 else tensor1 * value / tensor2)


@_row("aten.lerp", tolerance=2, exact_numbers=True)
def _lerp(self: Ref, end: Ref, weight: Ref) -> Ref:
    step = end - self
    is_near_start = _call("abs", weight) < 0.5
    factor = select(is_near_start, weight, weight - 1.0)
    return _multiply_add(factor, step, select(is_near_start, self, end))


@_row("aten.maximum")
def _maximum(self: Ref, other: Ref) -> Ref:
    return self | other if self.dtype == torch.bool else _call("max", self, other)


@_row("aten.minimum")
def _minimum(self: Ref, other: Ref) -> Ref:
    return self & other if self.dtype == torch.bool else _call("min", self, other)


@_row("aten.fmax")
def _fmax(self: Ref, other: Ref) -> Ref:
    return select((self >= other) | other.differs(other), self, other)


@_row("aten.fmin")
def _fmin(self: Ref, other: Ref) -> Ref:
    return select((self <= other) | other.differs(other), self, other)


@_row("aten.clamp")
def _clamp(self: Ref, min: Ref | None, max: Ref | None) -> Ref:
    raised = self if min is None else _call("max", self, min)
    return raised if max is None else _call("min", raised, max)


@_row("aten.clamp_min")
def _clamp_min(self: Ref, min: Ref) -> Ref:
    return _call("max", self, min)


@_row("aten.clamp_max")
def _clamp_max(self: Ref, max: Ref) -> Ref:
    return _call("min", self, max)


@_row("aten.copysign")
def _copysign(self: Ref, other: Ref) -> Ref:
    return _call("copysign", self, other)


@_row("aten.where")
def _where(condition: Ref, self: Ref, other: Ref) -> Ref:
    return select(condition.cast(torch.bool), self, other)


@_row("aten.masked_fill")
def _masked_fill(self: Ref, mask: Ref, value: Ref) -> Ref:
    return select(mask.cast(torch.bool), value, self)


# --- rounding


def _rounding(function: str) -> Callable[..., Ref]:
    def build(self: Ref) -> Ref:
        return _call(function, self) if self.is_float else self

    return build


for _name, _function in {"floor": "floor", "ceil": "ceil", "trunc": "trunc"}.items():
    _row(f"aten.{_name}")(_rounding(_function))


@_row("aten.round")
def _round(self: Ref, *, decimals: int = 0) -> Ref:
    if decimals:
        raise Unfusable("rounding to decimals is left to eager")
    return _call("rint", self) if self.is_float else self


@_row("aten.frac")
def _frac(self: Ref) -> Ref:
    return self - _call("trunc", self)


# --- comparisons and logic


def _comparison(compare: Callable[[Ref, Ref], Ref]) -> Callable[..., Ref]:
    def build(self: Ref, other: Ref) -> Ref:
        return compare(self, other)

    return build


for _name, _compare in {
    "eq": lambda a, b: a.equals(b),
    "ne": lambda a, b: a.differs(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}.items():
    _row(f"aten.{_name}", computes=Computes.COMMON)(_comparison(_compare))

for _name, _compare in {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}.items():
    _row(f"aten.logical_{_name}", computes=Computes.BOOL)(_comparison(_compare))
    _row(f"aten.bitwise_{_name}")(_comparison(_compare))


@_row("aten.logical_not", computes=Computes.BOOL)
@_row("aten.bitwise_not")
def _not(self: Ref) -> Ref:
    return ~self


@_row("aten.isnan", computes=Computes.OWN)
def _isnan(self: Ref) -> Ref:
    return self.differs(self)


@_row("aten.isinf", computes=Computes.OWN)
def _isinf(self: Ref) -> Ref:
    if not self.is_float:
        return self.differs(self)
    return _call("abs", self).equals(math.inf)


@_row("aten.isfinite", computes=Computes.OWN)
def _isfinite(self: Ref) -> Ref:
    if not self.is_float:
        return self.equals(self)
    return _call("abs", self) < math.inf


@_row("aten.nan_to_num")
def _nan_to_num(self: Ref, *, nan: float | None, posinf: float | None, neginf: float | None) -> Ref:
    if not self.is_float:
        return self
    if posinf is None or neginf is None:
        raise Unfusable("nan_to_num is fused when posinf and neginf are given")
    result = select(self.differs(self), _const_like(self, nan or 0.0), self)
    result = select(self.equals(math.inf), _const_like(self, posinf), result)
    return select(self.equals(-math.inf), _const_like(self, neginf), result)


# --- elementary functions


def _elementary(function: str) -> Callable[..., Ref]:
    def build(self: Ref) -> Ref:
        return _call(function, self)

    return build


_row("aten.sqrt", tolerance=1)(_elementary("sqrt"))
for _name in ("exp", "log", "tanh", "erf", "sigmoid"):
    _row(f"aten.{_name}", tolerance=3, heavy=True)(_elementary(_name))
for _name in (
    "expm1 log1p log2 log10 exp2 sin cos tan asin acos atan sinh cosh asinh acosh atanh erfc"
).split():
    _row(f"aten.{_name}", tolerance=5, heavy=True)(_elementary(_name))


@_row("aten.rsqrt", tolerance=1)
def _rsqrt(self: Ref) -> Ref:
    return 1.0 / _call("sqrt", self)


@_row("aten.atan2", tolerance=5, heavy=True)
def _atan2(self: Ref, other: Ref) -> Ref:
    return _call("atan2", self, other)


# --- activations


@_row("aten.relu")
def _relu(self: Ref) -> Ref:
    return _call("max", self, 0)


@_row("aten.relu6")
def _relu6(self: Ref) -> Ref:
    return _call("min", _call("max", self, 0), 6)


@_row("aten.hardtanh")
def _hardtanh(self: Ref, *, min_val: Number, max_val: Number) -> Ref:
    return _call("min", _call("max", self, min_val), max_val)


@_row("aten.leaky_relu")
def _leaky_relu(self: Ref, *, negative_slope: Number) -> Ref:
    return select(self > 0, self, self * negative_slope)


@_row("aten.threshold")
def _threshold(self: Ref, *, threshold: Number, value: Number) -> Ref:
    return select(self <= threshold, _const_like(self, value), self)


@_row("aten.hardshrink")
def _hardshrink(self: Ref, *, lambd: Number) -> Ref:
    inside = (self >= -lambd) & (self <= lambd)
    return select(inside, _const_like(self, 0), self)


@_row("aten.softshrink")
def _softshrink(self: Ref, *, lambd: Number) -> Ref:
    shrunk = select(self > lambd, self - lambd, select(self < -lambd, self + lambd, self * 0))
    return select(self.differs(self), self, shrunk)


@_row("aten.elu", tolerance=6, heavy=True)
def _elu(self: Ref, *, alpha: Number, scale: Number, input_scale: Number) -> Ref:
    negative = _call("expm1", self * input_scale) * (alpha * scale)
    return select(self <= 0, negative, self * scale)


@_row("aten.celu", tolerance=6, heavy=True)
def _celu(self: Ref, *, alpha: Number) -> Ref:
    return select(self <= 0, _call("expm1", self * (1.0 / alpha)) * alpha, self)


@_row("aten.selu", tolerance=6, heavy=True)
def _selu(self: Ref) -> Ref:
    return _elu(
        self, alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946,
        input_scale=1,
    )  # fmt: skip


@_row("aten.hardsigmoid", tolerance=1)
def _hardsigmoid(self: Ref) -> Ref:
    return _relu6(self + 3.0) * (1.0 / 6.0)


@_row("aten.hardswish", tolerance=1)
def _hardswish(self: Ref) -> Ref:
    return self * _relu6(self + 3.0) * (1.0 / 6.0)


@_row("aten.silu", tolerance=4, heavy=True)
def _silu(self: Ref) -> Ref:
    return self / (1.0 + _call("exp", -self))


@_row("aten.gelu", tolerance=4, heavy=True)
def _gelu(self: Ref, *, approximate: str) -> Ref:
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (self + 0.044715 * (self * self * self))
        return 0.5 * self * (1.0 + _call("tanh", inner))
    return self * _call("normal_cdf", self)


@_row("aten.softplus", tolerance=5, heavy=True)
def _softplus(self: Ref, *, beta: Number, threshold: Number) -> Ref:
    scaled = self * beta
    return select(scaled > threshold, self, _call("log1p", _call("exp", scaled)) / beta)


@_row("aten.log_sigmoid", tolerance=5, heavy=True)
def _log_sigmoid(self: Ref) -> Ref:
    return _call("min", self, 0.0) - _call("log1p", _call("exp", -_call("abs", self)))


@_row("aten.mish", tolerance=6, heavy=True)
def _mish(self: Ref) -> Ref:
    return self * _call("tanh", _call("log1p", _call("exp", self)))


@_row("aten.logaddexp", tolerance=6, heavy=True)
def _logaddexp(self: Ref, other: Ref) -> Ref:
    largest = _call("max", self, other)
    sum_ = largest + _call("log1p", _call("exp", -_call("abs", self - other)))
    return select(_call("abs", self).equals(math.inf) & self.equals(other), self, sum_)


@_row("aten.xlogy", tolerance=5, heavy=True)
def _xlogy(self: Ref, other: Ref) -> Ref:
    product = select(self.equals(0), _const_like(self, 0), self * _call("log", other))
    return select(other.differs(other), other, product)


@_row("aten.logit", tolerance=6, heavy=True)
def _logit(self: Ref, *, eps: float | None) -> Ref:
    x = self if eps is None else _call("min", _call("max", self, eps), 1.0 - eps)
    return _call("log", x / (1.0 - x))
