"""Which calls are run on small real tensors, to see what type their results have.

A run on fake tensors begins with the import of what torch does symbolic sizes with, and in torch
2.13 of its distributed tensors too: most of a second, which many programs need for nothing else.
A call whose result has a type that no number in its operands decides can be run as it is, on zeros
of the right types, when that costs little; and what eager returns is right by definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.effects import effects_of
from fxkit.analysis.type_inference.type_facts import (
    Facts,
    FactTable,
    facts_in,
    materialise,
    span_of,
    with_operands,
)
from fxkit.analysis.type_inference.type_modes import is_intercepted
from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType

# Bytes of operands and results together, and about how many products are added up.
_MOST_BYTES = 1 << 24
_MOST_PRODUCTS = 1 << 26

# Beside pointwise operators, which torch marks. None of them has a result whose size, dtype or
# strides depend on the numbers in an operand.
_KNOWN = frozenset(
    f"aten.{name}"
    for name in """
    linear matmul mm bmm addmm baddbmm scaled_dot_product_attention embedding
    conv1d conv2d conv3d max_pool2d avg_pool2d adaptive_avg_pool2d
    softmax log_softmax layer_norm group_norm rms_norm batch_norm instance_norm
    sum mean amax amin var std logsumexp cumsum argmax argmin
    reshape view transpose permute t unsqueeze squeeze expand expand_as select slice narrow
    chunk split unbind flatten unflatten contiguous clone detach to type_as
    cat stack gather index_select dropout pad tril triu topk
    """.split()
)


def may_run(node: fx.Node, operands: list[Facts], expected: Any) -> bool:
    """Tell whether a call is one to run on real tensors.

    Args:
        node: The call.
        operands: The facts of the tensors among its operands.
        expected: The type that it was seen to return for operands of these types; it says what a
            run takes, and no more.
    """
    call = resolve(node)
    results = [leaf for leaf in pytree.tree_leaves(expected) if type(leaf) is TensorType]
    if call is None or node.op == "call_module" or not results or not operands:
        return False
    if not _is_known(call) or not effects_of(node).is_pure:
        return False
    if is_intercepted() or torch._C._are_functorch_transforms_active():
        return False
    known = [*results, *(facts.type for facts in operands)]
    if any(it.is_symbolic or it.stride is None or it.device.type != "cpu" for it in known):
        return False
    size = sum(span_of(it) for it in results) + sum(map(_storage, operands))
    return size <= _MOST_BYTES and _products(known) <= _MOST_PRODUCTS


def _is_known(call: Call) -> bool:
    if call.name == "python.getitem":
        return all(map(_is_plain_index, pytree.tree_leaves(list(call.arguments.values())[1:])))
    overload = call.operator.overload
    return call.name in _KNOWN or (
        overload is not None
        and overload.namespace == "aten"
        and torch.Tag.pointwise in overload.tags
    )


def _is_plain_index(value: Any) -> bool:
    if isinstance(value, slice):
        return all(map(_is_plain_index, (value.start, value.stop, value.step)))
    return value is None or value is Ellipsis or type(value) is int


def _storage(facts: Facts) -> int:
    return span_of(facts.type) if facts.nbytes < 0 else facts.nbytes


def _products(known: list[TensorType]) -> float:
    """Return how many products a matrix product of tensors of these types has; more for others."""
    largest = sorted((math.prod(it.shape) for it in known), reverse=True)[:3]
    return math.sqrt(math.prod(largest))


def run_on_zeros(
    run: Callable[[Callable[[Facts], torch.Tensor]], Any], table: FactTable, *, keep_grad: bool
) -> Any:
    """Run a call on real tensors, and return what is known of its result.

    Args:
        run: Makes the call; it is given what makes a tensor from facts.
        table: Gives facts.
        keep_grad: Whether operands are made by autograd where their facts say so.

    Returns:
        None where the call fails, or changes an operand, or its result is no plain tensor.
    """
    made: list[tuple[torch.Tensor, Facts]] = []

    def make(facts: Facts) -> torch.Tensor:
        tensor = materialise(facts, keep_grad=keep_grad)
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory.set_(tensor.untyped_storage()).zero_()  # what lies between its elements too
        made.append((tensor, facts))
        return tensor

    try:
        result = run(make)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    value = table.of_results(with_operands(result, made))
    is_plain = all(facts.core.is_plain for facts in facts_in(value))
    is_faithful = all(table.of(tensor).core is facts.core for tensor, facts in made)
    return value if is_plain and is_faithful else None
