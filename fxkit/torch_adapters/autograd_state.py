"""What autograd keeps beside tensors: hooks for saved tensors, versions, the running backward."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxkit.torch_adapters.private_names import private

_HOOKS = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "telling whether saved tensors go through hooks",
    "they are taken to: everything runs in eager under autograd",
)
_SET_VERSIONS = private(
    "torch._C._autograd._unsafe_set_version_counter",
    "putting back what a recorded run has written",
    "a backward through what was put back raises an error",
)
_KEEP_VERSION = private(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "writing running statistics as batch norm does",
    "they are written through Tensor.data",
)
_KEEPS_GRAPH = private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "freeing what a backward has saved",
    "it is kept as long as the graph",
)
_DEVICES = private(
    "torch._C._autograd.DeviceType",
    "the quick entry into compiled programs",
    "calls go through Python, some microseconds slower",
)
_STEP_HOOKS = private(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "telling whether steps of optimisers are hooked",
    "they are taken to be, and not fused",
)
_STEPPED_HOOKS = private(
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "telling whether steps of optimisers are hooked",
    "they are taken to be, and not fused",
)

DeviceType: Any = _DEVICES.get()
_top_hooks, _set_versions = _HOOKS.get(), _SET_VERSIONS.get()
_keep_version, _keep_graph = _KEEP_VERSION.get(), _KEEPS_GRAPH.get()


def has_saved_tensors_hooks() -> bool:
    """Tell whether the tensors that autograd saves go through hooks."""
    if _top_hooks is None:
        _HOOKS.warn()
        return True
    return _top_hooks(True) is not None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor count as written so often."""
    if _set_versions is not None:
        _set_versions((tensor,), (version,))


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which writes to a tensor are not counted."""
    return contextlib.nullcontext() if _keep_version is None else _keep_version(tensor)


def unversioned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to write to under `version_kept`."""
    return tensor.data if _keep_version is None else tensor


def backward_may_run_again() -> bool:
    """Tell whether the backward that runs keeps its graph."""
    return _keep_graph is None or bool(_keep_graph())


def has_step_hooks() -> bool:
    """Tell whether hooks are registered for the steps of all optimisers."""
    return bool(_STEP_HOOKS.get(True)) or bool(_STEPPED_HOOKS.get(True))
