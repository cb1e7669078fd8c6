"""Types that the author of an opaque function declares, for where it can't run without numbers."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxkit.ir.attributes import find_attribute
from fxkit.ir.types import TensorType, contiguous_stride
from fxkit.torch_adapters.layers import BatchNorm
from fxkit.torch_adapters.operators import grouped_product, grouped_product_overload

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


def declared_type_of_module(module: Any) -> Callable[..., Any] | None:
    """Return the rule for what a module returns, or None; see `declare_type`."""
    return _quantized if is_quantizer(module) else None


def declared_type_of_call(node: fx.Node, root: nn.Module) -> Callable[..., Any] | None:
    """Return the rule for what a call in the graph of `root` returns, or None."""
    if node.op != "call_module":
        return declared_type(node.target)
    return declared_type_of_module(find_attribute(root, str(node.target)))


@contextlib.contextmanager
def without_numbers(module: nn.Module) -> Iterator[None]:
    """Let no part of a module ask a tensor for a number that types do not depend on.

    A quantiser gives back what it takes; a module may call it in its hooks, or on its weights. A
    batch normalisation without momentum does not divide by the number of batches it has seen.
    """
    parts = list(module.modules())
    instead = [(part.__dict__, *replaced) for part in parts for replaced in _aside(part)]
    before = [own.get(name, _MISSING) for own, name, _ in instead]
    for own, name, value in instead:
        own[name] = value
    try:
        yield
    finally:
        for (own, name, _), value in zip(instead, before, strict=True):
            if value is _MISSING:
                del own[name]
            else:
                own[name] = value


_MISSING = object()


def _aside(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each attribute of a module that stands in the way of types, and what replaces it."""
    if is_quantizer(part):
        yield "forward", _itself
    if isinstance(part, BatchNorm) and part.momentum is None:
        yield "momentum", 0.0


def _itself(x: Any) -> Any:
    return x


def is_quantizer(module: Any) -> bool:
    """Tell whether a module is one of torch's that observe a tensor, or quantise it as if.

    Which way they go depends on numbers that they keep in tensors; what they return does not.
    """
    classes = tuple(
        base
        for home, name in _QUANTIZERS
        if (base := getattr(sys.modules.get(home), name, None)) is not None
    )
    is_own = type(module).__module__.startswith("torch.")
    return isinstance(module, classes) and is_own and "forward" not in module.__dict__


# Where torch has the classes. Whoever has made such a module has imported them.
_QUANTIZERS = (
    ("torch.ao.quantization.fake_quantize", "FakeQuantizeBase"),
    ("torch.ao.quantization.observer", "ObserverBase"),
)


def _quantized(x: TensorType) -> TensorType:
    """Return the type of a tensor that was observed, or quantised as if: laid out without gaps."""
    if x.is_symbolic or x.stride is None:
        return x
    like = torch.empty_strided(x.shape, x.stride, device="meta")
    return replace(x, stride=torch.empty_like(like).stride())


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


for _product in (grouped_product(), grouped_product_overload()):
    if _product is not None:
        declare_type(_product)(_product_of_groups)
