"""Products of matrices as a family of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from fxkit.lower.families.family import Family, Joined, Sample
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import objection, objection_by_kind
from fxkit.lower.families.products.bf16x3_printer import Bf16x3ProductPrinter
from fxkit.lower.families.products.matrices import is_matrix_product, matrix_product
from fxkit.lower.families.products.printer import ProductPrinter
from fxkit.lower.loop_ir.product import Product


def _samples() -> dict[str, Sample]:
    made = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    return {
        "square": (torch.mm, (rand(70, 65), rand(65, 50))),
        "layer": (F.linear, (rand(33, 100), rand(49, 100), rand(49))),
        "one row": (F.linear, (rand(1, 300), rand(130, 300))),
        "turned": (lambda a, b: a.t() @ b, (rand(40, 24), rand(40, 100))),
        "batch": (torch.bmm, (rand(3, 17, 200), rand(3, 200, 31))),
        "followed": (lambda a, b: torch.relu(a @ b) * 2, (rand(20, 30), rand(30, 48))),
    }


def _objection(found: ProductNode) -> str | None:
    assert isinstance(found.product, Product)
    return objection(found.product)


def _objection_by_kind(found: ProductNode) -> str | None:
    assert isinstance(found.product, Product)
    return objection_by_kind(found.product)


def _others(found: ProductNode, allows_bf16x3: bool) -> list[ProductNode]:
    """Return a product of split numbers."""
    assert isinstance(found.product, Product)
    return [replace(found, product=replace(found.product, is_bf16x3=True))] if allows_bf16x3 else []


FAMILY = Family(
    computes=is_matrix_product,
    printers={"product": ProductPrinter, "bf16x3_product": Bf16x3ProductPrinter},
    kernels=Joined(matrix_product, _objection, _objection_by_kind, _others),
    samples=_samples,
)
