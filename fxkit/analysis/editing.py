"""Edit sessions that look at memory: who takes a node's place must not show in what it shares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.shared_memory import (
    memory_above,
    memory_around,
    memory_below,
    memory_beneath,
    who_notices,
)
from fxkit.errors import RewriteError
from fxkit.ir.graph_arguments import graph_module_of
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import resolve
from fxkit.ir.open_sessions import open_on, opened
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.program_changes import GraphProgram, ProgramChange
from fxkit.ir.session import EditSession
from fxkit.torch_adapters.fx_nodes import input_nodes_of


class CheckedSession(EditSession):
    """An edit session whose `replace` refuses what somebody would notice in shared memory."""

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` use `new`, and erase `old`.

        The old node's recorded type goes to the new one when that has none; so does what users have
        noted in its `meta`, when nobody else uses the new one.

        Cost: that of the change; linear in the users of the memory when one of the two is a view.

        Raises:
            RewriteError: When a user of `old` comes before `new`, when `new` itself uses `old`, or
                when `new` shares memory and `old` did not, or the other way round, and a write or
                the caller would show that.
        """
        old, new = self._given(old), self._given(new)
        why = None if old is new or old in input_nodes_of(new) else _objection(old, new)
        if why is not None:
            raise RewriteError(
                f"expected a node in the place of %{old.name} that nobody can tell from it, got "
                f"%{new.name}: {why}",
                node=format_node(old),
                source=format_source(old),
                hint="call fxkit.propagate_types if types are missing; edit.replace_uses and "
                "edit.erase leave it to you",
            )
        super().replace(old, new)


def _objection(old: fx.Node, new: fx.Node) -> str | None:
    """Return who would notice that another node's memory is in the place of a node's.

    What a call does that writes, or of which nothing is known, whoever replaces it has to know.
    """
    if not (_is_known(old) and _is_known(new)) or _read_one_attribute(old, new):
        return None
    is_fresh = not new.users and not effects_of(new).aliases and new.op not in COMPUTES_NOTHING
    if is_fresh and not effects_of(old).aliases:
        return None
    derived = memory_above(old) or {old}
    before, after = memory_below(old), memory_below(new)
    beneath = memory_beneath(old)
    if beneath.isdisjoint(after.surely):
        who = who_notices(derived, beneath, old, (old,))
        if who is not None:
            shared = next((node for node in before.may if node is not old), min(beneath))
            return f"it would share no memory with %{shared.name}, and {who}"
    rest = memory_around([new], (old,)) or set()
    if rest.isdisjoint(before.may):
        who = who_notices(derived, rest, old, (old,))
        if who is not None:
            shared = next((node for node in after.may if node is not new), new)
            return f"it would share memory with %{shared.name}, and {who}"
    return None


def _read_one_attribute(old: fx.Node, new: fx.Node) -> bool:
    """Tell whether two nodes are the same tensor, which its module holds."""
    return old.op == new.op == "get_attr" and old.target == new.target


def _is_known(node: fx.Node) -> bool:
    call = resolve(node)
    return call is None or not (call.operator.is_opaque or effects_of(node).writes)


def edit(
    gm: fx.GraphModule | GraphProgram, by: str = ""
) -> contextlib.AbstractContextManager[EditSession]:
    """Open a session that changes a graph, or does not change it at all.

    On leaving, what was changed is checked; the module's code is generated when it is next asked
    for. When anything raises, inside or in that check, graph, attributes and code are as they were.

    Inside of a session that this thread has open on the same module, such as in a pass, that very
    session is given out: what changes inside goes into its journal, and is taken back with it. An
    error inside takes back the changes since this call.

    What is done to the graph of a captured program is done to the program: its graphs for other
    calls are given up, and those that are captured from then on get the same edit before they run.
    Where one is another graph than in its constants, that call raises.

    Args:
        gm: The module to change, in place; or a captured program, of which the graph that ran last
            is changed.
        by: Who changes it, for provenance: a pass's name.

    Raises:
        InvalidGraphError: When the edited graph breaks an invariant.
        UnsupportedError: When it is no `GraphModule`, and no captured program.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> relu = fxkit.graph(gm).find(torch.relu)[0].fx_node
        >>> with fxkit.edit(gm) as e:
        ...     e.replace(relu, e.call(torch.tanh, relu.args[0], before=relu))
        >>> print(e.diff())
        insert    %tanh = aten.tanh(%input_1)
        rewire    return %tanh
        erase     %_0 = aten.relu(%input_1)
    """
    return edit_as(None, gm, by)


@contextlib.contextmanager
def edit_as(
    change: ProgramChange | None, gm: fx.GraphModule | GraphProgram, by: str = ""
) -> Iterator[EditSession]:
    """Open a session as `edit` does, for a change that can be applied to other graphs anew.

    Args:
        change: What is going to be done; None for what only the session's journal says.
        gm: As `edit` takes it.
        by: As `edit` takes it.
    """
    gm = graph_module_of(gm)
    around = open_on(gm)
    if isinstance(around, EditSession):
        with around.savepoint(by):
            yield around
        return
    session = CheckedSession(gm, by)
    try:
        with opened(session, change), session.savepoint():
            yield session
    finally:
        session.close()
