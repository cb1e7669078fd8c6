"""What `torch.nn` keeps to itself of modules."""

from __future__ import annotations

from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from fxkit.torch_adapters.private_names import private

_CALL = private(
    "torch.nn.Module._call_impl",
    "telling which modules a call is made in",
    "the method that calls it is looked for",
)
_NORM = private(
    "torch.nn.modules.batchnorm._BatchNorm",
    "telling batch norms",
    "those with public names are known",
)
_BUILTINS = private(
    "torch._C._VariableFunctions",
    "telling functions of torch written in C",
    "those are known that torch has under their names",
)
_FUNCTIONS = private(
    "torch._C._nn", "writing reproducers", "calls of its functions are not written"
)

CALL_OF_MODULE: CodeType = _CALL.get(nn.Module.__call__).__code__
"""The code that each call of a module runs through; its frame has the module in `self`."""

BatchNorm: Any = _NORM.get((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
"""The class, or classes, of batch norms."""

FUNCTIONS_IN_C: ModuleType = _FUNCTIONS.get(torch.nn.functional)
"""The module of functions that `torch.nn.functional` takes from C."""


def is_function_in_c(function: Any) -> bool:
    """Tell whether something is a function of torch, such as `torch.neg`, that is written in C."""
    name = getattr(function, "__name__", "")
    holder = _BUILTINS.get(torch)
    return isinstance(function, BuiltinFunctionType) and function is getattr(holder, name, None)


def is_builtin_of_torch(target: Any) -> bool:
    """Tell whether a builtin is one of torch's own."""
    home = getattr(target, "__module__", None) or ""
    return home.startswith("torch._C") or is_function_in_c(target)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters, by name."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers, by name."""
    return module._buffers


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """Return the names of the buffers that no state dict of a module holds."""
    return module._non_persistent_buffers_set


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's children, by name."""
    return module._modules


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that are called behind `forward`."""
    return module._forward_hooks


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that are called before `forward`."""
    return module._forward_pre_hooks


def backward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that are called behind a module's backward pass."""
    return module._backward_hooks


def backward_pre_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that are called before a module's backward pass."""
    return module._backward_pre_hooks


def replica_of(module: nn.Module) -> Any:
    """Return the copy of a module that `nn.DataParallel` makes for another device."""
    return module._replicate_for_data_parallel()
