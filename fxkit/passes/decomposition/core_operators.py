"""The closed set of operators that `DecomposeToCore` lowers to: one table, printed in the docs.

It is what torch tags as its core set, without gradients of operators and without what writes, and
with a few more that have no exact form in others: random numbers, whose order of draws must stay,
and running statistics. It is written out here, so that it does not move with torch's releases.
"""

from __future__ import annotations

from typing import Any

# Family → operators, as `packet.overload`; `packet` alone is `packet.default`.
CORE_FAMILIES: dict[str, str] = {
    "Elementwise, one operand": """
        abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh elu erf exp expm1 floor gelu
        hardtanh isinf isnan leaky_relu log log10 log1p log2 logical_not neg reciprocal relu round
        rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
    """,
    "Elementwise, several operands": """
        add.Scalar add.Tensor atan2 bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Scalar
        bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor clamp clamp.Tensor div.Scalar
        div.Scalar_mode div.Tensor div.Tensor_mode eq.Scalar eq.Tensor fmod.Scalar fmod.Tensor
        ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor logical_and logical_or
        logical_xor lt.Scalar lt.Tensor maximum minimum mul.Scalar mul.Tensor ne.Scalar ne.Tensor
        pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor remainder.Scalar remainder.Tensor sub.Scalar
        sub.Tensor where.self
    """,
    "Reductions and sorting": """
        amax amin any any.dim any.dims argmax argmin cumsum max.dim mean mean.dim min.dim prod
        prod.dim_int sort sum.dim_IntList topk var.correction var.dim
    """,
    "Products of matrices, convolution, distances": """
        addmm bmm convolution mm _cdist_forward _pdist_forward
    """,
    "Pooling, resampling, padding": """
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d avg_pool1d avg_pool2d
        avg_pool3d col2im constant_pad_nd grid_sampler_2d max_pool2d_with_indices
        max_pool3d_with_indices reflection_pad1d reflection_pad2d reflection_pad3d replication_pad2d
        replication_pad3d upsample_bilinear2d.vec upsample_nearest2d.vec
    """,
    "Normalisation and attention weights": """
        _log_softmax _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _softmax native_group_norm native_layer_norm
    """,
    "Views": """
        alias as_strided detach diagonal expand permute select.int slice.Tensor split_with_sizes
        squeeze.dim squeeze.dims unsqueeze view
    """,
    "Moving data": """
        _to_copy cat clone copy embedding _embedding_bag flip gather index.Tensor index_put
        index_select masked_scatter nonzero repeat scatter.src scatter.value scatter_add
        scatter_reduce.two select_scatter slice_scatter
    """,
    "Making tensors": """
        arange.start_step empty.memory_format empty_strided fill.Scalar full full_like scalar_tensor
    """,
    "Random numbers": """
        bernoulli bernoulli.p bernoulli.Tensor binomial cauchy exponential geometric log_normal
        multinomial native_dropout normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor
        normal_functional poisson rand rand_like randint randint.low randint_like
        randint_like.low_dtype randn randn_like randperm uniform
    """,
    "Fourier transforms": """
        _fft_c2c _fft_c2r _fft_r2c
    """,
    "Complex numbers": """
        complex conj_physical imag polar real view_as_complex view_as_real
    """,
    "Linear algebra": """
        _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky
        linalg_cholesky_ex linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq
        linalg_lu_factor_ex linalg_qr triangular_solve
    """,
    "Sizes and single numbers": """
        _local_scalar_dense sym_is_contiguous sym_numel sym_size.int sym_storage_offset
        sym_stride.int
    """,
    "Writing results back, at the end of the graph": """
        copy_
    """,
}


def _full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


CORE_OPERATORS: frozenset[str] = frozenset(
    _full_name(name) for names in CORE_FAMILIES.values() for name in names.split()
)
"""Every operator of the core set, as `str(overload)`: `aten.add.Tensor`."""


def is_core(target: Any) -> bool:
    """Tell whether a node's target is an operator of the core set."""
    return str(target) in CORE_OPERATORS


def core_operators_page() -> str:
    """Return the table as the documentation prints it."""
    lines = []
    for family, names in CORE_FAMILIES.items():
        listed = sorted(_full_name(name) for name in names.split())
        lines += [f"## {family}", "", ", ".join(f"`{name}`" for name in listed), ""]
    return "\n".join(lines)
