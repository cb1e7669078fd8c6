"""Quantisation: observe a program's values, and let its operators take integers::

    spec = fxkit.quantization.int8_static()
    prepared = fxkit.quantization.prepare(model, args, spec)    # computes what the model does
    for batch in batches:
        prepared(*batch)
    quantized = fxkit.quantization.convert(prepared)            # quantise and dequantise nodes
    fast = fxkit.compile(quantized)

Each step is a graph of plain `torch.fx` nodes that runs and can be drawn.
"""

from __future__ import annotations

import importlib
from typing import Any

from fxkit.quantization.affine import QuantizationParameters
from fxkit.quantization.algorithms import (
    CorrectedBias,
    DecomposeAttention,
    EqualizeLayers,
    NormalizeByBatches,
    RotateInputs,
    ScaleInputs,
    SetStatistics,
    SmoothActivations,
    WeightChoice,
    ada_round,
    awq,
    correct_biases,
    decompose_attention,
    equalize,
    fit_scales,
    gptq,
    reestimate_batch_norms,
    rotate_inputs,
    smooth_for,
    smooth_quant,
)
from fxkit.quantization.algorithms.weight_choice import WeightProblem, choose_weights
from fxkit.quantization.backends import BACKENDS, BackendDescription
from fxkit.quantization.calibration import calibrate, quantize
from fxkit.quantization.comparison import ComparedOperator, QuantizationComparison, compare
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.conversion import QuantizeOperands, convert
from fxkit.quantization.integer_state import IntegerState, hold_in_integers
from fxkit.quantization.observers import OBSERVERS, RangeObserver, ValueRange
from fxkit.quantization.preparation import InsertObservers, PreparedProgram, prepare
from fxkit.quantization.qat import InsertFakeQuantizers, QatProgram, prepare_qat
from fxkit.quantization.quantization_choices import QuantizationChoices
from fxkit.quantization.quantization_report import QuantizationReport, QuantizationRow, report
from fxkit.quantization.specs import (
    QuantizationSpec,
    TensorSpec,
    bfloat16_weight_only,
    float8_weight_only,
    int4_dynamic,
    int4_weight_only,
    int8_dynamic,
    int8_static,
    int8_weight_only,
)
from fxkit.quantization.stored_weight import StoredWeight
from fxkit.torch_adapters import quantized_operators

__all__ = [
    "BACKENDS",
    "OBSERVERS",
    "BackendDescription",
    "ComparedOperator",
    "CorrectedBias",
    "DecomposeAttention",
    "EqualizeLayers",
    "InsertFakeQuantizers",
    "InsertObservers",
    "IntegerState",
    "NormalizeByBatches",
    "PreparedProgram",
    "QatProgram",
    "QuantizationChoices",
    "QuantizationComparison",
    "QuantizationConfig",
    "QuantizationParameters",
    "QuantizationReport",
    "QuantizationRow",
    "QuantizationSpec",
    "QuantizeOperands",
    "RangeObserver",
    "RotateInputs",
    "ScaleInputs",
    "SetStatistics",
    "SmoothActivations",
    "StoredWeight",
    "TensorSpec",
    "ValueRange",
    "WeightChoice",
    "WeightProblem",
    "ada_round",
    "awq",
    "bfloat16_weight_only",
    "calibrate",
    "choose_weights",
    "compare",
    "convert",
    "correct_biases",
    "decompose_attention",
    "equalize",
    "fit_scales",
    "float8_weight_only",
    "gptq",
    "hold_in_integers",
    "int4_dynamic",
    "int4_weight_only",
    "int8_dynamic",
    "int8_static",
    "int8_weight_only",
    "prepare",
    "prepare_qat",
    "quantize",
    "reestimate_batch_norms",
    "report",
    "rotate_inputs",
    "smooth_for",
    "smooth_quant",
]

quantized_operators.register()  # so that rules can be written over them

_ABOVE = {"search": "fxkit.searching"}
"""What compiles, and so lies above the compiler, but is named here."""


def __getattr__(name: str) -> Any:
    if name in _ABOVE:
        return getattr(importlib.import_module(_ABOVE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
