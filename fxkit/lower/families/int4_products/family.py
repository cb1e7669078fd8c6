"""Products by 4-bit integers in groups as a family of kernels."""

from __future__ import annotations

import torch

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.int4_products.autotune import objection
from fxkit.lower.families.int4_products.custom_op import NAME, operator
from fxkit.lower.families.int4_products.nodes import int4_product
from fxkit.lower.families.int4_products.printer import Int4ProductPrinter
from fxkit.lower.families.product_node import calls_of


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        return torch.randint(low, high, shape, dtype=dtype, generator=made)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=made)

    multiply = operator()
    return {
        "one row": (
            lambda a, b, s: multiply(a, b, s, None, 128),
            (floats(1, 256), rand(130, 128), floats(130, 2)),
        ),
        "bytes": (
            lambda a, b, s: multiply(a, b, s, None, 32, None, 3),
            (rand(3, 96, dtype=torch.uint8), rand(65, 48), floats(65, 3)),
        ),
        "many rows": (
            lambda a, b, s: multiply(a, b, s, None, 64),
            (rand(40, 128), rand(65, 64), floats(65, 2)),
        ),
        "many rows of bytes": (
            lambda a, b, s: multiply(a, b, s, None, 64, None, 3),
            (rand(40, 128, dtype=torch.uint8), rand(65, 64), floats(65, 2)),
        ),
        "many rows, zero points": (
            lambda a, b, s, z: multiply(a, b, s, z, 32),
            (floats(21, 352), rand(50, 176), floats(50, 11), rand(50, 11)),
        ),
        "odd groups": (
            lambda a, b, s: torch.relu(multiply(a, b, s, None, 6)),
            (rand(3, 30), rand(48, 15), floats(48, 5)),
        ),
    }


FAMILY = Family(
    computes=calls_of(NAME),
    printers={"int4_product": Int4ProductPrinter},
    kernels=Joined(int4_product, objection, objection_by_kind=objection),
    samples=_samples,
)
