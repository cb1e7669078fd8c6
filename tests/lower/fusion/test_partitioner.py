"""What shares a kernel, what must not, and the reasons given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.lower import CompiledModule, to_cpp


def compiled(fn: Callable[..., Any], *args: Any) -> CompiledModule:
    return to_cpp(fx.symbolic_trace(fn), args)


def fused(module: CompiledModule) -> list[set[str]]:
    """Return the node names of each kernel."""
    return [set(region.nodes) for region in module.regions if region.kernel]


def reason(module: CompiledModule, node: str) -> str:
    return next(r.reason for r in module.regions if r.nodes == (node,) and r.reason)


def check(fn: Callable[..., Any], *args: torch.Tensor) -> CompiledModule:
    """Compile, and compare results and changed inputs with eager's."""
    module = compiled(fn, *args)
    ours, eagers = [a.clone() for a in args], [a.clone() for a in args]
    torch.manual_seed(3)
    found = module(*ours)
    torch.manual_seed(3)
    torch.testing.assert_close(found, fn(*eagers), equal_nan=True)
    torch.testing.assert_close(ours, eagers)
    assert module.report().calls == 1
    return module


THREADS = torch.get_num_threads()
X, Y = torch.randn(40, 64), torch.randn(40, 64)


def test_a_chain_is_one_kernel() -> None:
    module = check(lambda x, y: torch.sigmoid(x * 2 + y) - y.abs(), X, Y)
    assert [len(names) for names in fused(module)] == [5]


def test_an_operator_alone_is_a_kernel() -> None:
    index = torch.arange(0, 40, 2)
    for fn, name in (
        (lambda x, y: torch.sort(x + y)[0], "add"),
        (lambda x, y: torch.cat([x, y]).msort(), "cat"),
        (lambda x, y: x.sum(1).sort()[0], "sum_1"),
        (lambda x, y: x[index].msort(), "getitem"),
    ):
        assert {name} in fused(check(fn, X, Y))


def test_what_eager_does_faster_is_left_to_it() -> None:
    image = torch.randn(1, 2, 20, 20)
    for fn, x, name, words in (
        (lambda x: x.cummax(1)[1], X[:8], "cummax", "whatever is taken in"),
        (lambda x: torch.diag_embed(x), X, "diag_embed", "many places"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic") + 1, image, "interpolate", ""),
        (lambda x: F.interpolate(x, size=(9, 30), mode="bilinear"), image, "interpolate", "alone"),
    ):
        module = compiled(fn, x)
        assert words in reason(module, name)
        assert words in module.explain(name)
    assert fused(check(lambda x: F.interpolate(x, size=(9, 30), mode="bilinear") * 2, image))


def test_a_reduction_along_few_rows_is_left_to_the_threads_of_eager() -> None:
    torch.set_num_threads(4)
    try:
        module = compiled(lambda x: x.softmax(-1), torch.randn(1, 70_000))
    finally:
        torch.set_num_threads(THREADS)
    assert "divides its rows among threads" in reason(module, "softmax")


def test_reductions_take_producers_and_epilogues_in() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        h = x + y
        return h, F.softmax(F.layer_norm(h, (64,)) * 3, -1) + 1, h.mean(-1, keepdim=True) * h

    module = check(fn, X, Y)
    assert [len(names) for names in fused(module)] == [7]


def test_row_scalars_and_their_arithmetic_stay_in_the_kernel() -> None:
    def fn(x: torch.Tensor) -> Any:
        mean = x.mean(-1, keepdim=True)
        scale = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5)
        return (x - mean) * scale, scale.squeeze(-1)

    module = check(fn, X)
    assert len(fused(module)) == 1


def test_an_operator_waits_for_the_neighbours_of_its_reader() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = -x
        return turned * torch.tanh(y.softmax(-1))

    def between_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = -x
        return (turned + (x @ y.T).tanh() @ y).sort()[0]

    assert fused(check(fn, X, Y)) == [{"neg", "softmax", "tanh", "mul"}]
    assert {"neg", "add", "matmul_1"} in fused(check(between_products, X, Y))


def test_products_part_regions_and_take_what_follows_in() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh((torch.relu(x) + 1) @ w * 2)

    module = check(fn, X, torch.randn(64, 48))
    assert [len(names) for names in fused(module)] == [2, 3]


def test_a_region_never_surrounds_a_node_that_it_feeds() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x * 2 + 1
        return a @ w + a - x

    module = check(fn, X, torch.randn(64, 64))
    assert fused(module) == [{"mul", "add"}, {"matmul", "add_1", "sub"}]


def test_views_between_operators_are_followed() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = (x + y).unsqueeze(1)
        b = (a * 2).transpose(0, 2)
        return b + 1, a, b.squeeze(1).t() - y

    module = check(fn, X, Y)
    assert [len(names) for names in fused(module)] == [4]


def test_a_view_that_regroups_dimensions_is_followed() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).exp().view(20, 128).tanh() * 2

    module = check(fn, X, Y)
    assert [len(names) for names in fused(module)] == [4]


def test_a_value_read_in_two_orders_is_right() -> None:
    check(lambda x: (x.exp() + x.exp().t()) * 2, torch.randn(48, 48))


