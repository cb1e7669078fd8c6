"""Whether two programs do the same, judged against float64.

An error is that of a whole tensor: the largest difference from the float64 result, over the largest
float64 value. Ours may be twice eager's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.float64 import in_float64, widened_module
from fxkit.errors import NumericsError
from fxkit.ir.types import TensorType

# How much worse than eager's, against float64, an error may be.
ERROR_RATIO = 2.0


@dataclass(frozen=True)
class Comparison:
    """How far two results are from float64.

    Attributes:
        error: Largest absolute error of the result, over the largest finite float64 value.
        eager_error: The same for what it is compared with.
    """

    error: float
    eager_error: float

    def is_within(self, dtype: torch.dtype) -> bool:
        """Tell whether the error is at most twice eager's, or as small as can be measured.

        That is two units in the last place; for float64, which is its own reference here, 64.
        """
        units = 64 if dtype == torch.float64 else 2
        floor = units * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        return self.error <= max(ERROR_RATIO * self.eager_error, floor)


def compare(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Comparison:
    """Measure two tensors against a float64 reference of the same shape."""
    scale = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 1.0
    scale = scale or 1.0

    def error(value: torch.Tensor) -> float:
        value = value.double()
        same = (value == exact) | (value.isnan() & exact.isnan())
        difference = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=torch.inf)
        return (difference.max().item() if difference.numel() else 0.0) / scale

    return Comparison(error(got), error(eager))


def assert_equivalent(
    before: Callable[..., Any],
    after: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    exact: bool = False,
    gradients: bool = True,
) -> None:
    """Check that two programs do the same to the same inputs.

    Compared are structure, shapes, dtypes, strides, values, what happens to the arguments, and the
    gradients of the inputs and parameters that require them. A program that brings tensors which
    the other has not takes parameters as constants, and theirs are not compared.

    Args:
        before: The program to be equal to.
        after: The program to check.
        args: Inputs; each program gets its own copy.
        kwargs: Keyword inputs.
        exact: Require equal numbers; else an error against float64 of at most twice `before`'s.
        gradients: Compare gradients too.

    Raises:
        NumericsError: On the first difference.
    """
    inputs = (args, dict(kwargs or {}))
    expected, got = (Observation(program, inputs, gradients) for program in (before, after))
    truth = None if exact else Observation(before, inputs, gradients, run_wide=True)
    assert_same(expected, got, truth)


def assert_same(expected: Observation, got: Observation, truth: Observation | None) -> None:
    """Check that two observed calls of programs did the same; see `assert_equivalent`.

    Args:
        expected: What has to come out.
        got: What came out.
        truth: The same in float64; None to require equal numbers.

    Raises:
        NumericsError: On the first difference.
    """
    for part in ("outputs", "arguments", "gradients"):
        wanted, found = getattr(expected, part), getattr(got, part)
        exactly = wanted if truth is None else getattr(truth, part)
        _check_trees(part, wanted, found, exactly, truth is None)
    if got.state <= expected.state:
        _check_parameters(expected, got, truth)


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


# Stands for the gradient of a program that has none.
_NO_DERIVATIVE = "no derivative"
_WITHOUT_DERIVATIVE = ("is not implemented", "modified by an inplace operation")


def _gradients(outputs: Any, wanted: list[torch.Tensor]) -> list[torch.Tensor | str]:
    """Return the gradients; that of an input that no result depends on is zero."""
    results = [
        _real(t)
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
        return [_NO_DERIVATIVE] * len(wanted)


def _check_parameters(expected: Observation, got: Observation, truth: Observation | None) -> None:
    """Compare the gradients of parameters that both programs read, as one long vector.

    Alone, one may be nothing but rounding: that of a bias of attention's keys is zero. An exact
    program may sum over the uses of a value in another order, so it gets the slack of float64.
    """
    names = [name for name in expected.parameters if name in got.parameters]
    wants, have = ([o.parameters[name] for name in names] for o in (expected, got))
    exact: list[Any] = wants if truth is None else [truth.parameters.get(name) for name in names]
    if not names or not all(isinstance(t, torch.Tensor) for t in (*wants, *exact)):
        return
    scale = max((_largest(t) for t in exact), default=0.0) or 1.0
    for name, want, found, exactly in zip(names, wants, have, exact, strict=True):
        if not isinstance(found, torch.Tensor) or want.shape != found.shape:
            raise NumericsError(f"expected a gradient of {name}, got {found!r}")
        own = _largest(exactly) or 1.0
        compared = compare(
            _real(found.detach()), _real(want.detach()), _real(exactly.detach()).double()
        )
        share = own / scale
        scaled = Comparison(compared.error * share, compared.eager_error * share)
        units = 64 * torch.finfo(want.dtype).eps if truth is None else 0.0
        if scaled.error > units and not scaled.is_within(want.dtype):
            allowed = max(units, ERROR_RATIO * scaled.eager_error)
            raise NumericsError(
                f"expected the gradient of {name} with an error of at most {allowed:.3g} of the "
                f"largest gradient, got {scaled.error:.3g}"
            )


def _largest(tensor: Any) -> float:
    """Return the largest finite magnitude, or zero."""
    if not isinstance(tensor, torch.Tensor):
        return 0.0
    finite = _real(tensor.detach())
    finite = finite[finite.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _check_trees(part: str, expected: Any, got: Any, truth: Any, exact: bool) -> None:
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    got_leaves, got_spec = pytree.tree_flatten(got)
    if expected_spec != got_spec:
        raise NumericsError(f"expected {part} of the form {expected_spec}, got {got_spec}")
    for index, (e, g, t) in enumerate(
        zip(expected_leaves, got_leaves, pytree.tree_leaves(truth), strict=True)
    ):
        _check_leaf(f"{part}[{index}]", e, g, t, exact)


def _check_leaf(name: str, expected: Any, got: Any, truth: Any, exact: bool) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(expected) is type(got) and (expected == got or expected != expected)
        if not same:
            raise NumericsError(f"expected {name} to be {expected!r}, got {got!r}")
        return
    want, have = TensorType.of(expected), TensorType.of(got)
    if name.startswith("gradients"):  # autograd lays them out as it likes
        have = replace(have, stride=want.stride)
    if want != have:
        raise NumericsError(
            f"expected {name} of type {want} stride {want.stride} requires_grad "
            f"{want.requires_grad}, got {have} stride {have.stride} requires_grad "
            f"{have.requires_grad}"
        )
    expected, got, truth = (_real(t.detach()) for t in (expected, got, truth))
    if exact or not expected.dtype.is_floating_point:
        if not torch.equal(_without_nan(expected), _without_nan(got)) or not (
            torch.equal(expected.isnan(), got.isnan())
        ):
            raise NumericsError(f"expected {name} to equal {_short(expected)}, got {_short(got)}")
        if name.startswith("outputs") and _zeros_differ(expected, got):
            raise NumericsError(
                f"expected {name} to equal in the signs of its zeros too, got others"
            )
        return
    compared = compare(got, expected, truth.double())
    if not compared.is_within(expected.dtype):
        raise NumericsError(
            f"expected {name} with an error of at most twice {compared.eager_error:.3g}, "
            f"got {compared.error:.3g}, against float64"
        )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones; all others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(nan=1.25, posinf=torch.inf, neginf=-torch.inf)


def _zeros_differ(expected: torch.Tensor, got: torch.Tensor) -> bool:
    zeros = expected == 0
    return not torch.equal(expected[zeros].signbit(), got[zeros].signbit())


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
        key = tensor.untyped_storage()._cdata
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


def _short(tensor: torch.Tensor) -> str:
    return f"{tensor.flatten()[:6].tolist()}{'...' if tensor.numel() > 6 else ''}"
