"""Types found by key are those of a whole run on fake tensors, whatever a program does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from fxkit.analysis.tensor_types import TypeAnalysis, propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.types import TensorType, type_of, type_of_value
from fxkit.tracing.symbolic import symbolic_trace
from tests.analysis.full_run import types_by_full_run
from tests.architectures import HUGGING_FACE, convolutional
from tests.operator_samples import samples

Build = Callable[..., Any]


class _Writer:
    """Writes calls into a graph: `w.call(torch.relu, x)`, `w.method("t_", x)`."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_method(name, args, kwargs)


def _module(build: Build, count: int) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(count)]
    graph.output(build(_Writer(graph), *inputs))
    return fx.GraphModule(nn.Module(), graph)


def _types(gm: fx.GraphModule) -> dict[str, Any]:
    return {node.name: type_of(node) for node in gm.graph.nodes}


def _grad_spreads_to_a_view(w: _Writer, x: Any, weight: Any) -> Any:
    copy = w.method("clone", x)
    view = w.method("view", copy, -1)
    w.method("add_", copy, weight)
    return copy, w.call(torch.relu, view)


def _grad_spreads_to_a_base(w: _Writer, x: Any, weight: Any) -> Any:
    copy = w.method("clone", x)
    w.method("mul_", w.call(operator.getitem, copy, 0), weight)
    return w.call(torch.relu, copy)


def _inplace_on_what_autograd_made(w: _Writer, x: Any, weight: Any) -> Any:
    product = w.call(torch.mul, x, weight)
    return w.call(torch.sum, w.call(torch.relu_, product)), product


def _transposed_in_place(w: _Writer, x: Any) -> Any:
    copy = w.method("clone", x)
    early = w.call(torch.add, copy, 1)
    w.method("t_", copy)
    return early, w.call(torch.relu, copy), copy


def _resized(w: _Writer, x: Any) -> Any:
    copy = w.method("clone", x)
    w.method("resize_", copy, 2, 2)
    return w.call(torch.add, copy, 1)


def _made_to_require_grad(w: _Writer, x: Any) -> Any:
    copy = w.method("clone", x)
    w.call(setattr, copy, "requires_grad", True)
    return w.call(torch.mul, copy, 2)


def _written_to_an_argument(w: _Writer, x: Any) -> Any:
    out = w.call(torch.empty, 0)
    w.call(torch.add, x, x, out=out)
    return w.call(torch.relu, out)


def _grad_switched(w: _Writer, x: Any, weight: Any) -> Any:
    first = w.call(torch.mul, x, weight)
    w.call(torch._C._set_grad_enabled, False)
    second = w.call(torch.mul, x, weight)
    w.call(torch._C._set_grad_enabled, True)
    return first, second, w.call(torch.mul, x, weight)


def _transpose_and_say_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.t_()


def _unknown_call_that_writes(w: _Writer, x: Any) -> Any:
    copy = w.method("clone", x)
    view = w.method("view", copy, -1)
    w.call(_transpose_and_say_nothing, copy)
    return w.call(torch.relu, copy), view


def _list_that_is_written(w: _Writer, x: Any) -> Any:
    parts = w.call(list, w.call(torch.split, x, 1))
    w.call(operator.setitem, parts, 0, 3)
    return w.call(operator.getitem, parts, 0), w.call(operator.getitem, parts, 1)


def _number_of_a_constant(w: _Writer, x: Any) -> Any:
    constant = w.call(torch.add, w.call(torch.tensor, 3), 1)
    return w.call(torch.full, (w.method("item", constant), 2), 1.0)


def _number_of_a_written_constant(w: _Writer, x: Any) -> Any:
    constant = w.call(torch.tensor, 3)
    w.method("add_", constant, 2)
    return w.call(torch.full, (w.method("item", constant), 2), 1.0)


def _conjugates(w: _Writer, x: Any) -> Any:
    conjugate = w.call(torch.conj, w.call(torch.complex, x, x))
    return (
        conjugate,
        w.call(operator.getitem, conjugate, 0),
        w.call(torch.resolve_conj, conjugate),
        w.call(getattr, conjugate, "imag"),
    )


