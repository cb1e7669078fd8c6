"""Attention as a family of kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxkit.lower.families.attention.attention import emit_attention, is_attention
from fxkit.lower.families.attention.autotune import attention_objection, attention_objection_by_kind
from fxkit.lower.families.attention.printer import AttentionPrinter
from fxkit.lower.families.family import Alone, Family, Sample


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)

    several = rand(2, 3, 70, 24), rand(2, 3, 90, 24), rand(2, 3, 90, 31)
    few = rand(1, 4, 1, 16), rand(1, 2, 33, 16), rand(1, 2, 33, 16)
    mask = rand(2, 1, 70, 90)
    return {
        "plain": (F.scaled_dot_product_attention, several),
        "causal": (causal, several),
        "added mask": (F.scaled_dot_product_attention, (*several, mask)),
        "mask that chooses": (F.scaled_dot_product_attention, (*several, mask > -1)),
        "shared heads": (shared, few),
    }


FAMILY = Family(
    computes=is_attention,
    printers={"attention": AttentionPrinter},
    kernels=Alone(emit_attention, attention_objection, attention_objection_by_kind),
    samples=_samples,
)
