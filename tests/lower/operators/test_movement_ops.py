"""Operators that move elements: alone and among others, against eager, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxkit
from fxkit.lower import CompiledModule, Policy, to_cpp
from fxkit.lower.fusion.candidates import candidate
from fxkit.lower.operators.movement_ops import TABLE
from tests.lower.kernels import compile_all, difference, fused_names
from tests.sampling import Sample

ALWAYS = Policy(min_members=1)

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers, with what is special to the dtype among them."""
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    x = torch.randn(shape).to(dtype)
    if x.numel() > 6:
        x.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0]).to(dtype)
    return x


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def moves(d: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Return calls, each with a name of its own."""
    x, y, cube = tensor(5, 7, dtype=d), tensor(5, 7, dtype=d), tensor(3, 5, 7, dtype=d)
    wide = tensor(12, 30, dtype=d).t()
    row = tensor(9, dtype=d)
    image = tensor(2, 8, 6, 4, dtype=d)
    spread = tensor(4, 10, 12, dtype=d)[:, ::2, 1:11:3]
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (torch.cat, ([x, y, x[:2]],), {}),
        (torch.cat, ([x, y[:, 2:5]], -1), {}),
        (torch.cat, ([wide, wide], 1), {}),
        (torch.cat, ([torch.empty(0, dtype=d), row, row[:0], row],), {}),
        (torch.concat, ([spread, spread[:, 1:2]], 1), {}),
        (torch.stack, ([x, y], 1), {}),
        (torch.stack, ([x, y, x], -1), {}),
        (torch.stack, ([row[0], row[1]],), {}),
        (torch.hstack, ([row, row[:3]],), {}),
        (torch.hstack, ([x, y[:, :1]],), {}),
        (torch.hstack, ([row[0], row[1]],), {}),
        (torch.vstack, ([row, row],), {}),
        (torch.vstack, ([x, y[1:]],), {}),
        (torch.dstack, ([x, y],), {}),
        (torch.dstack, ([row, row],), {}),
        (torch.column_stack, ([row, row, torch.stack([row, row], 1)],), {}),
        (torch.block_diag, (x, row, y[:1]), {}),
        (F.pad, (x, (2, 3)), {}),
        (F.pad, (cube, (1, 0, 2, 1), "constant", 3), {}),
        (F.pad, (cube, (-1, 2, 0, -2)), {}),
        (F.pad, (cube, (-2, -1, 1, -1, 0, 2)), {}),
        (torch.flip, (cube, (0, -1)), {}),
        (torch.fliplr, (x,), {}),
        (torch.flipud, (x,), {}),
        *((torch.rot90, (x, k), {}) for k in (-1, 0, 1, 2, 3)),
        (torch.rot90, (cube, 1, (2, 1)), {}),
        (torch.roll, (x, 2, 0), {}),
        (torch.roll, (cube, (1, -9), (0, 2)), {}),
        (torch.Tensor.repeat, (x, 3, 2), {}),
        (torch.Tensor.repeat, (row, 2, 1, 3), {}),
        (torch.tile, (x, (2,)), {}),
        (torch.repeat_interleave, (x, 3), {"dim": 1}),
        (torch.repeat_interleave, (x, 2), {}),
        (F.pixel_shuffle, (image, 2), {}),
        (F.pixel_unshuffle, (image, 2), {}),
        (F.channel_shuffle, (image, 4), {}),
        *((f, (x, k), {}) for f in (torch.tril, torch.triu) for k in (-2, 0, 3)),
        (torch.tril, (cube,), {}),
        (torch.diag_embed, (x,), {}),
        (torch.diag_embed, (x,), {"offset": -2, "dim1": 0, "dim2": 2}),
        (torch.diag, (row, 2), {}),
        (torch.diag, (x, -1), {}),
        (torch.gather, (x, 1, ids(7, 4, 9)), {}),
        (torch.gather, (x, 0, ids(5, 3, 7)), {}),
        (torch.take_along_dim, (x, ids(5, 4, 1) - 2, 0), {}),
        (torch.take_along_dim, (x, ids(35, 2, 3)), {}),
        (torch.take, (x, ids(70, 3, 4) - 35), {}),
        (torch.index_select, (cube, 1, ids(5, 8)), {}),
        (torch.index_select, (cube, -1, ids(7, 8).int()), {}),
        (F.embedding, (ids(5, 2, 6), x), {}),
        (torch.outer, (row, row[2:]), {}),
        (torch.kron, (x, y[:2, :3]), {}),
        (torch.kron, (row, x), {}),
        (torch.select_scatter, (x, row[:7], 0, -2), {}),
        (torch.slice_scatter, (x, y[:2], 0, 1, 3), {}),
        (torch.slice_scatter, (x, y[:, 3:], 1, 3), {}),
        (torch.diagonal_scatter, (x, row[:4], -1), {}),
        (torch.diagonal_scatter, (cube, x[:3, :5].t(), 0), {"dim1": 0, "dim2": 2}),
        (torch.cartesian_prod, (row[:4], row[2:5], row[:2]), {}),
        (torch.diff, (x,), {}),
        (torch.diff, (x,), {"dim": 0, "prepend": y[:2], "append": y}),
        (torch.permute_copy, (cube, (2, 0, 1)), {}),
        (torch.expand_copy, (row, (3, 9)), {}),
        (torch.diagonal_copy, (cube, 1, 0, 2), {}),
        (torch.unfold_copy, (cube, 1, 3, 2), {}),
        (torch.view_copy, (cube, (15, 7)), {}),
        (torch.slice_copy, (cube, 1, -4, None, 2), {}),
        (torch.transpose_copy, (wide, 0, 1), {}),
        (torch.Tensor.new_ones, (x, (3, 4)), {}),
        (torch.full_like, (x, 1), {}),
        (torch.zeros_like, (wide,), {}),
        (torch.ones_like, (x,), {}),
    ]  # fmt: skip
    if d.itemsize > 1 and d not in (torch.bfloat16, torch.float16):
        triple = tensor(4, 3, 5, dtype=d)
        calls += [
            (torch.linalg.cross, (triple, triple[:1].flip(2)), {"dim": 1}),
            (torch.cross, (triple[..., :3], triple[..., 2:]), {"dim": -1}),
            (torch.addr, (x, row[:5], row[2:]), {"beta": 2, "alpha": 3}),
        ]
    if d.is_floating_point:
        calls += [
            (F.glu, (image, 1), {}),
            (F.prelu, (image, row[:8]), {}),
            (F.prelu, (x, row[3:4]), {}),
            (F.unfold, (image, 3), {}),
            (F.unfold, (image, (2, 3)), {"padding": (1, 2), "stride": (2, 1), "dilation": 2}),
            (F.pad, (cube, (2, 3), "reflect"), {}),
            (F.pad, (cube, (5, 6), "replicate"), {}),
            (F.pad, (cube, (7, 2), "circular"), {}),
            (F.pad, (image, (2, 3, 1, 4), "reflect"), {}),
            (F.pad, (image, (0, 3, 7, 1), "replicate"), {}),
            (F.pad, (image, (4, 1, 0, 5), "circular"), {}),
        ]
    return {f"{f.__name__}_{i}": (f, args, k) for i, (f, args, k) in enumerate(calls)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_elements_are_eagers(dtype: torch.dtype, some: Sample) -> None:
    made = moves(dtype)
    calls = {name: made[name] for name in some(made, len(made) // 5)}
    refused = {"row_stack"}
    for name in list(calls):
        try:
            function, args, kwargs = calls[name]
            function(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            refused.add(name)
            del calls[name]
    compiled, inputs, nodes = compile_all(list(calls.values()))
    found = compiled(*inputs)
    assert compiled.report().calls == 1
    missing = [r for r in compiled.regions if not r.kernel and "rounded" not in str(r.reason)]
    assert not missing, missing
    for name, node, result in zip(calls, nodes, found, strict=True):
        function, args, kwargs = calls[name]
        row = TABLE.get(f"aten.{function.__name__}")
        allowed = row.tolerance if row else 0
        assert difference(result, function(*args, **kwargs)) <= allowed, (name, node)


def turned(value: Any) -> Any:
    """Return a tensor with its dimensions in another order in memory."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    order = [0, 2, 3, 1] if value.dim() == 4 else list(reversed(range(value.dim())))
    return value.permute(order).contiguous().permute([order.index(d) for d in range(value.dim())])


def test_layouts_are_eagers_whatever_the_operands() -> None:
    calls = [(f, *pytree.tree_map(turned, (a, k))) for f, a, k in moves(torch.float32).values()]
    calls = [call for call in calls if call[0] not in (torch.kron, torch.take_along_dim)]
    compiled, inputs, nodes = compile_all(calls)
    for (function, args, kwargs), node, found in zip(calls, nodes, compiled(*inputs), strict=True):
        expected = function(*args, **kwargs)
        assert found.stride() == expected.stride(), node
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert len(fused_names(compiled)) == len(calls) - 1


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_index_out_of_range_raises_as_in_eager(bad: int) -> None:
    index = ids(5, 40)
    gm = fx.symbolic_trace(lambda x, i: torch.index_select(x, 0, i) * 2 + 1)
    x = torch.randn(7, 30)
    compiled = to_cpp(gm, (x, index))
    torch.testing.assert_close(compiled(x, index), x[index] * 2 + 1)
    assert any(region.kernel and len(region.nodes) == 3 for region in compiled.regions)
    index[3] = bad
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x, index)


