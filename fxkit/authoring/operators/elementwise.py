"""`@fxkit.operator`: a Python function of scalars as an operator of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from fxkit.authoring.operators.composed import reference
from fxkit.authoring.operators.definition import Definition, Parameter
from fxkit.authoring.operators.dtype_promotion import number_as_tensor
from fxkit.authoring.operators.eager_kernels import EagerKernels
from fxkit.authoring.operators.kernel_form import RESERVED
from fxkit.authoring.operators.registration import Registration
from fxkit.authoring.operators.statements import FunctionReader
from fxkit.authoring.operators.terms import const, in_order, number, operand
from fxkit.errors import UnsupportedError
from fxkit.ir.modes import has_modes, is_followed
from fxkit.lower.runtime import binding

# Larger expressions take a compiler too long.
_MAX_TERMS = 20_000

# So many types of operands are tried before the dispatcher is asked.
_MAX_PROGRAMS = 4

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class ElementwiseOperator:
    """An operator of tensors that was written as a function of scalars; see `operator`.

    Attributes:
        definition: What it computes.
        overload: The operator of `torch.ops`, as graphs call it.
    """

    _fxkit_stands_for = "overload"  # what is remembered of calls is no state of a program

    def __init__(
        self, function: Callable[..., Any], definition: Definition, registration: Registration
    ) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.definition = definition
        self.overload = registration.overload
        self._registration = registration
        self._signature = inspect.signature(function)
        self._count = len(definition.tensors)
        self._programs: tuple[tuple[tuple[Any, ...], Any], ...] = ()
        positional = [p.is_tensor for p in definition.parameters]
        self._is_fast = positional == sorted(positional, reverse=True)

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Compute the operator; of Python numbers alone, by the Python function itself.

        Args:
            args: Tensors, which broadcast and promote as operands of torch's own operators do, or
                Python numbers, at least one of them a tensor; then numeric parameters.
            out: Where the result is written.
            kwargs: The same by name.
        """
        if torch.compiler.is_compiling():
            return self._call(args, kwargs, out)
        if out is None and not kwargs:
            count = self._count
            operands, rest = (args, ()) if len(args) == count else (args[:count], args[count:])
            for numbers, program in self._programs:
                if numbers == rest:
                    found = program(*operands)
                    if found is not _MISS[0]:
                        return found
        return self._call(args, kwargs, out)

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

    @property
    def kernels(self) -> EagerKernels:
        """The kernels of eager calls."""
        return self._registration.kernels

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])  # a copy or pickle is the operator of that name

    def __repr__(self) -> str:
        return f"<operator {self._registration.namespace}::{self.definition.schema}>"

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if not kwargs and len(args) == len(self.definition.parameters):
            return list(args)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return list(bound.arguments.values())

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

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        arguments = self._arguments(args, kwargs)
        if all(isinstance(value, (bool, int, float)) for value in arguments):
            return self.__wrapped__(*args, **kwargs)
        if any(isinstance(value, (bool, int, float)) for value in arguments[: self._count]):
            arguments = self._with_tensors(arguments)
        if out is not None:
            return self._into(out, arguments)
        found = self.overload(*arguments)
        if self._is_fast and not kwargs:
            self._learn(args)
        return found

    def _learn(self, args: Sequence[Any]) -> None:
        """Remember a program for operands of such types, to be called past the dispatcher."""
        operands, rest = tuple(args[: self._count]), tuple(args[self._count :])
        if not all(type(x) in _TENSORS and x.is_cpu for x in operands):
            return
        if has_modes() or is_followed() or binding.is_awaited():
            return
        numbers = dict(self.definition.numbers)
        numbers.update(zip(numbers, rest, strict=False))
        program = self._registration.kernels.program(operands, numbers)
        if program is not None:
            _MISS[0] = binding.miss()
            self._programs = ((rest, program), *self._programs[: _MAX_PROGRAMS - 1])

    def _into(self, out: Any, arguments: list[Any]) -> Any:
        found = self.overload(*arguments)
        if not isinstance(out, torch.Tensor):
            for one, result in zip(out, found, strict=True):
                _copy_into(one, result)
            return out
        return _copy_into(out, found)


_MISS: list[Any] = [object()]


