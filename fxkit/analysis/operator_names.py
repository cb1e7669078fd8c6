"""Names of operators that a search asks for: all that a spelling means, and whether they exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxkit.errors import FxkitError
from fxkit.ir.op import operator_name, resolve
from fxkit.ir.schema import signatures


def operator_names(spelling: Any) -> tuple[str, ...]:
    """Return the names of the operators that a spelling means, its own first.

    Args:
        spelling: As `operator_name` takes it. A class of layers with an option `inplace` means the
            operator that writes in place too.
    """
    name = operator_name(spelling)
    is_layer = isinstance(spelling, type) and issubclass(spelling, torch.nn.Module)
    if is_layer and "inplace" in inspect.signature(spelling).parameters and _exists(f"{name}_"):
        return name, f"{name}_"
    return (name,)


def shown_operator(node: fx.Node) -> str:
    """Return the name of a node's operator, or of its kind when it calls none."""
    call = resolve(node)
    return node.op if call is None else call.name


def check_known(name: str, present: Collection[str | None]) -> None:
    """Refuse the name of an operator of ATen that there is none of.

    Args:
        name: The name; what is in another namespace than `aten` may yet be registered.
        present: Names that the graph has: they exist, whatever they are.

    Raises:
        FxkitError: When there is no such operator; with those of similar names.
    """
    is_aten = name.startswith("aten.") or "." not in name
    if name in present or not is_aten or _exists(name):
        return
    wanted = name.removeprefix("aten.")
    near = [f"aten.{one}" for one in difflib.get_close_matches(wanted, _all_names(), n=3)]
    raise FxkitError(
        f"expected the name of an operator, got {name!r}, which none has",
        hint=f"did you mean {' or '.join(near)}?" if near else "pass a function, as F.relu",
    )


def _exists(name: str) -> bool:
    packet = name.removeprefix("aten.")
    return bool(signatures(packet) or signatures(packet.removesuffix("_out")))


@functools.cache
def _all_names() -> tuple[str, ...]:
    """Return the names of ATen that functions and methods of torch have."""
    names = {*dir(torch), *dir(torch.Tensor), *dir(F)}
    return tuple(sorted(name for name in names if not name.startswith("_") and signatures(name)))
