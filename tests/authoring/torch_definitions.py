"""Pointwise operators of torch, each written again as a function of scalars.

The table is keyed by the name that torch's own table of operators (OpInfo) has for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def softplus_(x, beta=1, threshold=20):
    scaled = x * beta
    return x * 1.0 if scaled > threshold else math.log1p(math.exp(scaled)) / beta


def elu(x, alpha=1.0):
    return x if x > 0 else alpha * math.expm1(x)


def hardtanh(x, min_val=-1.0, max_val=1.0):
    return min_val if x < min_val else (max_val if x > max_val else x)


def softshrink(x, lambd=0.5):
    if x > lambd:
        return x - lambd
    return x + lambd if x < -lambd else x * 0.0


def threshold(x, threshold, value):
    return value if x <= threshold else x


def silu(x):
    return x / (1.0 + math.exp(-x))


def logsigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def hardsigmoid(x):
    return min(max(x + 3.0, 0.0), 6.0) / 6.0


def gelu(x):
    return x * 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))


def gelu_tanh(x):
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def mish(x):
    return x * math.tanh(math.log1p(math.exp(x)) if x < 20.0 else x)


def selu(x):
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return scale * x if x > 0 else scale * alpha * math.expm1(x)


def sign(x):
    return 1 if x > 0 else (-1 if x < 0 else (x * 0 if x == x else 0))


def sinc(x):
    return math.sin(math.pi * x) / (math.pi * x) if x != 0 else 1.0


def nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0):
    if x != x:
        return nan
    return posinf if x == math.inf else (neginf if x == -math.inf else x)


def logit(x, eps=-1.0):
    p = x if eps < 0 else (eps if x < eps else (1.0 - eps if x > 1.0 - eps else x))
    return math.log(p / (1.0 - p))


def entr(x):
    if x != x:
        return x
    return -(x * math.log(x)) if x > 0 else (0.0 if x == 0 else -math.inf)


def digamma(x):
    """The logarithmic derivative of gamma: by recurrence, then its asymptotic series."""
    y, below = (1.0 - x if x < 0.5 else x * 1.0), 0.0
    for _ in range(10):
        below = below - 1.0 / y if y < 10.0 else below
        y = y + 1.0 if y < 10.0 else y
    square = 1.0 / (y * y)
    series = 0.0
    for c in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = (series + c) * square
    value = math.log(y) - 0.5 / y - series + below
    if x == 0:
        return math.copysign(math.inf, -1.0 * x)
    if x >= 0.5:
        return value
    distance = x - round(x)
    return math.nan if distance == 0 else value - math.pi / math.tan(math.pi * distance)


def erfinv(x):
    """By Giles' polynomial, then two steps of Newton's method."""
    w = -math.log((1.0 - x) * (1.0 + x))
    near, far = w - 2.5, math.sqrt(w) - 3.0
    a, b = 2.81022636e-08, -0.000200214257
    for c in (3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
              -0.00417768164, 0.246640727, 1.50140941):  # fmt: skip
        a = c + a * near
    for c in (0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
              0.00943887047, 1.00167406, 2.83297682):  # fmt: skip
        b = c + b * far
    y = (a if w < 5.0 else b) * x
    for _ in range(2):
        y = y - (math.erf(y) - x) / (2.0 / math.sqrt(math.pi) * math.exp(-y * y))
    return math.copysign(math.inf, x) if abs(x) == 1 else y


def logaddexp(x, y):
    if abs(x) == math.inf and x == y:
        return x * 1.0
    return max(x, y) + math.log1p(math.exp(-abs(x - y)))


def logaddexp2(x, y):
    if abs(x) == math.inf and x == y:
        return x * 1.0
    return max(x, y) + math.log2(1.0 + 2.0 ** -abs(x - y))


def xlogy(x, y):
    return math.nan if y != y else (0.0 if x == 0 else x * math.log(y))


def xlog1py(x, y):
    return math.nan if y != y else (0.0 if x == 0 else x * math.log1p(y))


def heaviside(x, values):
    return values if x == 0 else (1 if x > 0 else 0)


def lerp(x, end, weight):
    step = end - x
    return x + weight * step if abs(weight) < 0.5 else end - step * (1.0 - weight)


def fmax(x, y):
    return y if x != x else (x if y != y else max(x, y))


def fmin(x, y):
    return y if x != x else (x if y != y else min(x, y))


def isclose(x, y, rtol=1e-05, atol=1e-08, equal_nan=False):
    if x == y or (equal_nan and x != x and y != y):
        return True
    return abs(x - y) <= atol + abs(rtol * y) and math.isfinite(y)


def fmod(x, y):
    rest = abs(x) % abs(y)
    return rest if x >= 0 else -rest


def angle(x):
    return x * 1.0 if x != x else (math.pi if x < 0 else 0.0)


def smooth_l1(x, y, beta=1.0):
    d = abs(x - y)
    return 0.5 * d * d / beta if d < beta else d - 0.5 * beta


def huber(x, y, delta=1.0):
    d = abs(x - y)
    return 0.5 * d * d if d <= delta else delta * (d - 0.5 * delta)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    # --- of one number
    "abs": lambda x: abs(x),
    "acos": lambda x: math.acos(x),
    "acosh": lambda x: math.acosh(x),
    "asin": lambda x: math.asin(x),
    "asinh": lambda x: math.asinh(x),
    "atan": lambda x: math.atan(x),
    "atanh": lambda x: math.atanh(x),
    "bitwise_not": lambda x: ~x,
    "ceil": lambda x: math.ceil(x),
    "positive": lambda x: +x,
    "conj_physical": lambda x: x,
    "real": lambda x: x,
    "cos": lambda x: math.cos(x),
    "cosh": lambda x: math.cosh(x),
    "deg2rad": lambda x: math.radians(x),
    "rad2deg": lambda x: math.degrees(x),
    "exp": lambda x: math.exp(x),
    "exp2": lambda x: 2.0**x,
    "expm1": lambda x: math.expm1(x),
    "floor": lambda x: math.floor(x),
    "frac": lambda x: x - math.trunc(x),
    "log": lambda x: math.log(x),
    "log10": lambda x: math.log10(x),
    "log1p": lambda x: math.log1p(x),
    "log2": lambda x: math.log2(x),
    "lgamma": lambda x: math.lgamma(x),
    "digamma": digamma,
    "erf": lambda x: math.erf(x),
    "erfc": lambda x: math.erfc(x),
    "erfinv": erfinv,
    "logical_not": lambda x: not x,
    "neg": lambda x: -x,
    "round": lambda x: round(x),
    "sin": lambda x: math.sin(x),
    "sinc": sinc,
    "sinh": lambda x: math.sinh(x),
    "sign": sign,
    "sgn": sign,
    "signbit": lambda x: math.copysign(1.0, x) < 0,
    "tan": lambda x: math.tan(x),
    "tanh": lambda x: math.tanh(x),
    "trunc": lambda x: math.trunc(x),
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "sqrt": lambda x: math.sqrt(x),
    "square": lambda x: x * x,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-1.0 * x)),
    "angle": angle,
    "nan_to_num": nan_to_num,
    "logit": logit,
    "special.entr": entr,
    "special.ndtr": lambda x: 0.5 * math.erfc(x * -math.sqrt(0.5)),
    "isfinite": lambda x: math.isfinite(x),
    "isinf": lambda x: math.isinf(x),
    "isnan": lambda x: math.isnan(x),
    "isposinf": lambda x: x == math.inf,
    "isneginf": lambda x: x == -math.inf,
    "isreal": lambda x: x == x or x != x,
    # --- activations
    "nn.functional.relu": lambda x: max(x, 0),
    "nn.functional.relu6": lambda x: min(max(x, 0), 6),
    "nn.functional.elu": elu,
    "nn.functional.celu": lambda x, alpha=1.0: x if x > 0 else alpha * math.expm1(x / alpha),
    "nn.functional.selu": selu,
    "nn.functional.silu": silu,
    "nn.functional.mish": mish,
    "nn.functional.gelu": gelu,
    "nn.functional.hardsigmoid": hardsigmoid,
    "nn.functional.hardswish": lambda x: x * min(max(x + 3.0, 0.0), 6.0) / 6.0,
    "nn.functional.hardshrink": lambda x, lambd=0.5: x if abs(x) > lambd or x != x else 0.0,
    "nn.functional.hardtanh": hardtanh,
    "nn.functional.leaky_relu": lambda x, negative_slope=0.01: x if x > 0 else negative_slope * x,
    "nn.functional.logsigmoid": logsigmoid,
    "nn.functional.softplus": softplus_,
    "nn.functional.softshrink": softshrink,
    "nn.functional.softsign": lambda x: x / (1.0 + abs(x)),
    "nn.functional.tanhshrink": lambda x: x - math.tanh(x),
    "nn.functional.threshold": threshold,
    # --- of two numbers
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "mul": lambda x, y: x * y,
    "div.no_rounding_mode": lambda x, y: x / y,
    "div.floor_rounding": lambda x, y: x // y,
    "div.trunc_rounding": lambda x, y: math.trunc(x / y),
    "true_divide": lambda x, y: x / y,
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": fmod,
    "pow": lambda x, y: x**y,
    "__radd__": lambda x, y: y + x,
    "__rmul__": lambda x, y: y * x,
    "__rsub__": lambda x, y: y - x,
    "__rdiv__": lambda x, y: y / x,
    "__rpow__": lambda x, y: y**x,
    "__rmod__": lambda x, y: y % x,
    "atan2": lambda x, y: math.atan2(x, y),
    "copysign": lambda x, y: math.copysign(x, y),
    "hypot": lambda x, y: math.hypot(x, y),
    "nextafter": lambda x, y: math.nextafter(x, y),
    "ldexp": lambda x, y: x * 2.0**y,
    "logaddexp": logaddexp,
    "logaddexp2": logaddexp2,
    "xlogy": xlogy,
    "special.xlog1py": xlog1py,
    "heaviside": heaviside,
    "maximum": lambda x, y: max(x, y),
    "minimum": lambda x, y: min(x, y),
    "max.binary": lambda x, y: max(x, y),
    "min.binary": lambda x, y: min(x, y),
    "clamp_min": lambda x, y: max(x, y),
    "clamp_max": lambda x, y: min(x, y),
    "fmax": fmax,
    "fmin": fmin,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "isclose": isclose,
    "logical_and": lambda x, y: bool(x) and bool(y),
    "logical_or": lambda x, y: bool(x) or bool(y),
    "logical_xor": lambda x, y: bool(x) != bool(y),
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_left_shift": lambda x, y: x << y,
    "bitwise_right_shift": lambda x, y: x >> y,
    "__rand__": lambda x, y: y & x,
    "__ror__": lambda x, y: y | x,
    "__rxor__": lambda x, y: y ^ x,
    "nn.functional.prelu": lambda x, weight: x if x > 0 else weight * x,
    "nn.functional.mse_loss": lambda x, y: (x - y) * (x - y),
    "nn.functional.l1_loss": lambda x, y: abs(x - y),
    "nn.functional.smooth_l1_loss": smooth_l1,
    "nn.functional.huber_loss": huber,
    # --- of three numbers
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "lerp": lerp,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "where": lambda c, x, y: x if c else y,
    "masked_fill": lambda x, mask, value: value if mask else x,
}
