"""Calls that run in eager as a whole, at no more than the cost of eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxkit.ir.modes import has_dispatch_modes, has_function_modes, is_followed
from fxkit.ir.op import resolve
from fxkit.torch_adapters.grad_modes import set_grad_enabled
from fxkit.torch_adapters.operators import HigherOrderOperator
from fxkit.tracing.recorder.recorder import active_recorder

# After so many calls guards are asked again: another graph may serve by now.
CALLS_ON_TRUST = 64

MAX_KINDS = 64

# Whether gradients are on, and of each argument its shape, dtype and whether it asks for them.
Kind = tuple[bool, tuple[tuple[torch.Size, torch.dtype, bool], ...]]


class Leaving(Protocol):
    """A module that may leave some or all of its calls to eager."""

    @property
    def leaves_calls(self) -> bool:
        """Whether it does, as far as that is known when it is made."""
        ...

    @property
    def calls_in_eager(self) -> int:
        """How many of its calls eager has run."""
        ...

    def note_eager_call(self) -> None:
        """Count a call that the program itself has run in the module's place."""


MISS = object()
"""What `EagerFallback.entry` returns for a call that it does not serve."""


class EagerFallback:
    """Serves the kinds of calls whose graphs run in eager by the program itself.

    That is right whatever guards would say, so they are asked now and then only: their check costs
    more than a small program has to lose.

    Args:
        fn: The program.

    Attributes:
        finish: None: the program returns what a call returns.
        miss: What `entry` returns for a call that it does not serve.
    """

    finish = None
    miss = MISS

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._seen: dict[Leaving, int] = {}
        self._trusted: dict[Kind, tuple[Leaving, int]] = {}

    def watch(self, module: Leaving) -> None:
        """Take note of a module that leaves calls to eager."""
        self._seen[module] = module.calls_in_eager

    def entry(self, *args: Any) -> Any:
        """Run the program if it is known that its graph runs in eager for such arguments."""
        is_seen = has_dispatch_modes() or has_function_modes() or is_followed()
        if is_seen or active_recorder() is not None or not self._takes(args):
            return MISS
        return self._fn(*args)

    def _takes(self, args: tuple[Any, ...]) -> bool:
        """Tell whether a call is to be left to the program itself; count it if so."""
        if not self._trusted or (kind := _kind(args)) is None:
            return False
        module, left = self._trusted.get(kind, (None, 0))
        if module is None or not left:
            return False
        self._trusted[kind] = (module, left - 1)
        module.note_eager_call()
        self._seen[module] += 1
        return True

    def learn(self, args: tuple[Any, ...]) -> None:
        """Note whether the call that a graph has just served was left to eager."""
        if not self._seen or (kind := _kind(args)) is None:
            return
        ran = [module for module, calls in self._seen.items() if module.calls_in_eager > calls]
        self._seen = {module: module.calls_in_eager for module in self._seen}
        self._trusted.pop(kind, None)
        if ran and len(self._trusted) < MAX_KINDS:
            self._trusted[kind] = (ran[-1], CALLS_ON_TRUST)


def left_because(gm: fx.GraphModule, args: Iterable[torch.Tensor]) -> str | None:
    """Return why a program is left to eager before anything is tried with it, or None.

    No kernel follows a program that itself turns gradients on, and of quantised tensors not even
    types are known without numbers.

    Args:
        gm: The captured program.
        args: Its inputs.
    """
    tensors = (*args, *gm.parameters(), *gm.buffers())
    if any(tensor.is_quantized for tensor in tensors):
        return "an input is quantised"
    is_differentiable = any(tensor.requires_grad for tensor in tensors)
    is_trained = torch.is_grad_enabled() and is_differentiable
    is_wanted = not torch.is_grad_enabled() and is_differentiable
    for node in gm.graph.nodes:
        if is_trained and isinstance(node.target, HigherOrderOperator):
            return f"the gradient of %{node.name} is that of the functions it calls"
        call = resolve(node)
        if call is None:
            continue
        if call.name == "aten.requires_grad_" and call.arguments.get("requires_grad") is not False:
            return f"%{node.name} asks for gradients"
        if is_wanted and node.target is set_grad_enabled and node.args == (True,):
            return f"%{node.name} turns gradients on"
    return None


def _kind(args: tuple[Any, ...]) -> Kind | None:
    """Return what a call is known by; None where it is more than plain tensors."""
    if any(type(a) not in _PLAIN for a in args):
        return None
    return torch.is_grad_enabled(), tuple([(a.shape, a.dtype, a.requires_grad) for a in args])


_PLAIN = (torch.Tensor, nn.Parameter)
