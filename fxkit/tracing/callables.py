"""Callables of any kind as Python functions whose parameters are known, for them to be traced."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.ir.schema import Signature, signature_of, signatures
from fxkit.torch_adapters.layers import forward_hooks_of, forward_pre_hooks_of
from fxkit.torch_adapters.operators import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    overload_name_of,
    overload_of,
    schema_of,
)
from fxkit.tracing.captured import Captured
from fxkit.tracing.environment.opaque_objects import can_hand_on

Emit = Callable[..., Any]
"""Appends a node: takes its kind, its target, its arguments, and those given by keyword."""

_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile was given
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)
_OPERATORS = (OpOverload, OpOverloadPacket)
_OF_ONE = (operator.methodcaller, operator.itemgetter, operator.attrgetter)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_DEFAULTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Program:
    """What a callable comes down to.

    Attributes:
        function: What is called in the end.
        owner: The module whose method it is, given that it is one.
        args: What it is given first: by `functools.partial`, or as its `self`.
        kwargs: What it is given by keyword.
    """

    function: Any
    owner: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages and graph modules call it."""
        return _name_of(self.function)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own tracer follows it: a module, or a Python function with nothing given.

        Defaults that no graph can write down are given, and are no longer parameters. A call of a
        module that has hooks, for one, is more than its `forward`, and that tracer follows no more.
        """
        if self.args or self.kwargs:
            return False
        if isinstance(self.function, nn.Module):
            return not does_more_than_forward(self.function)
        is_function = isinstance(inspect.unwrap(self.function), types.FunctionType)
        return is_function or self.is_method

    @property
    def is_method(self) -> bool:
        """Whether it is a method that the class of its module has."""
        return self.owner is not None and self.function is not self.owner

    def call(self, emit: Emit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it on placeholders; what is written in C becomes one node."""
        function = self.function
        args, kwargs = (*self.args, *args), {**self.kwargs, **kwargs}
        if self.is_method:
            args = (self.owner, *args)
        if isinstance(function, _DESCRIPTORS) and hasattr(torch.Tensor, function.__name__):
            return emit("call_method", function.__name__, args, kwargs)
        if isinstance(function, _OPERATORS) or _is_of_torch(function) or _is_of_math(function):
            return emit("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    def parameters(self) -> list[Parameter]:
        """Return what is still to be given.

        Raises:
            UnsupportedError: When it can't be told.
        """
        function = self.function
        found = _signature(self)
        if found is not None:
            return found
        if isinstance(function, _OF_ONE):
            return [Parameter("input", Parameter.POSITIONAL_ONLY)]
        is_usual = isinstance(function, nn.Module) and _has_usual_call(function)
        target = function.forward if is_usual else function
        try:
            bound = functools.partial(target, *self._all_args, **self.kwargs)
            known = list(inspect.signature(bound).parameters.values())
        except (TypeError, ValueError):
            known = []
        if isinstance(function, nn.Module) and any(it.kind in _VARIABLE for it in known):
            self._refuse_hooks_of_any_arguments(function)
        left = [it for it in known if it.kind not in _VARIABLE and it.name not in self.kwargs]
        if not left and (not known or known[0].kind in _VARIABLE):
            raise UnsupportedError(
                f"expected a callable whose parameters are known, got {self.name}",
                hint=f"trace a function that calls it, such as `lambda x: {self.name}(x)`",
            )
        return left

    def _refuse_hooks_of_any_arguments(self, module: nn.Module) -> None:
        if does_more_than_forward(module):
            raise UnsupportedError(
                f"expected a module with hooks to say which arguments it takes, got "
                f"{self.name}, which takes any number",
                hint="trace a function that calls it with those that it is given",
            )

    @property
    def _all_args(self) -> tuple[Any, ...]:
        return (self.owner, *self.args) if self.is_method else self.args


def does_more_than_forward(module: nn.Module) -> bool:
    """Tell whether a call of a module runs more than the `forward` of its class, such as hooks."""
    has_hooks = bool(forward_hooks_of(module) or forward_pre_hooks_of(module))
    return has_hooks or "forward" in vars(module) or not _has_usual_call(module)


def _has_usual_call(module: nn.Module) -> bool:
    """Tell whether a call of a module is torch's own; each `GraphModule` has it in other words."""
    return type(module).__call__ is nn.Module.__call__ or isinstance(module, fx.GraphModule)


def program_of(fn: Any) -> Program:
    """Take a callable apart.

    Args:
        fn: A function of Python or C, module, bound method, `functools.partial`, memoised function,
            operator, or an object with `__call__`.

    Raises:
        UnsupportedError: When it is a class, or its calls don't give values that a graph holds.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(fn, functools.partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        elif isinstance(fn, types.MethodType) and not isinstance(fn.__self__, nn.Module):
            args, fn = (fn.__self__, *args), fn.__func__
        elif isinstance(fn, types.MethodWrapperType) or _is_bound_to_tensor(fn):
            args, fn = (fn.__self__, *args), getattr(type(fn.__self__), fn.__name__)
        elif isinstance(fn, functools._lru_cache_wrapper):
            fn = fn.__wrapped__
        elif isinstance(fn, CustomOpDef):
            fn = overload_of(fn)
        elif hasattr(fn, _COMPILED):
            fn = getattr(fn, _COMPILED)
        elif isinstance(fn, Captured):
            fn = _unchanged(fn)
        elif not isinstance(fn, (type, nn.Module, *_CALLED_AS_THEY_ARE)):
            fn = types.MethodType(type(fn).__call__, fn)
        else:
            break
    if isinstance(fn, type):
        raise UnsupportedError(
            f"expected a function or a module, got the class {fn.__qualname__}",
            hint="make an instance, or give one of its methods",
        )
    if isinstance(fn, torch.jit.ScriptFunction) or can_hand_on(fn):
        raise UnsupportedError(
            f"expected a callable that can be followed, got {_name_of(fn)}, which is compiled code",
            hint="trace the Python function that it was made of, or use fxkit.capture(fn, args)",
        )
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise UnsupportedError(
            f"expected a function that returns values, got {_name_of(fn)}, which gives them later",
            hint="return a list instead of using yield or await",
        )
    if isinstance(fn, types.MethodType):
        owner: Any = fn.__self__
        return Program(fn.__func__, owner, args, kwargs)
    return Program(*_with_defaults(fn, args, kwargs))


def _unchanged(captured: Captured) -> Any:
    """Return what a program was captured of, if its graph computes the same."""
    if captured.is_altered:
        raise UnsupportedError(
            f"expected a program whose graph was not changed, got {captured!r}, changed by "
            f"{captured.names_of_changes}",
            hint="take its .graph_module, or trace its .fn for the program without the changes",
        )
    return captured.fn


_CALLED_AS_THEY_ARE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(*_DESCRIPTORS, *_OPERATORS, *_OF_ONE, torch.jit.ScriptFunction),
)


def _with_defaults(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Give a function its defaults, where those can't be written in the code of a graph."""
    owner = fn if isinstance(fn, nn.Module) else None
    if not isinstance(fn, types.FunctionType) or not (fn.__defaults__ or fn.__kwdefaults__):
        return fn, owner, args, kwargs
    known = inspect.signature(fn).parameters.values()
    fixed = {
        parameter.name: parameter.default
        for parameter in list(known)[len(args) :]
        if parameter.default is not Parameter.empty and not _can_be_written(parameter.default)
    }
    return fn, owner, args, {**fixed, **kwargs}


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _can_be_written(default: Any) -> bool:
    if isinstance(default, (tuple, list)):
        return all(map(_can_be_written, default))
    return isinstance(default, _DEFAULTS)


def _is_bound_to_tensor(fn: Any) -> bool:
    return isinstance(fn, types.BuiltinFunctionType) and isinstance(fn.__self__, torch.Tensor)


def _is_of_torch(fn: Any) -> bool:
    home = str(getattr(fn, "__module__", None) or "")
    is_in_c = isinstance(fn, types.BuiltinFunctionType)
    return is_in_c and (home.startswith("torch") or getattr(torch, fn.__name__, None) is fn)


def _is_of_math(fn: Any) -> bool:
    return isinstance(fn, types.BuiltinFunctionType) and fn.__module__ == "math"


def _signature(program: Program) -> list[Parameter] | None:
    """Return what an operator of torch has to be given beside what it has, from its schema."""
    fn = program.function
    if isinstance(fn, OpOverload):
        found = [signature_of(fn)]
    elif isinstance(fn, OpOverloadPacket):
        found = [signature_of(getattr(fn, name)) for name in fn.overloads()]
    elif isinstance(fn, _DESCRIPTORS) or _is_of_torch(fn):
        found = list(signatures(fn.__name__.strip("_") if "__" in fn.__name__ else fn.__name__))
    else:
        return None
    is_method = isinstance(fn, _DESCRIPTORS)
    fitting = [it for known in found if (it := _left(known, program, is_method)) is not None]
    return min(fitting, key=lambda it: it[0])[1] if fitting else None


def _left(
    signature: Signature, program: Program, is_method: bool
) -> tuple[int, list[Parameter]] | None:
    """Return how well an overload fits, lower being better, and what it needs yet."""
    known = signature.of_method if is_method else signature.positional
    if len(program.args) > len(known):
        return None
    taken = {parameter.name for parameter in known[: len(program.args)]}
    for name in program.kwargs:
        parameter = signature._named(name)
        if parameter is None or parameter.name in taken:
            return None
        taken.add(parameter.name)
    overload = signature.overload
    gives_list = [str(it.real_type) for it in schema_of(overload).returns] == ["List[Tensor]"]
    is_default = overload_name_of(overload) == "default"
    needed = [
        Parameter(
            "input" if parameter.name == "self" else parameter.name,
            Parameter.KEYWORD_ONLY if parameter.keyword_only else Parameter.POSITIONAL_ONLY,
        )
        for parameter in (*known, *(p for p in signature.parameters if p.keyword_only))
        if parameter.name in signature._required and parameter.name not in taken
    ]
    return 2 * gives_list + (not is_default), needed
