"""Kernels whose last axis numbers the columns of a product."""

from __future__ import annotations

from dataclasses import replace

from fxkit.lower.loop_ir.loop_ir import Access, Kernel


def with_rows_of(kernel: Kernel, columns: int) -> Kernel | None:
    """Return a kernel whose last axis, cut where rows end, has so many columns, if one can."""
    if not kernel.sizes or kernel.sizes[-1] % columns:
        return None
    *outer, last = kernel.sizes
    if last == columns:
        return kernel

    def cut(access: Access) -> Access:
        *others, stride = access.strides
        return replace(access, strides=(*others, stride * columns, stride))

    body = tuple(replace(i, detail=cut(i.detail)) if i.op == "load" else i for i in kernel.body)
    stores = tuple(replace(s, access=cut(s.access)) for s in kernel.stores)
    return replace(kernel, sizes=(*outer, last // columns, columns), body=body, stores=stores)
