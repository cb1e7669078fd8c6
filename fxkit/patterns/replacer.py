"""Put the replacement of a rule into the graph, and take out what it replaces."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.tensor_types import infer_type
from fxkit.ir import provenance
from fxkit.ir.op import Attribute
from fxkit.ir.session import EditSession
from fxkit.ir.types import KEY as TYPE_KEY
from fxkit.patterns.language import COMPUTES, computation
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.safety import Safety
from fxkit.torch_adapters.fx_nodes import args_of, is_erased, kwargs_of


class Replacer:
    """Makes the replacements of one run.

    Args:
        session: The session.
        safety: Is told of what is made.
    """

    def __init__(self, session: EditSession, safety: Safety) -> None:
        self._session = session
        self._safety = safety
        self._reads: dict[str, fx.Node] | None = None

    def insert(
        self, candidate: Rule, match: Match, place: fx.Node
    ) -> tuple[list[fx.Node], list[Any]]:
        """Copy the replacement in front of a place; return the new nodes and the results."""
        template = candidate.template
        made: dict[fx.Node, Any] = {}

        def substitute(node: fx.Node) -> Any:
            if node in made:
                return made[node]
            if node.op == "placeholder":
                value = match.bindings.get(str(node.target))
                return self._read(value, place) if isinstance(value, Attribute) else value
            return match.values[template.reuses[node]]

        inserted: list[fx.Node] = []
        insert = self._session.insert_at
        for node in template.body:
            args = map_arg(args_of(node), substitute)
            if node.target is computation:
                made[node] = node.meta[COMPUTES](*args)
                continue
            kwargs = map_arg(kwargs_of(node), substitute) if kwargs_of(node) else {}
            made[node] = new = insert(place, node.op, node.target, args, kwargs, node.name)
            inserted.append(new)
        values = [substitute(v) if isinstance(v, fx.Node) else v for v in template.values]
        self._type(inserted, match, values)
        for node in inserted:
            self._safety.inserted(node)
        return inserted, values

    def _type(self, inserted: list[fx.Node], match: Match, values: list[Any]) -> None:
        """Give the new nodes types: the results those of what they replace."""
        for output, value in zip(match.outputs, values, strict=True):
            if not isinstance(value, fx.Node):
                continue
            known = output.meta.get(TYPE_KEY)
            if known is not None:
                value.meta.setdefault(TYPE_KEY, known)
            if value in inserted:
                provenance.carry_notes(value, output)
        for node in inserted:
            if TYPE_KEY not in node.meta:
                infer_type(node)

    def _read(self, attribute: Attribute, place: fx.Node) -> fx.Node:
        """Read a parameter of a module that the replacement takes apart."""
        if self._reads is None:
            nodes = reversed(self._session.graph.find_nodes(op="get_attr"))
            self._reads = {str(node.target): node for node in nodes}
        first = self._reads.get(attribute.path)
        if first is not None and not is_erased(first) and first < place:
            return first
        read = self._session.insert("get_attr", attribute.path, before=place)
        self._reads[attribute.path] = read
        self._safety.inserted(read)
        return read

    def substitute(self, output: fx.Node, value: Any, own: frozenset[fx.Node]) -> None:
        """Give the users of a result its new value, but for those that were matched or made."""
        if isinstance(value, fx.Node):
            self._session.replace_uses(output, value, where=lambda user: user not in own)
            self._safety.substituted(output, value)
            return
        for user in list(output.users):
            self._session.set_args(
                user,
                map_arg(user.args, lambda n: value if n is output else n),
                map_arg(user.kwargs, lambda n: value if n is output else n),
            )

    def erase(self, originals: list[fx.Node], keep: list[Any]) -> list[fx.Node]:
        """Erase the matched nodes that nobody uses any more; return them in order."""
        gone = []
        for node in reversed(originals):
            if not node.users and node not in keep:
                self._session.erase(node)
                gone.append(node)
        return gone[::-1]
