"""The errors of an edit session: what was asked for does not leave the graph in order."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxkit.errors import RewriteError
from fxkit.ir.printer import format_node, format_source


def is_over() -> RewriteError:
    """A change was asked of a session that has ended."""
    return RewriteError(
        "expected an open session, got one that has ended",
        hint="edit inside of `with fxkit.edit(gm) as e:`",
    )


def too_early(place: fx.Node, operand: fx.Node) -> RewriteError:
    """An operand of a new node is not defined at its place."""
    return _at(
        operand,
        f"expected operands defined before %{place.name}, got %{operand.name}",
        hint="insert after that operand, or leave the place out",
    )


def behind_output(output: fx.Node) -> RewriteError:
    """A node was to be inserted after the output."""
    return RewriteError(
        "expected a place in the graph, got one after its output",
        node=format_node(output),
        hint="write before= that node",
    )


def two_places(before: fx.Node, after: fx.Node) -> RewriteError:
    """A node was to be inserted at two places."""
    return RewriteError(
        f"expected one place, got before %{before.name} and after %{after.name}",
        hint="leave one of them out",
    )


def no_single_place(node: fx.Node, count: str) -> RewriteError:
    """A node was to be moved to no place, or to two."""
    return RewriteError(
        f"expected one place to move %{node.name} to, got {count}",
        hint="write before=node or after=node",
    )


def wrong_side(node: fx.Node, other: fx.Node) -> RewriteError:
    """A moved node would stand before an operand or after a user."""
    return _at(
        node,
        f"expected %{node.name} between its operands and its users, got %"
        f"{other.name} on the wrong side",
        hint="move that node too",
    )


def same_node(node: fx.Node) -> RewriteError:
    """A node was to be replaced by itself."""
    return RewriteError(
        f"expected another node in the place of %{node.name}, got itself",
        node=format_node(node),
        hint="leave it as it is",
    )


def uses_replaced(old: fx.Node, new: fx.Node) -> RewriteError:
    """A node was to be replaced by one that is computed from it."""
    return RewriteError(
        f"expected a node that does without %{old.name} in its place, got %{new.name}, "
        "which uses it",
        node=format_node(new),
        source=format_source(old),
        hint="keep the old one: edit.replace_uses(old, new)",
    )


def earlier_user(old: fx.Node, new: fx.Node, user: fx.Node) -> RewriteError:
    """A user of a replaced node stands before what it would use then."""
    return _at(
        user,
        f"expected %{new.name} before every user of %{old.name}, got %{user.name} before it",
        hint="insert the new node right after the old one",
    )


def output_erased(output: fx.Node) -> RewriteError:
    """The output was to be erased."""
    return RewriteError(
        "expected a node that may be erased, got the output",
        node=format_node(output),
        hint="use set_output",
    )


def still_used(node: fx.Node, users: Iterable[fx.Node]) -> RewriteError:
    """A node was to be erased that has users."""
    names = ", ".join(f"%{user.name}" for user in users)
    return _at(
        node,
        f"expected %{node.name} to have no users, got {names}",
        hint="replace its uses first",
    )


def _at(node: fx.Node, message: str, *, hint: str) -> RewriteError:
    """Return an error that shows a node with its source line."""
    return RewriteError(message, node=format_node(node), source=format_source(node), hint=hint)
