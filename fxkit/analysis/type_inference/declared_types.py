"""Types that the author of an opaque function declares, for where it can't run without numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxkit.ir.types import TensorType, contiguous_stride

_RULES: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()


def declare_type(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Declare what a function returns, so that types go through calls of it without running it.

    Args:
        function: The function that graphs call.

    Returns:
        A decorator for the rule: it takes what the function takes, with a `TensorType` for each
        tensor, and returns a `TensorType`, a Python value, or a tuple, list or dict of them.

    Example:
        >>> import dataclasses, torch, fxkit
        >>> def every_other(x):
        ...     return torch.from_numpy(x.numpy()[::2].copy())
        >>> @fxkit.declare_type(every_other)
        ... def _(x):
        ...     shape = ((x.shape[0] + 1) // 2, *x.shape[1:])
        ...     return dataclasses.replace(x, shape=shape)
        >>> graph = torch.fx.Graph()
        >>> _ = graph.output(graph.call_function(every_other, (graph.placeholder("x"),)))
        >>> gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        >>> print(fxkit.propagate_types(gm, (torch.randn(5, 3),)))
        f32[3,3]
    """

    def declare(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES[function] = rule
        return rule

    return declare


def declared_type(function: Any) -> Callable[..., Any] | None:
    """Return the rule that was declared for a function, or None."""
    try:
        return _RULES.get(function)
    except TypeError:
        return None


def _product_of_groups(
    mat_a: TensorType,
    mat_b: TensorType,
    offs: TensorType | None = None,
    bias: TensorType | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorType:
    """Return the type of `torch._grouped_mm`, whose fake takes bfloat16 only (torch 2.13)."""
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    groups: tuple[Any, ...] = ()
    if len(mat_a.shape) == len(mat_b.shape):
        groups = (mat_a.shape[0],) if len(mat_a.shape) == 3 or offs is None else (offs.shape[0],)
    operands = [operand for operand in (mat_a, mat_b, bias) if operand is not None]
    has_gradient = any(operand.requires_grad for operand in operands)
    shape = (*groups, rows, columns)
    return TensorType(
        shape,
        out_dtype or mat_a.dtype,
        contiguous_stride(shape),
        mat_a.device,
        torch.is_grad_enabled() and has_gradient,
    )


_GROUPED_MM = getattr(torch, "_grouped_mm", None)
if _GROUPED_MM is not None:
    declare_type(_GROUPED_MM)(_product_of_groups)
