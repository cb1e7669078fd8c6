"""What torch computes by other calls is decomposed, with eager's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.passes.decompose_for_kernels import DecomposeForKernels
from fxkit.passes.decomposition.for_kernels import FUNCTIONS, OPERATORS
from fxkit.passes.manager.manager import PassManager
from tests.sampling import one_in

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def decomposed(program: Any, *args: Tensor) -> fx.GraphModule:
    """Capture and decompose, with numbers compared."""
    gm = fxkit.capture(program, args).graph_module
    PassManager([DecomposeForKernels()], verify="numerics", args=args).run(gm)
    return gm


def names(gm: fx.GraphModule) -> list[str]:
    calls = [resolve(node) for node in gm.graph.nodes]
    return [call.name for call in calls if call is not None]


CALLS = {
    "isclose": lambda x, y: torch.isclose(x, y, equal_nan=True),
    "isclose of a method": lambda x, y: x.isclose(other=y, rtol=0.1),
    "trapezoid": lambda x, y: torch.trapezoid(x, y, dim=1),
    "trapz": lambda x, y: torch.trapz(x, dx=0.5),
    "cumulative_trapezoid": lambda x, y: torch.cumulative_trapezoid(x, dim=0),
    "gradient": lambda x, y: torch.gradient(x, spacing=2.0, dim=(0, 2), edge_order=2),
    "quantile": lambda x, y: torch.quantile(x, 0.3, dim=1, keepdim=True),
    "nanquantile": lambda x, y: torch.nanquantile(x, 0.75, interpolation="nearest"),
    "diff": lambda x, y: torch.diff(x, n=2, dim=1, append=y),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "einsum of dots": lambda x, y: torch.einsum("bij,bij->bi", x, y),
    "einsum of one": lambda x, y: torch.einsum("bij->j", x),
    "einsum without sums": lambda x, y: torch.einsum("bi,bj->bij", x[:, 0], y[:, 1]),
    "inner": lambda x, y: torch.inner(x, y),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([0, 2], [0, 2])),
    "atleast_1d": lambda x, y: torch.atleast_1d(x) * 2,
    "atleast_3d": lambda x, y: torch.atleast_3d(x[0]) + y[1, :, :, None],
    "local_response_norm": lambda x, y: F.local_response_norm(x, 3, alpha=0.1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_decomposed_with_the_same_numbers(name: str) -> None:
    gm = decomposed(CALLS[name], X, Y)
    assert not set(names(gm)) & ({*OPERATORS, *FUNCTIONS} - {"aten.diff"})
    (found,) = (gm(X, Y),)
    torch.testing.assert_close(found, CALLS[name](X, Y))


def test_single_differences_stay() -> None:
    assert names(decomposed(lambda x: torch.diff(x), X)) == ["aten.diff"]


def test_rows_times_columns_are_summed() -> None:
    gm = decomposed(CALLS["einsum of dots"], X, Y)
    assert "aten.sum" in names(gm) and "aten.bmm" not in names(gm)


def test_what_raises_for_numbers_of_a_tensor_stays() -> None:
    q = torch.tensor([0.25, 0.5])
    assert "aten.quantile" in names(decomposed(lambda x, q: torch.quantile(x, q), X, q))
    fast = fxkit.compile(lambda x, q: torch.quantile(x, q))
    with torch.no_grad():
        torch.testing.assert_close(fast(X, q), torch.quantile(X, q))
        with pytest.raises(RuntimeError, match="range"):
            fast(X, q + 1)


@pytest.mark.parametrize(
    ("weighs", "masked", "shared"),
    one_in(2, [True, False], [None, "keys", "causal"], [True, False]),
)
def test_attention_of_many_heads_is_products_and_attention(
    weighs: bool, masked: str | None, shared: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    keys = torch.zeros(4, 6, dtype=torch.bool)
    keys[:, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    options: dict[str, Any] = {
        None: {}, "keys": {"key_padding_mask": keys}, "causal": {"attn_mask": causal},
    }[masked]  # fmt: skip

    def program(x: Tensor, y: Tensor) -> Any:
        other = x if shared else y
        return layer(x, other, other, need_weights=weighs, **options)

    gm = decomposed(program, X, Y)
    found = names(gm)
    assert "aten.linear" in found and not any(name.startswith("opaque") for name in found)
    assert ("aten.softmax" if weighs else "aten.scaled_dot_product_attention") in found
    fast = fxkit.compile(program)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(X, Y), program(X, Y))
    assert any(region.kernel for region in fast.compiled_modules[0].regions)


def test_attention_of_other_sizes_is_decomposed_for_them() -> None:
    layer = nn.MultiheadAttention(8, 2).eval()
    fast = fxkit.compile(lambda x: layer(x, x, x)[0], dynamic=True)
    with torch.no_grad():
        for length in (3, 5, 7, 9):
            x = torch.randn(length, 2, 8)
            torch.testing.assert_close(fast(x), layer(x, x, x)[0])


TARGET = torch.tensor([1, 0, -100, 5])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
LOSSES = {
    "cross_entropy": lambda x, y, k: F.cross_entropy(x[:, :, 0], TARGET, reduction=k),
    "cross_entropy of images": lambda x, y, k: F.cross_entropy(
        x, y[:, 0].abs().long(), ignore_index=0, reduction=k
    ),
    "triplet_margin_loss": lambda x, y, k: F.triplet_margin_loss(
        x, y, x * y, swap=True, reduction=k
    ),
    "cosine_embedding_loss": lambda x, y, k: F.cosine_embedding_loss(
        x[:, 0], y[:, 0], SIGNS, 0.25, reduction=k
    ),
    "multi_margin_loss": lambda x, y, k: F.multi_margin_loss(
        x[:, 0], TARGET.abs() % 8, p=2, reduction=k
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
def test_losses_are_reduced_after_their_rows(name: str, kind: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](x, y, kind)

    gm = decomposed(program, X, Y)
    assert (f"aten.{kind}" in names(gm) or "aten.sum" in names(gm)) == (kind != "none")
    fast = fxkit.compile(program)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(X, Y), program(X, Y))
    assert not fast.compiled_modules[0].reasons


def test_losses_without_rows_stay() -> None:
    weight = torch.rand(6)
    for program in (
        lambda x, y: F.cross_entropy(x[:, :, 0], TARGET, weight),
        lambda x, y: F.cross_entropy(x[:, :, 0], TARGET, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, y.softmax(1)),
        lambda x, y: F.cross_entropy(x[0, :, 0], TARGET[0]),
    ):
        gm = decomposed(program, X, Y)
        assert "aten.cross_entropy_loss" in names(gm) and "aten.sum" not in names(gm)
        torch.testing.assert_close(gm(X, Y), program(X, Y))


def test_nothing_to_count_and_classes_out_of_range_are_as_in_eager() -> None:
    fast = fxkit.compile(lambda x, t: F.cross_entropy(x, t))
    x = torch.randn(4, 6)
    with torch.no_grad():
        for target in (TARGET, torch.full((4,), -100)):
            torch.testing.assert_close(fast(x, target), F.cross_entropy(x, target), equal_nan=True)
        with pytest.raises(IndexError, match="out of bounds"):
            fast(x, TARGET + 3)
        assert fast(x[:0], TARGET[:0]).isnan()


def _normalised(x: Tensor) -> torch.Tensor:
    weight, bias, mean = torch.arange(3.0), torch.ones(3), torch.full((3,), 0.5)
    aten = torch.ops.aten
    form = aten._native_batch_norm_legit_no_training.default
    return torch.relu(form(x, weight, bias, mean, weight + 0.1, 0.1, 1e-5)[0])


def test_a_batch_norm_of_exported_graphs_joins_its_neighbours() -> None:
    x = torch.randn(2, 3, 5)
    gm = fxkit.capture(_normalised, (x,)).graph_module
    PassManager([DecomposeForKernels()], args=(x,), verify="numerics").run(gm)
    names = [call.name for n in gm.graph.nodes if (call := resolve(n)) is not None]
    assert "aten.batch_norm" in names and "aten._native_batch_norm_legit_no_training" not in names
    program = fxkit.compile(_normalised)
    torch.testing.assert_close(program(x), _normalised(x))
    assert any("relu" in r.nodes and len(r.nodes) > 1 for r in program.compiled_modules[0].regions)


def test_a_batch_norm_whose_other_results_are_read_stays() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        form = torch.ops.aten._native_batch_norm_legit_no_training.default
        return form(x, None, None, torch.zeros(3), torch.ones(3), 0.1, 1e-5)

    x = torch.randn(2, 3, 5)
    gm = fxkit.capture(program, (x,)).graph_module
    assert not PassManager([DecomposeForKernels()], args=(x,)).run(gm).modified