def test_reductions_along_different_axes_are_apart() -> None:
    module = check(lambda x: (x * 2).mean(0) + x.exp().mean(1).exp().sum(), X)
    assert len(fused(module)) >= 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (x * 2 + y).add_(1).exp() * 2,
        lambda x, y: (torch.sub(x, y).mul_(y), x * y + 1),
        lambda x, y: x.mul_(2) + y * x + x.amax(),
    ],
)
def test_in_place_calls_keep_their_place(fn: Callable[..., Any]) -> None:
    check(fn, X, Y)


def test_a_write_between_producer_and_consumer_is_seen() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x * 2
        b = a + y
        a.add_(100)
        c = a + y
        return b * 3, c * 3

    module = check(fn, X, Y)
    assert not any({"add", "add_1"} <= names for names in fused(module))
    assert reason(module, "add_") == "it changes its operand in place"


def test_a_view_written_later_is_seen() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x * 2 + y
        view = a.view(-1)
        before = a.exp() + 1
        view.zero_()
        return before, a.exp() + 1

    check(fn, X, Y)


def test_inputs_that_overlap_may_be_written() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = y * 2 + 1
        x.add_(1)
        return a + y * 2 + 1

    module = compiled(fn, X.clone(), Y.clone())
    ours, eagers = X.clone(), X.clone()
    torch.testing.assert_close(module(ours, ours), fn(eagers, eagers))


def test_random_draws_keep_their_order() -> None:
    def fn(x: torch.Tensor) -> Any:
        a = F.dropout(x * 2 + 1, 0.5)
        b = torch.rand_like(x) + x * 3
        return a * b, torch.rand_like(x) - 1

    check(fn, X)


def test_an_unknown_call_is_never_crossed() -> None:
    log: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        log.append(x.clone())
        return x.zero_()

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.mul, (x, 2))
    graph.call_function(note, (a,))
    b = graph.call_function(torch.add, (a, 1))
    c = graph.call_function(torch.exp, (b,))
    graph.output((a, c))
    gm = fx.GraphModule(nn.Module(), graph)
    module = to_cpp(gm, (X,))
    seen = len(log)
    found = module(X)
    assert len(log) == seen + 1
    assert torch.equal(log[-1], X * 2)
    torch.testing.assert_close(found, (torch.zeros_like(X), torch.ones_like(X).exp()))


def test_modules_are_fused_through_their_parameters() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    with torch.no_grad():
        module = to_cpp(fx.symbolic_trace(net), (X,))
        assert fused(module) == [{"_0"}, {"_1", "_2"}]
        torch.testing.assert_close(module(X), net(X))
        net.get_parameter("2.weight").mul_(3)
        net.get_parameter("0.weight").mul_(2)
        torch.testing.assert_close(module(X), net(X))


def test_each_candidate_left_to_eager_has_a_reason() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, c: torch.Tensor) -> Any:
        return x @ x.t() + 1, torch.special.i0(x), i // i, c * c, x[:, :0] + 1

    c = torch.randn(40, 64, dtype=torch.complex64)
    module = compiled(fn, X, torch.ones(40, 64, dtype=torch.int64), c)
    text = str(module.report())
    for words in ("no row for", "integers", "c64", "no elements"):
        assert words in text, text
    assert all(region.kernel or region.reason for region in module.regions)


def test_views_and_casts_that_take_a_second_tensor() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        wide = y * 2 + 1
        mean = x.exp().mean(-1, keepdim=True)
        return mean.expand_as(wide), (x * 3).to(wide) - 1, (x * 3).type_as(wide.double()) - 1

    check(fn, X, Y)


def test_a_region_in_eager_takes_its_own_inputs() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> Any:
        z = x.index_select(0, i)
        return (z.type_as(y) * 2 + z).exp(), F.layer_norm(z * 2, (64,)).mean(-1).unsqueeze(0)

    module = compiled(fn, X, Y, torch.arange(9))
    for call in module._plan.calls.values():  # as if a tensor inside had come with other strides
        call._expected[:] = [(dtype, shape, (7, 7)) for dtype, shape, _ in call._expected]
    module.native_program = None  # it checks by itself
    torch.testing.assert_close(module(X, Y, torch.arange(9)), fn(X, Y, torch.arange(9)))
    assert module.report().kernel_misses == len(module._plan.calls) > 0


def test_dead_candidates_do_no_harm() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        unused = x * 2 + 1  # noqa: F841
        return x.exp() - 1

    check(fn, X)


def test_partition_is_linear() -> None:
    """The work for a graph of twice the length is twice as much, counted in resolved nodes."""
    from fxkit.lower.fusion import group, partitioner, placement

    def count(length: int) -> int:
        graph = fx.Graph()
        x = first = graph.placeholder("x")
        for step in range(length):
            x = graph.call_function(torch.matmul if step % 5 == 0 else torch.add, (x, first))
        graph.output(x)
        gm = fx.GraphModule(nn.Module(), graph)
        calls = 0
        original = placement.place

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "place", counted)
            from fxkit.analysis.tensor_types import propagate_types

            propagate_types(gm, (torch.randn(8, 8),))
            partitioner.partition(gm)
        return calls

    assert count(400) <= 2.2 * count(200)


def test_what_returns_its_operand_returns_it_compiled_too() -> None:
    for fn in (torch.positive, lambda x: +x, lambda x: x.to(torch.float32), torch.detach):
        fast, x = fxkit.compile(fn), torch.randn(3)
        for _ in range(3):
            assert fast(x).data_ptr() == x.data_ptr()
    assert fused(check(lambda x: (+(x * 2)).exp(), X)) == [{"mul", "exp"}]
