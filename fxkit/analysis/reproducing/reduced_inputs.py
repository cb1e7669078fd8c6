"""Smaller and plainer inputs and weights of a small program, for a reducer to try."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fxkit.ir.types import KEY
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.layers import buffers_of, parameters_of

# Under these keys of its `meta` a node's type may be recorded, which is another one then.
_TYPE_KEYS = (KEY, "val", "tensor_meta", "example_value")

Program = tuple[fx.GraphModule, tuple[Any, ...]]
Step = Callable[[torch.Tensor], torch.Tensor]


def sizes_of(program: Program) -> list[int]:
    """Return the sizes that axes of inputs and weights have, ones left out, largest first."""
    return sorted({n for t in _tensors(*program) for n in t.shape if n > 1}, reverse=True)


def smaller_sizes(program: Program, size: int) -> Iterator[tuple[int, Callable[[], Program]]]:
    """Yield ways to make axes of one size smaller, everywhere at once, with the new size.

    The first or the last elements are kept. Constants of calls that equal the size change with it,
    and, should that not do, stay.
    """
    has_constants = _has_constant(program, size)
    for smaller in sorted({1, 2, 3, size // 2} & set(range(1, size))):
        for at_end in (False, True):
            for in_constants in (True, False) if has_constants else (False,):
                yield (
                    smaller,
                    functools.partial(_resized, program, size, smaller, in_constants, at_end),
                )


def plainer_values(program: Program) -> Iterator[Callable[[Program], Program]]:
    """Yield ways to make tensors plainer: in type, in numbers, in strides."""
    gm, args = program
    count = len(_tensors(gm, args))
    if any(tensor.requires_grad for tensor in _tensors(gm, args)):
        yield lambda p: _mapped(p, _without_gradient)
    if any(_is_unusual(tensor) for tensor in _tensors(gm, args)):
        yield lambda p: _mapped(p, _in_float32)
    for index in range(count):
        for plain in (_minus_one, torch.ones_like, torch.zeros_like, torch.round, _short):
            yield lambda p, i=index, f=plain: _mapped(p, lambda t: _filled(t, f), i)
        yield lambda p, i=index: _mapped(p, _contiguous, i)


def _tensors(gm: fx.GraphModule, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors of a program: those in its inputs, then parameters and buffers."""
    leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return [*leaves, *(value for _, _, value in _attributes(gm))]


def _attributes(gm: fx.GraphModule) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in gm.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, value in table.items():
                if value is not None:
                    yield module, name, value


def _mapped(program: Program, step: Step, only: int | None = None) -> Program:
    """Return a copy of a program with its tensors changed: all of them, or the one at a place."""
    gm, args = copy.deepcopy(program[0]), program[1]
    count = iter(range(1_000_000_000))
    done: dict[int, torch.Tensor] = {}

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if only is not None and next(count) != only:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = step(tensor)
        return done[id(tensor)]

    args = pytree.tree_map_only(torch.Tensor, changed, args)
    for module, name, value in list(_attributes(gm)):
        made = changed(value)
        if isinstance(value, nn.Parameter) and not isinstance(made, nn.Parameter):
            made = nn.Parameter(made.detach(), requires_grad=value.requires_grad)
        table: dict[str, Any] = (
            parameters_of(module) if name in parameters_of(module) else buffers_of(module)
        )
        table[name] = made
    return gm, args


def _has_constant(program: Program, size: int) -> bool:
    gm, args = program
    found: list[Any] = pytree.tree_leaves(args)
    map_aggregate([(n.args, n.kwargs) for n in gm.graph.nodes], found.append)
    modules = [v for m in gm.modules() for v in m.__dict__.values()]
    found.extend(pytree.tree_leaves([v for v in modules if isinstance(v, (int, tuple))]))
    return any(type(value) is int and value == size for value in found)


def _resized(
    program: Program, size: int, smaller: int, in_constants: bool, at_end: bool
) -> Program:
    gm, args = _mapped(program, lambda tensor: _narrowed(tensor, size, smaller, at_end))
    for node in gm.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k not in _TYPE_KEYS}
    if in_constants:
        for node in gm.graph.nodes:
            node.args = map_aggregate(node.args, lambda v: _replaced(v, size, smaller))
            node.kwargs = map_aggregate(node.kwargs, lambda v: _replaced(v, size, smaller))
        for module in gm.modules():
            _resize_module(module, size, smaller)
        args = pytree.tree_map(lambda v: _replaced(v, size, smaller), args)
        gm.recompile()
    return gm, args


def _replaced(value: Any, size: int, smaller: int) -> Any:
    return smaller if type(value) is int and value == size else value


def _resize_module(module: nn.Module, size: int, smaller: int) -> None:
    """Change what a module of torch.nn remembers of its sizes."""
    if not type(module).__module__.startswith("torch.nn."):
        return
    for name, value in list(module.__dict__.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, tuple):
            module.__dict__[name] = tuple(_replaced(v, size, smaller) for v in value)
        else:
            module.__dict__[name] = _replaced(value, size, smaller)


def _narrowed(tensor: torch.Tensor, size: int, smaller: int, at_end: bool) -> torch.Tensor:
    """Take the first or last elements along the axes of a size; the order of strides stays."""
    if size not in tensor.shape:
        return tensor
    cut = tensor.detach()
    for axis, length in enumerate(tensor.shape):
        if length == size:
            cut = cut.narrow(axis, size - smaller if at_end else 0, smaller)
    order = sorted(range(cut.dim()), key=lambda axis: -tensor.stride(axis))
    back = [order.index(axis) for axis in range(cut.dim())]
    dense = cut.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    return dense.requires_grad_(tensor.requires_grad)


def _filled(tensor: torch.Tensor, plain: Step) -> torch.Tensor:
    """Give a tensor other numbers in the same places; integers are left to ones and zeros."""
    is_number = tensor.is_floating_point()
    if not is_number and plain not in (torch.ones_like, torch.zeros_like):
        return tensor
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    made.copy_(plain(tensor.detach()))
    return made.requires_grad_(tensor.requires_grad)


def _minus_one(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, -1.0)


def _short(tensor: torch.Tensor) -> torch.Tensor:
    return torch.round(tensor, decimals=1) if tensor.dtype.itemsize > 2 else tensor


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return dense.requires_grad_(tensor.requires_grad)


def _is_unusual(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_unusual(tensor):
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()


def is_same(one: Program, other: Program) -> bool:
    """Tell whether a step changed nothing: tensors, constants and strides."""
    pairs = zip(_tensors(*one), _tensors(*other), strict=True)
    return one[0].code == other[0].code and all(_is_same_tensor(a, b) for a, b in pairs)


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    same = one.shape == other.shape and one.stride() == other.stride()
    same = same and one.requires_grad == other.requires_grad and one.dtype == other.dtype
    return same and torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
