"""The operators of `torch.ops.quantized_decomposed`; without them nothing is quantised."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.private_names import private

_LIBRARY = private(
    "torch.ao.quantization.fx._decomposed.quantized_decomposed_lib",
    "operators that quantise and dequantise",
    "fxkit.quantization refuses to work",
)


def register() -> None:
    """Let `torch.ops.quantized_decomposed` have its operators, where this torch knows them."""
    _LIBRARY.get()


@functools.cache
def quantized_operators() -> Any:
    """Return the namespace of the operators, registered.

    Raises:
        UnsupportedError: When this torch has none.
    """
    if _LIBRARY.get() is None:
        raise UnsupportedError(
            f"expected a torch with {_LIBRARY.path}, got {torch.__version__} without it",
            hint="install a torch that fxkit is tested with",
        )
    return torch.ops.quantized_decomposed
