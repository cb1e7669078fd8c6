"""What `torch.autocast` does to each operator: the adapter to torch's own lists.

The lists are those of `ATen/autocast_mode.h` (CUDA) and `ATen/autocast_mode.cpp` (CPU) of torch
2.11 to 2.14; a test holds their names against the kernels that torch registers. An operator in no
list is called as it is, and so is every overload that is not named, such as the `out=` ones.
"""

from __future__ import annotations

from typing import Any

from fxkit.torch_adapters.operators import has_kernel, schema_of

LOWER, FLOAT32, PROMOTE, SET_DTYPE, APPEND_DTYPE = (
    "lower",  # every operand in the lower precision
    "float32",  # every operand in float32
    "promote",  # every operand in the widest of their dtypes
    "set_dtype",  # dtype=float32, where the call names none
    "append_dtype",  # the overload with a dtype, and float32 for it
)

_LOWER_EVERYWHERE = """
    _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
    scaled_dot_product_attention
"""
_LOSSES = """
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss poisson_nll_loss binary_cross_entropy_with_logits
"""

_LISTS: dict[str, dict[str, str]] = {
    "cpu": {
        LOWER: f"""{_LOWER_EVERYWHERE}
            conv1d.padding conv2d.padding conv3d.padding _addmm_activation mkldnn_rnn_layer
            _native_multi_head_attention
        """,
        FLOAT32: f"""{_LOSSES}
            avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile
            quantile.scalar nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d
            _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky
            cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d
            max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d
            replication_pad1d replication_pad2d replication_pad3d cross_entropy_loss
            ctc_loss.IntList ctc_loss.Tensor multilabel_margin_loss_forward fft_fft fft_ifft
            fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn
            fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank
            linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
            linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky linalg_svdvals
            linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv
            linalg_tensorsolve fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd
            triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
            linalg_cholesky_ex linalg_qr linalg_svd linalg_eig linalg_eigh linalg_lstsq
            linalg_inv_ex linalg_matrix_sqrth
        """,
        PROMOTE: "stack cat index_copy",
    },
    "cuda": {
        LOWER: f"""{_LOWER_EVERYWHERE}
            _convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr
            einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
            lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        """,
        FLOAT32: f"""{_LOSSES}
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
            pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
            rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
            dist pdist cdist renorm logsumexp upsample_nearest1d
            _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
            upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
            _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
            linalg_matrix_sqrth
        """,
        SET_DTYPE: """
            prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
            linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
        """,
        APPEND_DTYPE: "norm.Scalar norm.ScalarOpt_dim",
        PROMOTE: """
            addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
            scatter_add
        """,
    },
}


def _is_listed(device: str, name: str) -> bool:
    """Tell whether the torch that is installed casts for an operator of the lists.

    torch 2.11 casts for the parts of `rms_norm` instead; torch 2.14 has no `cholesky` and `qr`.
    """
    return has_kernel(f"aten::{name}", f"Autocast{device.upper()}") is not False


AUTOCAST: dict[str, dict[str, str]] = {
    device: {
        name: policy
        for policy, names in lists.items()
        for name in names.split()
        if _is_listed(device, name)
    }
    for device, lists in _LISTS.items()
}
"""Device type → overload (`linear`, `conv1d.padding`) → policy."""

# Operators that torch's CUDA autocast refuses, since they overflow in half precision.
BANNED = {"cuda": frozenset({"binary_cross_entropy"})}

# Operators in no list: their kernels call listed ones, which autocast then casts for, or autocast
# does more to them than to cast, as to the weights of `_cudnn_rnn`, which it lays out anew.
HIDING = frozenset(
    {
        "_trilinear",
        "linalg_pinv.atol_rtol_tensor",
        "_transformer_encoder_layer_fwd",
        "_cudnn_rnn",
    }
)

WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Overload → the one that takes a dtype too."""


def overload_key(overload: Any) -> str:
    """Return an ATen overload's name as the lists write it; "" for one of another library."""
    namespace, _, packet = schema_of(overload).name.partition("::")
    if namespace != "aten":
        return ""
    named = schema_of(overload).overload_name
    return f"{packet}.{named}" if named else packet
