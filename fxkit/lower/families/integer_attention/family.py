"""Attention of 8-bit integers as a family of kernels."""

from __future__ import annotations

import torch

from fxkit.lower.families.family import Alone, Family, Sample
from fxkit.lower.families.integer_attention.autotune import no_objection
from fxkit.lower.families.integer_attention.custom_op import NAME, operator
from fxkit.lower.families.integer_attention.nodes import emit_integer_attention
from fxkit.lower.families.integer_attention.printer import IntegerAttentionPrinter
from fxkit.lower.families.product_node import calls_of


def _samples() -> dict[str, Sample]:
    """Return samples of few weights: one between two integers may be rounded to either."""
    made = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        return torch.randint(low, high, shape, dtype=dtype, generator=made)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers = (3e-4, [3, -7, 0, 5], 0.003, [0, 255], torch.uint8, 0.02)
        return operator()(q, k, v, mask, *numbers)

    def attend_signed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        numbers = (1e-4, [0, 0, -128, 0], 0.004, [-128, 127], torch.int8, 0.02)
        return operator()(q, k, v, None, *numbers)

    def attend_and_divide(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers = (3e-4, [3, -7, 2, 5], 0.004, [0, 255], torch.uint8, 0.02, True)
        return operator()(q, k, v, mask, *numbers)

    several = rand(1, 2, 13, 24), rand(1, 2, 21, 24), rand(1, 2, 21, 31)
    unsigned = (rand(1, 2, 13, 24, dtype=torch.uint8), *several[1:])
    mask = torch.randn(1, 1, 13, 21, generator=made)
    return {
        "plain": (attend, several),
        "unsigned queries": (attend, unsigned),
        "signed weights": (attend_signed, several),
        "added mask": (attend, (*several, mask)),
        "mask that chooses": (attend, (*several, mask > -1)),
        "divided last": (attend_and_divide, several),
        "divided last, unsigned queries": (attend_and_divide, (*unsigned, mask)),
        "many keys": (attend, (rand(1, 2, 2, 16), rand(1, 2, 133, 16), rand(1, 2, 133, 16))),
    }


FAMILY = Family(
    computes=calls_of(NAME),
    printers={"integer_attention": IntegerAttentionPrinter},
    kernels=Alone(emit_integer_attention, no_objection, no_objection),
    samples=_samples,
)
