"""Which calls are run on small real tensors, to see what type their results have.

A run on fake tensors begins with the import of what torch does symbolic sizes with, and in torch
2.13 of its distributed tensors too: most of a second, which many programs need for nothing else.
A call whose result has a type that no number in its operands decides can be run as it is, on zeros
of the right types, when that costs little; and what eager returns is right by definition.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.type_inference.type_facts import (
    FactTable,
    TypeFacts,
    materialise,
    span_of,
    with_operands,
)
from fxkit.analysis.type_inference.type_modes import is_intercepted
from fxkit.ir.modes import is_followed
from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters import pytree

# Bytes of operands and results together, and about how many products are added up, at most: where
# fake tensors would cost that import first, and where it has been paid for already.
_MOST = (1 << 26, 1 << 28)
_MOST_ONCE_IMPORTED = (1 << 24, 1 << 26)

# Beside pointwise operators, which torch marks. None of them has a result whose size, dtype or
# strides depend on the numbers in an operand; an index of bools would, and is told apart. Results
# of the first have no more elements than the operands together, or twice as many.
_NO_LARGER = frozenset(
    f"aten.{name}"
    for name in """
    softmax log_softmax layer_norm group_norm rms_norm batch_norm instance_norm
    sum mean amax amin aminmax prod var std norm linalg_vector_norm logsumexp any all max min median
    cumsum cumprod argmax argmin sort argsort topk
    reshape view transpose permute t unsqueeze squeeze expand expand_as select slice narrow
    chunk split unbind flatten unflatten contiguous clone detach to type_as movedim diagonal
    cat stack gather dropout tril triu roll flip view_as_real view_as_complex
    mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy_loss nll_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits pixel_shuffle pixel_unshuffle
    zeros_like ones_like full_like copy_ fill_ zero_ masked_fill_
    """.split()
)
_KNOWN = _NO_LARGER | frozenset(
    f"aten.{name}"
    for name in """
    linear matmul mm bmm addmm baddbmm addbmm mv addmv dot outer einsum scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution embedding
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d
    upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
    index index_select scatter scatter_add index_add take_along_dim
    pad repeat im2col unfold fft_fft fft_ifft fft_rfft fft_irfft
    zeros ones full arange new_zeros new_ones new_full
    """.split()
)

# Functions and composites of torch that are no operators themselves, of which the same holds.
_FUNCTIONS = frozenset(
    {
        "torch.nn.functional.interpolate",
        "torch.nn.functional.normalize",
        "torch.nn.functional.multi_head_attention_forward",
        "torch.nn.functional.unfold",
        "torch.norm",
    }
)
_RECURRENT = frozenset(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_INDEXING = frozenset({"aten.index", "python.getitem", "python.setitem"})
_BY_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_POSITIONS = frozenset({torch.int32, torch.int64})
_PRODUCTS = frozenset({"aten.linear", "aten.matmul", "aten.mm", "aten.bmm"})


def may_run(node: fx.Node, operands: list[TypeFacts], expected: Any) -> bool:
    """Tell whether a call is one to run on real tensors.

    Args:
        node: The call.
        operands: The facts of the tensors among its operands.
        expected: The type that it was seen to return for operands of these types, or None; it says
            what a run takes, and no more.
    """
    call = resolve(node)
    if call is None or node.op == "call_module" or not _is_known(call):
        return False
    if not _is_contained(node) or is_intercepted():
        return False
    if is_followed():
        return False
    results = [leaf for leaf in pytree.tree_leaves(expected) if type(leaf) is TensorType]
    known = [*results, *(facts.type for facts in operands)]
    if any(it.is_symbolic or it.stride is None or it.device.type != "cpu" for it in known):
        return False
    most, most_products = _MOST_ONCE_IMPORTED if "sympy" in sys.modules else _MOST
    made = sum(map(span_of, results)) if results else _bound(call, operands)
    if made is None or made + sum(map(_storage, operands)) > most:
        return False
    return _is_linear(call) or _products(known) <= most_products


def _is_linear(call: Call) -> bool:
    """Tell whether a call takes time in proportion to its elements."""
    return call.name in _NO_LARGER or call.name in _INDEXING or _is_pointwise(call)


def _is_pointwise(call: Call) -> bool:
    overload = call.operator.overload
    return overload is not None and torch.Tag.pointwise in overload.tags


def _is_known(call: Call) -> bool:
    overload = call.operator.overload
    if call.name in _INDEXING:
        return all(map(_is_plain_index, pytree.tree_leaves(list(call.arguments.values())[1])))
    if call.name in _KNOWN or call.name in _FUNCTIONS:
        return True
    if overload is None or overload.namespace != "aten" or not _BY_DATA.isdisjoint(overload.tags):
        return False
    return _is_pointwise(call) or str(overload) in _RECURRENT


def _is_plain_index(value: Any) -> bool:
    """Tell whether an index says by its type alone what a result is like.

    A tensor of one number stands for that number: where a view begins, or where a slice ends.
    """
    if isinstance(value, slice):
        return all(part is None or type(part) is int for part in _parts(value))
    if isinstance(value, fx.Node):
        known = type_of(value)
        return isinstance(known, TensorType) and known.dtype in _POSITIONS and bool(known.shape)
    return value is None or value is Ellipsis or type(value) is int


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _is_contained(node: fx.Node) -> bool:
    """Tell whether a call changes nothing but its operands."""
    effects = effects_of(node)
    if effects.is_opaque or effects.is_random or effects.is_global or effects.may_raise:
        return False
    return all(isinstance(written, fx.Node) for written in effects.writes)


def _bound(call: Call, operands: list[TypeFacts]) -> int | None:
    """Return how many bytes a result that nobody has seen has at most, where that is plain."""
    if call.name == "python.setitem":
        return 0
    shapes = [facts.type.shape for facts in operands]
    width = max((8, *(2 * facts.type.dtype.itemsize for facts in operands)))
    if call.name in _NO_LARGER or call.name == "python.getitem":
        return width * sum(map(math.prod, shapes))
    if _is_pointwise(call) and shapes:
        return width * math.prod(max(sizes) for sizes in _aligned(shapes))
    if call.name in _PRODUCTS and all(shapes):
        first, second = (shapes * 2)[:2]  # one tensor may be both
        return width * math.prod(first) * math.prod(second) // max(first[-1], 1)
    return None


def _aligned(shapes: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Iterate over the sizes that meet when shapes are broadcast."""
    return itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)


