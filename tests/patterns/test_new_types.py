"""What a rewrite makes has the types that it has, be they those of what it replaces or others."""

from __future__ import annotations

import pytest
import torch

import fxkit
from fxkit.ir.types import type_of
from fxkit.passes import Canonicalise

KEEP = fxkit.rule(lambda x: x.sum(1), lambda x: x.sum(1, keepdim=True), name="keep", exact=False)
WIDEN = fxkit.rule(lambda x: torch.relu(x), lambda x: x.double().sin(), name="widen", exact=False)


def types(gm: torch.fx.GraphModule) -> dict[str, str]:
    return {node.name: str(type_of(node)) for node in gm.graph.nodes if node.op != "output"}


def test_shapes_follow_a_rewrite() -> None:
    x = torch.randn(3, 4)
    gm = fxkit.capture(lambda x: x.sum(1).reshape(3) + 1, (x,)).graph_module
    fxkit.rewrite(gm, KEEP)
    assert list(types(gm).values()) == ["f32[3,4]", "f32[3,1]", "f32[3]", "f32[3]"]
    fxkit.PassManager([Canonicalise()]).run(gm)
    assert gm(x).shape == (3,)


def test_dtypes_follow_a_rewrite() -> None:
    x = torch.randn(3, 4)
    gm = fxkit.capture(lambda x: torch.relu(x).to(torch.float32), (x,)).graph_module
    fxkit.rewrite(gm, WIDEN)
    assert list(types(gm).values()) == ["f32[3,4]", "f64[3,4]", "f64[3,4]", "f32[3,4]"]
    fxkit.PassManager([Canonicalise()]).run(gm)
    assert gm(x).dtype == torch.float32


def test_types_are_taken_back_with_the_rest() -> None:
    gm = fxkit.capture(lambda x: x.sum(1).cos(), (torch.randn(3, 4),)).graph_module
    before = types(gm)
    with pytest.raises(KeyError), fxkit.edit(gm) as session:
        fxkit.rewrite(gm, KEEP)
        assert [c.detail for c in session.journal if c.kind == "retype"] == [
            "%sum_2: f32[3,1]",
            "%cos: f32[3,1]",
        ]
        raise KeyError
    assert types(gm) == before


def test_gradients_are_followed_as_before() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    gm = fxkit.capture(lambda x: x.sum(1).cos(), (x,)).graph_module
    fxkit.rewrite(gm, KEEP)
    for node in gm.graph.nodes:
        known = type_of(node)
        assert node.op == "output" or known.requires_grad


def test_what_nobody_can_see_through_has_no_type_any_more() -> None:
    @fxkit.opaque
    def shown(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item() > 0)

    gm = fxkit.capture(lambda x: shown(x.sum(1)).cos(), (torch.randn(3, 4),)).graph_module
    fxkit.rewrite(gm, KEEP)
    assert list(types(gm).values())[-2:] == ["None", "None"]


def test_nodes_without_types_get_none_of_what_they_replace() -> None:
    gm = fxkit.symbolic_trace(lambda x: x.sum(1).cos())
    fxkit.rewrite(gm, KEEP)
    assert set(types(gm).values()) == {"None"}