def run(
    fn: Callable[..., Any], *args: torch.Tensor, policy: Policy | None = None
) -> CompiledModule:
    """Compile, and compare results with eager's."""
    gm = fx.symbolic_trace(fn)
    compiled = to_cpp(gm, args, policy=policy)
    found, expected = compiled(*args), fn(*args)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert a.stride() == b.stride()
    assert compiled.report().calls == 1
    return compiled


def kernels(compiled: CompiledModule) -> list[set[str]]:
    return [set(region.nodes) for region in compiled.regions if region.kernel]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def test_rotary_embedding_is_one_kernel() -> None:
    x, cos, sin = torch.randn(2, 3, 10, 8), torch.randn(10, 8), torch.randn(10, 8)
    assert [len(names) for names in kernels(run(rotary, x, cos, sin))] == [5]


def test_halves_of_a_computed_value_are_read_in_one_kernel() -> None:
    def glu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = (x + y).chunk(2, dim=-1)
        return a * torch.sigmoid(b)

    compiled = run(glu, torch.randn(6, 20), torch.randn(6, 20))
    assert [len(names) for names in kernels(compiled)] == [3]


def test_what_is_used_outside_is_not_computed_in_parts() -> None:
    def fn(x: torch.Tensor) -> Any:
        a = x.exp() + 1
        return a, a[:, :5] * 2 - x[:, 5:10]

    run(fn, torch.randn(6, 20))


