"""Compare a captured program with the program itself, call by call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fxkit.tracing.captured import Captured

Make = Callable[[], tuple[Callable[..., Any], list[tuple[Any, ...]]]]


def assert_faithful(make: Make, *, graphs: int | None = None) -> Captured:
    """Run a program in eager and captured, on equal arguments, and expect no difference.

    Args:
        make: Returns the program and the arguments of each call, anew each time it is called.
        graphs: How many graphs the captured program has to have in the end.

    Returns:
        The captured program.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eager, eager_calls = make()
        torch.manual_seed(0)
        fn, calls = make()
        captured = Captured(fn)
        expected = [_observe(eager, args, seed) for seed, args in enumerate(eager_calls)]
        got = [_observe(captured, args, seed) for seed, args in enumerate(calls)]
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_same(ours, theirs, f"call {number}")
    if isinstance(fn, torch.nn.Module):
        assert_same(dict(fn.state_dict()), dict(eager.state_dict()), "state")
    if graphs is not None:
        assert len(captured.graphs) == graphs, captured.explain(*calls[-1])
    return captured


def _observe(fn: Callable[..., Any], args: tuple[Any, ...], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    seen: dict[str, Any] = {"result": None, "error": None}
    try:
        seen["result"] = fn(*args)
    except (RuntimeError, ValueError, IndexError) as error:
        seen["error"] = (type(error), str(error))
    seen["result"] = _detached(seen["result"])
    seen["arguments"] = _detached(args)
    seen["random"] = torch.get_rng_state()
    seen["modes"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )
    return seen


def _detached(value: Any) -> Any:
    """Copy the tensors of a nested value, since later calls may write to them."""
    if isinstance(value, torch.Tensor):
        return (
            value.detach().as_subclass(torch.Tensor).clone(),
            value.requires_grad,
            value.stride(),
            value.is_inference(),
        )
    if isinstance(value, torch.nn.Module):
        return _detached(dict(value.state_dict()))
    if isinstance(value, Mapping):
        return (type(value), {key: _detached(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value), [_detached(item) for item in value])
    if isinstance(value, (np.ndarray, torch.Generator)):
        return value.tolist() if isinstance(value, np.ndarray) else value.get_state()
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    if names or (
        hasattr(value, "__dict__") and not callable(value) and not isinstance(value, enum.Enum)
    ):
        names += getattr(value, "__dict__", ())
        return (type(value), {name: _detached(getattr(value, name)) for name in names})
    return value


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Expect two nested values to be equal, tensors bit by bit, with NaN equal to NaN."""
    our_leaves, our_spec = pytree.tree_flatten(ours)
    their_leaves, their_spec = pytree.tree_flatten(theirs)
    assert our_spec == their_spec, f"{where}: {our_spec} is not {their_spec}"
    for our, their in zip(our_leaves, their_leaves, strict=True):
        if isinstance(their, torch.Tensor):
            torch.testing.assert_close(
                our, their, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
            )
        else:
            assert our == their or (our != our and their != their), f"{where}: {our} {their}"
