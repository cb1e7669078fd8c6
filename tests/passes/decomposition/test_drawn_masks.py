"""Masks are drawn as in place: in the order of memory, whatever the axes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxkit
from fxkit.passes.decomposition import drawn_masks
from fxkit.passes.decomposition.drawn_masks import drawn_mask, memory_order
from fxkit.passes.manager.manager import PassManager

LAYOUTS = {
    "contiguous": torch.randn(2, 3, 4, 5),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "turned": torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0),
    "swapped": torch.randn(3, 2, 4, 5).transpose(0, 1),
    "axes of one": torch.randn(4, 1, 5, 1).permute(1, 2, 3, 0),
}


def call(overload, *args, **kwargs):
    return overload(*args, **kwargs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_has_the_numbers_and_the_place_of_one_drawn_in_place(layout):
    x = LAYOUTS[layout]
    torch.manual_seed(3)
    expected = torch.empty_like(x).bernoulli_(0.5)
    torch.manual_seed(3)
    mask = drawn_mask(call, x, 0.5, memory_order(x.shape, x.stride()))
    assert torch.equal(mask, expected)
    known = zip(x.shape, mask.stride(), expected.stride(), strict=True)
    assert all(size == 1 or a == b for size, a, b in known)


def test_a_machine_that_follows_the_axes_draws_along_them(monkeypatch):
    x = LAYOUTS["turned"]
    monkeypatch.setattr(drawn_masks, "draws_as_memory_lies", lambda: False)
    torch.manual_seed(3)
    expected = torch.empty(x.shape).bernoulli_(0.5)
    torch.manual_seed(3)
    mask = drawn_mask(call, x, 0.5, memory_order(x.shape, x.stride()))
    assert torch.equal(mask, expected)
    assert mask.stride() == x.stride()


def test_gaps_and_overlaps_have_no_order():
    assert memory_order((2, 5), (0, 1)) is None
    assert memory_order((2, 2), (8, 2)) is None
    assert memory_order((2, 3), (3, 1)) is None
    assert memory_order((2, 3), (1, 2)) == [1, 0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["decompose_to_core", "functionalise"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.empty_like(x).bernoulli_(0.5),
        nn.Dropout(0.5),
        nn.AlphaDropout(0.4),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.5, inplace=True)),
        nn.Sequential(nn.ReLU(), nn.Dropout2d(0.5, inplace=True)),
        nn.Sequential(nn.ReLU(), nn.FeatureAlphaDropout(0.5, inplace=True)),
    ],
)
def test_noise_of_every_layout_stays(program, layout, name):
    x = LAYOUTS[layout]
    gm = fxkit.capture(program, (x,)).graph_module
    PassManager([fxkit.passes.PASSES[name]()], args=(x,)).run(gm)
    torch.manual_seed(3)
    expected = program(x)
    torch.manual_seed(3)
    assert torch.equal(gm(x), expected)
