"""A script that shows what a rewrite broke: by running the rule or pass again where it can be had.

A rule or pass at the top level of a module is imported and run, so that the script tells when it
was mended. Of any other, the script has the graph that it left.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from fxkit.analysis.reproducing.module_code import ModuleWriter
from fxkit.analysis.reproducing.reproducer import Script
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import FxkitError, UnsupportedError
from fxkit.passes.base import Pass
from fxkit.passes.manager.differences import ProgramDifference
from fxkit.passes.manager.functions import DecoratedPass, FunctionPass
from fxkit.patterns.engine import rewrite
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rule_code import APPLY_RULE, rule_code, rules_named

_RUN_PASS = """
import copy
import fxkit
rewritten = copy.deepcopy(program)
print(fxkit.PassManager([{made}], args=args, verify="off").run(rewritten))
""".strip()

RunPass = Callable[[fx.GraphModule], fx.GraphModule]


def write_rewrite(
    folder: Path,
    small: fx.GraphModule,
    pair: tuple[fx.GraphModule, fx.GraphModule],
    args: tuple[Any, ...],
    *,
    rule: str | None,
    current: Pass,
    run_pass: RunPass,
    difference: ProgramDifference,
    title: str,
) -> Path:
    """Write a folder that runs alone and shows that a program and its rewritten form differ.

    Args:
        folder: Where to write.
        small: The program.
        pair: The same right before and after the rewrite.
        args: Its inputs.
        rule: Name of the rule, or None.
        current: The pass.
        run_pass: Runs it on a copy of a module.
        difference: In what they differ.
        title: What is shown at the head of the script.

    Returns:
        The path of the script, which ends with status 1 while they differ.

    Raises:
        UnsupportedError: When the program or an input can't be written.
    """
    for lines, rewritten in _live(small, args, rule, current, run_pass):
        script = Script(title)
        try:
            script.add_program(small, args)
            statements = lines(script.writer)
            is_bad = difference.differ(small, rewritten(), args)
            _add_oracle(script, difference)
        except FxkitError:
            continue
        if is_bad:
            script.statements = f"{statements}\n{difference.statements}"
            return script.save(folder)
    script = Script(title)
    script.add_program(pair[0], args)
    script.add_module(pair[1], "rewritten")
    _add_oracle(script, difference)
    script.statements = difference.statements
    return script.save(folder)


def _add_oracle(script: Script, difference: ProgramDifference) -> None:
    if difference.oracle is not None:
        script.writer.functions.add(difference.oracle, "bad")


Lines = Callable[[ModuleWriter], str]


def _live(
    small: fx.GraphModule,
    args: tuple[Any, ...],
    rule: str | None,
    current: Pass,
    run_pass: RunPass,
) -> Iterator[tuple[Lines, Callable[[], fx.GraphModule]]]:
    """Yield ways to rewrite the program in the script, with the program that comes out."""
    for found in rules_named(rule) if rule is not None else ():
        yield (
            lambda writer, found=found: APPLY_RULE.format(rule=rule_code(writer, found)),
            lambda found=found: _rewritten(small, args, found),
        )
    yield (
        lambda writer: _RUN_PASS.format(made=pass_code(writer, current)),
        lambda: run_pass(small),
    )


def _rewritten(gm: fx.GraphModule, args: tuple[Any, ...], rule: Rule) -> fx.GraphModule:
    rewritten = copy.deepcopy(gm)
    propagate_types(rewritten, args)
    rewrite(rewritten, rule)
    return rewritten


def pass_code(writer: ModuleWriter, current: Pass) -> str:
    """Return an expression that makes a pass.

    Raises:
        UnsupportedError: When a new process can't import it, or an option can't be written.
    """
    if isinstance(current, FunctionPass):
        return writer.importable(current.function)
    if isinstance(current, DecoratedPass):
        made, options = writer.importable(current.decorated), dict(current.options)
        return f"{made}({_keywords(writer, options)})" if options else made
    if not dataclasses.is_dataclass(current):
        raise UnsupportedError(f"expected a dataclass, got {type(current).__name__}")
    values = {f.name: (getattr(current, f.name), f.default) for f in dataclasses.fields(current)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    return f"{writer.importable(type(current))}({_keywords(writer, changed)})"


def _keywords(writer: ModuleWriter, values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={writer.value(value)}" for name, value in values.items())
