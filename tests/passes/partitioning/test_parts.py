"""Parts in submodules: what they take and return, and what can't be one."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.errors import RewriteError
from fxkit.passes.partitioning.parts import GraphPart, outline_parts


def body(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def test_a_part_reads_its_parameters_itself():
    gm = fxkit.symbolic_trace(lambda x: x)
    gm.register_parameter("w", nn.Parameter(torch.ones(3)))
    with edit(gm) as e:
        x = next(iter(gm.graph.nodes))
        read = e.get_attr("w")
        e.set_output(e.call(torch.mul, x, read))
    (product,) = body(gm.graph)
    part = GraphPart.of([product])
    assert (part.inputs, part.reads, part.outputs) == ((x,), (read,), (product,))
    module = part.module(gm)
    assert module.w is gm.w
    with edit(gm) as e:
        outline_parts(e, [(part, module)], {}, lambda index: "scale")
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    assert gm(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_part_nobody_uses_returns_its_last_node():
    gm = fxkit.symbolic_trace(lambda x: (torch.exp(x).neg(), x)[1])
    part = GraphPart.of(body(gm.graph))
    assert [n.name for n in part.outputs] == ["neg"]


def test_parts_that_wait_for_each_other_are_refused():
    gm = fxkit.symbolic_trace(lambda x: torch.exp(torch.sin(torch.exp(x))))
    first, middle, last = body(gm.graph)
    part = GraphPart.of([first, last])
    with pytest.raises(RewriteError, match="parts that can run one after another"), edit(gm) as e:
        outline_parts(e, [(part, part.module(gm))], {}, str)
    assert body(gm.graph) == [first, middle, last]
