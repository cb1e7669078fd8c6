"""Ten architectures stay inside of the core set, with their numbers; what can't says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxkit
from fxkit.analysis.editing import edit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import PostconditionError
from fxkit.passes import Functionalise, PassContext
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.decompose_to_core import DecomposeToCore
from fxkit.passes.decomposition import torch_decompositions
from fxkit.passes.decomposition.core_operators import CORE_OPERATORS, core_operators_page, is_core
from fxkit.passes.manager.manager import PassManager
from tests.architectures import HUGGING_FACE
from tests.generated_text import HoldPage
from tests.sampling import one_in

ARCHITECTURES = (
    *("bert", "gpt2", "llama", "qwen3", "opt", "vit", "swin", "convnext", "electra", "t5"),
)


def overloads(gm: fx.GraphModule) -> set[str]:
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    return {str(t) for t in targets if isinstance(t, torch._ops.OpOverload)}


def lowered(program, *args: torch.Tensor) -> fx.GraphModule:
    gm = fxkit.symbolic_trace(program)
    PassManager([DecomposeToAten(), DecomposeToCore()], verify="numerics", args=args).run(gm)
    assert overloads(gm) <= CORE_OPERATORS
    return gm


@pytest.mark.parametrize("name", one_in(3, ARCHITECTURES))
def test_architecture_stays_inside_of_the_set(name):
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE[name]()
    gm = fxkit.capture(model, (), inputs(2)).graph_module
    args = tuple(inputs(2)[n.target] for n in gm.graph.nodes if n.op == "placeholder")
    result = PassManager([DecomposeToCore()], verify="numerics", args=args).run(gm)
    assert "decompose_to_aten" in [record.name for record in result.records]
    assert [note for record in result.records for note in record.notes] == []
    assert overloads(gm) <= CORE_OPERATORS
    assert all(n.op in ("placeholder", "get_attr", "call_function", "output")
               for n in gm.graph.nodes)  # fmt: skip


X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.silu(x) + F.mish(x) * F.softplus(x),
        lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.celu(x) + F.selu(x),
        lambda x: F.group_norm(x, 3) + F.instance_norm(x),
        lambda x: F.rms_norm(x, (8,)) + F.layer_norm(x, (8,)),
        lambda x: torch.einsum("bchw,bcwk->bchk", x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2),
        lambda x: F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2),
        lambda x: torch.stack(x.chunk(2, -1)).roll(1, 0).std(1),
        lambda x: x.norm(dim=-1) + torch.logsumexp(x, -1) + torch.var_mean(x, -1)[1],
        lambda x: torch.addcmul(x, x, x, value=0.5) + torch.lerp(x, -x, 0.25),
        lambda x: F.log_softmax(x, 1) + F.glu(torch.cat([x, x], 1), 1),
        lambda x: x.masked_fill(x > 0, -1.0).tril() + x.cumsum(-1).flip(0),
        lambda x: F.conv_transpose2d(x, x.new_ones(3, 2, 2, 2)) * 2,
        lambda x: F.batch_norm(x, x.new_zeros(3), x.new_ones(3)),
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not connected")
def test_operators_keep_their_numbers_and_gradients(program):
    lowered(program, X.clone().requires_grad_())


def test_noise_is_drawn_in_the_same_order():
    lowered(lambda x: F.dropout(x, 0.5) + torch.rand_like(x) * F.dropout2d(x, 0.25), X)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.empty_like(x).exponential_(2.0),
        lambda x: torch.empty_like(x).geometric_(0.3),
        lambda x: torch.empty_like(x).cauchy_() + torch.empty_like(x).log_normal_(),
        lambda x: torch.normal(x, 1.0) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs()),
        lambda x: torch.poisson(x.abs()) + torch.empty_like(x).bernoulli_(x.sigmoid()),
    ],
)
def test_every_kind_of_noise_keeps_its_numbers(program):
    lowered(program, X)
    lowered(program, X.transpose(0, 2))


def test_a_bag_of_embeddings():
    lowered(lambda x: F.embedding_bag(torch.tensor([[1, 2], [0, 1]]), x), torch.randn(3, 4))


def test_a_transformer_in_training_draws_the_same_noise():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 8)
    program = fxkit.capture(layer, (x,))
    PassManager([DecomposeToCore()], args=(x,)).run(program)
    torch.manual_seed(3)
    expected = layer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, torch.zeros(8, 8)])
def test_attention_with_dropout(mask):
    lowered(lambda x: F.scaled_dot_product_attention(x, x, x, mask, dropout_p=0.5), X)


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.to(memory_format=torch.channels_last),
        X.permute(0, 2, 1, 3),
        X[0],
        X[:, :1],
        X[:, :, ::2].to(memory_format=torch.channels_last),
    ],
)
def test_pooling_of_whole_images_keeps_its_layout(x):
    gm = lowered(lambda x: F.adaptive_avg_pool2d(x, 1), x)
    assert gm(x).stride() == F.adaptive_avg_pool2d(x, 1).stride()


def test_equal_layers_are_worked_out_once(monkeypatch):
    from fxkit.passes.decomposition import decompositions

    calls = []
    record = decompositions.record
    monkeypatch.setattr(decompositions, "record", lambda *given: calls.append(1) or record(*given))
    lowered(nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))), torch.randn(2, 4))
    assert len(calls) == 1


def by_data(x):
    return x * (x.sum() * 0 + 2).item()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.reshape(-1).reshape(x.shape),
        lambda x: x.reshape(x.size(0), -1).reshape(x.shape[0] * x.shape[1], 64),
        lambda x: x.flatten().reshape(x.size()).reshape([x.numel() // 8, 8]),
        lambda x: x.neg().mean(-1).reshape(x.shape[:3]),
        by_data,
    ],
)
def test_sizes_and_numbers_from_nodes(program):
    lowered(program, X)


def test_constants_of_a_traced_program():
    def program(x):
        start = torch.zeros(3)
        start[0] = 1
        return x + torch.tensor([1.0, 2.0, 3.0]) * start

    x = torch.randn(3)
    gm = make_fx(program)(x)
    PassManager([DecomposeToAten(), DecomposeToCore()], verify="numerics", args=(x,)).run(gm)
    assert overloads(gm) <= CORE_OPERATORS


@pytest.mark.parametrize("pad", [(1, 1), (8, 0, 0, 2), (-1, 3, 2, -2), (0, 0), (-1, -1)])
def test_padding_in_a_circle_writes_nothing(pad):
    lowered(lambda x: F.pad(x.neg(), (*pad, 0, 0)[:4], mode="circular"), X)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_that_pads_in_a_circle(layout):
    x = X.to(memory_format=layout)
    lowered(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")), x)


def test_an_exported_module_keeps_its_check_of_inputs():
    sizes = ({0: torch.export.Dim("rows", min=2, max=8)},)
    gm = torch.export.export(nn.Linear(2, 2), (torch.randn(4, 2),), dynamic_shapes=sizes).module()
    PassManager([DecomposeToCore()], verify="numerics", args=(torch.randn(4, 2),)).run(gm)
    assert overloads(gm) <= CORE_OPERATORS
    with pytest.raises(AssertionError, match="Guard failed"):
        gm(torch.randn(10, 2))


def test_layout_is_kept():
    gm = lowered(lambda x: F.silu(x).relu(), X.to(memory_format=torch.channels_last))
    assert gm(X.to(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("offset", [0, 1, -2])
@pytest.mark.parametrize("axes", [(0, 1), (-1, 0), (1, 2)])
def test_writing_to_a_diagonal(offset, axes):
    def program(x):
        y = x + 1
        y.diagonal(offset, *axes).mul_(2)
        source = x.diagonal(offset, *axes) * 3
        return y, torch.diagonal_scatter(x.transpose(0, 2), source, offset, *axes)

    gm = fxkit.symbolic_trace(program)
    x = torch.randn(4, 4, 4)
    passes = [DecomposeToAten(), Functionalise(), DecomposeToCore()]
    PassManager(passes, verify="numerics", args=(x,)).run(gm)
    assert overloads(gm) <= CORE_OPERATORS
    for got, expected in zip(gm(x), program(x), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


def test_writing_to_part_of_a_tensor():
    x = torch.randn(4, 4)
    lowered(lambda x: torch.select_scatter(x, x[0] * 2, 0, -1), x)
    lowered(lambda x: torch.slice_scatter(x, x[:2] * 2, 0, 1, None, 2), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decimals", [0, 2, -1, 3])
def test_rounding_to_decimals(dtype, decimals):
    x = (torch.randn(200) * 100).to(dtype)
    gm = lowered(lambda x: torch.round(x, decimals=decimals), x)
    assert torch.equal(gm(x), torch.round(x, decimals=decimals))


@pytest.mark.parametrize("function", [torch.fmax, torch.fmin])
def test_choosing_without_nans(function):
    x = torch.tensor([1.0, -2.0, torch.nan, torch.nan, torch.inf, 3.0])
    y = torch.tensor([2.0, torch.nan, 1.0, torch.nan, 1.0, -torch.inf], dtype=torch.float64)
    gm = lowered(lambda x, y: function(x, y) + function(x, x.flip(0)), x, y)
    expected = function(x, y) + function(x, x.flip(0))
    assert torch.equal(gm(x, y).nan_to_num(7), expected.nan_to_num(7))
    lowered(lambda x: function(x, x.flip(0)), torch.arange(5))


def test_interpolation_between_two():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    lowered(lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(x, y, y), x, y)


def test_a_fault_of_a_decomposition_is_a_reason(monkeypatch):
    def faulty(x, other):
        raise AttributeError("no such thing")

    table = {torch.ops.aten.hypot.default: faulty}
    monkeypatch.setattr(torch_decompositions, "_own_table", lambda: table)
    gm = fxkit.symbolic_trace(lambda x: torch.hypot(x, x))
    with pytest.raises(PostconditionError, match="hypot") as caught:
        PassManager([DecomposeToAten(), DecomposeToCore()], args=(torch.randn(3),)).run(gm)
    assert caught.value.hint == (
        "%hypot_1 stays a call of aten.hypot.default: it can't run on types alone: no such thing; "
        "verify='structure' keeps what the pass could do"
    )


def test_what_has_no_decomposition_stays_with_a_note():
    gm = fxkit.symbolic_trace(lambda x: torch.linalg.matrix_exp(x))
    args = (torch.randn(3, 3),)
    PassManager([DecomposeToAten()], args=args).run(gm)
    propagate_types(gm, args)
    context = PassContext(args)
    with edit(gm) as session:
        DecomposeToCore().apply(session, context)
    assert "no decomposition" in context.notes[0]
    assert overloads(gm) == {"aten.linalg_matrix_exp.default"}


# What torch 2.14 has no more.
_REMOVED = set() if hasattr(torch.ops.aten, "cholesky") else {"aten.cholesky.default"}


def test_the_table_names_operators_of_torch():
    for name in CORE_OPERATORS - _REMOVED:
        _, packet, overload = name.split(".")
        assert str(getattr(getattr(torch.ops.aten, packet), overload)) == name
    assert is_core(torch.ops.aten.add.Tensor)
    assert not is_core(torch.ops.aten.linear.default)


def test_the_set_is_torchs_but_for_gradients_and_writes():
    """Tells when a release of torch tags another operator, so that the table can be looked at."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, full = name.partition("::")
        packet, _, overload = full.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, packet):
            found = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if found is not None and torch.Tag.core in found.tags:
                tagged.add(found)
    left_out = {str(t) for t in tagged} - CORE_OPERATORS
    assert all("backward" in name or name in _WRITING for name in left_out), left_out


_WRITING = {
    "aten._native_batch_norm_legit.default", "aten.atan2.out", "aten.resize_.default",
}  # fmt: skip


def test_the_documentation_prints_the_table(hold_page: HoldPage):
    hold_page("core_operators.md", "core operators", core_operators_page())
