"""Algorithms that make a program lose less when it is quantised; one file each.

Some return a float program that is quantised as any other; others choose integers and biases for a
prepared program.
"""

from __future__ import annotations

from fxkit.quantization.algorithms.ada_round import ada_round
from fxkit.quantization.algorithms.attention import DecomposeAttention, decompose_attention
from fxkit.quantization.algorithms.awq import awq
from fxkit.quantization.algorithms.batch_norms import (
    NormalizeByBatches,
    SetStatistics,
    reestimate_batch_norms,
)
from fxkit.quantization.algorithms.bias_correction import CorrectedBias, correct_biases
from fxkit.quantization.algorithms.equalization import EqualizeLayers, equalize
from fxkit.quantization.algorithms.gptq import gptq
from fxkit.quantization.algorithms.hadamard import RotateInputs, rotate_inputs
from fxkit.quantization.algorithms.scale_search import fit_scales
from fxkit.quantization.algorithms.scaled_inputs import ScaleInputs
from fxkit.quantization.algorithms.smooth_quant import SmoothActivations, smooth_quant
from fxkit.quantization.algorithms.smoothing_search import smooth_for
from fxkit.quantization.algorithms.weight_choice import WeightChoice

__all__ = [
    "CorrectedBias",
    "DecomposeAttention",
    "EqualizeLayers",
    "NormalizeByBatches",
    "RotateInputs",
    "ScaleInputs",
    "SetStatistics",
    "SmoothActivations",
    "WeightChoice",
    "ada_round",
    "awq",
    "correct_biases",
    "decompose_attention",
    "equalize",
    "fit_scales",
    "gptq",
    "reestimate_batch_norms",
    "rotate_inputs",
    "smooth_for",
    "smooth_quant",
]
