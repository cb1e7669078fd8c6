"""A value guard is a check and no barrier: what is pure may pass it, what writes may not."""

from __future__ import annotations

import torch

import fxkit
from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.ir.printer import format_graph
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE


def branching(x):
    y = torch.exp(x) * 2
    if x.sum() > 0:
        y = y + 1
    x.add_(1)
    return torch.tanh(y)


def captured():
    return fxkit.capture(branching, (torch.ones(8, 8),)).graph_module


def node(gm, text):
    return next(n for n in gm.graph.nodes if text in n.name)


def test_guard_only_raises():
    effects = effects_of(node(captured(), "check_value"))
    assert effects.may_raise and not effects.is_pure
    assert not (effects.writes or effects.is_random or effects.is_opaque)
    assert effects.describe() == "raises when its operand is not as expected"


def test_pure_nodes_pass_it_and_writes_do_not():
    gm = captured()
    order, check = EffectOrder(gm.graph), node(gm, "check_value")
    assert order.may_swap(node(gm, "exp"), check)
    assert not order.may_swap(node(gm, "add_"), check)
    assert not order.may_swap(check, check)


def test_passes_keep_it():
    gm = captured()
    PassManager(INFERENCE, args=(torch.ones(8, 8),)).run(gm)
    assert gm.graph.find_nodes(op="call_function", target=node(gm, "check_value").target)


def test_kernels_form_across_it_and_a_failed_guard_leaves_no_write():
    fast = fxkit.compile(branching)
    with torch.no_grad():
        for sign in (1, -1, 1):
            ours = torch.full((8, 8), 0.5 * sign)
            eager = ours.clone()
            torch.testing.assert_close(fast(ours), branching(eager))
            assert torch.equal(ours, eager)
    fused = [r for r in fast.compiled_modules[0].regions if r.kernel]
    assert any({"exp", "add"} <= set(r.nodes) for r in fused), "add stood behind the guard"


def writes_one_reads_other(x, y):
    before = y * 2
    x.add_(1)
    return torch.exp(before) + y * 2


def test_inputs_that_share_memory_stay_in_order():
    fast = fxkit.compile(writes_one_reads_other)
    with torch.no_grad():
        for offset in (0, 4, 32):
            ours, eager = torch.arange(64.0), torch.arange(64.0)
            pair = (ours[:32], ours[offset : offset + 32])
            wanted = (eager[:32], eager[offset : offset + 32])
            torch.testing.assert_close(fast(*pair), writes_one_reads_other(*wanted))
            assert torch.equal(ours, eager)
        fast(torch.arange(32.0), torch.arange(32.0))
    shared, apart = (format_graph(module.graph_module) for module in fast.compiled_modules)
    assert shared.count("aten.mul") == 2, "the write may change the second product"
    assert apart.count("aten.mul") == 1
