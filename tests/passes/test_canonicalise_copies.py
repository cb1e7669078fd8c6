"""Reshapes and `contiguous` that copy, and those that return what they are given."""

from __future__ import annotations

import pytest
import torch

import fxkit
from fxkit.ir.op import resolve
from fxkit.ir.types import type_of
from fxkit.passes import CanonicaliseCopies
from fxkit.passes.manager.manager import PassManager

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


def canonicalised(function, *args):
    """Return the names of a program's operators once the pass has run; numbers are the same."""
    gm = fxkit.symbolic_trace(function)
    PassManager([CanonicaliseCopies()], verify="numerics", args=args).run(gm)
    calls = [call for n in gm.graph.nodes if (call := resolve(n)) is not None]
    made, wanted = gm(*args), function(*args)
    assert made.stride() == wanted.stride()
    assert type_of(gm.graph.output_node().args[0]).stride == wanted.stride()
    return [call.name for call in calls]


COPIES = {
    "contiguous": (lambda x: x.transpose(1, 2).contiguous(), ["aten.clone"]),
    "reshape": (lambda x: x.transpose(1, 2).reshape(2, 12), ["aten.clone", "aten.view"]),
    "unknown size": (lambda x: x.mT.reshape(-1, 6), ["aten.clone", "aten.view"]),
    "sizes one by one": (lambda x: x.mT.reshape(6, 4), ["aten.clone", "aten.view"]),
    "flatten": (lambda x: x.permute(2, 1, 0).flatten(1), ["aten.clone", "aten.view"]),
    "ravel": (lambda x: x.mT.ravel(), ["aten.clone", "aten.view"]),
    "like another": (lambda x: x.mT.reshape_as(x), ["aten.clone", "aten.view"]),
    "expanded": (lambda x: x[:, :1].expand(2, 5, 4).reshape(10, 4), ["aten.clone", "aten.view"]),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name):
    function, wanted = COPIES[name]
    assert canonicalised(function, X)[-len(wanted) :] == wanted


VIEWS = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(6, 4),
    "dimensions that lie together": lambda x: x.transpose(0, 1).reshape(3, 2, 2, 2),
    "flatten": lambda x: x.flatten(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay(name):
    assert "aten.clone" not in canonicalised(VIEWS[name], X)


@pytest.mark.parametrize("kind", [torch.channels_last, torch.contiguous_format])
def test_memory_formats(kind):
    image = IMAGE if kind == torch.channels_last else IMAGE.to(memory_format=torch.channels_last)
    assert canonicalised(lambda x: x.contiguous(memory_format=kind), image) == ["aten.clone"]


def test_what_is_written_to_a_copy_stays_in_it():
    def program(x):
        y = x.mT.reshape(2, 12)
        y.add_(1)
        return y * x.sum()

    assert "aten.clone" in canonicalised(program, X)


class TestCompiled:
    def test_a_copy_joins_its_neighbours(self):
        compiled = fxkit.compile(lambda x: (x.mT + 1).reshape(2, 12) * 2)
        assert torch.equal(compiled(X), (X.mT + 1).reshape(2, 12) * 2)
        (region,) = compiled.compiled_modules[0].regions
        assert region.kernel is not None
        assert len(region.nodes) >= 3

    @pytest.mark.one_in(4)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    @pytest.mark.parametrize(
        ("shape", "order"),
        [((70, 200), (1, 0)), ((3, 65, 9, 7), (0, 2, 3, 1)), ((130, 2), (1, 0)), ((0, 3), (1, 0)),
         ((5, 6, 7, 8), (3, 1, 0, 2)), ((2, 300, 64), (0, 2, 1))],
    )  # fmt: skip
    def test_alone(self, shape, order, dtype):
        x = torch.randint(0, 100, shape).to(dtype)
        compiled = fxkit.compile(lambda x: x.permute(order).contiguous())
        assert torch.equal(compiled(x), x.permute(order))
        assert compiled(x).is_contiguous()
