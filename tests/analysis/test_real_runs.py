"""What small real tensors tell of a call's type is what eager returns for any numbers."""

from __future__ import annotations

import operator
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree

import fxkit
from fxkit.analysis.tensor_types import TypeAnalysis
from fxkit.analysis.type_inference import type_evaluation
from fxkit.analysis.type_inference.real_runs import may_run, run_on_zeros
from fxkit.analysis.type_inference.type_facts import FactTable, TypeFacts, facts_in
from fxkit.analysis.type_inference.type_memory import forget_results
from fxkit.ir.types import set_type, type_of, type_of_value
from tests.analysis.full_run import types_by_full_run
from tests.operator_samples import Sample, samples

PARTS = 24
SHORT = (8,)


@pytest.mark.parametrize(
    "part",
    [n if n in SHORT else pytest.param(n, marks=pytest.mark.sweep) for n in range(PARTS)],
)
def test_zeros_tell_the_types_that_eager_returns_for_other_numbers(part: int) -> None:
    wrong, runs = [], 0
    for sample in samples(part, PARTS):
        try:
            result, _ = sample.run()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # eager refuses it
        told = type_of_value(result)
        for found in (_on_zeros(sample, told), _on_zeros(sample, None)):
            runs += found is not None
            if found and pytree.tree_leaves(_types(found[0])) != pytree.tree_leaves(told):
                wrong.append((sample.name, _types(found[0]), told))
    assert not wrong
    assert runs > 10


def _on_zeros(sample: Sample, expected: Any) -> tuple[Any] | None:
    """Return what a run on zeros knows of a sample's result, where there is one."""
    table = FactTable()
    facts = {node: table.of(tensor) for node, tensor in sample.tensors.items()}
    if not may_run(sample.node, list(facts.values()), expected):
        return None

    def run(make: Callable[[TypeFacts], torch.Tensor]) -> Any:
        args, kwargs = fx.node.map_arg(
            (sample.node.args, sample.node.kwargs), lambda node: make(facts[node])
        )
        target: Any = sample.node.target
        if sample.node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    return run_on_zeros(run, table, keep_grad=False)


def _types(value: Any) -> Any:
    return pytree.tree_map_only(TypeFacts, lambda facts: facts.type, value)


def _views(x: torch.Tensor, w: torch.Tensor) -> Any:
    first, second, _ = x.chunk(3, -1)
    turned = F.linear(first.transpose(0, 1), w).reshape(4, -1)[1:, None]
    return turned.expand(-1, 2, -1), second.contiguous().view(-1), second[..., 1:].t()


def _attention(x: torch.Tensor, w: torch.Tensor) -> Any:
    heads = x.reshape(4, 2, 3, 2).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads)
    return F.layer_norm(attended, (2,)), torch.softmax(heads @ heads.mT, -1), w.sum(0)


