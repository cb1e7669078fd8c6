"""What nodes are searched for: operator, module, source line, dtype and shape."""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.operator_names import operator_names, shown_operator
from fxkit.errors import FxkitError
from fxkit.ir import provenance
from fxkit.ir.types import TensorType, type_of


@dataclass(frozen=True)
class NodeQuery:
    """What nodes have to be like; None where anything will do.

    Attributes:
        operator: An operator in any spelling, or another callable.
        module: Glob over the path of the module that a node ran in.
        source: `"model.py"` or `"model.py:41"`.
        dtype: Element type.
        shape: Sizes; None fits any size.

    Raises:
        FxkitError: When the operator can't be one, or the dtype is none.
    """

    operator: Any = None
    module: str | None = None
    source: str | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        operator, dtype = self.operator, self.dtype
        if operator is not None and not isinstance(operator, str) and not callable(operator):
            raise FxkitError(
                f"expected an operator, got {type(operator).__name__} {operator!r:.60}",
                hint="give one function or name, as torch.relu or 'relu'; call find for each",
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            named = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
            known = isinstance(getattr(torch, named, None), torch.dtype)
            raise FxkitError(
                f"expected a torch.dtype, got {type(dtype).__name__} {dtype!r:.60}",
                hint=f"write dtype=torch.{named if known else 'float32'}",
            )

    @functools.cached_property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators that are meant; none where any will do."""
        if self.operator is None:
            return ()
        is_layer = isinstance(self.operator, torch.nn.Module)
        return operator_names(type(self.operator) if is_layer else self.operator)

    def fits(self, node: fx.Node) -> bool:
        """Tell whether a node is one of those that are searched for."""
        if self.operators and shown_operator(node) not in self.operators:
            return False
        if self.module is not None and not fnmatch.fnmatchcase(
            provenance.module_path(node), self.module
        ):
            return False
        if self.source is not None and not _is_at(provenance.source_of(node), self.source):
            return False
        if self.dtype is None and self.shape is None:
            return True
        known = type_of(node)
        if not isinstance(known, TensorType):
            return False
        return self.dtype in (None, known.dtype) and _fits_shape(known.shape, self.shape)


def _is_at(found: provenance.Source | None, wanted: str) -> bool:
    if found is None:
        return False
    file, _, line = wanted.partition(":")
    same_file = found.file == file or found.file.endswith(f"/{file}")
    return same_file and (not line or found.line == int(line))


def _fits_shape(found: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
    if wanted is None:
        return True
    fits = (w is None or w == f for f, w in zip(found, wanted, strict=False))
    return len(found) == len(wanted) and all(fits)
