"""Let torch's fake tensors read a setting of TorchDynamo's without importing all of it.

A `FakeTensorMode` of torch 2.13 reads `torch._dynamo.config`. To import that module Python first
imports its package, which takes a second, many times what it takes to compile a small function. As
long as nobody has imported the package, one that holds its settings and nothing else stands in
while a fake tensor is worked on. Whatever needs more of it gets the real one.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fxkit.torch_adapters.late_imports import IMPORTING

_NAME = "torch._dynamo"
_known: list[types.ModuleType] = []
_marked: list[Any] = []


class _NeedsMore(ImportError):
    """More of the package is needed than its settings."""


def call_with_settings(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may be called twice, and may read settings of TorchDynamo's."""
    if _is_imported():
        return function(*args, **kwargs)
    # The function imports modules that import TorchDynamo, while this thread holds its lock: in the
    # other order to a thread that imports them late, which would get modules that are not complete.
    with IMPORTING:
        try:
            with _stand_in():
                return function(*args, **kwargs)
        except ImportError:
            importlib.import_module(_NAME)
    return function(*args, **kwargs)


def _is_imported() -> bool:
    """Tell whether TorchDynamo is there and complete."""
    package = sys.modules.get(_NAME)
    return package is not None and not getattr(package.__spec__, "_initializing", False)


@contextmanager
def _stand_in() -> Iterator[None]:
    """Put the package of settings into the place of the real one, for this thread's work.

    Other threads that import the package wait for the lock that Python itself takes.
    """
    lock = getattr(importlib._bootstrap, "_ModuleLockManager", None)  # type: ignore[attr-defined]
    if lock is None:
        raise _NeedsMore(_NAME)
    with lock(_NAME):
        if _NAME in sys.modules:
            yield
            return
        package, config = _known or _load()
        sys.modules[_NAME] = torch.__dict__["_dynamo"] = package
        sys.modules[config.__name__] = config
        try:
            yield
        finally:
            torch.__dict__.pop("_dynamo", None)
            sys.modules.pop(_NAME, None)
            sys.modules.pop(config.__name__, None)
            while _marked:
                vars(_marked.pop()).pop("__dynamo_disable", None)


def _load() -> list[types.ModuleType]:
    package = types.ModuleType(_NAME)
    package.__path__ = []
    package.__spec__ = importlib.util.spec_from_loader(_NAME, None, is_package=True)
    vars(package.__spec__)["_initializing"] = True  # others that find it wait
    vars(package)["__getattr__"] = _refuse
    name, path = f"{_NAME}.config", Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _NeedsMore(name)
    config = importlib.util.module_from_spec(spec)
    sys.modules[name] = config
    try:
        spec.loader.exec_module(config)
        vars(package).update(config=sys.modules[name], disable=_disable)
        _known[:] = [package, sys.modules[name]]
    finally:
        del sys.modules[name]
    return _known


def _disable(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `torch._dynamo.disable`: nothing is traced as long as nobody has imported it.

    What torch notes on the function is taken back, so that it asks again.
    """
    _marked.append(function)
    return function


def _refuse(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise _NeedsMore(f"{_NAME}.{name}")
