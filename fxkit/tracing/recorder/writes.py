"""Which outside tensors a program has written to, by their version counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.tensors import version_counter_of
from fxkit.tracing.guarding.aliasing_guards import storage_key
from fxkit.tracing.recorder.calls import CallSpelling
from fxkit.tracing.recorder.state_restore import Mutations


@dataclass(slots=True, eq=False)
class _Watched:
    tensor: torch.Tensor
    leaf: int | None
    target: str | None
    version: int | None
    is_marked: bool = False

    def is_written(self) -> bool:
        return (
            self.is_marked
            or self.version is None
            or version_counter_of(self.tensor) != self.version
        )


class Writes:
    """The tensors that a program was given or found, and what has become of them.

    Inference tensors count no versions; they are taken as written.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._storages: set[int] = set()

    def watch(
        self, tensor: torch.Tensor, *, leaf: int | None = None, target: str | None = None
    ) -> None:
        """Note from now on whether `tensor` is written to.

        Args:
            tensor: An argument, an outside tensor, or an alias of one with a counter of its own.
            leaf: Its index among the tensor arguments.
            target: The name of its attribute of the graph module.
        """
        self._watched.append(_Watched(tensor, leaf, target, version_of(tensor)))
        self._storages.add(storage_key(tensor))

    def watches(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is in memory that the program was given or found."""
        return storage_key(tensor) in self._storages

    def note_unseen(self, spelling: CallSpelling, arguments: Any) -> None:
        """Take the operands of a call as written that may write and count up no versions."""
        always = spelling.may_write_unseen
        if not always and not spelling.writes_in_training:
            return
        leaves = pytree.tree_leaves(arguments)
        if not always and not any(leaf is True for leaf in leaves):
            return
        storages = {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for watched in self._watched:
            if storage_key(watched.tensor) in storages:
                watched.is_marked |= always or not watched.tensor.requires_grad

    def so_far(self, is_random: bool) -> Mutations:
        """Return what has been written to, together with all that shares memory with it."""
        storages = {storage_key(w.tensor) for w in self._watched if w.is_written()}
        touched = [w for w in self._watched if storages and storage_key(w.tensor) in storages]
        return Mutations(
            tuple(watched.leaf for watched in touched if watched.leaf is not None),
            tuple(watched.target for watched in touched if watched.target is not None),
            is_random,
        )

    def clear(self) -> None:
        """Let go of the tensors."""
        self._watched.clear()


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often `tensor` was written to; None for an inference tensor."""
    return None if tensor.is_inference() else version_counter_of(tensor)
