"""The definition of an operator: its parameters, and what one element of each result is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fxkit.authoring.operators.derivative import derivative, product, total
from fxkit.authoring.operators.evaluation import Dtypes, KindComputer, ScalarEvaluation
from fxkit.authoring.operators.primitives import Kind
from fxkit.authoring.operators.row_derivative import row_gradient
from fxkit.authoring.operators.row_values import LENGTH, widened
from fxkit.authoring.operators.terms import Term, const, operand, row
from fxkit.lower.loop_ir.bits import Number


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator.

    Attributes:
        name: Its name.
        default: None for a tensor; the default of a numeric one.
        is_keyword_only: Whether Python calls name it; graphs need not.
    """

    name: str
    default: Number | None = None
    is_keyword_only: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor operand."""
        return self.default is None

    @property
    def schema(self) -> str:
        """Its part of the operator's schema."""
        if self.default is None:
            return f"Tensor {self.name}"
        if isinstance(self.default, bool):
            return f"bool {self.name}={self.default}"
        kind = "float" if isinstance(self.default, float) else "Scalar"
        return f"{kind} {self.name}={self.default!r}"


@dataclass(frozen=True)
class Definition:
    """What an operator computes.

    Attributes:
        name: The operator's name.
        parameters: Its parameters, in order.
        results: What one element of each of its results is.
        is_tuple: Whether it returns a tuple, though perhaps of one.
        gradients: The gradient of each tensor, of `grad_names` and the parameters, where its author
            gives them.
        rows: The tensors of which it takes whole rows; None for an operator of single elements.
        wide: Of each result, whether it has a value for each element of a row.
    """

    name: str
    parameters: tuple[Parameter, ...]
    results: tuple[Term, ...]
    is_tuple: bool = False
    gradients: tuple[Term, ...] = ()
    rows: frozenset[str] | None = None
    wide: tuple[bool, ...] = ()

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensor operands."""
        return tuple(p.name for p in self.parameters if p.is_tensor)

    def leaf(self, name: str) -> Term:
        """Return the term that stands for a tensor."""
        return row(name) if self.rows is not None and name in self.rows else operand(name)

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """Its numeric parameters, with their defaults."""
        return {p.name: p.default for p in self.parameters if p.default is not None}

    @property
    def schema(self) -> str:
        """Its schema, without a namespace."""
        arguments = ", ".join(parameter.schema for parameter in self.parameters)
        tensors = ", ".join(["Tensor"] * len(self.results))
        return f"{self.name}({arguments}) -> {f'({tensors})' if self.is_tuple else tensors}"

    def kinds(self, operands: Mapping[str, Kind], numbers: Mapping[str, Number]) -> list[Kind]:
        """Return the kind of each result."""
        dtypes = Dtypes(torch.float32, torch.int64)
        numbers = {LENGTH: 1, **numbers} if self.rows is not None else numbers
        evaluation = ScalarEvaluation(KindComputer(), dtypes, operands, numbers)
        return [evaluation.result(result) for result in self.results]

    def gradient(self, by: str) -> Definition:
        """Return what the gradient with respect to an operand is.

        It takes the gradients of the results, then the operands.
        """
        names = self.grad_names
        if self.rows is not None:
            return self._row_gradient(by, self.rows)
        found: Term | None = None
        if self.gradients:
            found = self.gradients[self.tensors.index(by)]
        else:
            slopes = [derivative(result, operand(by)) for result in self.results]
            for name, slope in zip(names, slopes, strict=True):
                found = total(found, product(slope, operand(name)))
        found = const(0.0) if found is None else found
        parameters = (*map(Parameter, names), *self.parameters)
        return Definition(f"{self.name}_grad_{by}", parameters, (found,))

    def _row_gradient(self, by: str, rows: frozenset[str]) -> Definition:
        names = self.grad_names
        wide = {name for name, is_wide in zip(names, self.wide, strict=True) if is_wide}
        grads = [row(name) if name in wide else operand(name) for name in names]
        found = (
            self.gradients[self.tensors.index(by)]
            if self.gradients
            else row_gradient(self.results, grads, self.leaf(by)) or const(0.0)
        )
        is_row = by in rows
        if is_row:
            found = widened(found, self.leaf(by))
        parameters = (*map(Parameter, names), *self.parameters)
        name = f"{self.name}_grad_{by}"
        return Definition(name, parameters, (found,), rows=rows | wide, wide=(is_row,))

    @property
    def grad_names(self) -> list[str]:
        """What the gradients of its results are called."""
        return [self._grad_name(position) for position in range(len(self.results))]

    def _grad_name(self, position: int) -> str:
        name = "grad" if len(self.results) == 1 else f"grad{position}"
        taken = {parameter.name for parameter in self.parameters}
        while name in taken:
            name += "_"
        return name
