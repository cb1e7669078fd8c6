"""Autotuning of attention: kernel against torch's library; see `times`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch

from fxkit.lower.autotuning import times
from fxkit.lower.autotuning.times import MIN_TERMS, all_near, near, strided
from fxkit.lower.building import toolchain
from fxkit.lower.codegen.cpp.preamble import preamble
from fxkit.lower.families.attention.attention import Attention
from fxkit.lower.families.attention.printer import AttentionPrinter
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import fully_parametrised, packed_parameters


def attention_objection(kernel: Kernel) -> str | None:
    """Return why torch's library is as fast for attention, or None where a kernel is faster."""
    attention: Attention = kernel.body[0].detail
    if attention.terms < MIN_TERMS:
        return None
    threads = torch.get_num_threads()
    what = f"attends {attention}"
    measure = functools.partial(_measured, kernel, attention, threads)
    return times.slower(what, repr(kernel), measure, AttentionPrinter.texts())


def attention_objection_by_kind(kernel: Kernel) -> str | None:
    """Do as `attention_objection` for one of many sizes: those near by get the same answer."""
    one: Attention = kernel.body[0].detail
    detail = replace(
        one,
        batch=near(one.batch),
        queries=near(one.queries),
        keys=near(one.keys),
        query=all_near(one.query),
        key=all_near(one.key),
        value=all_near(one.value),
        mask=None if one.mask is None else all_near(one.mask),
    )
    (store,) = kernel.stores
    access = replace(store.access, strides=all_near(store.access.strides))
    return attention_objection(
        replace(
            kernel,
            sizes=all_near(kernel.sizes),
            body=(replace(kernel.body[0], detail=detail),),
            stores=(replace(store, access=access),),
        )
    )


def _measured(kernel: Kernel, attention: Attention, threads: int) -> tuple[float, float]:
    """Time attention; the kernel is built for that alone, once for all sizes."""
    one = attention
    pairs, kept = (one.batch, one.heads), (one.batch, one.heads // one.shared)
    query = strided((*pairs, one.queries, one.depth), one.query)
    key = strided((*kept, one.keys, one.depth), one.key)
    value = strided((*kept, one.keys, one.width), one.value)
    mask = None
    if one.mask is not None:
        dtype = kernel.buffers[3].dtype
        mask = strided((*pairs, one.queries, one.keys), one.mask, dtype)
    result = strided((*pairs, one.queries, one.width), kernel.stores[0].access.strides)
    kernel = fully_parametrised(kernel)
    numbers = packed_parameters(kernel)
    text = AttentionPrinter(kernel, "fx_trial").text()
    head = preamble([kernel], [text], AttentionPrinter.texts(), toolchain.vector_library())
    function = times.trial_function(f"{head}\n{text}")
    buffers = [ctypes.c_void_p] * len(kernel.buffers)
    function.argtypes = [*buffers, ctypes.c_char_p, ctypes.c_long]
    given = [t for t in (query, key, value, mask, result) if t is not None]
    pointers = [t.data_ptr() for t in given]

    def library() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=one.is_causal, scale=one.scale,
            enable_gqa=one.shared > 1,
        )  # fmt: skip

    return times.fastest(lambda: function(*pointers, numbers, threads), library)
