"""What one call of a program did: to copies of inputs, which may be widened to float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.analysis.float64 import in_float64, widened_module
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.tensors import impl_address_of


class Observation:
    """One call of a program on copies of inputs.

    Args:
        program: What is called.
        inputs: `(args, kwargs)`; the call is given copies.
        gradients: Whether gradients of the inputs and parameters that require them are taken.
        run_wide: Whether program and inputs are widened first, so that it runs in float64.

    Attributes:
        outputs: What it returned.
        arguments: The copies that it was given, as it left them.
        gradients: Gradients of the inputs that require them.
        parameters: Gradients of the module's parameters that require them, by name; of a graph,
            those that its output depends on.
        state: Names of the parameters and buffers that it reads.
    """

    def __init__(
        self, program: Callable[..., Any], inputs: Any, gradients: bool, run_wide: bool = False
    ) -> None:
        if run_wide and isinstance(program, torch.nn.Module):
            program = widened_module(program)
        state = _state_of(program)
        parameters = {n: t for n, t in state.items() if t.requires_grad and t.is_leaf}
        inputs = clone_inputs(inputs, widen=run_wide)
        leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        wanted = [t for t in leaves if t.requires_grad] if gradients else []
        args, kwargs = pytree.tree_map_only(torch.Tensor, _non_leaf, inputs) if wanted else inputs
        generator = torch.random.get_rng_state()
        with in_float64() if run_wide else contextlib.nullcontext():
            try:
                self.outputs = quiet(program)(*args, **kwargs)
            finally:
                torch.random.set_rng_state(generator)
            inner = list(parameters.values()) if gradients else []
            found = _gradients(self.outputs, [*wanted, *inner])
        self.arguments = (args, kwargs)
        self.gradients = found[: len(wanted)]
        self.parameters: dict[str, Any] = dict(zip(parameters, found[len(wanted) :], strict=False))
        self.state = frozenset(state)


def _state_of(program: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name; of a graph, those that it reads."""
    if not isinstance(program, torch.nn.Module):
        return {}
    state = {
        **dict(program.named_parameters(remove_duplicate=False)),
        **dict(program.named_buffers(remove_duplicate=False)),
    }
    if not isinstance(program, fx.GraphModule):
        return state
    read = _read_by(program.graph)
    return {name: tensor for name, tensor in state.items() if _is_in(name, read)}


def _read_by(graph: fx.Graph) -> set[str]:
    """Return the names of attributes and modules that the output depends on."""
    queue = [graph.output_node()]
    seen = set(queue)
    for node in queue:
        fresh = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(fresh)
        queue += fresh
    return {str(node.target) for node in seen if node.op in ("get_attr", "call_module")}


def _is_in(name: str, read: set[str]) -> bool:
    """Tell whether a name is one of those read, or lies inside of a module that is."""
    parts = name.split(".")
    return any(".".join(parts[: length + 1]) in read for length in range(len(parts)))


def quiet(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a program; of a graph module, without writing to stderr what it raises."""
    if isinstance(program, fx.GraphModule):
        return functools.partial(torch.nn.Module.__call__, program)
    return program


def _non_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be written in place although its gradient is wanted."""
    return tensor * 1 if tensor.requires_grad else tensor


@dataclass(frozen=True, repr=False)
class NoDerivative:
    """Stands for the gradient of a program that has none; one is like another.

    Attributes:
        reason: What torch says of it.
    """

    reason: str = field(compare=False)

    def __repr__(self) -> str:
        return f"none: {self.reason}"


_WITHOUT_DERIVATIVE = (
    "is not implemented",
    "modified by an inplace operation",
    "no autograd formula was registered",
    "You must implement either the backward",
)


def _gradients(outputs: Any, wanted: list[torch.Tensor]) -> list[torch.Tensor | NoDerivative]:
    """Return the gradients; that of an input that no result depends on is zero."""
    results = [
        real_numbers(t)
        for t in pytree.tree_leaves(outputs)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not wanted or not results:
        return []
    total = torch.stack([(r * torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape)).sum().double()
                         for r in results]).sum()  # fmt: skip
    try:
        return list(torch.autograd.grad(total, wanted, materialize_grads=True))
    except RuntimeError as error:
        if not any(words in str(error) for words in _WITHOUT_DERIVATIVE):
            raise
        return [NoDerivative(str(error).partition("\n")[0])] * len(wanted)


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones; all others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def clone_inputs(inputs: Any, *, widen: bool = False) -> Any:
    """Copy the tensors of a nested value, with their strides and with the memory that they share.

    Args:
        inputs: The nested value; what is no tensor is kept as it is.
        widen: Copy floating point tensors to float64; memory is then shared no more.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        key = impl_address_of(tensor.untyped_storage())
        if key not in storages:
            storages[key] = tensor.untyped_storage().clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        if widen and (fresh.dtype.is_floating_point or fresh.dtype.is_complex):
            fresh = fresh.to(torch.complex128 if fresh.dtype.is_complex else torch.float64)
        fresh = fresh.conj() if tensor.is_conj() else fresh
        fresh = torch.ops.aten._neg_view(fresh) if tensor.is_neg() else fresh
        return fresh.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copied, inputs)


def overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements share memory, as those of an expanded tensor."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in axes)
