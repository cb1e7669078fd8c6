"""What a pass manager can be given: a graph module, a captured program, an exported one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.errors import PassError, UnsupportedError
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.program_changes import GraphProgram
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fx_graphs import codegen_of
from fxkit.tracing.captured import Captured


@dataclass(frozen=True)
class Subject:
    """A program as passes see it.

    Attributes:
        graph_module: What they change, in place.
        args: Inputs of that module, or None.
        kwargs: Its keyword inputs.
        program: What the manager was given.
    """

    graph_module: fx.GraphModule
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]
    program: Any

    @classmethod
    def of(cls, program: Any, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> Subject:
        """Find the graph module in a program, and the inputs that it takes.

        Args:
            program: A `GraphModule`; a captured program, of which the graph that ran last is
                changed; or an `ExportedProgram`, of which the module that it makes is.
            args: Example inputs of the program, or None.
            kwargs: Example keyword inputs.

        Raises:
            PassError: When it is none of them.
        """
        if isinstance(program, fx.GraphModule):
            return cls(program, args, kwargs, program)
        if isinstance(compiled := getattr(program, "captured", None), Captured):
            program = compiled  # of a compiled program
        if isinstance(program, Captured):
            if args is not None:
                args, kwargs = program.graph_inputs(args, dict(kwargs)), {}
            return cls(program.graph_module, args, kwargs, program)
        if isinstance(program, GraphProgram):
            return cls(program.graph_module, args, kwargs, program)
        if isinstance(program, torch.export.ExportedProgram):
            if args is None and program.example_inputs is not None:
                args, kwargs = program.example_inputs
            return cls(_module_of(program), args, kwargs, program)
        raise PassError(
            f"expected a GraphModule, a captured or an exported program, "
            f"got {type(program).__name__}",
            hint="fxkit.symbolic_trace or fxkit.capture make a graph of a module",
        )


def _module_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def export_again(gm: fx.GraphModule, program: Any) -> torch.export.ExportedProgram:
    """Export a module that passes made of an exported program, with the same dynamic sizes.

    Raises:
        PassError: When the program was no exported one.
        UnsupportedError: When the program has no example inputs.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise PassError(
            f"expected passes that ran on an ExportedProgram, got {type(program).__name__}",
            hint="torch.export.export(result.graph_module, args) exports any other module",
        )
    if program.example_inputs is None:
        raise UnsupportedError(
            "expected a program with example inputs, got none",
            hint="export it with torch.export.export(model, args)",
        )
    args, kwargs = program.example_inputs
    alone = _with_what_it_reads(gm)
    return torch.export.export(
        alone, args, kwargs, dynamic_shapes=_dynamic_sizes(program, args, kwargs), strict=False
    )


def _with_what_it_reads(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy without the parameters that passes have put others in the place of."""
    copied = copy_graph_module(gm)
    for node in copied.graph.find_nodes(op="get_attr"):
        if not node.users:
            copied.graph.erase_node(node)
    return copy_graph_module(copied)


def _dynamic_sizes(program: torch.export.ExportedProgram, args: Any, kwargs: Any) -> Any:
    """Return which axes of the inputs were symbolic, in the form that export takes."""
    lifted = {
        spec.arg.name: spec.kind for spec in program.graph_signature.input_specs
        if hasattr(spec.arg, "name")
    }  # fmt: skip
    user = torch.export.graph_signature.InputKind.USER_INPUT
    inputs = [
        node for node in program.graph.nodes
        if node.op == "placeholder" and lifted.get(node.name) == user
    ]  # fmt: skip
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    if not any(_symbolic_axes(node) for node in inputs) or len(leaves) != len(inputs):
        return None
    axes = [_symbolic_axes(n) if isinstance(v, torch.Tensor) else None
            for n, v in zip(inputs, leaves, strict=True)]  # fmt: skip
    shaped_args, shaped_kwargs = pytree.tree_unflatten(axes, spec)
    return (*shaped_args, *shaped_kwargs.values())


def _symbolic_axes(node: fx.Node) -> dict[int, Any]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    return {axis: torch.export.Dim.AUTO for axis, size in enumerate(value.shape)
            if isinstance(size, torch.SymInt)}  # fmt: skip


def graph_inputs(graph: fx.Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of a graph's placeholders, in order, for a call of its module."""
    if hasattr(codegen_of(graph), "pytree_info"):
        return pytree.tree_leaves((tuple(args), dict(kwargs)))
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]


def sample_inputs(gm: fx.GraphModule, *, seed: int = 0) -> tuple[Any, ...]:
    """Make inputs of the types that the placeholders have.

    Floating point numbers are normal, integers from 0 to 3 and truth values even.

    Args:
        gm: The module; the types of its placeholders are known.
        seed: Decides the numbers.

    Raises:
        PassError: When a type is not known, or the module takes nested inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if not isinstance(type_of(node), TensorType):
            raise PassError(
                f"expected example inputs, or placeholders of known types, "
                f"got %{node.name} of unknown type",
                hint="pass args=(...) to PassManager",
            )
    values = [_sample(type_of(node), generator) for node in placeholders]
    spec = getattr(codegen_of(gm.graph), "pytree_info", None)
    if spec is None:
        return tuple(values)
    args, kwargs = pytree.tree_unflatten(values, spec.in_spec)
    if kwargs:
        raise PassError("expected inputs by position, got a module with keyword inputs",
                        hint="pass args=(...) and kwargs={...} to PassManager")  # fmt: skip
    return tuple(args)


def _sample(known: TensorType, generator: torch.Generator) -> torch.Tensor:
    shape = tuple(int(size) for size in known.shape)
    if known.dtype == torch.bool:
        value = torch.randint(0, 2, shape, generator=generator).bool()
    elif known.dtype.is_floating_point or known.dtype.is_complex:
        value = torch.randn(shape, dtype=torch.float32, generator=generator).to(known.dtype)
    else:
        value = torch.randint(0, 4, shape, generator=generator).to(known.dtype)
    return value.to(known.device).requires_grad_(known.requires_grad)
