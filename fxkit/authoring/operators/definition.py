"""The definition of an operator: its parameters, and what one element of each result is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fxkit.authoring.operators.derivative import derivative, product, total
from fxkit.authoring.operators.evaluation import Dtypes, KindComputer, ScalarEvaluation
from fxkit.authoring.operators.primitives import Kind
from fxkit.authoring.operators.terms import Term, const, operand
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
    """

    name: str
    parameters: tuple[Parameter, ...]
    results: tuple[Term, ...]
    is_tuple: bool = False
    gradients: tuple[Term, ...] = ()

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensor operands."""
        return tuple(p.name for p in self.parameters if p.is_tensor)

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
        evaluation = ScalarEvaluation(KindComputer(), dtypes, operands, numbers)
        return [evaluation.result(result) for result in self.results]

    def gradient(self, by: str) -> Definition:
        """Return what the gradient with respect to an operand is.

        It takes the gradients of the results, then the operands.
        """
        names = self.grad_names
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
