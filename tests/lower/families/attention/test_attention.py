"""Attention in kernels: masks, shared heads, layouts, rows that see nothing, what is left."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import fxkit
from fxkit import config
from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower import to_cpp
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.compiling import whole_operators
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families.attention import autotune as attention_trial
from fxkit.lower.families.attention.attention import emit_attention
from fxkit.lower.loop_ir.interpreter import interpret
from tests.sampling import examples, one_in


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch):
    for name in ("objection", "objection_by_kind"):
        monkeypatch.setattr(whole_operators, name, lambda *_: None)


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def program(**options):
    """Return a graph of attention over three tensors, and one that takes a mask too."""
    plain = fx.symbolic_trace(lambda q, k, v: attend(q, k, v, **options))
    masked = fx.symbolic_trace(lambda q, k, v, m: attend(q, k, v, m, **options))
    return lambda *args: plain if len(args) == 3 else masked


def check(args, **options):
    gm = program(**options)(*args)
    compiled = to_cpp(gm, args)
    with torch.no_grad():
        found, eager = compiled(*args), gm(*args)
        exact = gm(*[a.double() if a.is_floating_point() else a for a in args])
    assert [r.nodes for r in compiled.regions if r.kernel] == [("scaled_dot_product_attention",)]
    assert compiled.report().calls == 1
    assert (found.shape, found.stride()) == (eager.shape, eager.stride())
    torch.testing.assert_close(found.isnan(), eager.isnan())
    error, allowed = [(t - exact).nan_to_num().norm() for t in (found, eager)]
    assert error <= 2 * allowed + 1e-6 * exact.nan_to_num().norm()
    return found


SHAPES = {
    "short": ((2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 10)),
    "long": ((1, 2, 150, 32), (1, 2, 200, 32), (1, 2, 200, 50)),
    "one query": ((2, 3, 1, 16), (2, 3, 300, 16), (2, 3, 300, 16)),
    "one key": ((2, 3, 5, 16), (2, 3, 1, 16), (2, 3, 1, 16)),
    "three dimensions": ((3, 20, 16), (3, 30, 16), (3, 30, 16)),
}


@pytest.mark.parametrize(("is_causal", "name"), one_in(2, [False, True], SHAPES))
def test_attention(name, is_causal):
    check([rand(*s) for s in SHAPES[name]], is_causal=is_causal)


@pytest.mark.parametrize(
    ("kind", "shape"),
    one_in(
        2,
        [torch.bool, torch.float32],
        [
            *[(40, 50), (2, 1, 40, 50), (2, 1, 1, 50), (40, 1), (1, 50)],
            *[(2, 1, 40, 17), (40, 32), (2, 1, 1, 64), (2, 1, 40, 70), (1, 70)],
        ],
    ),
)
def test_masks(shape, kind):
    keys = shape[-1] if shape[-1] > 1 else 50
    q, k = rand(2, 3, 40, 16), rand(2, 3, keys, 16)
    mask = rand(*shape) > 0.5 if kind == torch.bool else rand(*shape)
    check([q, k, k * 2, mask], scale=0.3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_may_lie_in_any_order(kind):
    q, k = rand(2, 3, 40, 16), rand(2, 3, 50, 16)
    mask = rand(2, 3, 50, 40).mT > 0.5 if kind == torch.bool else rand(2, 3, 50, 40).mT
    check([q, k, k * 2, mask])
    check([q, k, k * 2, mask[..., :1, :].expand(2, 3, 40, 50)])


def test_a_query_that_sees_nothing_gives_zeros():
    q, mask = rand(1, 2, 8, 16), torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    assert check([q, q, q, mask])[:, :, 3].eq(0).all()
    hidden = torch.zeros(8, 8).masked_fill(~mask, -torch.inf)
    assert check([q, q, q, hidden])[:, :, 3].eq(0).all()


def test_nan_spoils_the_rows_that_see_it():
    q, k = rand(1, 2, 8, 16), rand(1, 2, 9, 16)
    k[0, 0, 2, 3] = torch.nan
    q[0, 1, 4, 0] = torch.inf
    check([q, k, k.nan_to_num()])


def test_heads_may_share_keys():
    kv = rand(2, 2, 30, 16)
    check([rand(2, 6, 20, 16), kv, kv * 2], enable_gqa=True)


def test_heads_may_lie_in_one_tensor():
    def split(x):
        q, k, v = x.view(2, 50, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
        return attend(q, k, v).transpose(1, 2).reshape(2, 50, 64)

    x = rand(2, 50, 192)
    compiled = to_cpp(fx.symbolic_trace(split), (x,))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), split(x))
    assert any("scaled_dot_product_attention" in r.nodes for r in compiled.regions if r.kernel)


def reason(*args, **options):
    compiled = to_cpp(program(**options)(*args), args)
    (region,) = [r for r in compiled.regions if "scaled_dot" in r.nodes[0]]
    return region.reason


def test_what_is_left_to_torch_has_a_reason():
    q = rand(1, 2, 8, 16)
    assert "random" in reason(q, q, q, dropout_p=0.5)
    assert "bf16" in reason(*[q.bfloat16()] * 3)
    assert "broadcast" in reason(q.expand(3, 2, 8, 16), q, q)


def test_where_torch_is_faster_it_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(
        whole_operators, "objection", lambda kernels, found: kernels.objection(found)
    )
    monkeypatch.setattr(attention_trial, "_measured", lambda *_: (2.0, 1.0))
    q = rand(1, 2, 200, 32)
    with config.using_cache_dir(tmp_path):
        assert "torch's library attends 1 x 2 x [200, 32] over [200, 32]" in reason(q, q, q)


def test_attention_is_timed(tmp_path):
    q = rand(1, 2, 20, 32)
    with config.using_cache_dir(tmp_path):
        kernel = kernel_of([q, q, q, rand(20, 20)])
        times = attention_trial._measured(kernel, kernel.body[0].detail, 1)
    assert all(0 < one < 1 for one in times)


def kernel_of(args, **options):
    gm = program(**options)(*args)
    propagate_types(gm, tuple(args))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    return emit_attention(node, gm).kernel


@examples(6, of=40)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 600)),
    depth=st.sampled_from([1, 7, 16, 64, 80, 130]),
    width=st.sampled_from([1, 8, 15, 16, 32, 64, 96, 130]),
    kind=st.sampled_from([None, torch.bool, torch.float32]),
    is_turned=st.booleans(),
)
def test_few_queries(sizes, depth, width, kind, is_turned):
    batch, heads, queries, keys = sizes
    q, k = rand(batch, heads, queries, depth), rand(batch, heads, keys, depth)
    v = rand(batch, heads, keys, width)
    if is_turned:  # elements lie apart
        k, v = k.mT.contiguous().mT, v.mT.contiguous().mT
    if kind is None:
        check((q, k, v))
        return
    mask = rand(1, 1, queries, keys)
    mask = mask > -1 if kind == torch.bool else mask.masked_fill(mask > 1, -torch.inf)
    check((q, k, v, mask))


@examples(3, of=8)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 3, 130, 130, 60, 60))),
    is_turned=st.booleans(),
    is_causal=st.booleans(),
)
def test_any_sizes(sizes, is_turned, is_causal):
    batch, heads, queries, keys, depth, width = sizes

    def made(*shape):
        b, h, n, d = shape
        return rand(b, n, h, d).transpose(1, 2) if is_turned else rand(*shape)

    args = [made(batch, heads, queries, depth), made(batch, heads, keys, depth)]
    args.append(made(batch, heads, keys, width))
    kernel = kernel_of(args, is_causal=is_causal)
    count = batch * heads * queries * width
    expected, found = torch.empty(count), torch.empty(count)
    assert interpret(kernel, args, [expected])
    function = build(print_unit({"k": kernel}, vector_library())).handle.k
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    function(*[t.data_ptr() for t in (*args, found)], 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sees", ["all", "earlier", "mask"])
def test_sizes_that_are_known_late(sees):
    """One text serves few keys and many, be their number known when it is printed or not."""

    def model(q, k, v, hidden=None):
        return attend(q, k, v, hidden, is_causal=sees == "earlier")

    compiled = fxkit.compile(model, dynamic=True)
    for tokens in (20, 3, 33, 64, 65):
        q, k, v = (rand(2, tokens, 3, 32).transpose(1, 2) for _ in range(3))
        mask = (rand(2, 1, tokens, tokens) > -0.5,) if sees == "mask" else ()
        with torch.no_grad():
            compiled(q, k, v, *mask)
            found, eager = compiled(q, k, v, *mask), model(q, k, v, *mask)
        torch.testing.assert_close(found, eager, rtol=1e-5, atol=2e-6, equal_nan=True)
    module = compiled.compiled_modules[-1]
    assert module.report().calls and "fx_short_attention" in module.source
