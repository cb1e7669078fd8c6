"""Derivatives of registered operators, in both directions, within transforms of functions too.

`torch.library.register_autograd` knows gradients only: what it registers loses the tangents of
forward-mode differentiation without a word, and is refused within `torch.func.grad`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from fxkit.torch_adapters.private_names import private
from fxkit.torch_adapters.transforms import has_transforms, is_forward_mode

_PURPOSE = "derivatives of operators of one's own in forward mode and within torch.func"
_WITHOUT = "they have gradients only, and tangents count as zero"
_FUNCTION = private("torch.autograd.function._SingleLevelFunction", _PURPOSE, _WITHOUT)
_ALLOWED = private(
    "torch._functorch.utils.enable_single_level_autograd_function", _PURPOSE, _WITHOUT
)
_BELOW = private("torch._C._AutoDispatchBelowAutograd", _PURPOSE, _WITHOUT)
_KEYS_BELOW = private("torch._C._after_autograd_keyset", _PURPOSE, _WITHOUT)
_REQUIRES = private("torch._C._any_requires_grad", _PURPOSE, _WITHOUT)
_FORWARDS = private("torch.autograd.forward_ad._set_fwd_grad_enabled", _PURPOSE, _WITHOUT)
_NAMES = (_FUNCTION, _ALLOWED, _BELOW, _KEYS_BELOW, _REQUIRES, _FORWARDS)


def register_derivatives(
    library: torch.library.Library,
    overload: Any,
    backward: Callable[..., tuple[Any, ...]],
    setup_context: Callable[..., None],
    tangents: Callable[..., Any],
) -> None:
    """Register how an operator is differentiated.

    Args:
        library: What has registered the operator, and keeps the derivatives as long as it lives.
        overload: The operator; its arguments are positional.
        backward: As of `torch.library.register_autograd`.
        setup_context: The same.
        tangents: Takes a context, whose `likes` are shape, dtype and device of each result, then
            the arguments, and the tangent of each, None where it has none. It returns those of the
            results.
    """
    if _lacks_names():
        torch.library.register_autograd(
            overload._schema.name, backward, setup_context=setup_context, lib=library
        )
        return
    function = _function_of(overload, backward, setup_context, tangents)
    undifferentiated, requires_grad = _below_autograd(overload), _REQUIRES.get()

    def differentiated(keys: Any, *args: Any) -> Any:
        wants_gradient = torch.is_grad_enabled() and requires_grad(*args)
        if not (wants_gradient or is_forward_mode()):
            return undifferentiated(keys, args)
        with _one_level():
            return function.apply(*args, keys)

    library.impl(overload._opname, differentiated, "Autograd", with_keyset=True)


def register_pattern_derivatives(
    library: torch.library.Library,
    overload: Any,
    pattern: Callable[..., Any],
    backward: Callable[..., tuple[Any, ...]] | None,
    setup_context: Callable[..., None],
) -> None:
    """Register how an operator is differentiated whose value other operators of torch compute.

    In forward mode these compute it, and so their tangents, and where there is no `backward` they
    do wherever a gradient is asked for.

    Args:
        library: What has registered the operator, and keeps the derivatives as long as it lives.
        overload: The operator; its arguments are positional.
        pattern: Computes the same by operators that torch differentiates.
        backward: As of `torch.library.register_autograd`, or None.
        setup_context: The same.
    """
    if _lacks_names():
        if backward is not None:
            torch.library.register_autograd(
                overload._schema.name, backward, setup_context=setup_context, lib=library
            )
        return
    function = backward and _function_of(overload, backward, setup_context, _no_tangents)
    undifferentiated, requires_grad = _below_autograd(overload), _REQUIRES.get()

    def differentiated(keys: Any, *args: Any) -> Any:
        wants_gradient = torch.is_grad_enabled() and requires_grad(*args)
        if is_forward_mode() or (wants_gradient and function is None):
            return pattern(*args)
        if function is None or not wants_gradient:
            return undifferentiated(keys, args)
        with _one_level():
            return function.apply(*args, keys)

    library.impl(overload._opname, differentiated, "Autograd", with_keyset=True)


@functools.cache
def has_all_derivatives() -> bool:
    """Tell whether registered operators have derivatives in both directions, also in transforms."""
    return all(name.get() is not None for name in _NAMES)


def _lacks_names() -> bool:
    """Tell whether this torch lacks what derivatives in both directions take, and warn of it."""
    missing = next((name for name in _NAMES if name.get() is None), None)
    if missing is not None:
        missing.warn()
    return missing is not None


def _below_autograd(overload: Any) -> Callable[[Any, Sequence[Any]], Any]:
    """Return a function that calls an operator past autograd, with keys of the dispatcher."""
    below, keys_below = _BELOW.get(), _KEYS_BELOW.get()

    def undifferentiated(keys: Any, args: Sequence[Any]) -> Any:
        with below():
            return overload.redispatch(keys & keys_below, *args)

    return undifferentiated


def _no_tangents(ctx: Any, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
    raise AssertionError("forward mode goes through the pattern")


def _one_level() -> AbstractContextManager[Any]:
    """Allow a function that differentiates for the innermost transform, where there is one.

    The dispatcher has come to that transform by then, and goes on to the outer ones below autograd.
    """
    return _ALLOWED.get()() if has_transforms() else contextlib.nullcontext()


@contextlib.contextmanager
def _derivatives_of_outer_transforms() -> Iterator[None]:
    """Let outer transforms differentiate, which a function's forward turns off for all."""
    if not has_transforms():
        yield
        return
    with torch.enable_grad(), _FORWARDS.get()(True):
        yield


def _function_of(
    overload: Any,
    gradients: Callable[..., tuple[Any, ...]],
    setup_context: Callable[..., None],
    tangents: Callable[..., Any],
) -> Any:
    below, keys_below = _BELOW.get(), _KEYS_BELOW.get()

    def forward(ctx: Any, *args_and_keys: Any) -> Any:
        *args, keys = args_and_keys
        with below(), _derivatives_of_outer_transforms():
            found = overload.redispatch(keys & keys_below, *args)
        results = found if isinstance(found, tuple) else (found,)
        ctx.likes = [(r.shape, r.dtype, r.device) for r in results]
        setup_context(ctx, tuple(args), found)
        if is_forward_mode():
            # A zero that stood for no tangent would make NaN of an infinite slope.
            ctx.set_materialize_grads(False)
            ctx.args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
            ctx.save_for_forward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        return found

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        pairs = zip(grads, ctx.likes, strict=True)
        given = [zeros_like_result(like) if grad is None else grad for grad, like in pairs]
        found = gradients(ctx, *given)
        return *found[: len(ctx.needs_input_grad) - 1], None

    def jvp(ctx: Any, *tangents_and_none: Any) -> Any:
        saved = iter(_without_tangent(x) for x in ctx.saved_tensors)
        # What is None in place of an argument is a tensor.
        args = [next(saved) if arg is None else arg for arg in ctx.args]
        return tangents(ctx, args, tangents_and_none[:-1])

    methods: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward, "jvp": jvp}
    statics = {name: staticmethod(method) for name, method in methods.items()}
    return type(f"DerivativeOf_{overload._opname}", (_FUNCTION.get(),), statics)


def zeros_like_result(like: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
    """Return zeros of a shape and dtype, on a device, in one element of memory."""
    shape, dtype, device = like
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _without_tangent(x: torch.Tensor) -> torch.Tensor:
    return forward_ad.unpack_dual(x).primal if x.is_floating_point() else x