def test_costly_values_are_not_repeated() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.exp().tanh() + 1).expand(50, 40) * y + torch.sin(x).unfold(1, 3, 1)[:, 0].sum()

    def spread(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.exp().tanh() + x).unsqueeze(1) * y

    run(fn, torch.randn(1, 40), torch.randn(50, 40))
    compiled = run(spread, torch.randn(30, 40), torch.randn(30, 20, 40))
    assert kernels(compiled) == [{"exp", "tanh", "add"}, {"mul"}]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2)[1:, ::2] + 1,
        lambda x: (x * 2)[-1].exp() + 1,
        lambda x: (x * 2).view(3, 2, 20).transpose(0, 1).exp() + 1,
        lambda x: (x * 2).t().reshape(4, 30) + 1,
        lambda x: (x * 2).diagonal() + 1,
        lambda x: (x + 1).unfold(1, 5, 3) * 2,
        lambda x: torch.stack([x + 1, x * 2], 0).sum(0) + 1,
        lambda x: F.softmax(torch.cat([x, x * 2], 1), -1) + 1,
        lambda x: F.layer_norm((x * 3).view(6, 4, 5), (5,)) + 1,
        lambda x: torch.roll(x * 2, 3, 1) + x,
        lambda x: torch.flip(x * 2, (1,)) + x,
        lambda x: F.pad(x * 2, (1, 1, 2, 0)).relu() - 1,
        lambda x: torch.tril(x * 2) + torch.triu(x - 1, 1),
        lambda x: F.softmax(x, -1)[:, :5] * 2,
        lambda x: torch.flip(F.softmax(x, -1), (1,)) * 2 + x,
        lambda x: (x + 1).repeat(2, 3) * 2,
        lambda x: torch.repeat_interleave(x + 1, 2, dim=0) * 2,
        lambda x: torch.cat([x.sum(1, keepdim=True), x], 1) * 2 + 1,
        lambda x: [(x * 2).split([3, 7, 10], 1)[i] + 1 for i in range(3)],
        lambda x: (x[:, None] * 2 - x[None]).abs() + 1,
        lambda x: (x.view(-1) * 2).view(6, 20).t().contiguous() + 1,
        lambda x: F.one_hot((x.abs() * 3).long().clamp(0, 6), 7) * 2 + 1,
        lambda x: torch.where(torch.ones_like(x).tril() > 0, x, -torch.inf) + 1,
        lambda x: F.pixel_shuffle((x * 2).view(1, 4, 5, 6), 2) + 1,
    ],
)
def test_views_and_moves_among_others(fn: Callable[..., Any]) -> None:
    run(fn, torch.randn(6, 20), policy=ALWAYS)


