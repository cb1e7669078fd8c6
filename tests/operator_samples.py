"""torch's own sample inputs for its operators, as single nodes that can be run again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.ir.types import set_type, type_of_value
from tests import opinfos

SAMPLES = 6  # of each operator


@dataclass(frozen=True)
class Sample:
    """One call, as a node whose operands stand for tensors."""

    name: str
    node: fx.Node
    tensors: dict[fx.Node, torch.Tensor]

    def run(self) -> tuple[Any, dict[fx.Node, torch.Tensor]]:
        """Run the call on copies of its tensors; return its result and those copies."""
        copies = self.copies()
        args, kwargs = self.fill((self.node.args, self.node.kwargs), copies)
        if self.node.op == "call_method":
            return getattr(args[0], str(self.node.target))(*args[1:], **kwargs), copies
        return self.node.target(*args, **kwargs), copies  # type: ignore[operator]

    def copies(self) -> dict[fx.Node, torch.Tensor]:
        return {node: _copy(tensor) for node, tensor in self.tensors.items()}

    @staticmethod
    def fill(value: Any, tensors: dict[fx.Node, torch.Tensor]) -> Any:
        return fx.node.map_arg(value, lambda node: tensors[node])


def samples(part: int, parts: int) -> Iterator[Sample]:
    """Yield calls of every `parts`-th operator of torch's table, as function, method, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in opinfos.table().op_db[part::parts]:
            yield from _samples_of(info)


def _samples_of(info: Any) -> Iterator[Sample]:
    plain = torch.float32
    dtype = plain if plain in info.dtypes else min(info.dtypes, key=str, default=plain)
    torch.manual_seed(0)
    try:
        inputs = list(info.sample_inputs("cpu", dtype, requires_grad=False))[:SAMPLES]
    except (RuntimeError, ImportError):  # needs what is not there, such as a device or SciPy
        return
    name = f"{info.name}.{info.variant_test_name}".rstrip(".")
    targets: list[tuple[str, Any]] = [("call_function", info.op)]
    variants = [v for v in (info.method_variant, info.inplace_variant) if v is not None]
    targets += [("call_method", getattr(v, "__name__", info.name)) for v in variants]
    for one in inputs:
        args = (one.input, *one.args)
        if not all(_is_plain(leaf) for leaf in pytree.tree_leaves((args, one.kwargs))):
            continue
        for op, target in targets:
            try:
                yield _sample(name, op, target, args, one.kwargs)
            except (RuntimeError, NotImplementedError, AttributeError):  # no graph can hold it
                continue


def _sample(name: str, op: str, target: Any, args: Any, kwargs: Any) -> Sample:
    graph = fx.Graph()
    tensors: dict[fx.Node, torch.Tensor] = {}

    def lift(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(tensors)}")
        tensors[node] = tensor
        set_type(node, type_of_value(tensor))
        return node

    args, kwargs = pytree.tree_map_only(torch.Tensor, lift, (args, kwargs))
    return Sample(name, graph.create_node(op, target, args, kwargs), tensors)


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or leaf.layout == torch.strided


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return fresh.copy_(tensor)


def is_same(expected: Any, got: Any) -> bool:
    """Tell whether two results are equal in value, dtype, shape and stride."""
    expected, got = pytree.tree_leaves(expected), pytree.tree_leaves(got)
    return len(expected) == len(got) and all(
        _is_same(e, g) for e, g in zip(expected, got, strict=True)
    )


def _is_same(expected: Any, got: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return bool(expected == got or expected != expected)
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return False
    if expected.layout != torch.strided:
        expected, got = expected.to_dense(), got.to_dense()
    elif expected.numel() > 1 and expected.stride() != got.stride():
        return False
    if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:
        expected, got = expected.float(), got.float()
    return bool(((expected == got) | ((expected != expected) & (got != got))).all())
