"""Shrink a program and its inputs while an oracle goes on saying that they are bad.

The search asks for a smallest set of nodes: the shortest bad prefix of the nodes ends with one that
is needed; with that one kept, the same question is asked of those before it. Each answer takes a
binary search, so that k needed nodes of n cost about k (log2 n + 2) calls of the oracle; results,
bypasses and inputs are reduced by the same search over what is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from fxkit.analysis.observation import clone_inputs
from fxkit.analysis.reproducing.flat_program import flat_program
from fxkit.analysis.reproducing.reduced_inputs import (
    is_same,
    plainer_values,
    sizes_of,
    smaller_sizes,
)
from fxkit.analysis.reproducing.reproducer import Script, code_of
from fxkit.analysis.reproducing.subprogram import (
    LAST,
    LEAVES,
    WHOLE,
    SubprogramRecording,
    bypassed,
    with_outputs,
    without_unused_inputs,
)
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.ir.printer import format_graph
from fxkit.ir.types import set_type, type_of_value

T = TypeVar("T")
Program = tuple[fx.GraphModule, tuple[Any, ...]]
Oracle = Callable[[fx.GraphModule, tuple[Any, ...]], Any]

# Rounds of nodes, then inputs: what smaller inputs made superfluous goes in the second.
_ROUNDS = 2


@dataclass(frozen=True)
class Minified:
    """A small program for which the oracle says bad.

    Attributes:
        graph_module: The program; it takes one argument for each placeholder.
        args: Its inputs.
        bad: The oracle.
        calls: How often the oracle was asked.
        raised: How many of these times it raised; such a program counts as good.
        nodes_before: Number of nodes of the program it was made from.
    """

    graph_module: fx.GraphModule
    args: tuple[Any, ...]
    bad: Oracle
    calls: int
    raised: int
    nodes_before: int

    @property
    def nodes(self) -> int:
        """Number of nodes, inputs and output included."""
        return len(self.graph_module.graph.nodes)

    @property
    def code(self) -> str:
        """A script that makes the program and its inputs and asks the oracle, as text.

        An oracle that can't be written by its source is left out: the script runs the program.
        """
        try:
            return code_of(self.graph_module, self.args, check=self.bad)
        except UnsupportedError:
            return code_of(self.graph_module, self.args)

    def save(self, folder: str | Path) -> Path:
        """Write that script with its data; see `write_reproducer`. Return the script's path."""
        script = Script(f"{self.nodes} of {self.nodes_before} nodes")
        script.add_program(self.graph_module, self.args)
        try:
            script.set_check(self.bad)
        except UnsupportedError as error:
            script = Script(f"the oracle is not here: {error.message}")
            script.add_program(self.graph_module, self.args)
            script.set_check(None)
        return script.save(Path(folder))

    def __str__(self) -> str:
        return (
            f"{self.nodes_before} -> {self.nodes} nodes in {self.calls} calls of the oracle\n"
            f"{format_graph(self.graph_module)}"
        )


def minify(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    bad: Oracle,
    kwargs: Mapping[str, Any] | None = None,
) -> Minified:
    """Shrink a program and its inputs to a few nodes for which an oracle still says bad.

    Nodes are left out, their values becoming inputs as they were in one run; results are left out;
    nodes are bypassed; inputs of one type become one; then sizes and numbers are made smaller. Of
    what is left, no node can go by itself.

    Args:
        gm: The program; neither it nor the inputs are changed.
        args: Its inputs.
        bad: `bad(gm, args)` is True when the fault is there. It gets copies of the module and the
            inputs, and the random numbers of the start, each time. The inputs are one for each
            placeholder. It should look at whatever the program returns, a tensor or several: then
            results can be left out. When it raises, the program counts as good.
        kwargs: Keyword inputs.

    Returns:
        The small program; `.code` and `.save(folder)` make it a script.

    Raises:
        NumericsError: When the oracle says good of the program itself, or raises there.
        UnsupportedError: When `gm` is no `GraphModule`.

    Cost: for k nodes needed of n, about k (log2 n + 2) calls, then some 10 for each tensor that is
    left. The values of all nodes are in memory once.

    Example:
        >>> import torch, fxkit
        >>> from fxkit.torch_adapters.pytree import tree_leaves
        >>> gm = fxkit.symbolic_trace(lambda x: torch.exp(torch.log(x.cos() - 2).tanh()) * 3)
        >>> def has_nan(gm, args):
        ...     return any(value.isnan().any() for value in tree_leaves(gm(*args)))
        >>> small = fxkit.testing.minify(gm, (torch.ones(4, 8),), has_nan)
        >>> small.nodes
        3
    """
    flat, values = flat_program(gm, args, kwargs)
    asked = CountedOracle(bad)
    program = (flat, values)
    if not asked.answer(program, "the whole program"):
        raise NumericsError(
            "expected the oracle to say bad of the whole program, got good",
            hint="it takes (gm, args) and returns True when the fault is there",
        )
    form = _form_of(program, asked)
    for _ in range(_ROUNDS):
        before = len(program[0].graph.nodes)
        program = _fewer_nodes(program, form, asked)
        program = _fewer_results(program, form, asked)
        program = _fewer_steps(program, asked)
        program = _fewer_inputs(program, asked)
        program = _smaller(program, asked)
        if len(program[0].graph.nodes) == before:
            break
    program = _plainer(program, asked)
    _record_types(program)
    return Minified(*program, bad, asked.calls, asked.raised, len(gm.graph.nodes))