def _outside_of_the_view(w: _Writer, x: Any) -> Any:
    part = w.call(torch.ops.aten.slice.Tensor, x, 0, 1, 3)
    return (
        w.call(torch.as_strided, part, (4, 2), (2, 1)),
        w.method("storage_offset", part),
        w.method("view", part, torch.int32),
        w.method("contiguous", part),
    )


def _sparse(w: _Writer, x: Any) -> Any:
    return w.call(torch.sparse.mm, w.method("to_sparse", x), w.method("t", x))


def _numbers_in_keys(w: _Writer, x: Any) -> Any:
    return (
        w.call(torch.full_like, x, 1),
        w.call(torch.sum, x, 1),
        w.call(torch.full, (2,), True),
        w.call(torch.full, (2,), 1),
        w.call(torch.add, w.call(torch.arange, 4), 1),
        w.call(torch.add, w.call(torch.arange, 4), 1.0),
        w.call(torch.add, w.call(torch.arange, 4), True),
    )


def _attributes(w: _Writer, x: Any, weight: Any) -> Any:
    made = w.call(torch.mul, weight, 1)
    return [
        w.call(getattr, source, name)
        for source in (weight, made)
        for name in ("data", "is_leaf", "shape", "requires_grad", "_version")
    ]


_PROGRAMS: list[tuple[Build, int]] = [
    (_grad_spreads_to_a_view, 2),
    (_grad_spreads_to_a_base, 2),
    (_inplace_on_what_autograd_made, 2),
    (_transposed_in_place, 1),
    (_resized, 1),
    (_made_to_require_grad, 1),
    (_written_to_an_argument, 1),
    (_grad_switched, 2),
    (_unknown_call_that_writes, 1),
    (_list_that_is_written, 1),
    (_number_of_a_constant, 1),
    (_number_of_a_written_constant, 1),
    (_conjugates, 1),
    (_outside_of_the_view, 1),
    (_sparse, 1),
    (_numbers_in_keys, 1),
    (_attributes, 2),
]


def _inputs(count: int) -> tuple[Any, ...]:
    return (torch.randn(3, 4), torch.randn(4, requires_grad=True))[:count]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("build", "count"), _PROGRAMS, ids=lambda v: getattr(v, "__name__", ""))
def test_programs(build: Build, count: int, grad: bool) -> None:
    gm = _module(build, count)
    for _ in range(2):  # the second time from memory
        with torch.set_grad_enabled(grad):
            expected = types_by_full_run(gm, _inputs(count))
            TypeAnalysis(gm, _inputs(count))
            assert torch.is_grad_enabled() == grad
        assert _types(gm) == expected


def test_autocast_regions() -> None:
    def build(w: _Writer, x: Any) -> Any:
        region = w.call(_enter_autocast, "cpu", torch.bfloat16, True, True)
        inside = w.call(torch.mm, x, w.method("t", x))
        w.call(_exit_autocast, region)
        return inside, w.call(torch.mm, x, w.method("t", x))

    gm = _module(build, 1)
    inside, outside = TypeAnalysis(gm, _inputs(1)).output_type
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        outer = TypeAnalysis(_module(lambda w, x: w.call(torch.mm, x, w.method("t", x)), 1),
                             _inputs(1)).output_type  # fmt: skip
    assert outer.dtype == torch.bfloat16


def test_a_failure_inside_of_an_autocast_region_leaves_it() -> None:
    def build(w: _Writer, x: Any) -> Any:
        w.call(_enter_autocast, "cpu", torch.bfloat16, True, True)
        return w.call(torch.mm, x, x)

    with pytest.raises(InvalidGraphError):
        TypeAnalysis(_module(build, 1), _inputs(1))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_a_seed_set_in_the_graph_leaves_the_generator_alone() -> None:
    gm = _module(lambda w, x: (w.call(torch.manual_seed, 3), w.call(torch.rand_like, x)), 1)
    args, before = _inputs(1), torch.get_rng_state()
    TypeAnalysis(gm, args)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_one_tensor() -> None:
    x = torch.randn(3, 4)
    gm = _module(lambda w, x, y: (w.method("t_", x), w.call(torch.relu, y)), 2)
    assert TypeAnalysis(gm, (x, x)).output_type[1].shape == (4, 3)
    assert TypeAnalysis(gm, (x, x.clone())).output_type[1].shape == (3, 4)


