"""Values as Python expressions, with the imports that these need."""

from __future__ import annotations

import builtins
import enum
import math
import operator
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.layers import FUNCTIONS_IN_C
from fxkit.torch_adapters.operators import (
    OpOverload,
    OpOverloadPacket,
    custom_definition,
    overload_name_of,
    qualified_name_of,
)

# Where a function that does not know its own home is looked for, in this order.
_HOMES: tuple[Any, ...] = (
    torch,
    torch.nn,
    torch.nn.functional,
    operator,
    math,
    builtins,
    torch.Tensor,
    torch.special,
    torch.linalg,
    torch.fft,
    FUNCTIONS_IN_C,
    nn.init,
)
# Namespaces of operators that a plain `import torch` has registered.
_OPERATOR_NAMESPACES = frozenset({"aten", "prims", "prim", "quantized", "inductor", "higher_order"})


class PythonWriter:
    """Writes values as expressions, and remembers what has to be imported.

    Attributes:
        modules: Names of the modules that the expressions use.
        folders: Folders that must be on `sys.path` for these imports.
    """

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.folders: dict[str, None] = {}

    def value(self, value: Any) -> str:
        """Return an expression that gives an equal value.

        Raises:
            UnsupportedError: When there is none that a new process could evaluate.
        """
        if value is None or value is Ellipsis or isinstance(value, (bool, str, bytes)):
            return repr(value) if value is not Ellipsis else "..."
        if isinstance(value, enum.Enum):
            return f"{self.importable(type(value))}.{value.name}"
        if isinstance(value, (int, float, complex)):
            return self._number(value)
        if isinstance(value, (list, tuple, dict, set, frozenset, slice, range)):
            return self._container(value)
        if isinstance(value, _TORCH_CONSTANTS):
            return self._torch_constant(value)
        if isinstance(value, ModuleType):
            return self._import(value.__name__)
        return self.other(value)

    def other(self, value: Any) -> str:
        """Return an expression for what is no plain value: a function or a class."""
        if callable(value) and not isinstance(value, nn.Module):
            return self.function(value)
        raise UnsupportedError(
            f"expected a value that can be written as Python, got {type(value).__name__}",
            hint="pass plain numbers, containers, tensors, or functions of an importable module",
        )

    def function(self, function: Any) -> str:
        """Return an expression for a function or class that a new process can import."""
        if isinstance(function, (OpOverload, OpOverloadPacket)):
            return self._operator(function)
        return self.importable(function)

    def importable(self, thing: Any) -> str:
        """Return the qualified name of a function or class, and note the import."""
        name = getattr(thing, "__name__", "")
        for home in _HOMES:
            if name and getattr(home, name, None) is thing:
                return self._within(home, name)
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        path = getattr(thing, "__qualname__", name)
        found = module
        for part in path.split(".") if path else ():
            found = getattr(found, part, None)
        if module is None or found is not thing or not _is_importable(module):
            raise UnsupportedError(
                f"expected a function or class that a new process can import, got {path or thing}",
                hint="define it at the top level of a module that is a file",
            )
        return f"{self._import(module.__name__)}.{path}"

    def _within(self, home: Any, name: str) -> str:
        if home is builtins:
            return name
        if home is torch.Tensor:
            return f"{self._import('torch')}.Tensor.{name}"
        return f"{self._import(home.__name__)}.{name}"

    def _import(self, module: str) -> str:
        self.modules["torch" if module.partition(".")[0] == "torch" else module] = None
        folder = _folder_to_import_from(sys.modules[module])
        if folder is not None:
            self.folders[folder] = None
        return module

    def _operator(self, target: Any) -> str:
        is_packet = isinstance(target, OpOverloadPacket)
        namespace, _, name = (qualified_name_of(target) if is_packet else target.name()).partition(
            "::"
        )
        name = name.partition(".")[0]
        if namespace not in _OPERATOR_NAMESPACES:
            self._import_definition(f"{namespace}::{name}")
        self.modules["torch"] = None
        path = f"torch.ops.{namespace}.{name}"
        return path if is_packet else f"{path}.{overload_name_of(target)}"

    def _import_definition(self, name: str) -> None:
        """Import the module that registers a custom operator."""
        definition: Any = custom_definition(name)
        home = sys.modules.get(definition._init_fn.__module__) if definition is not None else None
        if home is None or not _is_importable(home):
            raise UnsupportedError(
                f"expected an operator that a new process can register by an import, got {name}",
                hint="register it with torch.library.custom_op at the top level of a module",
            )
        self._import(home.__name__)

    def _number(self, value: complex) -> str:
        if isinstance(value, complex):
            return f"complex({self._number(value.real)}, {self._number(value.imag)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if type(value) not in (int, float):
            return repr(float(value)) if isinstance(value, float) else repr(int(value))
        return repr(value)

    def _container(self, value: Any) -> str:
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.value, (value.start, value.stop, value.step)))})"
        if isinstance(value, range):
            return repr(value)
        if isinstance(value, Mapping):
            items = [f"{self.value(k)}: {self.value(v)}" for k, v in value.items()]
            text = f"{{{', '.join(items)}}}"
            return (
                text if type(value) in _PLAIN_DICTS else f"{self.importable(type(value))}({text})"
            )
        items = [self.value(item) for item in value]
        inside = ", ".join(items)
        if isinstance(value, list):
            return f"[{inside}]"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__}([{', '.join(sorted(items))}])"
        if isinstance(value, torch.Size):
            return f"torch.Size([{inside}])"
        text = f"({inside},)" if len(items) == 1 else f"({inside})"
        if hasattr(value, "_fields"):  # a named tuple
            return f"{self.importable(type(value))}({inside})"
        if type(value).__module__ == "torch.return_types":
            return f"torch.return_types.{type(value).__name__}({text})"
        return text

    def _torch_constant(self, value: Any) -> str:
        self.modules["torch"] = None
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        return str(value)


_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_PLAIN_DICTS = (dict, immutable_dict)


def _is_importable(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False
    spec = getattr(module, "__spec__", None)
    return spec is not None and (spec.origin in ("built-in", "frozen") or _file_of(module) != "")


def _file_of(module: ModuleType) -> str:
    """Return a module's file when that lies where the module's name says, else ""."""
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    path = Path(file)
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    names = module.__name__.split(".")
    named = [parts[-1].partition(".")[0] if i == 0 else p for i, p in enumerate(reversed(parts))]
    return file if named[: len(names)] == names[::-1] else ""


def _folder_to_import_from(module: ModuleType) -> str | None:
    """Return the folder that `sys.path` must hold, None where every process looks anyway."""
    file = _file_of(module)
    if not file:
        return None
    path = Path(file).resolve()
    if path.name == "__init__.py":
        path = path.parent
    folder = path.parents[module.__name__.count(".")]
    places = {Path(p).resolve() for p in sysconfig.get_paths().values()}
    return None if folder in places or folder.name == "lib-dynload" else str(folder)
