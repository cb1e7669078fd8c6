"""Guards on modules: their training flags, children and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxkit.tracing.guarding.guards import Guard, GuardedCall, Mismatch


@dataclass(frozen=True, slots=True)
class ModuleGuard(Guard):
    """A module's training flag, its children and how many hooks it has."""

    module: torch.nn.Module
    training: bool
    children: tuple[torch.nn.Module | None, ...]
    hooks: tuple[int, int]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return f"{type(self.module).__name__} {_mode_text(self.training)}"

    def check(self, call: GuardedCall) -> Mismatch | None:
        attributes = self.module.__dict__
        training = attributes.get("training")
        if training is None:  # that of another module, as what torch.compile returns has it
            training = self.module.training
        if training is not self.training:
            return Mismatch(self.what, _mode_text(self.training), _mode_text(training), self.source)
        children = attributes["_modules"]
        if len(children) != len(self.children) or any(
            new is not old for new, old in zip(children.values(), self.children, strict=True)
        ):
            return self._mismatch("one with other submodules")
        if hook_counts(attributes) != self.hooks:
            return self._mismatch("one with other hooks")
        return None


def _mode_text(training: bool) -> str:
    return f"in {'training' if training else 'evaluation'} mode"


def hook_counts(attributes: dict[str, Any]) -> tuple[int, int]:
    """Return how many forward hooks and forward pre-hooks a module has."""
    return len(attributes["_forward_hooks"]), len(attributes["_forward_pre_hooks"])