def test_inputs_that_are_views_sparse_or_meta() -> None:
    whole = torch.randn(5, 4)
    for x in (whole[1:], whole[:, ::2], whole.to_sparse(), torch.empty(3, 4, device="meta")):
        gm = _module(lambda w, x: w.call(torch.mul, w.method("to_dense", x), 2), 1)
        TypeAnalysis(gm, (x,))
        assert _types(gm) == types_by_full_run(gm, (x,))


def test_a_default_dtype_set_between_runs() -> None:
    gm = _module(lambda w, x: w.call(torch.div, w.call(torch.arange, 4), 2), 1)
    assert TypeAnalysis(gm, _inputs(1)).output_type.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert TypeAnalysis(gm, _inputs(1)).output_type.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_module_that_changes_between_runs() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5)))
    args = (torch.randn(2, 3, 8, 8),)
    first = TypeAnalysis(gm, args).output_type
    gm.get_submodule("0").padding = (1, 1)
    gm.double()
    args = (args[0].double(),)
    second = TypeAnalysis(gm, args).output_type
    assert (first.shape, second.shape) == ((2, 4, 6, 6), (2, 4, 8, 8))
    assert second.dtype == torch.float64


def test_channels_last_goes_through() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)))
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    plain = TypeAnalysis(gm, (x.contiguous(),)).output_type
    assert plain.memory_format == torch.contiguous_format
    known: TensorType = TypeAnalysis(gm, (x,)).output_type
    assert known.memory_format == torch.channels_last
    assert known.stride == gm(x).stride()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("turn", [
    lambda x: x, lambda x: x.transpose(2, 3), lambda x: x[:, ::2], lambda x: x.permute(1, 0, 3, 2),
    lambda x: x.to(memory_format=torch.channels_last), lambda x: x[:, :, :1, :1].transpose(1, 3),
    lambda x: x[:1, :1].transpose(2, 3),
])  # fmt: skip
def test_a_batch_norm_makes_its_result_dense(turn: Callable[[Any], Any], training: bool) -> None:
    x = turn(torch.randn(4, 4, 5, 6))
    gm = symbolic_trace(nn.Sequential(nn.BatchNorm2d(x.shape[1])).train(training))
    propagate_types(gm, (x,))
    returned: Any = gm.graph.output_node().args[0]
    assert type_of(returned).stride == gm(x).stride()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("function", [
    lambda x: F.logsigmoid(x), lambda x: F.channel_shuffle(x, 2),
    lambda x: torch.roll(x, 3), lambda x: torch.roll(x, 1, 1), lambda x: torch.roll(x, 0, 2),
    lambda x: torch.roll(x, (4, -1), (0, 1)), lambda x: torch.roll(x, (1, 5), (-1, 2)),
    lambda x: F.rrelu(x, training=True), lambda x: F.max_unpool2d(x, torch.zeros_like(x).long(), 2),
    lambda x: F.pad(x, (0, 0, 0, 0), "reflect"), lambda x: F.pad(x, (1, 0, 0, 2), "replicate"),
    lambda x: torch.ops.aten.reflection_pad2d_backward(x, x, [0, 0, 0, 0]),
    lambda x: torch.view_copy(x, (x.shape[0] * x.shape[1], -1)),
])  # fmt: skip
@pytest.mark.parametrize("turn", [
    lambda x: x, lambda x: x.to(memory_format=torch.channels_last), lambda x: x[:, :, ::2],
    lambda x: x.to(memory_format=torch.channels_last)[:, :2], lambda x: x[:1].expand(2, 4, 5, 6),
    lambda x: x[:, :, :1, :1].transpose(1, 3).contiguous().transpose(1, 3),
])  # fmt: skip
def test_results_are_laid_out_as_kernels_do_it(
    function: Callable[[Any], Any], turn: Callable[[Any], Any]
) -> None:
    x = turn(torch.randn(4, 4, 5, 6))
    gm = symbolic_trace(function)
    propagate_types(gm, (x,))
    returned: Any = gm.graph.output_node().args[0]
    assert type_of(returned).stride == gm(x).stride()


