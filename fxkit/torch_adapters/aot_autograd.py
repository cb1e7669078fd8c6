"""AOTAutograd: a program's forward and backward as graphs of operators that write nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.private_names import private

_TRAIN = "compiling what is trained"
_EAGER = "it runs in eager"
_EXPORT = private("torch._functorch.aot_autograd.aot_export_joint_simple", _TRAIN, _EAGER)
_SPLIT = private(
    "torch._functorch.partitioners.min_cut_rematerialization_partition", _TRAIN, _EAGER
)
_CONVERTER = private(
    "torch._export.converter.TS2EPConverter", "capturing TorchScript", "it is refused"
)


def joint_exporter() -> Callable[..., Any] | None:
    """Return what traces forward and backward at once, or None."""
    return _EXPORT.get()


def partitioner() -> Callable[..., Any] | None:
    """Return what splits a joint graph so that little is kept in between, or None."""
    return _SPLIT.get()


def torchscript_converter() -> Any:
    """Return the class that converts TorchScript into an exported program, or None."""
    return _CONVERTER.get()
