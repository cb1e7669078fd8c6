"""Arguments of torch's Python functions, which have no schema, by the names of their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fxkit.ir.schema import as_float

_HOMES = {"torch.nn.functional": F, "torch": torch}


@functools.cache
def signature_of(function: Any) -> inspect.Signature | None:
    """Return the parameters of a function; None where it takes any, or does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return (
        None
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        else (signature)
    )


@functools.cache
def signature_named(operator: str) -> inspect.Signature | None:
    """Return the parameters of an operator named after a Python function of torch.

    `torch.unique` and its like take any arguments; what they are is told by the method of tensors.
    """
    home, _, name = operator.rpartition(".")
    function = getattr(_HOMES.get(home), name, None)
    found = signature_of(function) if inspect.isfunction(function) else None
    method = getattr(torch.Tensor, name, None)
    if found is None and home == "torch" and inspect.isfunction(method):
        return signature_of(method)
    return found


@functools.cache
def float_parameters(operator: str) -> frozenset[str]:
    """Return the names of the parameters of such an operator that take a float."""
    signature = signature_named(operator)
    return frozenset() if signature is None else _float_parameters(signature)


@functools.cache
def _float_parameters(signature: inspect.Signature) -> frozenset[str]:
    return frozenset(
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation in (float, "float") or type(parameter.default) is float
    )


def bound_arguments(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with what is left out filled in.

    Args:
        signature: The function's parameters; None where it does not tell them.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        None where the parameters are not known, or don't take these arguments.
    """
    if signature is None:
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def named_arguments(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what `bound_arguments` does, where an integer in a float's place is that float."""
    bound = bound_arguments(signature, args, kwargs)
    if signature is None or bound is None:
        return None
    floats = _float_parameters(signature)
    return {name: as_float(v) if name in floats else v for name, v in bound.items()}


def named_arguments_of_method(
    operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a tensor's method by the names of a function's parameters.

    Args:
        operator: Name of the operator, such as `torch.norm`.
        args: Positional arguments, the tensor first.
        kwargs: Keyword arguments.

    Returns:
        None where either does not tell its parameters, or they don't take these arguments.
    """
    method = getattr(torch.Tensor, operator.rpartition(".")[2], None)
    own = named_arguments(signature_of(method), args, kwargs)
    if own is None:
        return None
    tensor, *rest = own.items()
    return named_arguments(signature_named(operator), (tensor[1],), dict(rest))
