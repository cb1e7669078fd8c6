"""Torch's own parts that make functional ATen: the one place that knows where torch keeps them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxkit.analysis.dependencies import ancestors
from fxkit.analysis.effects import effects_of
from fxkit.analysis.type_inference.fake_tensors import as_fake, new_fake_mode, without_log
from fxkit.ir.code_tracer import read_by_code
from fxkit.torch_adapters.aot_autograd import joint_exporter, partitioner
from fxkit.tracing.functional.effect_tokens import drop_tokens
from fxkit.tracing.functional.kept_whole import kept_whole
from fxkit.tracing.recorder.state_restore import random_states, set_random_states
from fxkit.tracing.values.refusals import Refusal, said

Decompositions = Mapping[Any, Callable[..., Any]]

# Torch's tracing sets what belongs to all threads, such as whether autograd looks for anomalies.
_one_at_a_time = threading.RLock()


def trace_functional(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[torch.Tensor],
    decompositions: Decompositions | None = None,
    *,
    train: bool = False,
) -> fx.GraphModule:
    """Follow a function of tensors down to functional ATen, on fake tensors.

    Args:
        function: Takes the inputs, writes to none of them, and returns tensors of their own.
        inputs: Tensors of the types to follow it with; those that require a gradient get one.
        decompositions: Operator → how to compute it by others.
        train: Whether to append the gradients of the inputs: the graph then takes the inputs and a
            tangent for each result that requires a gradient.

    Returns:
        The graph; each node knows the user's line.

    Raises:
        Refusal: When torch can't follow it; the reason is torch's.

    Source: torch/_functorch/aot_autograd.py, `aot_export_joint_simple`.
    """
    from torch.fx import traceback

    export = joint_exporter()
    if export is None:
        raise Refusal("this torch has no AOTAutograd that fxkit knows")

    state = random_states()
    mode = new_fake_mode()
    try:
        with (
            _one_at_a_time,
            kept_whole(),
            traceback.preserve_node_meta(),
            warnings.catch_warnings(),
            without_log(),
        ):
            warnings.simplefilter("ignore")  # what torch warns of was said when the program ran
            found: Any = export(
                function,
                tuple([as_fake(mode, tensor) for tensor in inputs]),
                trace_joint=train,
                decompositions=dict(decompositions or {}),
            )
    except Exception as error:  # whatever torch says, the graph can run as it is
        raise Refusal(f"torch can't trace it: {said(error)}") from error
    finally:
        set_random_states(state)
    if not train:
        drop_tokens(found)
    read_by_code(found)
    return found


def partition(joint: fx.GraphModule, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph with gradients into forward and backward so that little memory lies between.

    What is cheap to compute again is computed again in the backward, by other kernels than before,
    and so to other last bits.

    Args:
        joint: What `trace_functional` gave with `train=True`. It is changed.
        results: How many of its outputs the function itself has.

    Returns:
        The forward, which also gives what is kept, and the backward, which takes it and tangents.

    Raises:
        Refusal: When torch can't split it; the reason is torch's.

    Source: torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`.
    """
    split = partitioner()
    if split is None:
        raise Refusal("this torch has no partitioner that fxkit knows")
    _save_what_is_compared(joint, results)
    try:
        parts = split(joint, None, num_fwd_outputs=results)
    except Exception as error:
        raise Refusal(f"torch can't split it: {said(error)}") from error
    for part in parts:
        read_by_code(part)
    return parts


def _save_what_is_compared(joint: fx.GraphModule, results: int) -> None:
    """Have numbers saved that the gradient compares with what the forward picked out of them.

    None of them would equal their maximum if they were computed again to other last bits.
    """
    output: Any = joint.graph.output_node().args[0]
    returned = [it for it in output[:results] if isinstance(it, fx.Node)]
    of_forward = {*returned, *ancestors(returned)}
    compared = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor)
    computed_after = {*compared, *ancestors(compared)} - of_forward
    kept = {*compared, *(it for node in computed_after for it in node.all_input_nodes)}
    for node in map(_memory_of, kept & of_forward):
        if node.op == "call_function":
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _memory_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows; torch's split never saves views."""
    while node.op == "call_function" and effects_of(node).aliases:
        node = node.all_input_nodes[0]
    return node
