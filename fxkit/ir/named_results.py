"""Names of the results of operators that return several: `x.max(0).values` is `x.max(0)[0]`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fxkit.ir.call import Operator


@functools.cache
def place_of_result(operator: Operator, name: str) -> int | None:
    """Return which of an operator's results torch gives a name.

    Args:
        operator: The operator.
        name: Name of a result, as `"values"`.

    Returns:
        Its position, or None when the operator returns one result, or none of that name.
    """
    if operator.schema is None or len(operator.schema.returns) < 2:
        return None
    names = result_names(operator.name.removeprefix("aten."))
    return names.index(name) if name in names else None


@functools.cache
def result_names(packet: str) -> tuple[str, ...]:
    """Return the names of the results of `torch.<packet>`, in order; none where they have none.

    Source: `torch.return_types`, made from the schemas, which name the results of some overloads
    only.
    """
    kind: Any = getattr(torch.return_types, packet, None)
    return tuple(getattr(kind, "__match_args__", ()))
