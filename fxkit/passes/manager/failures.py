"""The error of a failed pass: where it was, what it was doing, and how to see it again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import fx

from fxkit.errors import FxkitError, InvalidGraphError, NumericsError, PassError, PostconditionError
from fxkit.ir.printer import format_node_safely, format_source
from fxkit.passes.base import Pass
from fxkit.passes.manager.protocols import Manager
from fxkit.passes.manager.tracking import TrackedSession
from fxkit.passes.subjects import Subject

_AROUND = 3
_INDENT = "\n         "


def failure(
    error: Exception, session: TrackedSession, place: str, take_back: Callable[[], None]
) -> PassError:
    """Take a failed pass back, and return the error that says all about it.

    Args:
        error: What was raised, by the pass or by a check of what it left.
        session: The session, still as the pass left it.
        place: Where the pass stands in its list.
        take_back: Takes its changes back.
    """
    rule, nodes = session.current or (getattr(error, "rule", None), ())
    node, source = getattr(error, "node", None), getattr(error, "source", None)
    is_verdict = isinstance(error, (InvalidGraphError, NumericsError, PostconditionError))
    if is_verdict:
        node = _around_line(session.graph, node)
    take_back()
    if nodes and not is_verdict:
        node = excerpt(session.graph, {n.name for n in nodes})
        source = source or format_source(nodes[-1])
    kind = PostconditionError if is_verdict else PassError
    return (type(error) if isinstance(error, PassError) else kind)(
        _message(error, place.partition(" ")[0], is_verdict),
        rule=rule,
        site=tuple(n.name for n in nodes),
        node=node,
        source=source,
        in_pass=place,
        hint=getattr(error, "hint", None) or "the graph is as it was before this pass",
    )


def _message(error: Exception, name: str, is_verdict: bool) -> str:
    told = error.message if isinstance(error, FxkitError) else f"{type(error).__name__}: {error}"
    is_whole = is_verdict or isinstance(error, PassError)
    return told if is_whole else f"expected {name} to run, got {told}"


def excerpt(graph: fx.Graph, names: Collection[str], around: int = _AROUND) -> str | None:
    """Return some nodes as text, marked, between those around them; None when they are gone."""
    return _marked(graph, lambda node, _: node.name in names, around)


def _around_line(graph: fx.Graph, line: str | None) -> str | None:
    """Return the node that has a certain text, marked, between those around it."""
    if line is None:
        return excerpt(graph, {"output"}, around=2 * _AROUND)
    return _marked(graph, lambda _, text: text == line, _AROUND) or line


def _marked(graph: fx.Graph, is_meant: Callable[[fx.Node, str], bool], around: int) -> str | None:
    """Return the nodes that are meant, marked, between those around them, as text."""
    nodes = list(graph.nodes)
    texts = [format_node_safely(node) for node in nodes]
    meant = {i for i, node in enumerate(nodes) if is_meant(node, texts[i])}
    if not meant:
        return None
    shown = range(max(0, min(meant) - around), min(len(nodes), max(meant) + around + 1))
    near = [i for i in shown if any(abs(i - m) <= around for m in meant)]
    lines: list[str] = []
    for position, i in enumerate(near):
        if position and near[position - 1] != i - 1:
            lines.append("  ...")
        lines.append(f"{'>' if i in meant else ' '} {texts[i]}")
    return _INDENT.join(lines)


_RUN_AGAIN = """
import fxkit
print(fxkit.PassManager([{made}], verify={verify!r}, args=args).run(program).table())
""".strip()


def reproduce(manager: Manager, subject: Subject, current: Pass, error: PassError) -> str | None:
    """Write a folder whose script runs a failed pass alone on the module as it was before it.

    A pass that a new process can't import is left out: the script then only runs the module.

    Returns:
        The path of the script; None, and a word in the error's hint, when it can't be written.
    """
    # Imported where a pass has failed: some 25 modules that no other run needs.
    from fxkit.analysis.reproducing.reproducer import Script
    from fxkit.passes.manager.reproduction import pass_code

    script = Script(f"{error.in_pass}: {error.message}")
    try:
        script.add_program(subject.graph_module, subject.args or (), subject.kwargs)
        try:
            made = pass_code(script.writer, current)
            script.statements = _RUN_AGAIN.format(made=made, verify=manager.verify)
        except FxkitError as unwritten:
            script.set_check(None)
            error.hint = f"{error.hint}; the script has no pass: {unwritten.message}"
        return str(script.save(Path(manager.reproduce or ".") / current.name))
    except FxkitError as unwritten:
        error.hint = f"{error.hint}; no script: {unwritten.message}"
        return None
