"""`@fxkit.row_operator`: a Python function of lists as an operator on the rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from fxkit.authoring.operators.defining import Options, decorates, defined
from fxkit.authoring.operators.elementwise import ElementwiseOperator
from fxkit.authoring.operators.reading import row_definition_of
from fxkit.authoring.operators.row_list import RowList
from fxkit.errors import UnsupportedError


class RowOperator(ElementwiseOperator):
    """An operator on the rows of tensors that was written as a function of lists."""

    _of_python = (bool, int, float, list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator for each row; of lists and numbers alone, by the function itself.

        Args:
            args: Tensors, whose last axis is the row unless `dim` says otherwise, then numbers.
                Those that are one number a row lack that axis. All others broadcast.
            kwargs: The same by name, `dim`, and `out`, where the result is written.
        """
        if "dim" not in kwargs:
            return super().__call__(*args, **kwargs)
        dim = kwargs.pop("dim")
        arguments = self._arguments(args, {k: v for k, v in kwargs.items() if k != "out"})
        rows = self.definition.rows or frozenset()
        pairs = list(zip(self.definition.parameters, arguments, strict=True))
        if not is_compiling():
            self._check(arguments)
        rank = max([v.ndim for p, v in pairs if p.name in rows and isinstance(v, torch.Tensor)])
        if not isinstance(dim, int):
            raise UnsupportedError(
                f"expected one dimension, a number, got dim={dim!r}",
                hint="flatten the dimensions that are one row: x.flatten(-2)",
            )
        if not -rank <= dim < rank:
            raise IndexError(f"expected a dimension in [{-rank}, {rank - 1}], got {dim}")
        axis = dim % rank - rank
        moved = [
            value.movedim(axis, -1)
            if p.name in rows and isinstance(value, torch.Tensor) and value.ndim >= -axis
            else value
            for p, value in pairs
        ]
        found = super().__call__(*moved, **({"out": kwargs["out"]} if "out" in kwargs else {}))
        return self._moved_back(found, axis)

    def of_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function itself, on lists that have the methods of rows."""
        rows = [RowList(value) if isinstance(value, list) else value for value in args]
        named = {n: RowList(v) if isinstance(v, list) else v for n, v in kwargs.items()}
        return super().of_numbers(rows, named)

    def _check(self, arguments: list[Any]) -> None:
        super()._check(arguments)
        rows = self.definition.rows or frozenset()
        given = dict(zip((p.name for p in self.definition.parameters), arguments, strict=True))
        tensors = [v for n, v in given.items() if n in rows and isinstance(v, torch.Tensor)]
        if not any(one.ndim for one in tensors):
            raise UnsupportedError(
                f"expected rows for {', '.join(sorted(rows))}, got tensors without dimensions",
                hint="the last dimension is the row: unsqueeze what is one element",
            )

    def _moved_back(self, found: Any, axis: int) -> Any:
        results = found if self.definition.is_tuple else (found,)
        pairs = zip(results, self.definition.wide, strict=True)
        back = tuple(r.movedim(-1, axis) if is_wide else r for r, is_wide in pairs)
        return back if self.definition.is_tuple else back[0]


@decorates
def row_operator(function: Callable[..., Any], options: Options) -> RowOperator:
    """Make an operator on the rows of tensors of a Python function of lists of numbers.

    Parameters without a default are lists: the elements along the last axis of a tensor. One that
    is annotated as `float`, `int` or `bool` is one number a row. Lists are read by `sum`, `max`,
    `min`, `len`, `zip` and comprehensions, parameters also by `row.sum(f)`, `row.max(f)`,
    `row.min(f)` and `row.mean(f)`; what is returned is a list, a number or a tuple of these. All
    else is as for `fxkit.operator`, options too.

    Args:
        function: The function.
        **options: Those of `fxkit.operator`.

    Returns:
        The operator, or a decorator where options are given.

    Raises:
        UnsupportedError: When the function can't be read: the message has the line, the reason and
            a remedy.
        NumericsError: When a gradient of one's own is not that of the operator.

    Example:
        >>> import math, torch, fxkit
        >>> @fxkit.row_operator
        ... def rms_norm(row, weight, eps=1e-6):
        ...     scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + eps)
        ...     return [x * scale * w for x, w in zip(row, weight)]
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
        tensor([[0.8485, 1.1314]])
    """
    return RowOperator(function, *defined(function, options, row_definition_of))