def _record_types(program: Program) -> None:
    """Record the types that the values have now, for whoever reads the graph."""
    for node, value in SubprogramRecording.of(*program).values.items():
        set_type(node, type_of_value(value))


class CountedOracle:
    """An oracle that is asked of copies, with the random numbers of the start, and counted.

    Args:
        bad: `bad(gm, args)`.

    Attributes:
        calls: How often it was asked.
        raised: How often it raised where that counts as good.
    """

    def __init__(self, bad: Oracle) -> None:
        self.bad = bad
        self.calls = 0
        self.raised = 0
        self._generator = torch.random.get_rng_state()

    def answer(self, program: Program, of: str) -> bool:
        """Tell whether a program is bad.

        Raises:
            NumericsError: When the oracle raises.
        """
        try:
            return self._ask(program)
        except Exception as error:
            raise NumericsError(
                f"expected the oracle to answer for {of}, got {type(error).__name__}: {error}",
                hint="let it catch what the fault raises, and return True",
            ) from error

    def __call__(self, program: Program | None) -> bool:
        """Tell whether a program is bad; None, and one at which the oracle raises, is not."""
        if program is None:
            return False
        try:
            return self._ask(program)
        except Exception:  # the oracle's, of a program that the reduction broke: counted
            self.raised += 1
            return False

    def _ask(self, program: Program) -> bool:
        self.calls += 1
        gm, args = program
        kept = torch.random.get_rng_state()
        torch.random.set_rng_state(self._generator)
        try:
            return bool(self.bad(_quiet_copy(gm), clone_inputs(args)))
        finally:
            torch.random.set_rng_state(kept)


def _quiet_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a module; a call of the copy does not write to stderr what it raises."""
    copied = copy.deepcopy(gm)
    type(copied).__call__ = torch.nn.Module.__call__  # each graph module has a class of its own
    return copied


def smallest_set(items: Sequence[T], is_bad: Callable[[list[T]], bool]) -> list[T]:
    """Return a small subset of items that is bad; all of them together are.

    When every superset of a bad set is bad too, no item of the result can be left out, and its k
    items of n cost at most k (log2 n + 2) calls.

    Args:
        items: The items, in order.
        is_bad: Tells of some of them, in their order, whether they are bad.
    """
    place = {id(item): index for index, item in enumerate(items)}

    def ordered(chosen: Iterable[T]) -> list[T]:
        return sorted(chosen, key=lambda item: place[id(item)])

    needed: list[T] = []
    left = list(items)
    while left and not is_bad(ordered(needed)):
        low, high = 1, len(left)
        while low < high:
            middle = (low + high) // 2
            if is_bad(ordered([*left[:middle], *needed])):
                high = middle
            else:
                low = middle + 1
        needed.append(left[high - 1])
        left = left[: high - 1]
    return ordered(needed)


def _form_of(program: Program, asked: CountedOracle) -> str:
    """Find out which results the oracle can take: any leaves, one tensor, or only the program's."""
    gm, _ = program
    output = next(iter(reversed(gm.graph.nodes))).args[0]
    returned = next(iter(reversed(gm.graph.nodes))).all_input_nodes
    leaves = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    leaves.graph_copy(gm.graph, copies)
    leaves.output(tuple(copies[node] for node in returned))
    if asked((fx.GraphModule(gm, leaves), program[1])):
        return LEAVES
    return LAST if isinstance(output, fx.Node) else WHOLE


