"""Passes that fail, in a module of their own: a new process can import them."""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.passes import Pass, pass_function


@pass_function
def fails_on(edit, context, *, function="fc"):
    """Raise at a node of this name."""
    for node in edit.graph.nodes:
        if node.name == function:
            raise ValueError(f"no {function}, please")


@dataclass(frozen=True)
class FailsAtOnce(Pass):
    """Raise."""

    what: str = "nothing"

    def apply(self, edit, context):
        raise ValueError(self.what)
