"""Calls that training leaves to eager, and that then cost no more than eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxkit.lower.training.training_module import TrainingModule

# After so many calls guards are asked again: another graph may serve by now.
CALLS_ON_TRUST = 64

MAX_KINDS = 64

Kind = tuple[tuple[torch.Size, torch.dtype, bool], ...]


class LeftToEager:
    """Knows the kinds of calls whose graphs run in eager, so that the program itself can run.

    That is right whatever guards would say, so they are asked now and then only: their check costs
    more than a small program has to lose.
    """

    def __init__(self) -> None:
        self._seen: dict[TrainingModule, int] = {}
        self._trusted: dict[Kind, tuple[TrainingModule, int]] = {}

    def watch(self, module: TrainingModule) -> None:
        """Take note of a module that leaves calls to eager."""
        self._seen[module] = module.eager_calls

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Tell whether a call is to be left to the program itself; count it if so."""
        if not self._trusted or (kind := _kind(args)) is None:
            return False
        module, left = self._trusted.get(kind, (None, 0))
        if module is None or not left:
            return False
        self._trusted[kind] = (module, left - 1)
        module.eager_calls += 1
        self._seen[module] += 1
        return True

    def learn(self, args: tuple[Any, ...]) -> None:
        """Note whether the call that a graph has just served was left to eager."""
        if not self._seen or (kind := _kind(args)) is None:
            return
        ran = [module for module, calls in self._seen.items() if module.eager_calls > calls]
        self._seen = {module: module.eager_calls for module in self._seen}
        self._trusted.pop(kind, None)
        if ran and len(self._trusted) < MAX_KINDS:
            self._trusted[kind] = (ran[-1], CALLS_ON_TRUST)


def _kind(args: tuple[Any, ...]) -> Kind | None:
    """Return what a call is known by; None where it is more than tensors under autograd."""
    if not torch.is_grad_enabled() or any(type(a) not in _PLAIN for a in args):
        return None
    return tuple([(a.shape, a.dtype, a.requires_grad) for a in args])


_PLAIN = (torch.Tensor, nn.Parameter)
