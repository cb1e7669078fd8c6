"""Parts of a program that run alone: what they take from the rest is recorded and becomes input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import effects_of
from fxkit.analysis.observation import clone_inputs
from fxkit.torch_adapters import pytree

# What a part returns: the leaves that are used outside of it, only the last of them, or what the
# whole program returned, with inputs in the place of what the part does not compute.
LEAVES, LAST, WHOLE = "leaves", "last", "whole"


@dataclass
class SubprogramRecording:
    """A program with the value of each of its nodes in one run.

    Attributes:
        gm: The program; called with one argument for each placeholder.
        values: Node → value. After an exception, the nodes before it.
    """

    gm: fx.GraphModule
    values: dict[fx.Node, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: fx.GraphModule, args: tuple[Any, ...]) -> SubprogramRecording:
        """Run a program on copies of inputs. Cost: the memory of all of its values."""
        recording = cls(gm)
        generator = torch.random.get_rng_state()
        try:
            _Recorder(recording).run(*clone_inputs(args), enable_io_processing=False)
        except Exception:  # the program's own: what was computed before it is recorded
            return recording
        finally:
            torch.random.set_rng_state(generator)
        return recording

    @property
    def computed(self) -> list[fx.Node]:
        """The nodes that compute or read something, in order."""
        return [n for n in self.gm.graph.nodes if n.op not in ("placeholder", "output")]

    def part(
        self, kept: Iterable[fx.Node], form: str
    ) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
        """Return a module that computes some of the nodes, and its inputs.

        Args:
            kept: The nodes to compute; the values of others are inputs where they are needed.
            form: `LEAVES`, `LAST` or `WHOLE`.

        Returns:
            None when a value that it needs was not recorded, or there is nothing to return.
        """
        members = set(kept)
        order = [n for n in self.gm.graph.nodes if n in members]
        output = next(iter(reversed(self.gm.graph.nodes)))
        users = [*order, output] if form == WHOLE else order
        taken = {operand for node in users for operand in node.all_input_nodes} - members
        if any(node not in self.values for node in taken):
            return None
        inputs = [n for n in self.gm.graph.nodes if n in taken]
        results = None if form == WHOLE else self._results(order, members, form)
        if results == []:
            return None
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        for node in inputs:
            copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        for node in order:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if results is None:
            graph.output(map_arg(output.args[0], copies.__getitem__))
        else:
            made = tuple(copies[node] for node in results)
            graph.output(made[0] if form == LAST else made)
        module = fx.GraphModule(self.gm, graph)
        module.training = self.gm.training
        return module, tuple(self.values[node] for node in inputs)

    def _results(
        self, order: list[fx.Node], members: Collection[fx.Node], form: str
    ) -> list[fx.Node]:
        """Return the members whose value somebody outside takes, or nobody at all.

        Of values that were recorded, those without a tensor in them are left out.
        """
        found = [
            n for n in order
            if n.op != "get_attr" and (not n.users or any(u not in members for u in n.users))
            and (n not in self.values or _holds_tensor(self.values[n]))
        ]  # fmt: skip
        return found[-1:] if form == LAST else found


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value, as it was before anyone wrote to it."""

    def __init__(self, recording: SubprogramRecording) -> None:
        super().__init__(recording.gm, garbage_collect_values=False)
        self.extra_traceback = False
        self._values = recording.values
        self._is_written = any(effects_of(n).writes for n in recording.gm.graph.nodes)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            self._values[n] = clone_inputs(_detached(result)) if self._is_written else result
        return result


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value
    )


def with_outputs(gm: fx.GraphModule, kept: Collection[int]) -> fx.GraphModule:
    """Return a copy of a module that returns only the results at these positions."""
    return _copied(gm, results=lambda values: tuple(values[i] for i in sorted(kept)))


def bypassed(gm: fx.GraphModule, instead: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """Return a copy of a module in which the users of some nodes take other nodes."""
    return _copied(gm, instead=instead)


def _copied(
    gm: fx.GraphModule,
    instead: dict[fx.Node, fx.Node] | None = None,
    results: Callable[[Any], Any] = lambda values: values,
) -> fx.GraphModule:
    instead = instead or {}
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(results(map_arg(node.args[0], copies.__getitem__)))
        elif node in instead:
            copies[node] = copies[instead[node]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    _drop_dead(graph)
    module = fx.GraphModule(gm, graph)
    module.training = gm.training
    return module


def _drop_dead(graph: fx.Graph) -> None:
    """Erase pure nodes that nobody uses; the graph belongs to no module yet."""
    for node in reversed(list(graph.nodes)):
        is_kept = node.op in ("placeholder", "output", "call_module")
        if not node.users and not is_kept and effects_of(node).is_pure:
            graph.erase_node(node)


def without_unused_inputs(
    gm: fx.GraphModule, args: tuple[Any, ...]
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Return a module, changed in place, without the placeholders that nobody uses."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    kept = []
    for node, value in zip(inputs, args, strict=True):
        if node.users:
            kept.append(value)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm, tuple(kept)
