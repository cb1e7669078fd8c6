"""Along which axes a graph that holds its state in integers may be called with other sizes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxkit.errors import UnsupportedError
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree

_TOLERANCE = 1e-2
"""Of results, over the largest: where sizes are read, they differ by more."""


def hold_sizes(program: Any, gm: fx.GraphModule, states: Mapping[str, Any]) -> None:
    """Let a graph refuse states of sizes that its program computes otherwise.

    Sizes that a program reads, such as the number of tokens before, are constants in a graph. The
    program is called with states that are longer by one along an axis, and the graph is compared
    with it: what agrees, or what only the graph can tell, is left free.

    Args:
        program: What the graph was made of: something that captures anew for other sizes.
        gm: The graph, which takes states in integers.
        states: How integers stand for each state, by the name of its input.
    """
    if isinstance(program, fx.GraphModule):
        return
    types = {node.name: type_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    if not all(isinstance(known, TensorType) and not known.is_symbolic for known in types.values()):
        return
    shapes = {name: tuple(types[name].shape) for name in states}
    ranks = max(map(len, shapes.values()), default=0)
    fixed = [a for a in range(ranks) if not _serves(program, gm, types, states, longer_along=a)]
    if fixed:
        gm.register_forward_pre_hook(_SizeCheck(tuple(types), shapes, tuple(fixed)))


@dataclass(frozen=True)
class _SizeCheck:
    """Refuses states of other sizes along some axes.

    Attributes:
        inputs: Names of all inputs, in order.
        shapes: Of the captured states, by name.
        axes: Along which they have to be the same.
    """

    inputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    axes: tuple[int, ...]

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        for name, value in zip(self.inputs, args, strict=False):
            shape = self.shapes.get(name)
            if shape is None or not isinstance(value, Tensor):
                continue
            known = [shape[a] for a in self.axes if a < len(shape)]
            given = [value.shape[a] for a in self.axes if a < value.ndim]
            if known != given:
                raise UnsupportedError(
                    f"expected {name!r} of shape {shape}, as it was captured, got "
                    f"{tuple(value.shape)}",
                    hint="the program reads its sizes, which are constants in this graph: hold the "
                    "state in a buffer of one size, or pass positions as tensors",
                )


def _serves(
    program: Any,
    gm: fx.GraphModule,
    types: Mapping[str, TensorType],
    states: Mapping[str, Any],
    *,
    longer_along: int,
) -> bool:
    """Tell whether a graph agrees with its program on states that are longer along an axis.

    Where the program does not take such states, nothing is known: other inputs may have to be
    longer too, which is not tried.
    """
    made = torch.Generator().manual_seed(0)
    floats, integers = [], []
    for name, known in types.items():
        shape = list(map(int, known.shape))
        if name not in states:
            value = _made(shape, known, made)
            floats.append(value)
            integers.append(value.clone())
            continue
        if longer_along < len(shape):
            shape[longer_along] += 1
        how = states[name]
        value = torch.randint(how.low, how.high + 1, shape, generator=made).to(how.dtype)
        value = value.to(known.device)
        floats.append(how.dequantize(value))
        integers.append(value)
    with torch.no_grad(), contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batches that calibration has not seen
        expected, found = program(*floats), gm(*integers)
        pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
        return all(_agree(one, other, states) for one, other in pairs)
    return True


def _made(shape: list[int], known: TensorType, made: torch.Generator) -> Tensor:
    if known.dtype.is_floating_point:
        return torch.randn(shape, generator=made).to(known.device, known.dtype)
    return torch.zeros(shape, dtype=known.dtype, device=known.device)


def _agree(expected: Any, found: Any, states: Mapping[str, Any]) -> bool:
    """Tell whether results are nearly the same; states are integers in one of them."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return True
    if expected.shape != found.shape:
        return False
    if found.dtype != expected.dtype:
        ways = [how for how in states.values() if how.dtype == found.dtype]
        return any(_near(expected, how.dequantize(found)) for how in ways)
    return _near(expected, found)


def _near(expected: Tensor, found: Tensor) -> bool:
    if not expected.numel():
        return True
    most = float(expected.double().abs().max())
    off = (expected.double() - found.double()).abs().max()
    return bool(off <= _TOLERANCE * most) or bool(expected.isnan().any())
