"""Whether a kernel multiplies faster than torch's library, on this machine and at these sizes.

Libraries differ by the maker of the processor: the one that torch uses may leave half of its speed
unused. So each shape of product is timed once, and the times are kept beside the built kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fxkit.errors import BuildError
from fxkit.lower.cpp import products, toolchain
from fxkit.lower.cpp.build import build, cache_folder
from fxkit.lower.cpp.free_numbers import all_freed, packed_numbers
from fxkit.lower.cpp.printer import print_unit
from fxkit.lower.loops.attention import Attention
from fxkit.lower.loops.loop_ir import Kernel
from fxkit.lower.loops.products.product import Batch, Product

# Multiplications below which the time of a call decides, not that of the product.
MIN_TERMS = 1 << 18

# Of larger products a part of this size is timed.
MAX_ROWS, MAX_COUNT = 768, 16

_ROUNDS = 4


def objection(product: Product) -> str | None:
    """Return why torch's library is as fast for a product, or None where a kernel is faster."""
    if product.terms < MIN_TERMS:
        return None
    threads = torch.get_num_threads()
    part = _part_of(product)
    return slower(f"multiplies {product}", _key(part), lambda: _measured(part, threads))


def attention_objection(kernel: Kernel) -> str | None:
    """Return why torch's library is as fast for attention, or None where a kernel is faster."""
    attention: Attention = kernel.body[0].detail
    if attention.terms < MIN_TERMS:
        return None
    threads = torch.get_num_threads()
    what = f"attends {attention}"
    return slower(what, repr(kernel), lambda: _measured_attention(kernel, attention, threads))


def objection_by_kind(product: Product) -> str | None:
    """Do as `objection` for one of many sizes: what was measured for sizes near by serves."""
    left, right = product.left_strides, product.right_strides
    return objection(
        replace(
            product,
            batch=tuple(Batch(near(b.size), near(b.left), near(b.right)) for b in product.batch),
            rows=near(product.rows),
            columns=near(product.columns),
            depth=near(product.depth),
            left_strides=(near(left[0]), near(left[1])),
            right_strides=(near(right[0]), near(right[1])),
        )
    )


def attention_objection_by_kind(kernel: Kernel) -> str | None:
    """Do as `attention_objection` for one of many sizes; see `objection_by_kind`."""
    one: Attention = kernel.body[0].detail
    detail = replace(
        one,
        batch=near(one.batch),
        queries=near(one.queries),
        keys=near(one.keys),
        query=_all_near(one.query),
        key=_all_near(one.key),
        value=_all_near(one.value),
        mask=None if one.mask is None else _all_near(one.mask),
    )
    (store,) = kernel.stores
    access = replace(store.access, strides=_all_near(store.access.strides))
    return attention_objection(
        replace(
            kernel,
            sizes=_all_near(kernel.sizes),
            body=(replace(kernel.body[0], detail=detail),),
            stores=(replace(store, access=access),),
        )
    )


def _all_near(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(near, sizes))


