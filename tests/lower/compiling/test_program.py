"""Whole graphs as programs of the binding: the same results as eager, step by step."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.ir.types import set_type, type_of_value
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.compiling import compiled_module
from fxkit.lower.runtime import binding

X, Y = torch.randn(2, 12, 16)


def check(fn: Callable[..., Any], *args: torch.Tensor) -> CompiledModule:
    """Compile a function, and see that its program is as near to float64 as eager is."""
    module = to_cpp(fx.symbolic_trace(fn), args)
    assert module.native_program is not None
    wide = [a.double() if a.is_floating_point() else a for a in args]
    exact, eager = pytree.tree_leaves(fn(*wide)), pytree.tree_leaves(fn(*args))
    for _ in range(2):
        found = pytree.tree_leaves(module(*args))
        for ours, usual, true in zip(found, eager, exact, strict=True):
            assert ours.dtype == usual.dtype and ours.stride() == usual.stride()
            error, bound = ((it.double() - true).abs().max() for it in (ours, usual))
            assert error <= 2 * bound
    assert module.native_program.calls == 2
    assert module.native_program.stand_ins == 0
    return module


def cut(x: torch.Tensor) -> torch.Tensor:
    """Something that stays in ATen and parts the kernels around it."""
    return x.sort(0).values


def test_kernels_and_other_nodes_take_turns() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = (x * 2 + y).exp()
        b = cut(a) * 3 - a
        c = cut(b + x).tanh() + y
        return c * a + b

    check(fn, X, Y)


@pytest.mark.parametrize(
    "returned",
    [
        lambda a, x: a,
        lambda a, x: (a, x, a),
        lambda a, x: [a, x],
        lambda a, x: {"a": a, "rest": (x, 3, None)},
        lambda a, x: (a,),
        lambda a, x: x,
        lambda a, x: (cut(a), a[0], a.t()),
        lambda a, x: a[1:, 2],
    ],
)
def test_results_of_any_form(returned: Callable[..., Any]) -> None:
    module = to_cpp(fx.symbolic_trace(lambda x: returned((x * 2 + 1).exp(), x)), (X,))
    expected = returned((X * 2 + 1).exp(), X)
    found = module(X)
    torch.testing.assert_close(found, expected)
    assert type(found) is type(expected)
    if isinstance(expected, tuple) and len(expected) == 3 and expected[0] is expected[2]:
        assert found[0] is found[2] and found[1] is X


def test_one_result_of_a_kernel_is_indexed_as_a_tensor() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1)[0] @ x.t()

    check(fn, X)


def test_kernels_of_several_results() -> None:
    def fn(x: torch.Tensor) -> Any:
        a = x * 2 + 1
        b = a.exp()
        return cut(a), cut(b) + a, b

    check(fn, X)


def test_many_values_are_divided_among_runs() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        parts = [F.layer_norm(cut(x) * i + 1, (16,)) for i in range(90)]
        total = parts[0]
        for part in parts[1:]:
            total = cut(total.softmax(-1)).flip(0) + part.tanh() - total.tanh()
        return total

    check(fn, X)


def test_writes_between_kernels_are_seen() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = (x * 2 + 1).clone()
        b = a.exp() + 1
        a.index_fill_(0, torch.arange(3), 7.0)
        return (a * b + 1).tanh() + a.exp()

    check(fn, X)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.randn(16))
        self.inner.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.inner.get_buffer("shift") if False else self.inner.shift
        return cut((x * self.inner.scale + shift).exp()) * self.inner.scale + 1  # type: ignore[operator]


@torch.no_grad()
def test_attributes_are_read_where_they_lie_at_each_call() -> None:
    net = Nested()
    gm = fx.symbolic_trace(net)
    module = to_cpp(gm, (X,))
    program = module.native_program

    def ran() -> int:
        before = program.calls
        torch.testing.assert_close(module(X), gm(X))
        return program.calls - before

    assert ran() == 1
    inner = gm.get_submodule("inner")
    inner.scale = nn.Parameter(torch.randn(16))
    assert ran() == 1
    inner.shift = torch.randn(16)
    assert ran() == 1
    inner.get_parameter("scale").data = torch.randn(16).double()
    assert ran() == 1 and program.stand_ins > 0
    inner.scale = nn.Parameter(torch.randn(16))
    other = nn.Module()
    other.scale, other.shift = nn.Parameter(torch.randn(16)), torch.randn(16)
    gm.inner = other
    assert ran() == 0


def test_gradients_are_asked_of_inputs_and_of_all_attributes() -> None:
    net = Nested().requires_grad_(False)
    module = to_cpp(fx.symbolic_trace(net), (X,))
    program = module.native_program
    assert not module(X).requires_grad and program.calls == 1
    net.inner.get_parameter("scale").requires_grad_()
    assert module(X).requires_grad and program.calls == 1
    net.requires_grad_(False)
    assert module(X.clone().requires_grad_()).requires_grad and program.calls == 1
    assert not module(X).requires_grad and program.calls == 2


def test_other_strides_inside_let_python_stand_in() -> None:
    def reorder(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t() if reorder.turned else x.clone()

    reorder.turned = False
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.exp, (graph.call_function(torch.mul, (x, 2)),))
    b = graph.call_function(reorder, (a,))
    c = graph.call_function(torch.tanh, (graph.call_function(torch.add, (b, a)),))
    graph.output(c)
    gm = fx.GraphModule(nn.Module(), graph)
    for node in graph.nodes:
        set_type(node, type_of_value(X))
    module = to_cpp(gm, (X,))
    program = module.native_program
    torch.testing.assert_close(module(X), gm(X))
    assert program.stand_ins == 0
    reorder.turned = True
    torch.testing.assert_close(module(X), gm(X))
    assert (program.calls, program.stand_ins) == (2, 1)
    assert module.report().kernel_misses == 1


def test_values_die_after_their_last_use() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x))
        return x.clone()

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in seen))
        return x.clone()

    graph = fx.Graph()
    value = graph.placeholder("x")
    for function in (note, note, look):
        value = graph.call_function(torch.sigmoid, (graph.call_function(torch.mul, (value, 0.5)),))
        value = graph.call_function(function, (value,))
    graph.output(value)
    gm = fx.GraphModule(nn.Module(), graph)
    for node in graph.nodes:
        set_type(node, type_of_value(X))
    module = to_cpp(gm, (X,))
    torch.testing.assert_close(module(X), gm(X))
    assert module.native_program.calls == 1
    assert alive[0] == 0


def test_errors_inside_are_eagers() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (F.embedding(i, x * 2 + 1) + 1).tanh()

    good, bad = torch.arange(5), torch.tensor([0, 1, 2, 3, 99])
    module = check(fn, X, good)
    with pytest.raises(IndexError):
        module(X, bad)
    torch.testing.assert_close(module(X, good), fn(X, good))


def test_large_values_are_let_go_of_while_kernels_run() -> None:
    """But not before one that may fail, since Python begins the run again then."""
    x, i = torch.randn(128, 256), torch.arange(5)

    def rows(x: torch.Tensor) -> torch.Tensor:
        value = cut(x)
        for _ in range(3):
            value = value.softmax(0).cumsum(1)
        return value

    def looked_up(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.embedding(i, rows(x)).exp()

    check(rows, x)
    module = check(looked_up, x, i)
    for _ in range(2):
        with pytest.raises(IndexError):
            module(x, i + 126)
        torch.testing.assert_close(module(x, i), looked_up(x, i))


def test_without_a_binding_python_runs_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return cut((x * 2 + 1).exp()) + 1

    monkeypatch.setattr(binding, "load", lambda: None)
    module = to_cpp(fx.symbolic_trace(fn), (X,))
    assert module.native_program is None
    torch.testing.assert_close(module(X), fn(X))
    assert module.report().calls == 1
    monkeypatch.undo()
    monkeypatch.setattr(compiled_module, "make_program", lambda *args: None)
    torch.testing.assert_close(to_cpp(fx.symbolic_trace(fn), (X,))(X), fn(X))


def test_a_layout_that_differs_is_not_trusted() -> None:
    native = binding.load()
    assert native is not None
    samples = list(binding._samples())
    assert all(binding._is_read_well(native, sample) for sample in samples)
    keys = tuple(map(binding.keys_of, samples))
    classes = (torch.Tensor, torch.nn.Parameter)

    def found(change: Callable[[int, torch.Tensor], tuple[Any, ...]]) -> bool:
        described = tuple(change(i, t) for i, t in enumerate(samples))
        return native.find_layout(*classes, described, (keys[0], keys[-1]), (0, 0))

    try:
        assert not found(lambda i, t: (t, t._cdata + 8, keys[i], None))
        assert not found(lambda i, t: (t, t._cdata, keys[i] + (i == 2), None))
    finally:
        assert binding._find_layout(native)


def test_long_kernels_let_other_threads_run() -> None:
    x = torch.randn(4000, 4000)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = to_cpp(fx.symbolic_trace(lambda x: (x.exp() + x.sin()).tanh() * x.erf()), (x,))
        module(x)
        ticks: list[float] = []
        done = threading.Event()

        def tick() -> None:
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0)

        ticker = threading.Thread(target=tick)
        ticker.start()
        start = time.perf_counter()
        module(x)
        end = time.perf_counter()
        done.set()
        ticker.join()
        third = (end - start) / 3
        assert any(start + third < tick < end - third for tick in ticks)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [30, 70, 130])
def test_kernels_and_runs_of_many_tensors(count: int) -> None:
    """More tensors than the binding has room for in one run are divided among several."""
    xs = tuple(torch.randn(33, generator=torch.Generator().manual_seed(i)) for i in range(count))
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]
    doubled = [graph.call_function(torch.mul, (x, 2)) for x in inputs]
    total = inputs[0]
    for x in inputs[1:]:
        total = graph.call_function(torch.add, (total, x))
    graph.output((total, *(graph.call_function(torch.add, (x, 1)) for x in doubled)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    module = to_cpp(gm, xs)
    for _ in range(3):
        assert all(map(torch.equal, module(*xs), gm(*xs)))


@pytest.mark.parametrize("count", [30, 70, 130])
def test_runs_of_many_parameters(count: int) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = torch.nn.ParameterList(torch.full((33,), float(i)) for i in range(count))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.cos(x * scale) + 1 for scale in self.scales]

    net, x = Net(), torch.linspace(-1, 1, 33)
    with torch.no_grad():
        compiled = fxkit.compile(net)
        for _ in range(4):
            torch.testing.assert_close(compiled(x), net(x))
