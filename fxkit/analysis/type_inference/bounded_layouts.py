"""The strides of a tensor that is held within tensors of bounds.

Fake tensors of torch 2.13 take the larger of the first two, and then the smaller with the third;
eager's one loop chooses an order of the axes that suits all three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.ir.op import resolve


def with_eager_strides(node: fx.Node, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Return a fake result with the strides that eager gives it.

    Args:
        node: The call.
        args: What it was given.
        kwargs: What it was given by name.
        result: What it returned.
    """
    if len(args) + len(kwargs) < 3:
        return result
    names = ("self", "min", "max")
    given: list[Any] = [
        args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(names)
    ]
    if not all(isinstance(value, torch.Tensor) for value in given):
        return result
    call = resolve(node)
    if call is None or call.name != "aten.clamp":
        return result
    alike = [torch.empty_strided(t.shape, t.stride(), device=result.device) for t in given]
    strides = torch.addcmul(*alike).stride()  # any other operator of three tensors
    if strides == result.stride():
        return result
    first = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return torch.maximum(first, result)
