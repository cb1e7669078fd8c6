"""Every operator of torch's table that writes, in place or with `out=`, as one that doesn't."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.functionalise import Functionalise
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.properties import property_named
from tests.operator_samples import Sample, is_same, samples

PARTS = 24

# What they make is not told by their operands; the last one leaves its `out=` empty in torch 2.13.
UNDETERMINED = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided",
                "new_empty_strided", "resize_", "resize_as_", "fft.ihfftn")  # fmt: skip

Program = tuple[fx.GraphModule, list[torch.Tensor]]


def programs(sample: Sample) -> Iterator[Program]:
    """Yield programs that write by a sample's call: new memory, a view of it, an input, `out=`."""
    name = str(sample.node.target)
    if sample.name in UNDETERMINED or sample.name.startswith("__"):
        return
    if sample.node.op == "call_method" and name.endswith("_") and not name.startswith("__"):
        yield _in_place(sample, lambda graph, x: (graph.call_method("clone", (x,)),) * 2)
        yield _in_place(sample, _in_a_view)
        yield _in_place(sample, lambda graph, x: (x, x))
    elif sample.node.op == "call_function":
        try:
            result, _ = sample.run()
        except RuntimeError:  # it shows memory that a copy of its operand has not
            return
        is_tuple = isinstance(result, tuple)
        results = list(result) if is_tuple else [result]
        if all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in results):
            yield _with_out(sample, results, is_tuple, empty=True)
            yield _with_out(sample, results, is_tuple, empty=False)


def _in_a_view(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    stacked = graph.call_function(torch.stack, ([x, x],))
    return stacked, graph.call_method("select", (stacked, 0, 1))


def _in_place(sample: Sample, place: Any) -> Program:
    graph = fx.Graph()
    inputs = {node: graph.placeholder(node.name) for node in sample.tensors}
    args = fx.node.map_arg(sample.node.args, inputs.__getitem__)
    kwargs = fx.node.map_arg(sample.node.kwargs, inputs.__getitem__)
    memory, target = place(graph, args[0])
    result = graph.call_method(str(sample.node.target), (target, *args[1:]), kwargs)
    after = graph.call_method("clone", (target,))
    graph.output((result, memory, after, target))
    return fx.GraphModule(torch.nn.Module(), graph), list(sample.copies().values())


def _with_out(sample: Sample, results: list[Any], is_tuple: bool, *, empty: bool) -> Program:
    graph = fx.Graph()
    inputs = {node: graph.placeholder(node.name) for node in sample.tensors}
    args = fx.node.map_arg(sample.node.args, inputs.__getitem__)
    kwargs = fx.node.map_arg(sample.node.kwargs, inputs.__getitem__)
    outs = [
        graph.call_function(
            torch.empty if empty else torch.zeros,
            (0 if empty else list(one.shape),),
            {"dtype": one.dtype},
        )
        for one in results
    ]
    written = tuple(outs) if is_tuple else outs[0]
    graph.call_function(sample.node.target, args, {**kwargs, "out": written})
    graph.output((*outs, graph.call_method("clone", (outs[0],))))
    return fx.GraphModule(torch.nn.Module(), graph), list(sample.copies().values())


def check(name: str, program: Program) -> str | None:
    """Return what became of a program: None if torch can't run it, "left", or "functional"."""
    gm, args = program
    try:
        expected, written = _run(gm, args)
    except Exception:  # torch refuses: no `out=`, another dtype, memory that overlaps itself
        return None
    before = str(gm.graph)
    example = [_copied(arg) for arg in args]
    try:
        known = propagate_types(gm, tuple(example))
    except InvalidGraphError:  # torch's fake tensors refuse it, or numbers decide
        return None
    if not _is_told(known, expected):
        return "types are wrong"
    result = PassManager([DecomposeToAten(), Functionalise()], args=tuple(example)).run(gm)
    got, got_written = _run(gm, args)
    told = f"{name}\n{before}\n{gm.graph}"
    assert is_alike(expected, got), told
    assert is_alike(written, got_written), told
    assert _sharing(expected) == _sharing(got), told
    if property_named("functional").check(gm) is None:
        return "functional"
    assert any(record.notes for record in result.records), told
    return f"left: {result.records[-1].notes}"


def _is_told(known: Any, results: Any) -> bool:
    """Tell whether the types that torch's fake tensors tell are those of the results."""
    pairs = zip(known, results, strict=True)
    return all(tuple(t.shape) == r.shape and tuple(t.stride) == r.stride() for t, r in pairs)


def is_alike(expected: Any, got: Any) -> bool:
    """Tell whether results are equal to rounding, and equal in dtype, shape and strides."""
    leaves = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    for one, other in leaves:
        if is_same(one, other):
            continue
        if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
            return False
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True):
            return False
    return True


def _run(gm: fx.GraphModule, args: list[torch.Tensor]) -> tuple[Any, Any]:
    copies = [_copied(arg) for arg in args]
    torch.manual_seed(0)
    return fx.Interpreter(gm).run(*copies), copies


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return fresh.copy_(tensor)


def _sharing(results: Any) -> list[list[bool]]:
    memory = [leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(results)]
    return [[a == b for a in memory] for b in memory]


def check_part(part: int, parts: int) -> list[str]:
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples(part, parts):
            for program in programs(sample):
                outcome = check(sample.name, program)
                if outcome is not None:
                    outcomes.append(f"{sample.name} {sample.node.target}: {outcome}")
    return outcomes


@pytest.mark.parametrize("part", [7])
def test_operators_that_write(part):
    outcomes = check_part(part, 300)
    assert any(outcome.endswith(": functional") for outcome in outcomes)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_that_write(part):
    outcomes = check_part(part, PARTS)
    functional = sum(outcome.endswith(": functional") for outcome in outcomes)
    assert functional > 0.8 * len(outcomes), "\n".join(sorted(set(outcomes)))