def near(size: int) -> int:
    """Round a size up to one whose binary digits after the second are noughts."""
    unit = 1 << max(0, size.bit_length() - 2)
    return -(-size // unit) * unit


def slower(what: str, key: str, measure: Callable[[], tuple[float, float]]) -> str | None:
    """Return in words that a kernel is slower than torch, or None.

    Args:
        what: What they do, as a phrase.
        key: Under which the times are kept.
        measure: Returns the seconds of the kernel and of torch.
    """
    key = f"{torch.get_num_threads()} threads: {key}"
    try:
        known = _known()
        if key not in known:
            known[key] = measure()
            _write(known)
    except BuildError as error:
        return error.message
    kernel, library = known[key]
    if kernel <= library:
        return None
    return f"torch's library {what} in {library * 1e6:.0f} us, a kernel in {kernel * 1e6:.0f} us"


def _part_of(product: Product) -> Product:
    """Return a product that is small enough to be timed, and like this one."""
    room, batch = MAX_COUNT, []
    for one in reversed(product.batch):
        size = min(one.size, max(room, 1))
        room //= size
        batch.append(replace(one, size=size))
    return replace(product, batch=tuple(reversed(batch)), rows=min(product.rows, MAX_ROWS))


def _key(product: Product) -> str:
    batch = [(b.size, b.left, b.right) for b in product.batch]
    return f"{product} {batch} {product.left_strides} {product.right_strides}"


_Times = dict[str, tuple[float, float]]


@functools.cache
def _known_in(path: Path) -> _Times:
    try:
        read = json.loads(path.read_text())
        return {str(key): (float(a), float(b)) for key, (a, b) in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _known() -> _Times:
    return _known_in(_path())


def _path() -> Path:
    """Return the file of times of this compiler, processor and torch."""
    text = "\0".join([_source(), *toolchain.current().flags, toolchain.current().identity])
    return cache_folder() / f"products-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _write(times: _Times) -> None:
    path = _path()
    try:
        descriptor, name = tempfile.mkstemp(prefix="products-", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(times, file, indent=1)
        os.replace(name, path)
    except OSError:
        return  # times that can't be kept are measured again by the next process


def _source() -> str:
    return f"{products.header()}\n{_TRIAL}"


_TRIAL = f"""
extern "C" void fx_trial(
    const float* a, const float* b, float* c, const long* n, const long* strides, long threads) {{
  const long rows = n[1], columns = n[2], depth = n[3], height = n[4];
  const long panels = (columns + {products.COLUMNS - 1}) / {products.COLUMNS};
  const long blocks = (rows + height - 1) / height;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long tile = 0; tile < n[0] * panels * blocks; ++tile) {{
    const long from = tile % panels * {products.COLUMNS}, batch = tile / (panels * blocks);
    const long first = tile / panels % blocks * height;
    const long width = columns - from < {products.COLUMNS} ? columns - from : {products.COLUMNS};
    const long count = rows - first < height ? rows - first : height;
    alignas(64) float sums[{max(products.BLOCKS)} * {products.COLUMNS}];
    fx_product(
        a + batch * strides[0] + first * strides[2], strides[2], strides[3],
        b + batch * strides[1] + from * strides[5], strides[4], strides[5], count, width, depth,
        sums);
    for (long r = 0; r < count; ++r)
      for (long j = 0; j < width; ++j)
        c[(batch * rows + first + r) * columns + from + j] =
            sums[r * {products.COLUMNS} + j];
  }}
}}
"""


def _measured(product: Product, threads: int) -> tuple[float, float]:
    """Time a product, with the dimensions of its batch taken as one."""
    count = product.count
    left, right = _matrices(product, count)
    kernel = _kernel(product, left, right, threads)

    def library() -> None:
        torch.matmul(left, right) if count > 1 else torch.mm(left[0], right[0])

    return fastest(kernel, library)


def timed_beside(product: Product, library: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a kernel for a product, and of what is called in its place."""
    left, right = _matrices(product, product.count)
    kernel = _kernel(product, left, right, torch.get_num_threads())
    return fastest(kernel, library)


def trial_function(source: str) -> Any:
    """Return what a trial's text calls `fx_trial`."""
    function = build(source).handle.fx_trial
    function.restype = None
    return function


def _kernel(
    product: Product, left: torch.Tensor, right: torch.Tensor, threads: int
) -> Callable[[], None]:
    """Return a call of the kernel that multiplies matrices of a product's sizes."""
    result = torch.empty(product.count, product.rows, product.columns)
    height = products.block_rows(product, threads)
    sizes = (ctypes.c_long * 5)(product.count, product.rows, product.columns, product.depth, height)
    strides = (ctypes.c_long * 6)(*left.stride()[:1], *right.stride()[:1], *left.stride()[1:],
                                  *right.stride()[1:])  # fmt: skip
    function = trial_function(_source())
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long]
    pointers = [t.data_ptr() for t in (left, right, result)]

    def kernel() -> None:
        function(*pointers, ctypes.addressof(sizes), ctypes.addressof(strides), threads)

    # The tensors live as long as what has their addresses.
    kernel.tensors = (left, right, result)  # type: ignore[attr-defined]
    return kernel


def _measured_attention(kernel: Kernel, attention: Attention, threads: int) -> tuple[float, float]:
    """Time attention; the kernel is built for that alone, once for all sizes."""
    one = attention
    pairs, kept = (one.batch, one.heads), (one.batch, one.heads // one.shared)
    query = _strided((*pairs, one.queries, one.depth), one.query)
    key = _strided((*kept, one.keys, one.depth), one.key)
    value = _strided((*kept, one.keys, one.width), one.value)
    mask = None
    if one.mask is not None:
        dtype = kernel.buffers[3].dtype
        mask = _strided((*pairs, one.queries, one.keys), one.mask, dtype)
    result = _strided((*pairs, one.queries, one.width), kernel.stores[0].access.strides)
    kernel = all_freed(kernel)
    numbers = packed_numbers(kernel)
    function = trial_function(print_unit({"fx_trial": kernel}, toolchain.vector_library()))
    buffers = [ctypes.c_void_p] * len(kernel.buffers)
    function.argtypes = [*buffers, ctypes.c_char_p, ctypes.c_long]
    given = [t for t in (query, key, value, mask, result) if t is not None]
    pointers = [t.data_ptr() for t in given]

    def library() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=one.is_causal, scale=one.scale,
            enable_gqa=one.shared > 1,
        )  # fmt: skip

    return fastest(lambda: function(*pointers, numbers, threads), library)


def _strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.ones(span, dtype=dtype).as_strided(shape, strides)


def _matrices(product: Product, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands of the product's strides, with their batch as one dimension."""
    batch = product.batch[-1] if product.batch else Batch(1, 0, 0)
    shapes = ((count, product.rows, product.depth), (count, product.depth, product.columns))
    strides = ((batch.left, *product.left_strides), (batch.right, *product.right_strides))
    return _strided(shapes[0], strides[0]), _strided(shapes[1], strides[1])


@torch.no_grad()
def fastest(*candidates: Callable[[], None]) -> tuple[float, float]:
    """Return the least time of each of two functions, which are called in turn."""
    best = [float("inf")] * len(candidates)
    for turn in range(_ROUNDS + 1):
        for position, candidate in enumerate(candidates):
            start = time.perf_counter()
            candidate()
            if turn:
                best[position] = min(best[position], time.perf_counter() - start)
    return best[0], best[1]
