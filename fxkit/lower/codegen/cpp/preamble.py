"""What stands before the kernels of a translation unit: the functions and macros that they use."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fxkit.lower.codegen.cpp import text as cpp_text
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.codegen.cpp.float16_staging import HALVES
from fxkit.lower.codegen.cpp.lane_text import LANES
from fxkit.lower.codegen.cpp.loop_attributes import IN_STEP, WHOLE_LOOPS
from fxkit.lower.codegen.cpp.non_temporal_stores import STREAMS
from fxkit.lower.codegen.cpp.packed_bfloat16 import PAIRS
from fxkit.lower.codegen.cpp.prefetching import PREFETCHES
from fxkit.lower.codegen.cpp.tiles import TRANSPOSE
from fxkit.lower.codegen.cpp.transposed_tiles import TURN
from fxkit.lower.loop_ir.loop_ir import Kernel


def preamble(
    kernels: Collection[Kernel],
    texts: Collection[str],
    below: Collection[str],
    glibc: tuple[int, int] | None,
) -> str:
    """Return what the text of kernels may need before it; see `preamble_parts`."""
    return "\n".join(preamble_parts(kernels, texts, below, glibc))


def preamble_parts(
    kernels: Collection[Kernel],
    texts: Collection[str],
    below: Collection[str],
    glibc: tuple[int, int] | None,
) -> list[str]:
    """Return texts that stand before those of kernels, each of which may need some of a text.

    Args:
        kernels: The kernels.
        texts: Their texts.
        below: Texts that those stand on, each behind those that it needs.
        glibc: Version of the C library on x86-64, or None where it has no vector functions.
    """
    own: set[str] = set()
    library: set[tuple[str, torch.dtype]] = set()
    composed: set[str] = set()
    for kernel in kernels:
        storage = {buffer.dtype for buffer in kernel.buffers}
        storage |= {i.detail for i in kernel.body if i.op == "round"}
        own |= cpp_text.own_functions(kernel.body, storage)
        library |= cpp_text.library_functions(kernel.body)
        composed |= cpp_text.composed_functions(kernel.body)
    parts = [vector_math.BASICS, cpp_text.MINMAX]
    ordered = sorted(library, key=str)
    parts += [cpp_text.declaration(op, dtype, glibc) for op, dtype in ordered]
    parts += sorted(composed)
    parts.append(vector_math.definitions(own))
    parts.append(_REDUCTIONS)
    own_text = "\n".join(texts)
    is_turning = "fx_transpose(" in own_text or "fx_turn(" in own_text
    if "FX_ASK" in own_text or is_turning:
        parts.append(PREFETCHES)
    if is_turning:
        parts.append(TRANSPOSE)
    if "fx_turn(" in own_text:
        parts.append(TURN)
    if "FX_STEP" in own_text or "FX_SCHEDULED" in own_text:
        parts.append(IN_STEP)
    if "FX_WHOLE_LOOPS" in own_text:
        parts.append(WHOLE_LOOPS)
    if "fx_fence()" in own_text:
        parts.append(STREAMS)
    if _uses_halves(own_text):
        parts.append(HALVES)
    if "fx_pair" in own_text:
        parts.append(PAIRS)
    if "FX_WIDE" in own_text or "FX_WIDE" in "\n".join(below):
        parts.append(LANES)
    return [*parts, *below]


def _uses_halves(text: str) -> bool:
    return any(f"fx_{name}(" in text for name in ("widen", "narrow", "round_halves", "sum_halves"))


_TYPES = "float, double, long, int, short, signed char, unsigned char, bool"
_REDUCTIONS = "".join(
    f"#pragma omp declare reduction({name} : {_TYPES} : omp_out = {name}(omp_out, omp_in)) "
    "initializer(omp_priv = omp_orig)\n"
    for name in ("fx_max", "fx_min")
)