def _copy_into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Write a result as operators of torch write theirs: torch checks dtypes and sizes."""
    if out.requires_grad or result.requires_grad:
        raise RuntimeError("expected out= without gradients: such results have no derivative")
    return (
        torch.add(result, 0, out=out)
        if result.dtype != torch.bool
        else torch.logical_or(result, result, out=out)
    )


@overload
def operator(function: Callable[..., Any], /) -> ElementwiseOperator: ...


@overload
def operator(
    *, name: str | None = None, namespace: str = "authored", tolerance: float = 16
) -> Callable[[Callable[..., Any]], ElementwiseOperator]: ...


def operator(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    namespace: str = "authored",
    tolerance: float = 16,
) -> Any:
    """Make an operator of tensors of a Python function of scalars.

    The function is read, not run: arithmetic, comparisons, conditions, local variables, loops of a
    known number of steps, functions of `math`, other operators and plain Python functions. From
    that follow its kernels, its derivatives of any order, its fake, and what `torch.vmap` and
    `torch.compile` need. Parameters without a default are tensors; those with a number as default
    are Python numbers.

    Args:
        function: The function.
        name: The operator's name; that of the function when left out.
        namespace: The namespace of `torch.ops` that has it.
        tolerance: Largest difference of a kernel from torch's composition of the same operations,
            in epsilons of the result's dtype, relative to max(1, |result|).

    Returns:
        The operator, or a decorator where options are given.

    Raises:
        UnsupportedError: When the function can't be read: the message has the line, the reason and
            a remedy.

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
    if function is None:
        return functools.partial(operator, name=name, namespace=namespace, tolerance=tolerance)
    definition = _definition(function, name or getattr(function, "__name__", ""))
    return ElementwiseOperator(function, definition, _register(definition, namespace, tolerance))


_registered: dict[str, Registration] = {}


def _register(definition: Definition, namespace: str, tolerance: float) -> Registration:
    """Register an operator in the place of an earlier one of the name, as cells are run again."""
    qualified = f"{namespace}::{definition.name}"
    if qualified in _registered:
        _registered.pop(qualified).withdraw()
    _registered[qualified] = Registration(definition, namespace, tolerance)
    return _registered[qualified]


def _definition(function: Callable[..., Any], name: str) -> Definition:
    if not name.isidentifier():
        raise UnsupportedError(
            f"expected a name for the operator, got {name!r}", hint="pass name= to fxkit.operator"
        )
    parameters = _parameters(function)
    arguments = {p.name: operand(p.name) if p.is_tensor else number(p.name) for p in parameters}
    found = FunctionReader().read(function, arguments)
    values = found if isinstance(found, tuple) else (found,)
    for value in values:
        if not hasattr(value, "op") and not isinstance(value, (bool, int, float)):
            raise UnsupportedError(
                f"expected {name} to return scalars, got {type(value).__name__}",
                source=_place(function),
                hint="return a number, or a tuple of numbers",
            )
    results = tuple(v if hasattr(v, "op") else const(v) for v in values)
    terms = len(in_order(results))
    if terms > _MAX_TERMS or not values:
        raise UnsupportedError(
            f"expected an operator of 1 to {_MAX_TERMS} operations, got {terms}",
            source=_place(function),
            hint="make its loops shorter",
        )
    return Definition(name, parameters, results, isinstance(found, tuple))


def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    found = [_parameter(p, function) for p in inspect.signature(function).parameters.values()]
    if not any(parameter.is_tensor for parameter in found):
        raise UnsupportedError(
            "expected at least one parameter without a default, which is a tensor, got none",
            source=_place(function),
            hint="leave out the default of what is a tensor",
        )
    return tuple(found)


def _parameter(parameter: inspect.Parameter, function: Callable[..., Any]) -> Parameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise UnsupportedError(
            f"expected parameters with names, got *{parameter.name}",
            source=_place(function),
            hint="an operator has a fixed number of operands: name each",
        )
    if parameter.name in RESERVED:
        raise UnsupportedError(
            f"expected another name than {parameter.name!r} for a parameter",
            source=_place(function),
            hint="rename it: operators have a parameter of that name already",
        )
    is_named = parameter.kind is parameter.KEYWORD_ONLY
    if parameter.default is parameter.empty:
        return Parameter(parameter.name, None, is_named)
    default = parameter.default
    if not isinstance(default, (bool, int, float)) or default != default or abs(default) > 1e300:
        raise UnsupportedError(
            f"expected a finite number as the default of {parameter.name!r}, got {default!r}",
            source=_place(function),
            hint="parameters with defaults are numbers; tensors have none",
        )
    return Parameter(parameter.name, default, is_named)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} in {function.__name__}"
