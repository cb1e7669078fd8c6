"""Gradient, inference and autocast regions: modes that ordinary torch calls don't show.

Entering `torch.autocast` or `torch.inference_mode` reaches no function mode. The recorder therefore
reads the state at each call and, when it differs from the state that the graph is in, writes the
nodes that change it, in the spelling that `torch.export` uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fxkit.torch_adapters.grad_modes import (
    InferenceMode,
    enter_autocast,
    enter_inference_mode,
    exit_autocast,
    exit_inference_mode,
    is_any_autocast_enabled,
    set_grad_enabled,
)

_DEVICES = ("cpu", "cuda")

Autocast = tuple[Any, ...] | None


class Ambient(NamedTuple):
    """The interpreter's modes that decide what a torch call does.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: None outside of all autocast regions, else `(enabled, dtype)` for each device and
            whether casts are cached. A region that turns autocast off inside of another one is not
            None: the casts that the outer one has cached stay.
    """

    grad: bool
    inference: bool
    autocast: Autocast

    def __str__(self) -> str:
        parts = [f"grad {'on' if self.grad else 'off'}"]
        if self.inference:
            parts.append("inference mode")
        for device, setting in zip(_DEVICES, self.autocast or (), strict=False):
            if setting[0]:
                parts.append(f"autocast {device} to {setting[1]}")
        return ", ".join(parts)


def read_ambient() -> Ambient:
    """Return the modes that are in force in this thread."""
    autocast = None
    if is_any_autocast_enabled() or _autocast_nesting():
        autocast = (
            *(
                (True, torch.get_autocast_dtype(device))
                if torch.is_autocast_enabled(device)
                else (False, None)
                for device in _DEVICES
            ),
            torch.is_autocast_cache_enabled(),
        )
    return Ambient(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def _autocast_nesting() -> int:
    """Return in how many autocast regions this thread is."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


@dataclass(slots=True)
class _Level:
    inference: bool
    autocast: Autocast
    leave: Callable[..., Any] | None
    entered: fx.Node | None
    grad_before: bool


class Regions:
    """Keeps the modes of a graph that is being recorded in step with those of the program.

    Args:
        emit: Appends a `call_function` node with this target and these arguments to the graph.
        entry: The modes in which the graph is entered.
    """

    def __init__(
        self, emit: Callable[[Callable[..., Any], tuple[Any, ...]], fx.Node], entry: Ambient
    ) -> None:
        self._emit = emit
        self.state = entry
        self.has_changed = False
        self._levels = [_Level(entry.inference, entry.autocast, None, None, entry.grad)]

    def follow(self, wanted: Ambient) -> None:
        """Write the nodes that bring the graph from the modes that it is in to `wanted`."""
        self.has_changed = True
        grad = self.state.grad
        inside = (wanted.inference, wanted.autocast)
        if inside != (self._levels[-1].inference, self._levels[-1].autocast):
            grad = self._move(wanted, grad)
        if grad != wanted.grad:
            self._emit(set_grad_enabled, (wanted.grad,))
        self.state = wanted

    def _move(self, wanted: Ambient, grad: bool) -> bool:
        depth = next(
            (
                depth
                for depth in reversed(range(len(self._levels)))
                if (self._levels[depth].inference, self._levels[depth].autocast)
                == (wanted.inference, wanted.autocast)
            ),
            None,
        )
        if depth is not None:
            return self._leave_to(depth, grad)
        if wanted.inference != self._levels[-1].inference:
            grad = self._enter_inference(wanted.inference, grad)
        self._enter_autocast(wanted.autocast, grad)
        return grad

    def _leave_to(self, depth: int, grad: bool) -> bool:
        while len(self._levels) > depth + 1:
            level = self._levels.pop()
            if level.leave is None:
                continue
            self._emit(level.leave, (level.entered,))
            if level.leave is exit_inference_mode:
                grad = level.grad_before
        return grad

    def _enter_inference(self, on: bool, grad: bool) -> bool:
        node = self._emit(enter_inference_mode, (on,))
        level = _Level(on, self._levels[-1].autocast, exit_inference_mode, node, grad)
        self._levels.append(level)
        return not on

    def _enter_autocast(self, wanted: Autocast, grad: bool) -> None:
        around = self._levels[-1]
        if wanted == around.autocast:
            return
        off = ((False, None),) * len(_DEVICES) + (True,)
        before, after = around.autocast or off, wanted or off
        cached = after[-1]
        for device, old, new in zip(_DEVICES, before[:-1], after[:-1], strict=True):
            if old == new and (before[-1] == cached or not new[0]):
                continue
            node = self._emit(enter_autocast, (device, new[1], new[0], cached))
            level = _Level(around.inference, ("partly", device), exit_autocast, node, grad)
            self._levels.append(level)
        self._levels[-1].autocast = wanted


@dataclass(frozen=True, slots=True)
class RegionModes:
    """A snapshot of this thread's modes, to return to when a call raises inside a region."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    nesting: int

    @classmethod
    def now(cls) -> RegionModes:
        """Take the snapshot."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _DEVICES
            ),
            torch.is_autocast_cache_enabled(),
            _autocast_nesting(),
        )

    def restore(self, error: BaseException) -> None:
        """Put the modes back as they were, leaving the regions that `error` broke out of."""
        _leave_inference_regions(error)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        nesting = torch.autocast_increment_nesting()
        while nesting > self.nesting:
            nesting = torch.autocast_decrement_nesting()
        if nesting == 0:
            torch.clear_autocast_cache()
        set_grad_enabled(self.grad)


def _leave_inference_regions(error: BaseException) -> None:
    """Close inference regions that are open: the frames of generated code still hold them."""
    trace = error.__traceback__
    held: list[Any] = []
    while trace is not None:
        values = trace.tb_frame.f_locals.values() if _is_generated(trace.tb_frame) else ()
        held += [value for value in values if isinstance(value, InferenceMode)]
        trace = trace.tb_next
    for mode in reversed(held):
        exit_inference_mode(mode)


def _is_generated(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith("<eval_with_key>")
