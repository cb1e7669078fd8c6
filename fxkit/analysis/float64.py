"""Run any program in float64: the reference that errors are measured against.

Widening weights and inputs is not enough: a program casts to float32 by name, makes new tensors,
reads constants and divides integers. So each operator is seen as it runs, and gets and gives
float64.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn

from fxkit.analysis.operator_mode import OperatorMode
from fxkit.ir.op import is_check
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import OpOverload, schema_of

Module = TypeVar("Module", bound=nn.Module)

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
# What bits are taken from, and what they make: dtypes by their size in bytes.
_FLOAT_OF_SIZE = {2: torch.float16, 4: torch.float32}
_REINTERPRETS = torch.ops.aten.view.dtype


def widened(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs a program in float64: on a copy of its weights, if it is a module.

    The copy casts to no narrower dtype than float64, makes no tensor of one, and draws the random
    numbers that the program draws. An operator that has no float64 runs as it is.

    Args:
        program: A module, or any function; it is left as it is.

    Returns:
        A function of the program's arguments, which should be in float64.
    """
    wide = widened_module(program) if isinstance(program, nn.Module) else program

    @functools.wraps(program, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with in_float64():
            return wide(*args, **kwargs)

    return run


def widened_module(module: Module) -> Module:
    """Return a copy of a module with parameters, buffers and other tensors of it in float64.

    A captured graph in it no longer checks values: they are those of another dtype.
    """
    with warnings.catch_warnings():
        # torch 2.13 warns of its own class when it copies what torch.export returned.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        wide = copy.deepcopy(module).double()
    for part in wide.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
                vars(part)[name] = _widen(value)
        if isinstance(part, fx.GraphModule):
            _without_checks(part)
    return wide


def _without_checks(gm: fx.GraphModule) -> None:
    """Take out what checks that values, such as dtypes, are those of the capture."""
    checks = [node for node in gm.graph.nodes if is_check(node) and not node.users]
    for node in checks:
        gm.graph.erase_node(node)
    if checks:
        gm.recompile()


@contextmanager
def in_float64() -> Iterator[None]:
    """Let each operator inside of the block compute in float64, whatever dtype it asks for."""
    with _mode_class()():
        yield


@functools.cache
def _mode_class() -> type[_InFloat64]:
    """Return the class of a mode that TorchDynamo leaves alone: that of torch 2.11 fails on it.

    To mark it imports TorchDynamo, so this waits until the mode is wanted.
    """
    dispatch: Any = torch.compiler.disable(_InFloat64.__torch_dispatch__)
    return type("_InFloat64", (_InFloat64,), {"__torch_dispatch__": dispatch})


class _InFloat64(OperatorMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = (args, kwargs)
        if not isinstance(func, OpOverload):
            return func(*pytree.tree_map(_followed, args), **pytree.tree_map(_followed, kwargs))
        if func is _REINTERPRETS:
            return _reinterpreted(*args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _in_dtypes(func, given, _narrow_dtype, _narrow)
        try:
            with _default_dtype(torch.float64):
                return _in_dtypes(func, given, _wide_dtype, _widen)
        except (RuntimeError, AssertionError):  # the latter from torch's quantising operators
            # It may have no float64; if that is not what is wrong, this raises too.
            return _in_dtypes(func, given, _narrow_dtype, _narrow)


def _followed(value: Any) -> Any:
    """Return a function that a higher-order operator calls, so that it runs in float64 too."""
    return in_float64()(value) if callable(value) else value


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_dtypes(func: Any, given: Any, dtype_for: Any, cast: Any) -> Any:
    """Call an operator on operands of other dtypes; what it writes to keeps its own.

    Args:
        func: An overload.
        given: `(args, kwargs)`
        dtype_for: What it gets for a dtype that it is asked for.
        cast: What makes a tensor that it can take.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def taken(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtype_for(value)
        if not isinstance(value, torch.Tensor):
            return value
        fit = cast(value)
        if fit is not value:
            copies[id(fit)] = (value, fit)
        return fit

    args, kwargs = pytree.tree_map(taken, given)
    result = func(*args, **kwargs)
    for operand in _written(func, args, kwargs):
        if id(operand) in copies:
            own, fit = copies[id(operand)]
            own.copy_(fit)

    def returned(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return copies[id(value)][0] if id(value) in copies else _widen(value)

    return pytree.tree_map(returned, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the operands that an overload writes to."""
    found = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return pytree.tree_leaves(found)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def _narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(dtype, dtype)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in _WIDE:
        return tensor
    return tensor.to(_WIDE[tensor.dtype])


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_narrow_dtype(tensor.dtype))


def _reinterpreted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the bits of a tensor as of another dtype: those that it has when it is not widened."""
    if tensor.dtype == torch.float64:
        tensor = tensor.to(_FLOAT_OF_SIZE.get(dtype.itemsize, torch.float32))
    return _widen(_REINTERPRETS(tensor, dtype))
