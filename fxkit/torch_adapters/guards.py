"""Quick comparisons of what a call finds with what was recorded, made by guards of TorchDynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.private_names import private

_MODULE = "torch._C._dynamo.guards"
_SLOWLY = "all is compared in Python at each call"
_VERSION = private(f"{_MODULE}.dict_version", "seeing that a dict has changed", _SLOWLY)
_GLOBAL = private(f"{_MODULE}.GlobalStateGuard", "comparing torch's settings", _SLOWLY)
_TENSORS = private(f"{_MODULE}.TensorGuards", "comparing tensors", _SLOWLY)


class _NeverSame:
    """A guard that holds for nothing, so that one in Python is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def check(self, *args: Any) -> bool:
        return False


count_of_writes: Callable[[dict[Any, Any]], int] | None = _VERSION.get()
"""Return the number of the last write to a dict, where CPython numbers them (3.11)."""

GlobalStateGuard: Any = _GLOBAL.get(_NeverSame)
TensorGuards: Any = _TENSORS.get(_NeverSame)
