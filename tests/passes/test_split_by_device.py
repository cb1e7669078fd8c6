"""Splitting by device, on devices that exist everywhere: the CPU and meta."""

from __future__ import annotations

import torch

import fxkit
from fxkit.ir.node_kinds import body_of
from fxkit.passes import SplitByDevice
from fxkit.passes.manager.manager import PassManager

X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


def split(function):
    gm = fxkit.symbolic_trace(function)
    PassManager([SplitByDevice()], verify="structure", args=(X,)).run(gm)
    return gm


def test_each_device_gets_a_part_and_a_copy_stays_where_it_copies_from():
    def f(x):
        y = torch.relu(x) * x.shape[0]
        z = y.to("meta").neg()
        return y.exp(), z.sin()

    gm = split(f)
    assert [n.name for n in body_of(gm.graph) if n.op == "call_module"] == ["part_cpu", "part_meta"]
    first, second = gm(X)
    assert torch.equal(first, f(X)[0])
    assert second.device.type == "meta"
    names = [n.name for n in body_of(gm.part_cpu.graph)]
    assert {"relu", "mul", "to", "exp"} <= set(names)
    assert [n.name for n in body_of(gm.part_meta.graph)] == ["neg", "sin"]


def test_one_device_is_one_part():
    gm = split(lambda x: (x.exp(), x.sin()))
    assert [n.op for n in gm.graph.nodes if n.name.startswith("part")] == ["call_module"]
    assert torch.equal(gm(X)[1], X.sin())