@pytest.mark.parametrize("function", [
    lambda x: F.pad(x, (1, 0, 0, 2, 1, 1), "reflect"),
    lambda x: F.pad(x, (1, 0, 0, 2, 1, 1), "replicate"),
    lambda x: torch.ops.aten.reflection_pad3d_backward(x, x[..., 1:], [0, 1, 0, 0, 0, 0]),
    lambda x: torch.ops.aten.replication_pad3d_backward(x, x[..., 1:], [0, 1, 0, 0, 0, 0]),
])  # fmt: skip
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_pads_of_volumes_are_laid_out_as_kernels_do_it(
    function: Callable[[Any], Any], layout: torch.memory_format
) -> None:
    x = torch.randn(2, 4, 5, 6, 7).to(memory_format=layout)
    gm = symbolic_trace(function)
    propagate_types(gm, (x,))
    returned: Any = gm.graph.output_node().args[0]
    assert type_of(returned).stride == gm(x).stride()


@pytest.mark.parametrize("function", [
    torch.copysign, torch.floor_divide, torch.heaviside, torch.logaddexp, torch.logaddexp2,
    torch.logical_and, torch.logical_xor, torch.xlogy, torch.special.xlog1py,
    lambda a, b: torch.div(a, b, rounding_mode="floor"), lambda a, b: torch.pow(2, a),
])  # fmt: skip
@pytest.mark.parametrize("turn", [
    lambda x: (x, x.mT.contiguous().mT), lambda x: (x.mT.contiguous().mT, x),
    lambda x: (x[:1].expand(3, 4, 5), x.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
])  # fmt: skip
def test_results_of_two_operands_are_laid_out_as_kernels_do_it(
    function: Callable[..., Any], turn: Callable[[Any], Any]
) -> None:
    args = turn(torch.randn(3, 4, 5))
    gm = symbolic_trace(lambda a, b: function(a, b))
    propagate_types(gm, args)
    returned: Any = gm.graph.output_node().args[0]
    assert type_of(returned).stride == gm(*args).stride()


@pytest.mark.parametrize("part", range(2))
def test_samples_of_operators(part: int) -> None:
    for sample in samples(3 + 20 * part, 40):
        graph = sample.node.graph
        graph.output(sample.node)
        gm = fx.GraphModule(nn.Module(), graph)
        args = tuple(sample.copies()[n] for n in graph.nodes if n.op == "placeholder")
        try:
            result, _ = sample.run()
            expected = types_by_full_run(gm, args)
        except (RuntimeError, NotImplementedError, AttributeError):  # eager or fake tensors can't
            continue
        for _ in range(2):
            TypeAnalysis(gm, args)
            found = _types(gm)
            if found["output"] == type_of_value(result):  # of which a fake tensor may say less
                expected |= dict.fromkeys(("output", sample.node.name), found["output"])
            assert repr(found) == repr(expected), sample.name


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers(name: str, grad: bool) -> None:
    from fxkit.tracing import capture

    model, inputs = HUGGING_FACE[name]()
    with torch.set_grad_enabled(grad):
        gm = capture(model, (), inputs(2)).graph_module
        args = tuple(_example(type_of(n)) for n in gm.graph.nodes if n.op == "placeholder")
        expected = types_by_full_run(gm, args)
        TypeAnalysis(gm, args)
    assert repr(_types(gm)) == repr(expected)


def _example(known: Any) -> Any:
    if not isinstance(known, TensorType):
        return known
    return torch.zeros(known.shape, dtype=known.dtype, requires_grad=known.requires_grad)


@pytest.mark.parametrize("grad", [True, False])
def test_convolutional_networks(grad: bool) -> None:
    model, inputs = convolutional("resnet18")
    gm = symbolic_trace(model)
    args = tuple(inputs(1).values())
    with torch.set_grad_enabled(grad):
        expected = types_by_full_run(gm, args)
        types = TypeAnalysis(gm, args)
    assert _types(gm) == expected
    assert not types._now.live_nodes


def test_recurrent_modules_and_functions_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 5, batch_first=True)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            hidden, last = self.gru(x)
            mixed, weights = self.attention(hidden, hidden, hidden)
            return F.interpolate(mixed.transpose(1, 2), 7), last, weights

    gm = symbolic_trace(Net().eval())
    args = (torch.randn(2, 3, 4),)
    expected = types_by_full_run(gm, args)
    TypeAnalysis(gm, args)
    assert _types(gm) == expected