def _fewer_nodes(program: Program, form: str, asked: CountedOracle) -> Program:
    """Leave out nodes; what others take from them becomes input."""
    recording = SubprogramRecording.of(*program)
    nodes = recording.computed

    def is_bad(kept: Collection[fx.Node]) -> bool:
        return asked(recording.part(kept, form))

    if not is_bad(nodes):
        return program
    needed = smallest_set(nodes, is_bad)
    for node in list(needed):
        fewer = [n for n in needed if n is not node]
        if len(needed) > 1 and is_bad(fewer):
            needed = fewer
    return recording.part(needed, form) or program


def _fewer_results(program: Program, form: str, asked: CountedOracle) -> Program:
    """Leave out results that the oracle does not need."""
    gm, args = program
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    if form != LEAVES or not isinstance(results, tuple) or len(results) < 2:
        return program

    def made(kept: Collection[int]) -> Program:
        return without_unused_inputs(with_outputs(gm, kept), args)

    kept = smallest_set(list(range(len(results))), lambda some: bool(some) and asked(made(some)))
    return made(kept) if kept else program


def _fewer_steps(program: Program, asked: CountedOracle) -> Program:
    """Let users of a node take an operand of the same type instead."""
    gm, args = program
    instead = _same_typed_operands(SubprogramRecording.of(gm, args))

    def made(kept: Collection[fx.Node]) -> Program:
        gone = {node: o for node, o in instead.items() if node not in kept}
        return without_unused_inputs(bypassed(gm, gone), args)

    if not instead:
        return program
    kept = smallest_set(list(instead), lambda some: asked(made(some)))
    return made(kept) if len(kept) < len(instead) else program


def _fewer_inputs(program: Program, asked: CountedOracle) -> Program:
    """Let inputs of the same type be one."""
    gm, args = program
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first: dict[str, fx.Node] = {}
    instead = {}
    for node, value in zip(inputs, args, strict=True):
        earlier = first.setdefault(repr(type_of_value(value)), node)
        if earlier is not node:
            instead[node] = earlier

    def made(kept: Collection[fx.Node]) -> Program:
        gone = {node: o for node, o in instead.items() if node not in kept}
        values = [v for node, v in zip(inputs, args, strict=True) if node not in gone]
        return without_unused_inputs(bypassed(gm, gone), tuple(values))

    if not instead:
        return program
    kept = smallest_set(list(instead), lambda some: asked(made(some)))
    return made(kept) if len(kept) < len(instead) else program


def _same_typed_operands(recording: SubprogramRecording) -> dict[fx.Node, fx.Node]:
    """Return node → an operand whose value has the same type."""
    found: dict[fx.Node, fx.Node] = {}
    for node in recording.computed:
        if node not in recording.values or node.op == "get_attr":
            continue
        own = repr(type_of_value(recording.values[node]))
        for operand in node.all_input_nodes:
            if repr(type_of_value(recording.values.get(operand))) == own:
                found[node] = operand
                break
    return found


def _smaller(program: Program, asked: CountedOracle) -> Program:
    """Make sizes of axes smaller, the largest first, each as often as it goes."""
    sizes = sizes_of(program)
    while sizes:
        size = sizes.pop(0)
        for smaller, step in smaller_sizes(program, size):
            made = _tried(step)
            if asked(made) and made is not None:
                program = made
                sizes.insert(0, smaller)
                break
    return program


def _plainer(program: Program, asked: CountedOracle) -> Program:
    """Take each step towards plainer numbers after which the program is still bad."""
    for step in list(plainer_values(program)):
        made = _tried(lambda p=program, step=step: step(p))
        if made is not None and not is_same(program, made) and asked(made):
            program = made
    return program


def _tried(step: Callable[[], Program]) -> Program | None:
    try:
        return step()
    except (RuntimeError, ValueError, TypeError):  # it does not fit these tensors
        return None