def _chained(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.cat([x.t(), x.t()], 1).to(torch.float64).sin(), F.gelu(x * 1.5) + w.mean()


class _Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = torch.nn.GRU(8, 8)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        x = x.reshape(4, 3, 4).repeat(1, 1, 2).clone().mul_(2)
        x[1].add_(1)
        x[:, 0], x[2, w.long()[0] % 3] = 3, 4
        attended, weights = self.attention(x, x, x)
        return attended, weights, self.recurrent(x)[0][:, w.argmax(-1) % 3], F.dropout(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", [_views, _attention, _chained, _Mixed().eval()])
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
def test_types_are_those_of_a_run_on_fake_tensors(
    program: Callable[..., Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (torch.randn(4, 12), torch.randn(4, 4))
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
    with modes[mode]():
        if mode == "grad":
            args = tuple(arg.requires_grad_() for arg in args)  # type: ignore[assignment]
        gm = fxkit.capture(program, args).graph_module
        expected = types_by_full_run(gm, args)
        forget_results()
        real = TypeAnalysis(gm, args)
        assert {node.name: type_of(node) for node in gm.graph.nodes} == expected
        values = {node.name: facts_in(real._now.values[node]) for node in gm.graph.nodes}
        forget_results()
        monkeypatch.setattr(type_evaluation, "may_run", lambda *_: False)
        fake = TypeAnalysis(gm, args)
        for node in gm.graph.nodes:
            told = [_told(facts) for facts in facts_in(fake._now.values[node])]
            assert [_told(facts) for facts in values[node.name]] == told, node.name


def _told(facts: TypeFacts) -> tuple[Any, ...]:
    core = facts.core
    known = (facts.type, core.is_conj, core.is_neg, core.is_plain)
    return *known, facts.offset, facts.nbytes, facts.is_view, facts.is_leaf


def _calls(build: Callable[..., Any], *tensors: torch.Tensor) -> fx.Node:
    """Return the node of a call of typed operands."""
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{number}") for number in range(len(tensors))]
    for node, tensor in zip(operands, tensors, strict=True):
        set_type(node, type_of_value(tensor))
    return build(graph, *operands)


def _may_run(node: fx.Node, *tensors: torch.Tensor, expected: torch.Tensor) -> bool:
    table = FactTable()
    return may_run(node, [table.of(tensor) for tensor in tensors], type_of_value(expected))


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.call_function(torch.nonzero, (x,)),
        lambda g, x: g.call_function(torch.where, (x,)),
        lambda g, x: g.call_function(operator.getitem, (x, x)),
        lambda g, x: g.call_function(F.one_hot, (x,)),
        lambda g, x: g.call_function(F.dropout, (x,)),
        lambda g, x: g.call_function(print, (x,)),
    ],
)
def test_what_data_or_chance_decide_and_what_may_do_anything_is_not_run(
    build: Callable[..., Any],
) -> None:
    x = torch.ones(3, 3)
    assert not _may_run(_calls(build, x), x, expected=x)


@pytest.mark.parametrize(
    ("index", "is_run"),
    [
        (torch.ones(2, dtype=torch.int64), True),
        (torch.ones(2, 3, dtype=torch.int32), True),
        (torch.ones((), dtype=torch.int64), False),  # a number: where a view begins
        (torch.ones(3, dtype=torch.bool), False),
        (torch.ones(3, dtype=torch.uint8), False),
    ],
)
def test_an_index_is_run_where_its_type_decides(index: torch.Tensor, is_run: bool) -> None:
    x = torch.ones(3, 3)
    node = _calls(lambda g, a, i: g.call_function(operator.getitem, (a, (0, i))), x, index)
    assert _may_run(node, x, index, expected=x) == is_run
    of_slice = _calls(lambda g, a, i: g.call_function(operator.getitem, (a, slice(i))), x, index)
    assert not _may_run(of_slice, x, index, expected=x)


def test_what_writes_into_operands_is_run_on_others() -> None:
    x = torch.ones(3, 3)
    node = _calls(lambda g, a: g.call_method("mul_", (a, 2)), x)
    assert _may_run(node, x, expected=x)
    table = FactTable()
    found = run_on_zeros(lambda make: make(table.of(x)).mul_(2), table, keep_grad=False)
    assert found is not None and found[0].type == type_of_value(x)
    assert torch.equal(x, torch.ones(3, 3))


def test_a_call_that_nobody_has_seen_is_run_where_its_result_is_surely_small() -> None:
    x, y = torch.empty(64, 32), torch.empty(32, 64)
    for build, is_run in (
        (lambda g, a, b: g.call_function(torch.matmul, (a, b)), True),
        (lambda g, a, b: g.call_function(torch.cat, ([a, a],)), True),
        (lambda g, a, b: g.call_method("repeat", (a, 100_000)), False),
    ):
        node = _calls(build, x, y)
        operands = [FactTable().of(tensor) for tensor in (x, y)]
        assert may_run(node, operands, None) == is_run
    wide, tall = torch.empty(1, 4096), torch.empty(4096, 1)
    node = _calls(lambda g, a, b: g.call_function(torch.add, (a, b)), wide, tall)
    assert not may_run(node, [FactTable().of(tensor) for tensor in (wide, tall)], None)


def test_what_costs_much_is_not_run() -> None:
    x, y = torch.empty(4096, 1), torch.empty(1, 4096)
    node = _calls(lambda g, a, b: g.call_function(torch.matmul, (a, b)), x, y)
    assert not _may_run(node, x, y, expected=torch.empty(4096, 4096))
    assert _may_run(node, x[:64], y[:, :64], expected=torch.empty(64, 64))
    many = torch.empty(1 << 20)
    added = _calls(lambda g, a, b: g.call_function(torch.add, (a, b)), many, many)
    assert _may_run(added, many, many, expected=many)  # whose time is that of its elements


def test_a_view_of_much_memory_is_not_made() -> None:
    x = torch.empty(1 << 25)[::4096]
    node = _calls(lambda g, a: g.call_function(torch.sin, (a,)), x)
    assert not _may_run(node, x, expected=torch.empty(1 << 13))


def test_a_type_that_was_recorded_for_other_operands_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(type_evaluation, "may_run", lambda *given: bool(seen.append(given[-1])))
    gm = fxkit.capture(lambda x: torch.sin(x), (torch.randn(2, 3),)).graph_module
    forget_results()
    fxkit.propagate_types(gm, (torch.randn(5, 3),))
    assert seen == [None]
    assert str(type_of(next(iter(reversed(gm.graph.nodes))))) == "f32[5,3]"


def test_a_call_that_zeros_do_not_suit_is_told_by_fake_tensors() -> None:
    table = FactTable()

    def run(make: Callable[[TypeFacts], torch.Tensor]) -> Any:
        return torch.embedding(make(table.of(torch.empty(0, 2))), torch.zeros(1, dtype=torch.int64))

    assert run_on_zeros(run, table, keep_grad=False) is None
    assert run_on_zeros(lambda make: make(table.of(torch.ones(2))).resize_(1), table,
                        keep_grad=False) is None  # fmt: skip


def test_a_mode_of_the_caller_sees_no_call_on_zeros() -> None:
    x = torch.ones(2)
    node = _calls(lambda g, a: g.call_function(torch.sin, (a,)), x)
    assert _may_run(node, x, expected=x)
    with torch.device("cpu"):
        assert not _may_run(node, x, expected=x)


_FIRST_CALL = """
import sys, torch
from torch import nn
import fxkit

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2)
                   for part in self.wide(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.back(attended.transpose(1, 2).flatten(2))
        return torch.softmax(nn.functional.gelu(x * 1.5), -1)

block = Block()
with torch.no_grad():
    compiled = fxkit.compile(block)
    x = torch.randn(2, 5, 8)
    assert torch.allclose(compiled(x), block(x), atol=1e-5)
assert compiled.compiled_modules[0].native_program is not None
print(*[name for name in sys.argv[1:] if name in sys.modules])
"""


_OTHER_FIRST_CALLS = """
import sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
import fxkit

def writes(x, i):
    y = x[i].clone().mul_(2)
    y[:, 0] = 3
    return torch.fft.rfft(y + 1).abs() + F.cross_entropy(y, i), y.norm()

def reshapes(x, i):
    return F.interpolate(x.view(1, 2, 2, 4).transpose(1, 2).reshape(1, 4, 4), scale_factor=2.0)

images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                       nn.ConvTranspose2d(8, 2, 3), nn.GroupNorm(2, 2)).eval()
recurrent = nn.LSTM(4, 8)
x, i = torch.randn(4, 4), torch.tensor([1, 0, 3])
with torch.no_grad():
    for program, args in ((writes, (x, i)), (reshapes, (x, i)), (recurrent, (x,)),
                          (images, (torch.randn(1, 3, 9, 9),))):
        compiled, expected = fxkit.compile(program), program(*args)
        pairs = zip(tree_leaves(compiled(*args)), tree_leaves(expected))
        assert all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in pairs)
        assert compiled.compiled_modules, program
print(*[name for name in sys.argv[1:] if name in sys.modules])
"""


@pytest.mark.parametrize("programs", [_FIRST_CALL, _OTHER_FIRST_CALLS])
def test_a_first_call_imports_nothing_that_it_does_not_need(
    programs: str, bare_python: list[str]
) -> None:
    slow = ["sympy", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.codecache"]
    slow += ["fxkit.lower.codegen.cuda.printer", "fxkit.view"]
    done = subprocess.run(
        [*bare_python, "-W", "ignore", "-c", programs, *slow],
        capture_output=True,
        text=True,
        check=False,
    )
    remarks = [line for line in done.stderr.splitlines() if "cpp_extension" not in line]  # torch's
    assert (done.stdout.split(), remarks) == ([], [])
