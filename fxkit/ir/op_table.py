"""How Python spells the operators of ATen: the part that no schema tells.

Builtin functions and tensor methods carry the operator's own name and need no row here. A row is
for a name that differs (`torch.special.expit` is `sigmoid`), a Python function whose parameters
differ from the schema's (`F.softmax` has `_stacklevel`), a reflected operand (`1 - x`), or a module
(`nn.ReLU` is `F.relu` with `inplace` taken from the module).

Adding a spelling is adding one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# The same operator under a second name, with equal parameters in equal order.
ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin",
    "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh",
    "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "true_divide": "div", "fix": "trunc", "greater": "gt", "greater_equal": "ge",
    "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne",
    "subtract": "sub", "special_expit": "sigmoid", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_exp2": "exp2", "special_expm1": "expm1",
    "special_log1p": "log1p", "special_round": "round", "special_sinc": "sinc",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp", "special_logit": "logit", "special_digamma": "digamma",
    "special_psi": "digamma", "special_gammaln": "lgamma", "special_xlogy": "xlogy",
    "special_i0": "i0", "special_polygamma": "polygamma", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "row_stack": "vstack", "ger": "outer",
    "inverse": "linalg_inv", "det": "linalg_det", "linalg_matmul": "matmul",
    "_unsafe_view": "view", "orgqr": "linalg_householder_product",
    "clip_": "clamp_", "divide_": "div_", "true_divide_": "div_", "multiply_": "mul_",
    "negative_": "neg_", "subtract_": "sub_", "absolute_": "abs_", "fix_": "trunc_",
    "swapaxes_": "transpose_", "swapdims_": "transpose_", "greater_": "gt_", "less_": "lt_",
    "greater_equal_": "ge_", "less_equal_": "le_", "not_equal_": "ne_",
}  # fmt: skip

# Parameter names of torch's Python side that differ from every schema's.
PARAMETER_NAMES = {
    "input": ("self",),
    "axis": ("dim",),
    "axis0": ("dim0",),
    "axis1": ("dim1",),
    "keepdims": ("keepdim",),
    "x1": ("self",),
    "x2": ("other",),
    "operands": ("tensors",),
    "exponent": ("other",),
    "a_min": ("min",),
    "a_max": ("max",),
    "source": ("self",),
    "destination": ("dim",),
    "split_size_or_sections": ("split_size", "split_sizes"),
    "indices_or_sections": ("indices", "sections"),
    "dims": ("dim",),
}

# Whole calls that equal a call of another operator once these constant arguments are dropped.
REDUCES_TO: dict[str, tuple[str, dict[str, Any]]] = {
    "_softmax": ("softmax", {"half_to_float": False}),
    "_log_softmax": ("log_softmax", {"half_to_float": False}),
}

# Operators whose schema declares no alias and whose result may still be an operand or a view of it.
UNDECLARED_ALIASES = frozenset(
    f"aten.{name}"
    for name in """
    broadcast_tensors meshgrid unsafe_split unsafe_split_with_sizes unsafe_chunk
    histogramdd type_as atleast_1d atleast_2d atleast_3d cartesian_prod block_diag einsum
    sum_to_size chain_matmul combinations alpha_dropout feature_dropout
    feature_alpha_dropout linalg_multi_dot lift lift_fresh rrelu to_dense_backward
    """.split()
)

# Operators whose schema declares an alias and whose result is a copy where it has to be one.
MAY_COPY = frozenset(
    f"aten.{name}"
    for name in """
    reshape reshape_as contiguous to flatten ravel resolve_conj resolve_neg dropout
    """.split()
)

# Operators that torch tags as perhaps aliasing or writing, and that only write: in training.
FRESH_RESULTS = frozenset(["aten.batch_norm", "aten._batch_norm_impl_index"])

# Calls that give back their operand itself where they change nothing; all others that share its
# memory make a tensor of their own.
GIVES_ITSELF = frozenset(
    """
    aten.contiguous aten.to aten.type_as aten.dropout aten.alpha_dropout aten.feature_dropout
    aten.flatten aten.positive aten.conj aten.resolve_conj aten.resolve_neg aten.real
    aten.atleast_1d aten.atleast_2d aten.atleast_3d python.identity
    """.split()
)

# Calls that equal a call of another operator with these constant arguments beside their own.
EXTENDS_TO: dict[str, tuple[str, dict[str, Any]]] = {
    "mT": ("transpose", {"dim0": -2, "dim1": -1}),
}

# Calls that change a mode for all that comes after them.
MODE_FUNCTIONS = frozenset(
    """
    _set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode
    manual_seed
    """.split()
)

INFIX = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "matmul": "matmul", "and_": "bitwise_and",
    "or_": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt",
    "ge": "ge", "neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not",
    "inv": "bitwise_not", "not_": "", "getitem": "", "setitem": "", "contains": "", "concat": "",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_",
    "ifloordiv": "floor_divide_", "imod": "remainder_", "ipow": "pow_", "iand": "bitwise_and_",
    "ior": "bitwise_or_", "ixor": "bitwise_xor_", "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_",
}  # fmt: skip

# `1 - x` arrives as `x.__rsub__(1)`: the operands change places.
REFLECTED = {
    "__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "div",
    "__rdiv__": "div", "__rfloordiv__": "floor_divide", "__rmod__": "remainder",
    "__rpow__": "pow", "__rmatmul__": "matmul", "__rand__": "bitwise_and",
    "__ror__": "bitwise_or", "__rxor__": "bitwise_xor", "__rlshift__": "bitwise_left_shift",
    "__rrshift__": "bitwise_right_shift", "rsub": "sub",
}  # fmt: skip

# Methods that are casts.
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}

# Attributes that compute a tensor; every other attribute of a tensor is a Python value.
TENSOR_ATTRIBUTES = {
    "T": "numpy_T",
    "mT": "mT",
    "H": "matrix_H",
    "mH": "mH",
    "real": "real",
    "imag": "imag",
    "data": "detach",
}

# Python functions of torch.nn.functional without one ATen operator, known to have no effects.
PURE_FUNCTIONS = frozenset(
    """
    interpolate upsample normalize softmin softsign tanhshrink hinge_embedding_loss
    multi_margin_loss gaussian_nll_loss fold unfold grid_sample affine_grid
    local_response_norm lp_pool1d lp_pool2d lp_pool3d multilabel_soft_margin_loss kl_div
    upsample_nearest upsample_bilinear max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
    adaptive_max_pool3d_with_indices margin_ranking_loss poisson_nll_loss triplet_margin_loss
    cosine_embedding_loss max_unpool1d max_unpool2d max_unpool3d ctc_loss multilabel_margin_loss
    """.split()
)

# Others that draw random numbers, unless one of these parameters is off.
PURE_WITHOUT_DROPOUT = {"multi_head_attention_forward": ("training", "dropout_p")}

# The same for Python functions of torch and Python methods of its tensors.
PURE_TORCH_FUNCTIONS = frozenset(
    ["norm", "tensordot", "cdist", "stft", "istft", "lu", "unique", "unique_consecutive"]
)


@dataclass(frozen=True)
class Spelling:
    """How the arguments of a Python function become those of an ATen operator.

    Attributes:
        packet: Name of the ATen operator; the function's own name when empty.
        rename: Python parameter → schema parameter.
        drop: Parameters without meaning for the result.
        require: Parameters that must have this value; with any other the call is opaque.
        preset: Schema arguments that Python does not pass.
        when: `(parameter, operator)`: another operator when that parameter is true.
        reduction: Whether a string `reduction` becomes ATen's number.
        signature_of: Name of the function that carries the signature, if it is another.
        pack: Position from which the positional arguments are one list of tensors.
    """

    packet: str = ""
    rename: dict[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    require: dict[str, Any] = field(default_factory=dict)
    preset: dict[str, Any] = field(default_factory=dict)
    when: tuple[str, str] | None = None
    reduction: bool = False
    signature_of: str = ""
    pack: int | None = None


_PLAIN = Spelling()
_LOSS = Spelling(require={"size_average": None, "reduce": None}, reduction=True)


def _loss(packet: str = "", **rename: str) -> Spelling:
    return Spelling(packet, rename, require=_LOSS.require, reduction=True)


def _max_pool(rank: int) -> Spelling:
    return Spelling(
        f"max_pool{rank}d",
        when=("return_indices", f"max_pool{rank}d_with_indices"),
        signature_of=f"_max_pool{rank}d",
    )


def _adaptive_max_pool(rank: int) -> Spelling:
    return Spelling(
        f"adaptive_max_pool{rank}d",
        require={"return_indices": True},
        signature_of=f"adaptive_max_pool{rank}d_with_indices",
    )


# Python functions of torch.nn.functional.
NN_FUNCTIONS: dict[str, Spelling] = {
    **dict.fromkeys(
        """
    relu relu6 elu selu celu leaky_relu hardtanh silu mish hardswish hardsigmoid rrelu
    sigmoid tanh glu layer_norm rms_norm group_norm pad adaptive_avg_pool2d
    adaptive_avg_pool3d
    """.split(),
        _PLAIN,
    ),
    "_threshold": Spelling("threshold"),
    "softmax": Spelling(drop=("_stacklevel",)),
    "log_softmax": Spelling(drop=("_stacklevel",)),
    "embedding": Spelling(
        rename={"input": "indices"}, require={"max_norm": None}, drop=("norm_type",)
    ),
    "dropout": Spelling(rename={"training": "train"}),
    "dropout1d": Spelling("feature_dropout", {"training": "train"}),
    "dropout2d": Spelling("feature_dropout", {"training": "train"}),
    "dropout3d": Spelling("feature_dropout", {"training": "train"}),
    "alpha_dropout": Spelling(rename={"training": "train"}),
    "feature_alpha_dropout": Spelling(rename={"training": "train"}),
    "batch_norm": Spelling(preset={"cudnn_enabled": True}),
    "instance_norm": Spelling(preset={"cudnn_enabled": True}),
    "max_pool1d": _max_pool(1),
    "max_pool2d": _max_pool(2),
    "max_pool3d": _max_pool(3),
    "adaptive_max_pool1d": _adaptive_max_pool(1),
    "adaptive_max_pool2d": _adaptive_max_pool(2),
    "adaptive_max_pool3d": _adaptive_max_pool(3),
    "mse_loss": Spelling(
        require={"size_average": None, "reduce": None, "weight": None}, reduction=True
    ),
    "l1_loss": Spelling(
        require={"size_average": None, "reduce": None, "weight": None}, reduction=True
    ),
    "smooth_l1_loss": _LOSS,
    "huber_loss": Spelling(require={"weight": None}, reduction=True),
    "kl_div": _LOSS,
    "binary_cross_entropy": _LOSS,
    "binary_cross_entropy_with_logits": _LOSS,
    "cross_entropy": _loss("cross_entropy_loss"),
    "nll_loss": _loss("nll_loss_nd"),
    "soft_margin_loss": _LOSS,
}

# Python functions of torch itself.
TORCH_FUNCTIONS: dict[str, Spelling] = {
    "split": Spelling(rename={"tensor": "self", "split_size_or_sections": "split_size"}),
    "einsum": Spelling(pack=1),
    "meshgrid": Spelling(pack=0),
    "broadcast_tensors": Spelling(pack=0),
    "block_diag": Spelling(pack=0),
    "cartesian_prod": Spelling(pack=0),
}

_INPLACE = ("inplace",)
_DROPOUT = ("p", "training", "inplace")
_NORM = ("running_mean", "running_var", "weight", "bias", "momentum", "eps", "training")
_CONV = ("weight", "bias", "stride", "padding", "dilation", "groups")
_POOLING = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_MAX_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

# Modules: the function of torch.nn.functional (or torch) they call and the attributes they pass,
# under the function's parameter name; `parameter=attribute` where the two differ.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name.lower(), _INPLACE) for name in ("ReLU", "ReLU6", "SiLU", "Mish", "SELU")},
    "Hardswish": ("hardswish", _INPLACE),
    "Hardsigmoid": ("hardsigmoid", _INPLACE),
    "ELU": ("elu", ("alpha", "inplace")),
    "CELU": ("celu", ("alpha", "inplace")),
    "LeakyReLU": ("leaky_relu", ("negative_slope", "inplace")),
    "Hardtanh": ("hardtanh", ("min_val", "max_val", "inplace")),
    "Threshold": ("threshold", ("threshold", "value", "inplace")),
    "GELU": ("gelu", ("approximate",)),
    "GLU": ("glu", ("dim",)),
    "Sigmoid": ("torch.sigmoid", ()),
    "Tanh": ("torch.tanh", ()),
    "Softplus": ("softplus", ("beta", "threshold")),
    "LogSigmoid": ("logsigmoid", ()),
    "Softsign": ("softsign", ()),
    "PReLU": ("prelu", ("weight",)),
    "Softmax": ("softmax", ("dim",)),
    "LogSoftmax": ("log_softmax", ("dim",)),
    "Dropout": ("dropout", _DROPOUT),
    "Dropout1d": ("dropout1d", _DROPOUT),
    "Dropout2d": ("dropout2d", _DROPOUT),
    "Dropout3d": ("dropout3d", _DROPOUT),
    "AlphaDropout": ("alpha_dropout", ("p", "training")),
    "LayerNorm": ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    "RMSNorm": ("rms_norm", ("normalized_shape", "weight", "eps")),
    "GroupNorm": ("group_norm", ("num_groups", "weight", "bias", "eps")),
    "BatchNorm1d": ("batch_norm", _NORM),
    "BatchNorm2d": ("batch_norm", _NORM),
    "BatchNorm3d": ("batch_norm", _NORM),
    "Linear": ("linear", ("weight", "bias")),
    "Bilinear": ("bilinear", ("weight", "bias")),
    "Conv1d": ("torch.conv1d", _CONV),
    "Conv2d": ("torch.conv2d", _CONV),
    "Conv3d": ("torch.conv3d", _CONV),
    **{f"ConvTranspose{n}d": (f"torch.conv_transpose{n}d", (*_CONV, "output_padding"))
       for n in (1, 2, 3)},
    "Embedding": ("embedding", ("weight", "padding_idx", "max_norm", "scale_grad_by_freq",
                                "sparse")),
    "Flatten": ("torch.flatten", ("start_dim", "end_dim")),
    "MaxPool1d": ("max_pool1d", _MAX_POOLING),
    "MaxPool2d": ("max_pool2d", _MAX_POOLING),
    "MaxPool3d": ("max_pool3d", _MAX_POOLING),
    "AvgPool1d": ("avg_pool1d", _POOLING),
    "AvgPool2d": ("avg_pool2d", (*_POOLING, "divisor_override")),
    "AvgPool3d": ("avg_pool3d", (*_POOLING, "divisor_override")),
    "AdaptiveAvgPool1d": ("adaptive_avg_pool1d", ("output_size",)),
    "AdaptiveAvgPool2d": ("adaptive_avg_pool2d", ("output_size",)),
    "AdaptiveAvgPool3d": ("adaptive_avg_pool3d", ("output_size",)),
    "PixelShuffle": ("pixel_shuffle", ("upscale_factor",)),
    "PixelUnshuffle": ("pixel_unshuffle", ("downscale_factor",)),
    "Upsample": ("interpolate", ("size", "scale_factor", "mode", "align_corners",
                                 "recompute_scale_factor")),
    "CosineSimilarity": ("cosine_similarity", ("dim", "eps")),
    "MSELoss": ("mse_loss", ("reduction",)),
    "L1Loss": ("l1_loss", ("reduction",)),
    "CrossEntropyLoss": ("cross_entropy", ("weight", "ignore_index", "reduction",
                                           "label_smoothing")),
}  # fmt: skip

# Packet → the argument whose None says the same as the overload that does not have it.
NONE_SAYS_NOTHING = {"div": "rounding_mode", "div_": "rounding_mode"}

# Operators whose numbers say nothing of the result's dtype: `F.elu(x, alpha=1)` is `alpha=1.0`.
NUMBERS_WITHOUT_DTYPE = frozenset(
    """
    elu celu hardtanh leaky_relu rrelu rrelu_with_noise threshold softplus hardshrink softshrink
    norm native_norm dist renorm histc lerp linalg_norm linalg_vector_norm linalg_matrix_norm
    linalg_cond
    """.split()
)
