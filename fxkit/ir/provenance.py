"""Where a node came from: the user's source line, the module it ran in, the rewrites that made it.

The source line and the module stack lie where torch's own tools keep them, in
`node.meta["stack_trace"]` and `node.meta["nn_module_stack"]`, so that each reads the other's.
What rewrites did lies in `node.meta["fxkit_provenance"]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from torch import fx

KEY = "fxkit_provenance"

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program.

    Attributes:
        file: Path of the file, or `<ipython-input-...>` in a notebook.
        line: Line, from 1.
        function: Name of the function the line is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


class Provenance(NamedTuple):
    """What a rewrite made a node from.

    Attributes:
        replaced: Names of the nodes of the original graph that this node stands for.
        by: Rules and passes that touched it, oldest first.
    """

    replaced: tuple[str, ...] = ()
    by: tuple[str, ...] = ()


# What calls an operator in the place of its user.
_AUTHORED = str(Path(__file__).parents[1] / "authoring")


def source_of(node: fx.Node) -> Source | None:
    """Return the innermost user's line that made the node, if it was recorded."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    frames = [f for f in _FRAME.finditer(trace) if not f["file"].startswith(_AUTHORED)]
    if not frames:
        return None
    last = frames[-1]
    return Source(last["file"], int(last["line"]), last["function"] or "<module>")


def module_path(node: fx.Node) -> str:
    """Return the qualified name of the module that the node ran in; "" for the root or unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return "" if path == _OF_NO_MODULE else _plain_path(path)


def module_stack(node: fx.Node) -> list[tuple[str, type | str]]:
    """Return `(qualified name, class)` of the modules around the node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(_plain_path(path), cls) for path, cls in stack.values() if path != _OF_NO_MODULE]


def provenance_of(node: fx.Node) -> Provenance:
    """Return what rewrites recorded; an original node stands for itself."""
    return node.meta.get(KEY) or Provenance(replaced=(node.name,))


def derive(new: fx.Node, originals: Sequence[fx.Node], by: str) -> None:
    """Record that `new` stands for `originals`; give it their source and module if it has none.

    Args:
        new: A node that a rewrite made.
        originals: Nodes that it replaces, in graph order; the last one's source line is taken.
        by: Name of the rule or pass.
    """
    meta = new.meta
    if any(KEY in node.meta for node in originals):
        meta[KEY] = _joined(originals, by)
    else:
        meta[KEY] = Provenance(tuple([node.name for node in originals]), (by,))
    for key in _PLACE:
        if meta.get(key):
            continue
        for node in reversed(originals):
            carried = node.meta.get(key)
            if carried:
                meta[key] = carried
                break


def carry_notes(new: fx.Node, old: fx.Node) -> None:
    """Give a node what users and their tools have noted in the `meta` of the one it replaces.

    What says how the old node was called or what is known of its value stays behind: all keys of
    fxkit's, and those of torch's that are not notes of a user's. What the new node has, it keeps.

    Args:
        new: The node that computes the value from now on.
        old: The one that it replaces.
    """
    for key, value in old.meta.items():
        if key not in _NO_NOTES and not str(key).startswith("fxkit_"):
            new.meta.setdefault(key, value)


def stand_where(new: fx.Node, node: fx.Node) -> None:
    """Give a node that a rewrite made the source line and the module of one of its originals.

    Args:
        new: The node.
        node: The original whose place it takes: what was folded into it came from elsewhere.
    """
    for key in _PLACE:
        if key in node.meta:
            new.meta[key] = node.meta[key]
        else:
            new.meta.pop(key, None)


_PLACE = ("stack_trace", "nn_module_stack")

# torch.export's word for the module of a node that ran in none, such as one that reads a size.
_OF_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"

# What torch writes on nodes of the call that they are and of its value.
_NO_NOTES = frozenset(
    [*_PLACE, "val", "tensor_meta", "example_value", "type", "unbacked_bindings", "grapharg",
     "eager_input_vals", "original_aten", "source_fn_stack", "torch_fn", "from_node", "seq_nr",
     "fwd_source_fn_stack", "fwd_nn_module_stack", "is_wrapped", "tensor_dict", "desc",
     "mutation_region_id", "has_backward_hook", "is_gradient_acc", "partitioner_tag",
     "autograd_backward"]
)  # fmt: skip


def _joined(originals: Sequence[fx.Node], by: str) -> Provenance:
    """Return what the original nodes of some nodes are, and who touched them."""
    replaced: dict[str, None] = {}
    history: dict[str, None] = {}
    for node in originals:
        before = node.meta.get(KEY)
        if before is None:
            replaced[node.name] = None
        else:
            replaced.update(dict.fromkeys(before.replaced))
            history.update(dict.fromkeys(before.by))
    history[by] = None
    return Provenance(tuple(replaced), tuple(history))


def _plain_path(path: str) -> str:
    """Strip the `L['self'].` and `['name']` spellings that Dynamo and export write."""
    path = re.sub(r"^L\['(?:self|args|fn)'\]\.?", "", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    return path.lstrip(".")
