"""Matrix products of 8-bit integers as a family of kernels."""

from __future__ import annotations

import torch

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.integer_products.autotune import objection, objection_by_kind
from fxkit.lower.families.integer_products.custom_op import NAME, operator
from fxkit.lower.families.integer_products.nodes import integer_product
from fxkit.lower.families.integer_products.printer import IntegerProductPrinter
from fxkit.lower.families.product_node import calls_of


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def rand(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        return torch.randint(low, high, shape, dtype=dtype, generator=made)

    multiply = operator()
    return {
        "layer": (lambda a, b: multiply(a, b.t()), (rand(70, 100), rand(49, 100))),
        "unsigned": (
            lambda a, b: multiply(a, b.t(), None, 3),
            (rand(33, 70, dtype=torch.uint8), rand(130, 70)),
        ),
        "one row": (lambda a, b: multiply(a, b.t(), None, -7), (rand(1, 300), rand(130, 300))),
        "turned": (multiply, (rand(40, 90), rand(90, 65))),
        "zero points": (
            lambda a, b, zeros: multiply(a, b.t(), zeros.to(torch.int32)),
            (rand(20, 64), rand(48, 64), rand(20, 1)),
        ),
        "followed": (
            lambda a, b, scale: torch.relu(multiply(a, b.t()).to(torch.float32) * scale),
            (rand(20, 30), rand(48, 30), torch.rand(48, generator=made)),
        ),
    }


FAMILY = Family(
    computes=calls_of(NAME),
    printers={"integer_product": IntegerProductPrinter},
    kernels=Joined(integer_product, objection, objection_by_kind),
    samples=_samples,
)
