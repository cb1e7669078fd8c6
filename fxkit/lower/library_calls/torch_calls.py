"""What library calls with packed weights share: which there are, and when they apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxkit.ir.modes import is_followed
from fxkit.torch_adapters.modes import count_dispatch_modes, count_function_modes
from fxkit.torch_adapters.operators import schema_of


def has_calls(namespace: Any, calls: Mapping[str, int]) -> bool:
    """Tell whether torch has operators as they are known.

    Args:
        namespace: Such as `torch.ops.mkl`.
        calls: Names, with their overloads → how many arguments they take in the known versions.
    """
    return all(_argument_count(namespace, name) == count for name, count in calls.items())


def _argument_count(namespace: Any, name: str) -> int:
    packet, overload = name.split(".")
    found = getattr(getattr(namespace, packet, None), overload, None)
    return 0 if found is None else len(schema_of(found).arguments)


def serve(input: Tensor, operands: Sequence[Tensor | None]) -> bool:
    """Tell whether an input is plain float32 numbers, and nothing asks for gradients or looks on.

    Args:
        input: What is multiplied or convolved.
        operands: Weights and what else is read.
    """
    if type(input) is not Tensor or input.dtype != torch.float32 or not input.is_cpu:
        return False
    if _is_watched() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (input, *operands)
    ):
        return False
    return input.numel() > 0 and input.layout == torch.strided


def _is_watched() -> bool:
    """Tell whether a function transform, a tracer or a mode looks at the calls."""
    return bool(is_followed() or count_dispatch_modes() or count_function_modes())
