"""Descriptions of accelerators: what they take is quantised and partitioned, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import FxkitError, UnsupportedError
from fxkit.passes import Partition
from fxkit.passes.partitioning.backend_call import BackendCall


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4)
        self.norm, self.hidden = nn.LayerNorm(64), nn.Linear(64, 32)
        self.inner, self.head = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.first(x)), 2)
        y = self.norm(self.grouped(y).flatten(1))
        return self.head(F.gelu(self.inner(F.relu(self.hidden(y)))))


def partitioned(
    backend: q.BackendDescription, config: q.QuantizationConfig | None = None
) -> tuple[list[list[str]], str, fx.GraphModule]:
    """Return the operators of each region, the notes, and the graph, which computes the same."""
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 10, 10)
    with torch.no_grad():
        program = fxkit.quantize(model, config or backend.config(), [(x,)])
        wanted = program(x)
        result = fxkit.PassManager([Partition(backend)]).run(program)
        assert torch.equal(program(x), wanted)
    gm = program.graph_module
    assert isinstance(gm, fx.GraphModule)
    calls = [module for module in gm.modules() if isinstance(module, BackendCall)]
    regions = [
        [node.name for node in call.region.graph.nodes if node.op.startswith("call")]
        for call in calls
    ]
    return regions, "\n".join(result.records[0].notes), gm


def test_a_library_like_xnnpack_gets_its_parts() -> None:
    regions, notes, gm = partitioned(q.BACKENDS["xnnpack"])
    first, second, third = regions
    assert [one for one in first if "quantize" not in one] == ["conv2d", "relu", "max_pool2d"]
    assert [one for one in second if "quantize" not in one] == ["linear", "relu_1", "linear_1"]
    assert [one for one in third if "quantize" not in one] == ["linear_2"]
    assert "%conv2d_1: it has 4 groups of several channels" in notes
    assert "%layer_norm: xnnpack has no row for aten.layer_norm" in notes
    assert "first %gelu: xnnpack has no row for aten.gelu" in notes
    left = [node.name for node in fxkit.graph(gm) if node.operator == "aten.conv2d"]
    assert left == ["conv2d_1"]


def test_a_made_up_accelerator_gives_and_takes_integers_only() -> None:
    regions, notes, gm = partitioned(q.BACKENDS["narrow_tiles"])
    taken = [one for region in regions for one in region if "quantize" not in one]
    assert taken == ["linear", "relu_1"]
    assert all("quantize_per_tensor" in region[-1] for region in regions)
    assert "%linear_1: its result is not quantised again" in notes
    assert "%linear_2: its weight of [10, 16] is no whole number of tiles of 16" in notes
    weights = [b for name, b in gm.named_buffers() if name.endswith("_weight_quantized")]
    assert weights and all(int(one.abs().max()) == 7 for one in weights)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (q.int8_static(), "xnnpack stores no uint8 0 to 255 per_tensor"),
        (q.int4_weight_only(16), "per_group"),
        (q.int8_weight_only(), "xnnpack multiplies no float, int8 -127 to 127 per_channel"),
    ],
    ids=["unsigned", "groups", "floats"],
)
def test_what_is_stored_otherwise_stays(spec: q.QuantizationSpec, reason: str) -> None:
    config = q.QuantizationConfig(spec, by_operator={F.conv2d: None})
    regions, notes, _ = partitioned(q.BACKENDS["xnnpack"], config)
    assert reason in notes
    assert not any(name.startswith("linear") for region in regions for name in region)


def test_scales_of_tokens_are_computed_where_they_are_taken() -> None:
    config = q.QuantizationConfig(q.int8_dynamic(), by_operator={F.conv2d: None})
    regions, _, _ = partitioned(q.BACKENDS["xnnpack"], config)
    taken = {name for region in regions for name in region}
    assert {"linear", "linear_1", "linear_2"} <= taken
    assert any(name.startswith("choose_qparams") for name in taken)


def test_a_description_of_ones_own_compiles_its_regions() -> None:
    compiled: list[tuple[int, tuple[Any, ...]]] = []

    def make(region: fx.GraphModule, types: tuple[Any, ...]) -> fx.GraphModule:
        compiled.append((len(region.graph.nodes), types))
        return region

    spec = q.int8_static(weights="per_tensor")
    mine = q.BackendDescription("mine", {"aten.linear": (spec,)}, make=make)
    regions, _, _ = partitioned(mine)
    assert len(compiled) == len(regions) >= 1
    known = [one for _, types in compiled for one in types if one is not None]
    assert {one.dtype for one in known} == {torch.float32}


def test_a_result_with_other_users_is_no_part_of_a_chain() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(F.relu(y)) + y

    x = torch.randn(4, 16)
    backend = q.BACKENDS["narrow_tiles"]
    with torch.no_grad():
        program = fxkit.quantize(Twice().eval(), backend.config(), [(x,)])
        result = fxkit.PassManager([Partition(backend)]).run(program)
    notes = "\n".join(result.records[0].notes)
    assert "%linear: its result is not quantised again, and narrow_tiles gives no floats" in notes


def test_descriptions_are_checked() -> None:
    with pytest.raises(UnsupportedError, match=r"operators that can be quantised, got 'aten.sin'"):
        q.BackendDescription("bad", {"aten.sin": (q.int8_static(),)})
    with pytest.raises(UnsupportedError, match=r"got 'aten.linear': \(\)"):
        q.BackendDescription("bad", {"aten.linear": ()})
    spec = q.int8_static()
    with pytest.raises(UnsupportedError, match="a tuple of QuantizationSpec for"):
        q.BackendDescription("bad", {"aten.linear": spec})  # type: ignore[dict-item]
    for names in ({"aten.foo"}, "aten.relu", {"foo"}):
        for field in ("fused", "moves", "floats"):
            with pytest.raises(UnsupportedError, match=f"expected {field}= to be a set of"):
                q.BackendDescription("bad", {"aten.linear": (spec,)}, **{field: names})
    for limits in ({"aten.conv2d": lambda call: None}, {"aten.linear": 3}):
        with pytest.raises(UnsupportedError, match="functions for operators that bad takes"):
            q.BackendDescription("bad", {"aten.linear": (spec,)}, limits=limits)
    found = q.BackendDescription("mine", {"aten.linear": (spec,)}, fused={F.relu, "gelu"})
    assert found.fused == {"aten.relu", "aten.gelu"}


def test_what_a_description_calls_may_fail() -> None:
    spec = q.int8_static(weights="per_tensor")
    nothing = q.BackendDescription("mine", {"aten.linear": (spec,)}, make=lambda *_: None)
    _, notes, _ = partitioned(nothing)
    assert "expected make= to return what runs the region, got None" in notes
    limits = {"aten.linear": lambda call: False}
    odd = q.BackendDescription("mine", {"aten.linear": (spec,)}, limits=limits)
    with pytest.raises(FxkitError, match=r"limit of aten.linear to return a reason or None"):
        partitioned(odd)


@pytest.mark.filterwarnings("error")
def test_a_partitioned_program_is_compiled_with_gradients_on() -> None:
    x = torch.randn(4, 16)
    layers = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    mine = q.BackendDescription("mine", {"aten.linear": (q.int8_static(),)}, fused={"relu"})
    program = fxkit.quantize(nn.Sequential(*layers).eval(), mine.config(), [(x,)])
    fxkit.PassManager([Partition(mine)]).run(program)
    fast = fxkit.compile(program)
    for _ in range(2):
        torch.testing.assert_close(fast(x), program(x))
    fast(x).sum().backward()
