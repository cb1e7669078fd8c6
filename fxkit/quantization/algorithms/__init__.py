"""Algorithms that make a float program lose less when it is quantised; one file each."""

from __future__ import annotations

from fxkit.quantization.algorithms.smooth_quant import SmoothActivations, smooth_quant

__all__ = ["SmoothActivations", "smooth_quant"]
