"""Counterexamples to a rule: found on inputs, shrunk, and written as a script."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import assert_equivalent
from fxkit.analysis.observation import clone_inputs, quiet
from fxkit.analysis.reproducing.reduction import minify
from fxkit.analysis.reproducing.reproducer import Script
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import CounterexampleError, FxkitError, NumericsError, UnsupportedError
from fxkit.ir.printer import format_graph, format_value
from fxkit.ir.types import TensorType
from fxkit.patterns.engine import rewrite
from fxkit.patterns.reasons import explain
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rule_code import APPLY_RULE, rule_code
from fxkit.torch_adapters.fx_nodes import rename_node

# Where and how results may differ, by the parts of the message that tell it.
_PLACES = ("outputs", "arguments", "gradients")
_KINDS = ("it raises", "of type", "to equal in the signs", "to equal", "error of", "to be", "form")

_COMPARE = """
from fxkit.testing import assert_equivalent
assert_equivalent(program, rewritten, args, exact={exact})
""".strip()

_RAISED = (RuntimeError, TypeError, IndexError, ValueError)


def tried(rule: Rule, gm: fx.GraphModule, args: tuple[Any, ...]) -> tuple[bool, str | None]:
    """Rewrite a program by a rule, once, and compare.

    Args:
        rule: The rule.
        gm: The program; it is not changed.
        args: Its inputs.

    Returns:
        Whether the program runs and the rule accepted it, and how the results differ, or None.
    """
    rewritten = _rewritten(rule, gm, args)
    if rewritten is None:
        return False, None
    try:
        assert_equivalent(gm, rewritten, args, exact=rule.exact)
    except NumericsError as error:
        return True, error.message
    except _RAISED as error:
        return True, f"it raises {error}"
    return True, None


def why_refused(rule: Rule, gm: fx.GraphModule, args: tuple[Any, ...]) -> str:
    """Return why a rule did not accept a program: what the program raises, or what stopped it."""
    try:
        quiet(gm)(*clone_inputs(args))
        typed = copy.deepcopy(gm)
        propagate_types(typed, args)
    except (*_RAISED, FxkitError) as error:
        return f"the operators do not take such operands: {str(error).splitlines()[0]}"
    told = explain(typed, rule)
    if told.miss is not None:
        return f"expected {told.miss.expected}, got {told.miss.got}"
    return told.reason.splitlines()[0]


def _rewritten(rule: Rule, gm: fx.GraphModule, args: tuple[Any, ...]) -> fx.GraphModule | None:
    """Return a copy of a program that the rule has rewritten; None when it does not."""
    try:
        quiet(gm)(*clone_inputs(args))
        rewritten = copy.deepcopy(gm)
        propagate_types(rewritten, args)
    except (*_RAISED, FxkitError):
        return None
    return rewritten if rewrite(rewritten, rule, limit=1).count else None


def counterexample(
    rule: Rule,
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    difference: str,
    constants: Mapping[str, Any],
) -> CounterexampleError:
    """Shrink a program that a rule breaks, and return the error that shows it.

    Args:
        rule: The rule.
        gm: The program, as `pattern_module` makes it.
        args: Its inputs.
        difference: How the results differ; they go on to differ in this way.
        constants: Capture → constant, for the message.
    """
    kind = _kind_of(difference)

    def is_broken(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        found = tried(rule, gm, args)[1]
        return found is not None and _kind_of(found) == kind

    small = minify(gm, args, is_broken)
    program, values = small.graph_module, small.args
    _name_after_captures(program, gm)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    shown = [f"{n}={_describe(v)}" for n, v in zip(names, values, strict=True)]
    shown.extend(f"{name}={_describe(value)}" for name, value in constants.items())
    return CounterexampleError(
        f"{rule.name} changes the result: {tried(rule, program, values)[1] or difference}",
        code=_code(rule, program, values),
        node=format_graph(program).replace("\n", "\n         "),
        source=PurePath(rule.file).name,
        hint=f"inputs: {', '.join(shown)}",
    )


def _kind_of(difference: str) -> tuple[str | None, ...]:
    return tuple(
        next((part for part in parts if part in difference), None) for parts in (_PLACES, _KINDS)
    )


def _name_after_captures(program: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Give inputs that were copies of captures the names of these."""
    copies = {
        node.name: node.args[0].name
        for node in gm.graph.nodes
        if node.target is torch.clone and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    }  # fmt: skip
    taken = {node.name for node in program.graph.nodes}
    for node in program.graph.find_nodes(op="placeholder"):
        wished = copies.get(node.name)
        if wished is not None and wished not in taken:
            rename_node(node, wished)
            node.target = node.name
    program.recompile()


def _code(rule: Rule, program: fx.GraphModule, args: tuple[Any, ...]) -> str:
    """Return a script that rewrites the program, by the rule where that can be imported.

    Where the program can't be written down, as with an operator that only this process knows, the
    script is a comment that says so.
    """
    script = Script()
    try:
        script.add_program(program, args)
        made = _rewriting(script, rule, program, args)
    except UnsupportedError as error:
        return f"# no script of its own: {error.message}"
    script.statements = f"{made}\n{_COMPARE.format(exact=rule.exact)}".strip()
    return script.text(None)


def _rewriting(script: Script, rule: Rule, program: fx.GraphModule, args: tuple[Any, ...]) -> str:
    """Return the statements that rewrite the program, or give the script the result instead."""
    try:
        return APPLY_RULE.format(rule=rule_code(script.writer, rule))
    except UnsupportedError:
        rewritten = _rewritten(rule, program, args)
        if rewritten is not None:
            script.add_module(rewritten, "rewritten")
        return ""


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return format_value(value)
    text = str(TensorType.of(value))
    text = f"{text} stride {tuple(value.stride())}" if value.dim() else text
    numbers = f" {value.tolist()}" if value.numel() <= 4 else ""
    return f"{text}{numbers}{' requires_grad' if value.requires_grad else ''}"
