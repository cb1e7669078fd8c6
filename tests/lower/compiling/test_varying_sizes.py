"""Which numbers are held to vary with the sizes of inputs, and which sizes are timed as one."""

from __future__ import annotations

import torch

from fxkit.lower.autotuning.times import near
from fxkit.lower.compiling.varying_sizes import VaryingSizes
from fxkit.lower.loop_ir.runtime_parameters import bits_of


def test_sizes_that_were_others_before_vary() -> None:
    sizes = VaryingSizes()
    sizes.see((torch.ones(3, 4, 2), torch.ones(7)))
    assert not sizes.vary and not sizes.numbers()
    sizes.see((torch.ones(5, 4, 2), torch.ones(7)))
    assert sizes.vary
    assert sizes.numbers() == {n for v in (5, 20, 40) for n in (v, bits_of(float(v)))}
    sizes.see((torch.ones(3, 4, 2), torch.ones(8)))
    assert {3, 12, 24, 8} <= sizes.numbers()
    assert not {4, 2} & sizes.numbers()


def test_what_is_as_large_with_a_size_of_one_does_not_vary() -> None:
    sizes = VaryingSizes()
    for batch in (6, 1):
        sizes.see((torch.ones(batch, 4),))
    assert sizes.numbers() == set()


def test_sizes_near_by_are_one() -> None:
    assert [near(n) for n in (0, 1, 2, 3, 4, 5, 7, 9, 13, 48, 50, 384, 385, 1536)] == [
        0, 1, 2, 3, 4, 6, 8, 12, 16, 48, 64, 384, 512, 1536,
    ]  # fmt: skip
    assert all(n <= near(n) < 1.5 * n for n in range(1, 3000))
