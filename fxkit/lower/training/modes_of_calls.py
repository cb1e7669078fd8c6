"""The modes that calls of a graph run in, so that each can be had where a call is moved to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxkit.torch_adapters.grad_modes import enter_autocast, exit_autocast, set_grad_enabled

_SET_GRAD = set_grad_enabled
_ENTER = enter_autocast
_EXIT = exit_autocast


@dataclass(frozen=True)
class Mode:
    """What a graph has set around a call; nothing is set where it begins, and where it ends.

    Attributes:
        is_followed: Whether autograd follows the call.
        autocasts: The calls that have entered the autocast regions around it, the outer ones first.
    """

    is_followed: bool = True
    autocasts: tuple[fx.Node, ...] = ()


def modes_of(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """Return the mode that each node of a graph runs in."""
    modes: dict[fx.Node, Mode] = {}
    mode = Mode()
    for node in graph.nodes:
        if node.target is _SET_GRAD:
            mode = Mode(bool(node.args[0]), mode.autocasts)
        elif node.target is _ENTER:
            mode = Mode(mode.is_followed, (*mode.autocasts, node))
        elif node.target is _EXIT:
            left = tuple(it for it in mode.autocasts if it is not node.args[0])
            mode = Mode(mode.is_followed, left)
        modes[node] = mode
    return modes


class ModeSetter:
    """Sets modes at the end of a graph that is being made.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._mode = Mode()
        self._entered: list[fx.Node] = []

    def switch(self, mode: Mode) -> None:
        """Let what is appended from now on run in a mode."""
        before, after = self._mode.autocasts, mode.autocasts
        shared = 0
        while before[shared : shared + 1] and before[: shared + 1] == after[: shared + 1]:
            shared += 1
        for entered in reversed(self._entered[shared:]):
            self._graph.call_function(_EXIT, (entered,))
        del self._entered[shared:]
        self._entered += [self._graph.call_function(_ENTER, it.args) for it in after[shared:]]
        if mode.is_followed is not self._mode.is_followed:
            self._graph.call_function(_SET_GRAD, (mode.is_followed,))
        self._mode = mode
