"""Edit sessions: the one way to change a graph.

    with fxkit.edit(gm) as e:
        new = e.call(torch.relu, x, before=user)
        e.replace(old, new)

A session records a journal, carries source lines and provenance to every node it makes, recompiles
the module when its code is next asked for, and puts everything back when anything raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.ir import edit_errors, provenance
from fxkit.ir.insertion_points import first_body_node, insertion_point
from fxkit.ir.journal import snapshot, snapshot_with
from fxkit.ir.journalled_module import JournalledModule
from fxkit.ir.many_operands import WIDE, WideNodes
from fxkit.ir.names import MODULE_NAME, keep_module_name
from fxkit.ir.node_arguments import (
    any_node,
    check_args,
    check_name,
    check_path,
    check_target,
    node_in,
    operands_in,
)
from fxkit.ir.on_behalf import OnBehalf
from fxkit.ir.op import keep_operator
from fxkit.ir.open_sessions import check_is_latest, forget, is_open
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.ir.types import TensorType, set_type
from fxkit.torch_adapters.fx_nodes import (
    args_of,
    input_nodes_of,
    kwargs_of,
    rename_node,
    set_arguments,
)
from fxkit.torch_adapters.graph_surgery import erase_node, insert_node, name_of_target, restore_name


class EditSession(JournalledModule):
    """Changes a graph, and remembers how to take each change back.

    Get one from `fxkit.edit`. Where a node is asked for, the object that `fxkit.graph` shows for it
    will do, and so will its name, which is looked for through the graph; as an operand a name is a
    text. Every method that makes a node takes `before` or `after`; without either the node goes as
    early as its operands allow.

    Attributes:
        gm: The module under edit.
        journal: What was changed so far, each a `GraphChange`, oldest first.
    """

    def __init__(self, gm: fx.GraphModule, by: str = "") -> None:
        super().__init__(gm, by)
        self._is_closed = False
        self._wide = WideNodes()

    def close(self) -> None:
        """Take no more changes."""
        self._is_closed = True

    def undo(self, to: int | None = None) -> None:
        """Take back every change after the place that `mark` returned.

        Without a place, all of them; in a block that joined an open session, all of the block's.
        Once the session is over, the module's code is brought up to date too.

        Raises:
            RewriteError: When there is no such place, or the session is over and another one has
                changed the module since.
        """
        if is_open(self):
            super().undo(to)
            return
        check_is_latest(self)
        super().undo(to)
        self.outdate(always=True)
        forget(self)

    def on_behalf_of(self, originals: Sequence[fx.Node], by: str) -> OnBehalf:
        """Give what is made inside the source, module and provenance of the nodes it replaces.

        Args:
            originals: The nodes that are being replaced, in graph order.
            by: The rule or pass.

        Raises:
            RewriteError: When one is no node of the graph.
        """
        return OnBehalf(self, self._replaced(originals), by)

    # Making nodes.

    def call(
        self,
        target: Any,
        *args: Any,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Insert a call of a function, of a method (`".view"`) or of a submodule (`"fc1"`).

        Args:
            target: A callable; or text: a method's name after a dot, else a module's path.
            *args: Operands: nodes, constants, or nested lists of them.
            before: Insert right before this node.
            after: Insert right after this node.
            name: Name to give it, made unique when taken.
            **kwargs: Keyword operands.

        Returns:
            The new node.

        Raises:
            RewriteError: When the place asked for comes before one of the operands.
        """
        if not isinstance(target, str):
            kind = "call_function"
        elif target.startswith("."):
            kind, target = "call_method", target[1:]
        else:
            kind = "call_module"
            check_path(self.gm, target)
        return self.insert(kind, target, args, kwargs, before=before, after=after, name=name)

    def insert(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Insert a node of any kind; `call` is the short form.

        Args:
            op: Kind of the node, such as `"call_function"`.
            target: What it calls or reads.
            args: Its operands; nodes, and what `fxkit.graph` shows for them.
            kwargs: Its keyword operands.
            before: The node to insert before.
            after: The node to insert after. Without either, it goes as early as operands allow.
            name: Name to give it, made unique when taken; made of the target when left out.

        Returns:
            The new node.

        Raises:
            RewriteError: When the target does not suit the kind, the name is empty, both places are
                given, or an operand is of another graph or comes later.
        """
        check_target(op, target)
        if name is not None:
            check_name(name)
        check_args(args)
        args, kwargs = self._operands(args), dict(self._operands(kwargs or {}))
        before = None if before is None else self._given(before)
        after = None if after is None else self._given(after)
        if before is not None and after is not None:
            raise edit_errors.two_places(before, after)
        place = insertion_point(self.graph, before, after, (args, kwargs))
        near = before or after
        return self.insert_at(
            place,
            op,
            target,
            args,
            kwargs,
            name_of_target(self.graph, target) if name is None else name,
            () if near is None or not _has_source(near) else (near,),
        )

    def insert_at(
        self,
        place: fx.Node,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        near: Sequence[fx.Node] = (),
    ) -> fx.Node:
        """Insert a node right before another one; the form of `insert` that costs least.

        It takes nodes of torch.fx only, and looks at no operand but for its place.

        Args:
            place: The node to insert before.
            op: Kind of the node.
            target: What it calls or reads.
            args: Its operands.
            kwargs: Its keyword operands.
            name: Name to give it, made unique when taken.
            near: Nodes whose source line it takes when it replaces none.
        """
        if name == MODULE_NAME:
            keep_module_name(self.graph)
        node = insert_node(place, op, target, args, kwargs, name)
        for operand in input_nodes_of(node):
            if not operand < place or operand.graph is not self.graph:
                self._remove(node)
                node_in(self.graph, operand)
                raise edit_errors.too_early(place, operand)
        if self.originals:
            provenance.derive(node, self.originals, self.by)
        elif self.by:
            provenance.derive(node, near, self.by)
        self.journal.entries.append(("insert", node, node.name, self.by, snapshot(node), None))
        return node

    def get_attr(self, path: str, *, before: fx.Node | None = None) -> fx.Node:
        """Insert a read of a parameter, buffer or other attribute by its qualified name."""
        return self.insert("get_attr", path, before=before or first_body_node(self.graph))

    def copy(self, node: fx.Node, substitute: Callable[[fx.Node], Any], **place: Any) -> fx.Node:
        """Insert a copy of a node of any graph, its operands mapped by `substitute`."""
        node = any_node(node)
        args = map_arg(node.args, substitute)
        kwargs = map_arg(node.kwargs, substitute)
        new = self.insert(node.op, node.target, args, kwargs, name=node.name, **place)
        for key, value in node.meta.items():
            new.meta.setdefault(key, value)
        return new

    # Changing nodes.

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` use `new`, and erase `old` when it has no effect left to keep.

        The old node's recorded type goes to the new one when that has none; so does what users have
        noted in its `meta`, when nobody else uses the new one.

        Raises:
            RewriteError: When a user of `old` comes before `new`, or `new` itself uses `old`.
        """
        old, new = self._given(old), self._given(new)
        if old is new:
            raise edit_errors.same_node(old)
        if old in input_nodes_of(new):
            raise edit_errors.uses_replaced(old, new)
        if not self.originals:
            provenance.derive(new, [old], self.by or "edit")
        if not new.users:
            provenance.carry_notes(new, old)
        self.replace_uses(old, new)
        self.erase(old)

    def replace_uses(self, old: fx.Node, new: fx.Node, where: Any = None) -> int:
        """Let the users of `old` use `new`; `new` itself goes on using `old`.

        Args:
            old: The node used so far.
            new: The node to use.
            where: Predicate that picks the users to change; all when left out.

        Returns:
            How many users were changed.
        """
        old, new = self._given(old), self._given(new)
        users = [u for u in old.users if u is not new and (where is None or where(u))]
        entries = self.journal.entries
        for user in users:
            if user < new:
                raise edit_errors.earlier_user(old, new, user)
            if len(input_nodes_of(user)) >= WIDE and self._exchange(user, old, new):
                continue
            undo = args_of(user), kwargs_of(user)
            user.replace_input_with(old, new)
            entries.append(("rewire", user, user.name, self.by, snapshot(user), undo))
        if TYPE_KEY not in new.meta and TYPE_KEY in old.meta:
            set_type(new, old.meta[TYPE_KEY])
        return len(users)

    def erase(self, node: fx.Node) -> None:
        """Erase a node that nobody uses.

        Raises:
            RewriteError: When it still has users, or is the output.
        """
        node = self._given(node)
        if node.op == "output":
            raise edit_errors.output_erased(node)
        if node.users:
            raise edit_errors.still_used(node, node.users)
        what, following = snapshot(node), node.next
        erase_node(node)
        self.journal.entries.append(("erase", node, node.name, self.by, what, following))

    def set_args(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Give a node other operands; keyword operands stay when `kwargs` is left out."""
        node = self._given(node)
        check_args(args)
        args, kwargs = self._operands(tuple(args)), kwargs and self._operands(kwargs)
        undo = args_of(node), kwargs_of(node)
        set_arguments(node, args, undo[1] if kwargs is None else kwargs)
        self._note("rewire", node, undo)

    def set_target(self, node: fx.Node, target: Any, op: str | None = None) -> None:
        """Let a node call something else; a function makes it a call of a function."""
        node = self._given(node)
        old_op, old_target = node.op, node.target
        op = op or (old_op if isinstance(target, str) else "call_function")
        check_target(op, target)
        node.target = target
        node.op = op

        def undo() -> None:
            node.op, node.target = old_op, old_target

        self._note("rewire", node, undo)

    def set_output(self, value: Any) -> None:
        """Let the graph return something else."""
        self.set_args(next(iter(reversed(self.graph.nodes))), (value,))

    def move(
        self, node: fx.Node, *, before: fx.Node | None = None, after: fx.Node | None = None
    ) -> None:
        """Move a node to another place; its operands must be defined there and its users later."""
        node = self._given(node)
        if (before is None) is (after is None):
            raise edit_errors.no_single_place(node, "none" if before is None else "two")
        following = node.next
        place = self._given(after).next if before is None else self._given(before)
        if place is node or place is following:  # it is there already
            return
        place.prepend(node)
        out_of_order = [o for o in node.all_input_nodes if node < o] or [
            u for u in node.users if u < node
        ]
        if out_of_order:
            following.prepend(node)
            raise edit_errors.wrong_side(node, out_of_order[0])
        self._record("move", node, f"%{node.name}", lambda: following.prepend(node))

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node another name, made unique when taken."""
        node = self._given(node)
        check_name(name)
        old = node.name
        keep_module_name(self.graph)
        rename_node(node, name)
        self._record("rename", node, f"%{old} -> %{node.name}",
                     lambda: restore_name(node, old))  # fmt: skip

    def retype(self, node: fx.Node, known: Any) -> None:
        """Record another type of a node, as `type_of` gives it; None for one that is not known."""
        node = self._given(node)
        before = node.meta.get(TYPE_KEY)
        _set_or_forget(node, known)
        text = "unknown" if known is None else str(known)
        self._record("retype", node, f"%{node.name}: {text}",
                     lambda: _set_or_forget(node, before))  # fmt: skip

    # Changing the module.

    def add_attribute(self, name: str, value: Any, *, before: fx.Node | None = None) -> fx.Node:
        """Register a parameter, buffer or submodule under a free name, and read it in the graph.

        Args:
            name: Name wished for; a number is added when it is taken.
            value: A `Parameter`, a tensor (registered as a buffer) or a module.
            before: Where to insert the read.

        Returns:
            The `get_attr` node.
        """
        path = self.register(name, value)
        node = self.get_attr(path, before=before)
        if isinstance(value, torch.Tensor):
            set_type(node, TensorType.of(value))
        return node

    def _exchange(self, user: fx.Node, old: fx.Node, new: fx.Node) -> bool:
        """Exchange an operand of a node that has very many, unless they are nested deeper."""
        operands = self._wide.of(user)
        if operands is None:
            return False
        for hook in getattr(self.gm, "_replace_hooks", None) or ():
            hook(old=old, new=new.name, user=user)
        before = args_of(user)
        undo = operands.exchange(old, new)
        self._unsettled.add(user)
        keep_operator(user, before, old, new)
        what = snapshot_with(user, undo.after)
        self.journal.entries.append(("rewire", user, user.name, self.by, what, undo))
        return True

    def _given(self, value: Any) -> fx.Node:
        if self._is_closed:
            raise edit_errors.is_over()
        return node_in(self.graph, value)

    def _replaced(self, originals: Sequence[Any]) -> tuple[fx.Node, ...]:
        """Return the nodes that are meant, which may be erased by now unless named."""
        return tuple(self._given(n) if isinstance(n, str) else any_node(n) for n in originals)

    def _operands(self, value: Any) -> Any:
        if self._is_closed:
            self._given(None)
        return operands_in(self.graph, value)


def _set_or_forget(node: fx.Node, known: Any) -> None:
    if known is None:
        node.meta.pop(TYPE_KEY, None)
    else:
        set_type(node, known)


def _has_source(node: fx.Node) -> bool:
    return bool(node.meta.get("stack_trace") or node.meta.get("nn_module_stack"))
