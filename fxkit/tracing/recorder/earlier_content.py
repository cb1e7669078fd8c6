"""Tensor contents before a run that may have to be undone as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from fxkit.torch_adapters import pytree
from fxkit.tracing.guarding.aliasing_guards import storage_key
from fxkit.tracing.recorder.calls import spelling_of
from fxkit.tracing.recorder.state_restore import MemorySnapshot


class EarlierContent:
    """What tensors held before a program wrote to them, to be able to take a whole run back.

    What a program is going to write to is not known: whatever a call may write to is copied before
    its first such call. Inference tensors count no versions, so that nothing tells whether they
    were written to: they are copied before the first call that takes them.

    Args:
        arguments: The tensors that the program is given.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        self._snapshots: list[MemorySnapshot] = [MemorySnapshot([], is_random=True)]
        self._seen: set[tuple[Any, ...]] = set()
        self._followed = [(tensor, tensor.grad_fn) for tensor in arguments]

    def see(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_made: Callable[[torch.Tensor], bool],
    ) -> None:
        """Copy what a call may write to.

        Args:
            func: What is called.
            args: What it is given.
            kwargs: What it is given by keyword.
            is_made: Whether a tensor has been made by the program, so that nobody else has it.
        """
        may_write = _may_write(func, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            if is_dense and (may_write or leaf.is_inference()) and not is_made(leaf):
                self._keep(leaf)

    def _keep(self, tensor: torch.Tensor) -> None:
        key = (storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(),
               tensor.storage_offset())  # fmt: skip
        if key not in self._seen:
            self._seen.add(key)
            self._snapshots.append(MemorySnapshot([tensor], is_random=False))

    def objection(self, written: Iterable[torch.Tensor]) -> str | None:
        """Return why a run can't be taken back, or None.

        Args:
            written: The tensors from outside of the program that it has written to.
        """
        followed = {id(tensor): grad_fn for tensor, grad_fn in self._followed}
        storages = {key[0] for key in self._seen}
        for tensor in written:
            if tensor.grad_fn is not followed.get(id(tensor)):
                return "autograd follows what it writes to, and would follow it twice"
            if storage_key(tensor) not in storages and not tensor.is_inference():
                return "it writes to a tensor by other means than a call of torch"
        return None

    def restore(self) -> None:
        """Put everything back, the copies that were made first last."""
        for snapshot in reversed(self._snapshots):
            snapshot.restore()


_ASSIGNING = frozenset({"__set__", "__setitem__"})


def _may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call may write to what it is given, as far as its name or kind tells."""
    spelling = spelling_of(func)
    if isinstance(func, FunctionType) or spelling.may_write_unseen or spelling.writes_in_training:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _ASSIGNING or name.startswith("__i")
    return name.endswith("_") or "out" in kwargs
