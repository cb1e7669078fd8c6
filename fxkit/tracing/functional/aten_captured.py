"""Mode `aten`: a captured program as functional ATen, forward alone or forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.ir.program_changes import belongs_to
from fxkit.tracing.captured import Captured
from fxkit.tracing.changed_program import ChangedProgram
from fxkit.tracing.functional.aot_autograd import Decompositions
from fxkit.tracing.functional.functional_program import FunctionalProgram
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.values.refusals import Refusal


class AtenCaptured(Captured):
    """A captured program whose graphs are functional ATen; made by `capture(mode="aten")`.

    Guards, recaptures and everything around the graphs are those of mode `whole`.

    Args:
        fn: The program.
        train: Whether to differentiate it.
        decompositions: Operator of ATen → function that computes it by others.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        train: bool = False,
        decompositions: Decompositions | None = None,
    ) -> None:
        super().__init__(fn, backend=self._functional, dynamic=False)
        self._options = {"train": train, "decompositions": decompositions}
        self._train = train
        self._decompositions = decompositions
        self._gradients = _Gradients(self)

    @property
    def is_altered(self) -> bool:
        """Whether a change of the graph, or of that of the gradients, may give other results."""
        return super().is_altered or self._gradients.is_altered

    def _changed_graph(self, guarded: GuardedGraph) -> fx.GraphModule:
        return _program_of(guarded).forward

    def _keep_variant(self, kept: GuardedGraph) -> None:
        super()._keep_variant(kept)
        kept.is_stale = False
        _program_of(kept).is_altered = True

    def _make(
        self, guarded: GuardedGraph, inputs: tuple[torch.Tensor, ...], args: tuple[Any, ...] | None
    ) -> None:
        guarded.run = program = self._functional(guarded.graph_module, inputs)
        self.change_again(program.forward, args and program.inputs(args))
        program.is_altered = self.is_altered
        if program.backward is not None:
            self._gradients.change_again(program.backward, None)
            belongs_to(program.backward, self._gradients)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The functional graph that ran or was captured last.

        It takes the tensors among the arguments, then parameters, buffers and other tensors of the
        program. With a backward it gives, behind what the program computes, what that keeps.
        """
        return self._program.forward

    @property
    def backward_module(self) -> fx.GraphModule | None:
        """The graph of the gradients: takes what the forward kept, and tangents of the results.

        None where the program was not captured with `train=True`, or nothing asks for a gradient.
        """
        return self._program.backward

    def module(self) -> fx.GraphModule:
        """Return the program as a module of its own, with the parameters that it reads.

        As `torch.export.ExportedProgram.module`: parameters and buffers are those of the program,
        what it writes is written by `copy_` at the end, and results that are views are taken
        there. It takes the tensors among the arguments, in order, and holds for calls like the one
        that was captured last: guards on the arguments are not checked.

        Returns:
            A new graph module. Passes may change it, and it may be copied and saved.

        Example:
            >>> import torch, fxkit
            >>> layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
            >>> gm = fxkit.capture(layer, (x,), mode="aten").module()
            >>> torch.equal(gm(x), layer(x))
            True
        """
        return self._program.module()

    def graph_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Return what `graph_module` takes for a call: tensors, then those of the program.

        Args:
            args: Arguments of the program.
            kwargs: Its keyword arguments.
        """
        return (*super().graph_inputs(args, kwargs), *self._program.tensors)

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the tensors that the graph takes behind the arguments."""
        return self._program.attributes

    @property
    def _program(self) -> FunctionalProgram:
        return _program_of(self._latest())

    def _functional(self, gm: fx.GraphModule, args: tuple[torch.Tensor, ...]) -> FunctionalProgram:
        train = self._train and torch.is_grad_enabled()
        try:
            return FunctionalProgram(gm, args, self._decompositions, train=train)
        except Refusal as refusal:
            raise Refusal(f"it has no functional form: {refusal.reason}", refusal.hint) from refusal


class _Gradients(ChangedProgram):
    """The graphs of the gradients of a captured program, and what was applied to them."""

    def __init__(self, captured: AtenCaptured) -> None:
        super().__init__()
        self._captured = weakref.ref(captured)

    def _keep_only(self, gm: fx.GraphModule) -> bool:
        captured = self._captured()
        return captured is not None and captured.keep_where(
            lambda guarded: _program_of(guarded).backward is gm
        )


def _program_of(guarded: GuardedGraph) -> FunctionalProgram:
    assert isinstance(guarded.run, FunctionalProgram)
    return guarded.run
