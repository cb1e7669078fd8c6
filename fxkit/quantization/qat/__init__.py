"""Quantisation-aware training: a program trains with what quantisation does to its numbers."""

from __future__ import annotations

from fxkit.quantization.qat.insertion import InsertFakeQuantizers
from fxkit.quantization.qat.qat_program import QatProgram, prepare_qat

__all__ = ["InsertFakeQuantizers", "QatProgram", "prepare_qat"]
