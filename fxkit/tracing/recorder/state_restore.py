"""Restore state: tensors, random generators, Python containers and attributes.

Tensors are copied before they are written to: by a graph, before a value guard of it may fail, and
by a program that runs again. Most graphs write to nothing before their last guard, and need none of
this; what they write to is known from when they were captured. What a run has changed of Python
state is known once it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxkit.analysis.observation import overlaps
from fxkit.ir.modes import without_modes
from fxkit.torch_adapters.autograd_state import set_version
from fxkit.torch_adapters.tensors import version_counter_of
from fxkit.tracing.guarding import state_containers as h
from fxkit.tracing.values.contents import Content, content_of

Entries = list[tuple[h.GuardedContainer, dict[Any, Any]]]
"""What holds values, and the values that it held at some time."""


@dataclass(frozen=True, slots=True)
class Mutations:
    """What a graph changes, and so what has to be copied to be able to take it back.

    Attributes:
        leaves: Indices of the tensor arguments that are written to.
        outside: Names of the attributes of the graph module that are written to.
        is_random: Whether random numbers are drawn.
    """

    leaves: tuple[int, ...] = ()
    outside: tuple[str, ...] = ()
    is_random: bool = False

    def __bool__(self) -> bool:
        return bool(self.leaves or self.outside or self.is_random)


@dataclass(frozen=True, slots=True)
class _Saved:
    tensor: torch.Tensor
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    content: torch.Tensor
    version: int | None


class MemorySnapshot:
    """A copy of tensors and of torch's random state.

    Args:
        tensors: The tensors to copy, with the whole of the memory that each of them spans. Those
            whose elements share memory, as an expanded one's do, torch lets no one write to.
        is_random: Whether to keep the states of torch's random generators.
    """

    def __init__(self, tensors: list[torch.Tensor], is_random: bool) -> None:
        self._saved = [_save(tensor) for tensor in tensors if not overlaps(tensor)]
        self._random = random_states() if is_random else None

    def restore(self) -> None:
        """Put everything back, version counters included."""
        for saved in self._saved:
            with torch.inference_mode(saved.tensor.is_inference()), torch.no_grad():
                if _geometry(saved.tensor) != saved.geometry:
                    saved.tensor.as_strided_(*saved.geometry)
                saved.tensor.detach().copy_(saved.content)
            if saved.version is not None:
                set_version(saved.tensor, saved.version)
        if self._random is not None:
            set_random_states(self._random)

    def restore_if_changed(self) -> None:
        """Put back what has changed, seen by version counters or not."""
        for saved in self._saved:
            same_version = (
                saved.version is None or version_counter_of(saved.tensor) == saved.version
            )
            same = same_version and _geometry(saved.tensor) == saved.geometry
            if not same or not torch.equal(saved.tensor.detach(), saved.content):
                self.restore()
                return


def _save(tensor: torch.Tensor) -> _Saved:
    version = None if tensor.is_inference() else version_counter_of(tensor)
    with torch.no_grad():
        return _Saved(tensor, _geometry(tensor), tensor.detach().clone(), version)


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def random_states() -> list[torch.Tensor]:
    """Return the states of torch's default generators: the CPU's, then that of each CUDA device."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += [generator.get_state() for generator in torch.cuda.default_generators]
    return states


def set_random_states(states: list[torch.Tensor]) -> None:
    """Put the default generators into these states."""
    torch.default_generator.set_state(states[0])
    for generator, state in zip(torch.cuda.default_generators, states[1:], strict=False):
        generator.set_state(state)


def same_random_states(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Tell whether two results of `random_states` are the same; no mode sees that it is asked."""
    with without_modes(), torch.DisableTorchFunction():
        return len(some) == len(others) and all(map(torch.equal, some, others))


class Rewind:
    """What one run has changed of Python state and of its arguments.

    Args:
        before: What held values that were changed, and what it held before the run.
        containers: Argument containers that were changed, and their content before the run.
    """

    def __init__(self, before: Entries, containers: list[tuple[Any, Content]]) -> None:
        self._before = before
        self._after = [(holder, holder.read()) for holder, _ in before]
        self._containers = containers
        self._containers_after = [
            (container, content)
            for container, _ in containers
            if (content := content_of(container)) is not None
        ]

    def to_before(self) -> None:
        """Let everything be as it was before the run."""
        _put_back(self._before)
        _fill(self._containers)

    def to_after(self) -> None:
        """Let everything be as the run has left it."""
        _put_back(self._after)
        _fill(self._containers_after)


def _put_back(entries: Entries) -> None:
    """Let holders hold what they held."""
    for holder, wanted in entries:
        now = holder.read()
        changes = {
            key: wanted.get(key, h.ABSENT)
            for key in {**now, **wanted}
            if now.get(key, h.ABSENT) is not wanted.get(key, h.ABSENT)
        }
        if changes or list(now) != list(wanted):
            holder.write(changes, wanted)


def _fill(contents: list[tuple[Any, Content]]) -> None:
    for container, content in contents:
        if content.fill is not None:
            content.fill(container, content.values)
