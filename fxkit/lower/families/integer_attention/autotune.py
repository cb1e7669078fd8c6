"""Autotuning of integer attention: kernel against floats of torch; see `times`."""

from __future__ import annotations

import ctypes
import functools

import torch

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, strided
from fxkit.lower.building import toolchain
from fxkit.lower.codegen.cpp.preamble import preamble
from fxkit.lower.families.integer_attention.nodes import IntegerAttention
from fxkit.lower.families.integer_attention.printer import IntegerAttentionPrinter
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import fully_parametrised, packed_parameters


def no_objection(kernel: Kernel) -> None:
    """Return None: that integers are multiplied is decided where the operator is called."""


def reason_to_stay_float(kernel: Kernel) -> str | None:
    """Return why floats are as fast, or None where integers are faster.

    Args:
        kernel: That of the integers.
    """
    attention: IntegerAttention = kernel.body[0].detail
    if attention.terms < MIN_TERMS:
        return None
    measure = functools.partial(_measured, kernel, attention)
    key = f"integers or float {kernel!r}"
    return times.slower(f"attends {attention}", key, measure, IntegerAttentionPrinter.texts())


def _measured(kernel: Kernel, one: IntegerAttention) -> tuple[float, float]:
    """Time attention beside that of floats: what a graph computes where integers do not pay."""
    pairs = (one.batch, one.heads)
    types = [buffer.dtype for buffer in kernel.buffers]
    query = strided((*pairs, one.queries, one.depth), one.query, types[0])
    key = strided((*pairs, one.keys, one.depth), one.key, types[1])
    value = strided((*pairs, one.keys, one.width), one.value, types[2])
    given = [query, key, value]
    if one.mask is not None:
        given.append(strided((*pairs, one.queries, one.keys), one.mask, types[3]))
    result = strided((*pairs, one.queries, one.width), kernel.stores[0].access.strides)
    q, k, v = (operand.to(torch.float32) for operand in given[:3])
    open_kernel = fully_parametrised(kernel)
    numbers = packed_parameters(open_kernel)
    text = IntegerAttentionPrinter(open_kernel, "fx_trial").text()
    head = preamble(
        [open_kernel], [text], IntegerAttentionPrinter.texts(), toolchain.vector_library()
    )
    function = times.trial_function(f"{head}\n{text}")
    function.argtypes = [*[ctypes.c_void_p] * len(types), ctypes.c_char_p, ctypes.c_long]
    pointers = [operand.data_ptr() for operand in (*given, result)]
    threads = torch.get_num_threads()

    def library() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return times.fastest(lambda: function(*pointers, numbers, threads), library)
