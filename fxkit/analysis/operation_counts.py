"""How many operations the operators take for which torch has no formula, by hand.

Conventions: a pointwise operator takes one operation an element, whatever the function; a reduction
one an element that it reads; a comparison counts as one; moving data as none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Count = Callable[[Sequence[Any], torch.Tensor], int]
"""Takes a call's positional arguments and its first result."""

MOVES = frozenset(
    """
    clone _to_copy cat copy empty zeros ones full arange embedding index index_select gather
    scatter stack constant_pad_nd slice_scatter select_scatter repeat fill alias zeros_like
    ones_like full_like empty_like scalar_tensor roll flip tril triu _unsafe_view new_empty
    new_zeros new_ones empty_strided masked_fill where detach lift_fresh lift_fresh_copy im2col
    pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    linspace eye new_full set resize repeat_interleave masked_select index_put index_copy
    unsafe_split unsafe_split_with_sizes unsafe_chunk
    diagonal_copy expand_copy permute_copy view_copy unfold_copy narrow_copy
    """.split()
)
"""Operators of aten that only move or make data."""


def count(name: str, args: Sequence[Any], result: torch.Tensor) -> int | None:
    """Return the operations of a call of aten, or None without a formula.

    Args:
        name: The operator without its namespace: `avg_pool2d`.
        args: The positional arguments.
        result: The first tensor that it returns.
    """
    if name in MOVES:
        return 0
    if name in _PER_RESULT:
        return _PER_RESULT[name] * result.numel()
    formula = _FORMULAS.get(name)
    return formula(args, result) if formula is not None else None


# Operations for each element of the result. The normalisations: mean, variance, scale, shift; the
# interpolations: a product for each neighbour, and one addition less.
_PER_RESULT = {
    "native_layer_norm": 8,
    "native_group_norm": 8,
    "_native_batch_norm_legit_no_training": 4,
    "_fused_rms_norm": 5,
    "_softmax": 5,
    "_safe_softmax": 5,
    "_log_softmax": 5,
    "upsample_linear1d": 3,
    "upsample_bilinear2d": 7,
    "_upsample_bilinear2d_aa": 7,
    "upsample_trilinear3d": 15,
    "upsample_bicubic2d": 31,
    "_upsample_bicubic2d_aa": 31,
    "grid_sampler_2d": 7,
    "grid_sampler_3d": 15,
    "glu": 2,
    "prelu": 1,
    "_prelu_kernel": 1,
    "hardswish": 1,
    **dict.fromkeys(
        "bernoulli uniform normal rand randn rand_like randn_like exponential geometric".split(), 1
    ),
    "linalg_cross": 3,
    "_weight_norm_interface": 3,
    "cumsum": 1,
    "cumprod": 1,
    "cummax": 1,
    "cummin": 1,
    "logcumsumexp": 3,
}


def _window(args: Sequence[Any], result: torch.Tensor, dims: int) -> int:
    """Each element of the result looks at a whole window."""
    sizes = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    window = sizes[0] ** dims if len(sizes) == 1 else math.prod(sizes)
    return result.numel() * int(window)


def _pool(dims: int) -> Count:
    return lambda args, result: _window(args, result, dims)


def _adaptive(args: Sequence[Any], result: torch.Tensor, dims: int) -> int:
    """Windows are as many as wanted, and overlap where their number does not divide the size."""
    total = math.prod(result.shape[: result.dim() - dims])
    for size, wanted in zip(args[0].shape[-dims:], result.shape[-dims:], strict=True):
        total *= sum(-(-(i + 1) * size // wanted) - i * size // wanted for i in range(wanted))
    return total


def _adaptive_pool(dims: int) -> Count:
    return lambda args, result: _adaptive(args, result, dims)


def _fft(args: Sequence[Any], result: torch.Tensor, factor: float) -> int:
    """5 n log2 n operations for a complex transform of length n, half of that for a real one."""
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    whole = args[0] if args[0].numel() >= result.numel() else result
    length = math.prod(whole.shape[d] for d in dims)
    return round(factor * whole.numel() * math.log2(max(length, 2)))


def _distances(args: Sequence[Any], result: torch.Tensor) -> int:
    return 3 * result.numel() * args[0].shape[-1]


def _read(index: int, factor: int = 1) -> Count:
    return lambda args, result: factor * args[index].numel()


def _matrix_vector(args: Sequence[Any], result: torch.Tensor) -> int:
    return 2 * args[0].numel()


def _batch_norm(args: Sequence[Any], result: torch.Tensor) -> int:
    """The statistics of the batch are found in training only."""
    return (8 if args[5] else 4) * result.numel()


def _lstm_layer(args: Sequence[Any], result: torch.Tensor) -> int:
    """Two products for each step and row, then 13 operations for each hidden number."""
    x, of_x, of_hidden = args[:3]
    steps = x.numel() // x.shape[-1]
    return steps * (2 * (of_x.numel() + of_hidden.numel()) + 13 * (of_x.shape[0] // 4))


def _embedding_bag(args: Sequence[Any], result: torch.Tensor) -> int:
    return args[1].numel() * args[0].shape[-1]


_FORMULAS: dict[str, Count] = {
    "native_batch_norm": _batch_norm,
    "mkldnn_rnn_layer": _lstm_layer,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    **{f"max_pool{d}d_with_indices": _pool(d) for d in (2, 3)},
    **{f"{kind}_pool{d}d": _pool(d) for kind in ("max", "avg") for d in (1, 2, 3)},
    **{f"_adaptive_avg_pool{d}d": _adaptive_pool(d) for d in (2, 3)},
    **{
        f"adaptive_{kind}_pool{d}d": _adaptive_pool(d) for kind in ("max", "avg") for d in (1, 2, 3)
    },
    "mv": _matrix_vector,
    "addmv": lambda args, result: 2 * args[1].numel() + result.numel(),
    "dot": _read(0, 2),
    "vdot": _read(0, 2),
    "mse_loss": _read(0, 3),
    "nll_loss_forward": _read(1, 2),
    "nll_loss2d_forward": _read(1, 2),
    "scatter_add": _read(3),
    "index_add": _read(3),
    "_cdist_forward": _distances,
    "_euclidean_dist": _distances,
    "_fft_c2c": lambda args, result: _fft(args, result, 5.0),
    "_fft_r2c": lambda args, result: _fft(args, result, 2.5),
    "_fft_c2r": lambda args, result: _fft(args, result, 2.5),
}