def _storage(facts: TypeFacts) -> int:
    return span_of(facts.type) if facts.nbytes < 0 else facts.nbytes


def _products(known: list[TensorType]) -> float:
    """Return how many products a matrix product of tensors of these types has; more for others."""
    largest = sorted((math.prod(it.shape) for it in known), reverse=True)[:3]
    return math.sqrt(math.prod(largest))


def run_on_zeros(
    run: Callable[[Callable[[TypeFacts], torch.Tensor]], Any], table: FactTable, *, keep_grad: bool
) -> tuple[Any] | None:
    """Run a call on real tensors, and return what is known of its result.

    Args:
        run: Makes the call; it is given what makes a tensor from facts.
        table: Gives facts.
        keep_grad: Whether operands are made by autograd where their facts say so.

    Returns:
        What is known, alone in a tuple. None where the call fails, or gives an operand another
        shape, or its result is neither nothing nor made of plain tensors.
    """
    made: list[tuple[torch.Tensor, TypeFacts]] = []

    def make(facts: TypeFacts) -> torch.Tensor:
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
    found = [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]
    is_plain = all(type(leaf) is TypeFacts and leaf.core.is_plain for leaf in found)
    is_faithful = all(table.of(tensor).core is facts.core for tensor, facts in made)
    return (value,) if is_plain and is_faithful else None
