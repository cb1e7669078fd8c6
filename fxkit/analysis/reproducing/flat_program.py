"""A graph module called with a flat tuple: one argument for each placeholder, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from fxkit.errors import InvalidGraphError
from fxkit.ir.graph_arguments import check_graph_module
from fxkit.ir.graph_copies import SPECS, copy_graph_module
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_graphs import flattens_inputs


def flat_program(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Return a copy of a module that takes one positional argument for each placeholder.

    The copy shares parameters, buffers and submodules with the module. What `torch.export` returns
    takes the leaves of its nested arguments then, and returns a flat sequence.

    Args:
        gm: The module; it is not changed.
        args: Its arguments.
        kwargs: Its keyword arguments; defaults are filled in.

    Raises:
        InvalidGraphError: When the arguments do not fit the placeholders.
        UnsupportedError: When `gm` is no `GraphModule`.
    """
    check_graph_module(gm)
    copied = copy_graph_module(gm)
    kwargs = dict(kwargs or {})
    if flattens_inputs(gm.graph):
        copied.graph.set_codegen(CodeGen())
        for key in SPECS:
            vars(copied).pop(key, None)
        _drop_input_checks(copied)
        copied.recompile()
        return copied, _leaves(gm, args, kwargs)
    return copied, _bound(copied, args, kwargs)


def _drop_input_checks(gm: fx.GraphModule) -> None:
    """Erase the call by which `torch.export` checks that inputs are like its examples."""
    for node in gm.graph.find_nodes(op="call_module", target="_guards_fn"):
        if not node.users:
            gm.graph.erase_node(node)


def _leaves(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    if len(leaves) != len(inputs):
        raise InvalidGraphError(
            f"expected arguments with {len(inputs)} leaves, got {len(leaves)}",
            hint="call it with the arguments that it was exported with",
        )
    return tuple(leaves)


def _bound(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a value for each placeholder; `*args` and `**kwargs` become plain ones."""
    values: list[Any] = []
    position = 0
    is_changed = False
    for node in gm.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if name.startswith("*"):
            node.target = node.name
            is_changed = True
            rest = kwargs if name.startswith("**") else tuple(args[position:])
            values.append(dict(rest) if name.startswith("**") else rest)
            position = position if name.startswith("**") else len(args)
            kwargs = {} if name.startswith("**") else kwargs
        elif position < len(args):
            values.append(args[position])
            position += 1
        elif name in kwargs:
            values.append(kwargs.pop(name))
        elif node.args:
            values.append(node.args[0])
        else:
            raise InvalidGraphError(
                f"expected a value for {name!r}, got none",
                hint=f"pass it in args=(...) or kwargs={{{name!r}: ...}}",
            )
    if position < len(args) or kwargs:
        left = [*map(repr, kwargs), *(["positional ones"] if position < len(args) else [])]
        raise InvalidGraphError(
            f"expected arguments for {len(values)} placeholders, got {', '.join(left)} more",
            hint="print gm.code to see the parameters",
        )
    for node in gm.graph.find_nodes(op="placeholder"):
        is_changed |= bool(node.args)
        node.args = ()
    if is_changed:
        gm.recompile()
    return tuple(values)
