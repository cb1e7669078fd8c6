"""`@fxkit.operator`: a Python function of scalars as an operator of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from fxkit.authoring.operators.calling import Calls
from fxkit.authoring.operators.composed import reference
from fxkit.authoring.operators.defining import Options, decorates, defined
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.dtype_promotion import number_as_tensor
from fxkit.authoring.operators.eager_kernels import EagerKernels
from fxkit.authoring.operators.reading import definition_of
from fxkit.authoring.operators.registration import Registration
from fxkit.authoring.operators.samples import opinfo_of, samples
from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.opinfos import Sample


class ElementwiseOperator:
    """An operator of tensors that was written as a function of scalars; see `operator`.

    Attributes:
        definition: What it computes.
        overload: The operator of `torch.ops`, as graphs call it.
    """

    _fxkit_stands_for = "overload"  # what is remembered of calls is no state of a program
    _of_python: tuple[type, ...] = (
        bool,
        int,
        float,
    )  # of these alone the function itself is called

    def __init__(
        self, function: Callable[..., Any], definition: Definition, registration: Registration
    ) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.definition = definition
        self.overload = registration.overload
        self._registration = registration
        self._signature = inspect.signature(function)
        positional = [p for p in definition.parameters if not p.is_keyword_only]
        is_plain = len(positional) == len(definition.parameters)
        self._positional = len(positional) if is_plain else None  # where no name is needed
        self._calls = Calls(registration, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; of Python numbers alone, by the Python function itself.

        Args:
            args: Tensors, which broadcast and promote as operands of torch's own operators do, or
                Python numbers, at least one of them a tensor; then numeric parameters.
            kwargs: The same by name, and `out`, where the result is written.
        """
        if is_dynamo_compiling():  # what else compiles gives other tensors than plain ones
            return self._call(*args, **kwargs)
        return self._calls.fast(*args, **kwargs) if kwargs else self._calls.fast(*args)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator in float64, by torch's operators."""
        given = self._with_tensors(self._arguments(args, kwargs))
        named = dict(zip((p.name for p in self.definition.parameters), given, strict=True))
        tensors = [named[name] for name in self.definition.tensors]
        found = reference(self.definition, tensors, {n: named[n] for n in self.definition.numbers})
        return found if self.definition.is_tuple else found[0]

    def composition(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator by torch's operators, as `DecomposeToAten` spells it out."""
        given = self._with_tensors(self._arguments(args, kwargs))
        return self._registration.composition(*given)

    def of_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute the operator of Python numbers alone, by the Python function itself."""
        return self.__wrapped__(*args, **kwargs)

    def samples(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        *,
        low: float = -3.0,
        high: float = 3.0,
    ) -> Iterator[Sample]:
        """Yield what it may be called with: `args` and `kwargs`.

        Args:
            device: Where operands lie.
            dtype: Their dtype.
            requires_grad: Whether gradients are asked for.
            low: The least element of operands.
            high: The largest one.
        """
        return samples(self.definition, device, dtype, requires_grad, low, high)

    def opinfo(self, *, low: float = -3.0, high: float = 3.0) -> Any:
        """Return its entry in torch's table of operators, an `OpInfo` with samples.

        Args:
            low: The least element of samples, where it is defined on a part of all numbers only.
            high: The largest one.

        Raises:
            UnsupportedError: When torch's table, or what it requires, is not installed.
        """
        return opinfo_of(self.definition, self, low, high)

    @property
    def kernels(self) -> EagerKernels:
        """The kernels of eager calls."""
        return self._registration.kernels

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])  # a copy or pickle is the operator of that name

    def __repr__(self) -> str:
        return f"<operator {self._registration.namespace}::{self.definition.schema}>"

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        given: Sequence[Any] = args
        if kwargs or len(args) != self._positional:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.definition.name}() {error}") from None
            bound.apply_defaults()
            given = list(bound.arguments.values())
        pairs = zip(self.definition.parameters, given, strict=True)
        return [
            float(value) if isinstance(p.default, float) and type(value) is int else value
            for p, value in pairs
        ]

    def _with_tensors(self, arguments: list[Any]) -> list[Any]:
        """Return arguments with tensors in the place of numbers, where tensors are expected."""
        pairs = list(zip(self.definition.parameters, arguments, strict=True))
        tensors = [value for p, value in pairs if p.is_tensor and isinstance(value, torch.Tensor)]
        return [
            number_as_tensor(value, tensors)
            if p.is_tensor and isinstance(value, (bool, int, float))
            else value
            for p, value in pairs
        ]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        arguments = self._arguments(args, kwargs)
        if all(isinstance(value, self._of_python) for value in arguments):
            return self.of_numbers(args, kwargs)
        if not is_compiling():
            self._check(arguments)
        pairs = zip(self.definition.parameters, arguments, strict=True)
        if any(p.is_tensor and isinstance(value, (bool, int, float)) for p, value in pairs):
            arguments = self._with_tensors(arguments)
        if out is not None:
            return self._into(out, arguments)
        if is_compiling():
            return self.overload(*arguments)
        return self._calls.run(args, kwargs, arguments)

    def _check(self, arguments: list[Any]) -> None:
        """Refuse what is neither a tensor nor a number, before torch tells it by positions."""
        for parameter, value in zip(self.definition.parameters, arguments, strict=True):
            found = _refused(parameter.is_tensor, value)
            if found is not None:
                kind, got, hint = found
                name = self.definition.name
                raise UnsupportedError(
                    f"expected {kind} for {parameter.name} of {name}, got {got}", hint=hint
                )

    def _into(self, out: Any, arguments: list[Any]) -> Any:
        found = self.overload(*arguments)
        if not isinstance(out, torch.Tensor):
            for one, result in zip(out, found, strict=True):
                _copy_into(one, result)
            return out
        return _copy_into(out, found)


_NO_TENSORS = (list, tuple, dict, str, type(None), complex)


def _refused(takes_tensor: bool, value: Any) -> tuple[str, str, str] | None:
    """Return what is expected in the place of an argument, what it is, and a hint; None if fit."""
    got = type(value).__name__
    if isinstance(value, torch.Tensor):
        if not takes_tensor:
            hint = "pass .item() of it, or give the parameter no default: then it is a tensor"
            return "a number, as its default is,", got, hint
        if value.is_complex():
            return "a real tensor", str(value.dtype), "pass torch.view_as_real of it"
        if value.layout is torch.strided or value.layout is torch.jagged:
            return None
        return "a dense tensor", str(value.layout), "pass .to_dense() of it"
    if type(value) not in _NO_TENSORS and got != "ndarray":
        return None
    if takes_tensor:
        return "a tensor or a number", got, "convert it by torch.as_tensor"
    return "a number, as its default is,", got, "leave it out for its default"


def _copy_into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Write a result as operators of torch write theirs: torch checks dtypes and sizes."""
    if out.requires_grad or result.requires_grad:
        raise RuntimeError("expected out= without gradients: such results have no derivative")
    return (
        torch.add(result, 0, out=out)
        if result.dtype != torch.bool
        else torch.logical_or(result, result, out=out)
    )


@decorates
def operator(function: Callable[..., Any], options: Options) -> ElementwiseOperator:
    """Make an operator of tensors of a Python function of scalars.

    The function is read, not run: arithmetic, comparisons, conditions, local variables, loops of a
    known number of steps, functions of `math`, other operators and plain Python functions. From
    that follow its kernels, its derivatives of any order, its fake, and what `torch.vmap` and
    `torch.compile` need. Parameters without a default are tensors; those with a number as default
    are Python numbers.

    Args:
        function: The function.
        **options: Those of `Options`: name, namespace, tolerance, gradient, check_gradient.

    Returns:
        The operator, or a decorator where options are given.

    Raises:
        UnsupportedError: When the function can't be read: the message has the line, the reason and
            a remedy.
        NumericsError: When a gradient of one's own is not that of the operator.

    Example:
        >>> import math, torch, fxkit
        >>> @fxkit.operator
        ... def soft_shrink(x, width=0.5):
        ...     if abs(x) > width:
        ...         return x - math.copysign(width, x)
        ...     return x * x * x / (width * width) * 0.5
        >>> soft_shrink(torch.tensor([-2.0, 0.0, 0.25]))
        tensor([-1.5000,  0.0000,  0.0312])
    """
    return ElementwiseOperator(function, *defined(function, options, definition_of))
