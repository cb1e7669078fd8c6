"""Products of a few rows of float32 by 8-bit integers as a family of kernels."""

from __future__ import annotations

import torch

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.int8_weight_products.autotune import objection
from fxkit.lower.families.int8_weight_products.custom_op import NAME, operator
from fxkit.lower.families.int8_weight_products.nodes import int8_weight_product
from fxkit.lower.families.int8_weight_products.printer import Int8WeightProductPrinter
from fxkit.lower.families.product_node import calls_of


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8, generator=made)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    multiply = operator()
    return {
        "one row": (multiply, (rand(1, 300), weight(130, 300))),
        "three rows": (multiply, (rand(3, 70), weight(65, 70))),
        "followed": (
            lambda a, b, scale: torch.relu(multiply(a, b) * scale),
            (rand(2, 100), weight(48, 100), rand(48)),
        ),
    }


FAMILY = Family(
    computes=calls_of(NAME),
    printers={"int8_weight_product": Int8WeightProductPrinter},
    kernels=Joined(int8_weight_product, objection, objection_by_kind=objection),
    samples=_samples,
)