def test_a_gather_joins_what_reads_it() -> None:
    def fn(table: torch.Tensor, places: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.embedding(i, table) + places, (24,)) * 2

    compiled = run(fn, torch.randn(30, 24), torch.randn(5, 24), ids(30, 3, 5))
    assert [len(names) for names in kernels(compiled)] == [4]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, j: x[i] * 2 + 1,
        lambda x, i, j: x[:, :, j] * 2 + 1,
        lambda x, i, j: x[..., j] * 2 + 1,
        lambda x, i, j: x[i, 2] * 2 + 1,
        lambda x, i, j: x[1:, -1, j - 1] * 2 + 1,
        lambda x, i, j: x[i, None, ::2] * 2 + 1,
    ],
)
def test_tensors_as_keys(fn: Any) -> None:
    (names,) = kernels(run(fn, torch.randn(6, 7, 8), ids(6, 4), ids(8, 4)))
    assert names >= {"getitem", "mul", "add"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, j: x[i, :, j] * 2 + 1,
        lambda x, i, j: x[i[:, None] - 6, j] * 2 + 1,
        lambda x, i, j: x[None, i, 1:4, ..., j] * 2 + 1,
    ],
)
def test_keys_that_jump_at_each_element_are_left_to_eager(fn: Any) -> None:
    compiled = run(fn, torch.randn(6, 7, 8), ids(6, 4), ids(8, 4))
    (reason,) = compiled.reasons.values()
    assert "reads from one of many places" in reason


@pytest.mark.parametrize("key", [[1, 0], (slice(None), [2, 1, 1]), ([0, 1], [1, 2])])
def test_lists_as_keys_are_left_to_eager(key: Any) -> None:
    run(lambda x: (x[key] * 2).exp() + 1, torch.randn(6, 20))


def test_each_operator_of_the_table_is_named_by_torch() -> None:
    known = {name.removeprefix("aten.") for name in TABLE if name.startswith("aten.")}
    assert all(hasattr(torch.ops.aten, name) for name in known)


def test_a_candidate_knows_the_tensors_in_lists() -> None:
    gm = fx.symbolic_trace(lambda x, y: torch.cat([x, y]))
    to_cpp(gm, (torch.randn(3), torch.randn(4)))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert [t.name for t in candidate(node, gm).tensors] == ["x", "y"]
    assert isinstance(gm, nn.Module)


def test_a_border_on_every_side_is_left_to_eager_and_its_neighbours_are_fused() -> None:
    compiled = run(lambda x: F.pad(x, (1, 2, 2, 1), "reflect").exp() * 2, torch.randn(2, 6, 20))
    assert [len(names) for names in kernels(compiled)] == [2]
    assert any("many places" in str(region.reason) for region in compiled.regions)


def test_flips_of_a_single_number() -> None:
    x = torch.tensor(3.0)
    gm = fx.symbolic_trace(lambda x: (x.flip(0), x.flip(-1) + 1))
    assert [float(found) for found in to_cpp(gm, (x,), policy=ALWAYS)(x)] == [3, 4]


def test_single_numbers_that_are_picked() -> None:
    x, place = torch.randn(9, generator=torch.Generator().manual_seed(1)), torch.tensor(1)
    compiled = fxkit.compile(lambda x, i: (x.take(i) * 2, x.view(3, 3)[i, i]))
    for _ in range(2):
        found = compiled(x, place)
        torch.testing.assert_close(found, (x[1] * 2, x[4]), rtol=0, atol=0)
