"""Operators of the literature, each written as a function of scalars."""

from __future__ import annotations

import math

import fxkit


def softplus(x):
    """log(1 + e^x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@fxkit.operator(namespace="literature")
def mish(x):
    """x · tanh(softplus(x)), Misra 2019."""
    return x * math.tanh(softplus(x))


@fxkit.operator(namespace="literature")
def snake(x, a=1.0):
    """x + sin²(ax) / a, Ziyin et al. 2020."""
    s = math.sin(a * x)
    return x + s * s / a


@fxkit.operator(namespace="literature")
def squareplus(x, b=4.0):
    """(x + √(x² + b)) / 2, Barron 2021."""
    return 0.5 * (x + math.sqrt(x * x + b))


@fxkit.operator(namespace="literature")
def log_cosh(x, y):
    """log cosh(x - y), without overflow."""
    d = abs(x - y)
    return d + math.log1p(math.exp(-2.0 * d)) - math.log(2.0)


@fxkit.operator(namespace="literature")
def huber(x, y, delta=1.0):
    """Huber's loss of each element."""
    d = abs(x - y)
    if d < delta:
        return 0.5 * d * d
    return delta * (d - 0.5 * delta)


@fxkit.operator(namespace="literature")
def focal(x, target, gamma=2.0, alpha=0.25):
    """Focal loss of a logit, Lin et al. 2017."""
    p = 1.0 / (1.0 + math.exp(-x))
    cross_entropy = softplus(x) - x * target
    p_t = p * target + (1.0 - p) * (1.0 - target)
    alpha_t = alpha * target + (1.0 - alpha) * (1.0 - target)
    return alpha_t * (1.0 - p_t) ** gamma * cross_entropy


@fxkit.operator(namespace="literature")
def soft_shrink(x, width=0.5):
    """Shrink towards zero by `width`, smoothly below it."""
    if abs(x) > width:
        return x - math.copysign(width, x)
    return x * x * x / (width * width) * 0.5


@fxkit.operator(namespace="literature")
def smooth_sign(x):
    """x / √(1 + x²): a softsign."""
    return x / math.sqrt(1.0 + x * x)


@fxkit.operator(namespace="literature")
def gelu_without_erf(x):
    """The approximation of gelu by tanh."""
    return 0.5 * x * (1.0 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


@fxkit.operator(namespace="literature")
def wrapped_angle(x):
    """An angle, brought into [-π, π)."""
    return (x + math.pi) % (2.0 * math.pi) - math.pi


@fxkit.operator(namespace="literature")
def serf(x):
    """x · erf(softplus(x)), Nag and Bhattacharyya 2021."""
    return x * math.erf(softplus(x))


@fxkit.operator(namespace="literature")
def celu(x, alpha=1.5):
    """A continuously differentiable ELU, Barron 2017."""
    return x if x > 0 else alpha * math.expm1(x / alpha)


@fxkit.operator(namespace="literature")
def geman_mcclure(x, y, c=1.3):
    """A loss that outliers hardly move."""
    u = ((x - y) / c) ** 2
    return 2.0 * u / (u + 4.0)


@fxkit.operator(namespace="literature")
def tukey(x, c=4.685):
    """Tukey's biweight loss."""
    if abs(x) > c:
        return c * c / 6.0
    return c * c / 6.0 * (1.0 - (1.0 - (x / c) ** 2) ** 3)


@fxkit.operator(namespace="literature")
def quantile_loss(x, y, q=0.9):
    """The pinball loss."""
    d = y - x
    return q * d if d >= 0 else (q - 1.0) * d


@fxkit.operator(namespace="literature")
def piecewise(x):
    """Four pieces, by early returns."""
    if x != x:
        return x
    if x < -1.0:
        return -1.0 - 0.1 * (x + 1.0)
    if x < 1.0:
        return x
    scale = math.exp(1.0 - x)
    return 2.0 - scale


@fxkit.operator(namespace="literature")
def root(x, steps=0.0):
    """√|x| by Newton's method, left early."""
    a = abs(x) + 1e-3
    guess = 0.5 * (a + 1.0)
    for _ in range(12):
        better = 0.5 * (guess + a / guess)
        if abs(better - guess) < 1e-12:
            break
        guess = better
    return guess + steps


@fxkit.operator(namespace="literature")
def halvings(x):
    """How often |x| can be halved until it is at most 1, up to 12 times, and what is left."""
    rest, n = abs(x), 0
    while rest > 1.0 and n < 12:
        rest = rest * 0.5
        n += 1
    return rest + 0.25 * n


@fxkit.operator(namespace="literature")
def smooth_step(x, low, high):
    """3t² - 2t³ between two edges."""
    t = (x - low) / (high - low + 10.0)
    t = min(max(t, 0.0), 1.0)
    return t * t * (3.0 - 2.0 * t)


@fxkit.operator(namespace="literature")
def mish_of_difference(x, y):
    """Another operator, called by this one."""
    return mish(x - y) + soft_shrink(y, width=0.75)


OPERATORS = [
    mish, snake, squareplus, log_cosh, huber, focal, soft_shrink, smooth_sign, gelu_without_erf,
    wrapped_angle, serf, celu, geman_mcclure, tukey, quantile_loss, piecewise, root, halvings,
    smooth_step, mish_of_difference,
]  # fmt: skip
