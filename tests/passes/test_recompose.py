"""Attention written by hand in whole models, and what keeps it as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxkit
from fxkit.ir.op import resolve
from fxkit.ir.printer import format_graph
from fxkit.passes import Canonicalise, DeadCodeElimination, Recompose
from fxkit.passes.manager.manager import PassManager, PassResult
from fxkit.passes.pipelines import PIPELINES

LAYERS = 2
IDS = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, -3:] = 0
_COMMON = {"attn_implementation": "eager", "vocab_size": 99}
_SMALL = {
    **_COMMON, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
_GPT = {
    **_COMMON, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "GPT2": _GPT,
    "Bert": _SMALL,
    "Llama": {**_SMALL, "num_key_value_heads": 2},
    "Qwen3": {**_SMALL, "num_key_value_heads": 2, "head_dim": 8},
    "GPTNeoX": _SMALL,
    "Electra": {**_SMALL, "embedding_size": 16},
}


def operators(gm: fx.GraphModule) -> Counter[str]:
    calls = [resolve(node) for node in gm.graph.nodes]
    return Counter(call.name for call in calls if call is not None)


def recomposed(
    program: Any, *args: Any, numerics: bool = True
) -> tuple[fx.GraphModule, PassResult]:
    gm = program if isinstance(program, fx.GraphModule) else fxkit.symbolic_trace(program)
    verify = "numerics" if numerics else "each"
    passes = [Canonicalise(), Recompose(), DeadCodeElimination()]
    return gm, PassManager(passes, verify=verify, args=args).run(gm)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "padded"])
@pytest.mark.parametrize("name", sorted(_MODELS))
def test_attention_in_every_layer(name, masked):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_MODELS[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    inputs = {"input_ids": IDS, **({"attention_mask": PADDED} if masked else {})}
    expected = model(**inputs)[0]
    gm = fxkit.capture(model, (), inputs).graph_module
    before = operators(gm)
    assert before["aten.softmax"] == LAYERS
    args = tuple(inputs[n.target] for n in gm.graph.nodes if n.op == "placeholder")
    gm, result = recomposed(gm, *args, numerics=False)
    after = operators(gm)
    assert after["aten.scaled_dot_product_attention"] == LAYERS
    assert after["aten.softmax"] == after["aten.rsqrt"] == 0
    assert not [note for record in result.records for note in record.notes if "stays" in note]
    got = gm(*args)
    got = got[0] if isinstance(got, (tuple, list)) else got
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_the_same_at_every_call_and_hides_the_future_becomes_a_flag():
    import transformers

    model = transformers.GPT2Model(transformers.GPT2Config(**_GPT)).eval()
    gm = fxkit.capture(model, (), {"input_ids": IDS}).graph_module
    gm, _ = recomposed(gm, IDS, numerics=False)
    calls = [resolve(n) for n in gm.graph.nodes]
    attention = [c for c in calls if c and c.name == "aten.scaled_dot_product_attention"]
    assert [c.arguments["is_causal"] for c in attention] == [True, True]
    assert [c.arguments["attn_mask"] for c in attention] == [None, None]


def test_key_and_value_heads_that_are_shared_are_not_copied():
    import transformers

    model = transformers.LlamaModel(transformers.LlamaConfig(**_MODELS["Llama"])).eval()
    gm = fxkit.capture(model, (), {"input_ids": IDS}).graph_module
    gm, _ = recomposed(gm, IDS, numerics=False)
    calls = [resolve(n) for n in gm.graph.nodes]
    attention = [c for c in calls if c and c.name == "aten.scaled_dot_product_attention"]
    assert [c.arguments["enable_gqa"] for c in attention] == [True, True]


def heads(rows: int = 5, columns: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return tuple(torch.randn(2, 3, n, 4, dtype=dtype) for n in (rows, columns, columns))


def flags(gm: fx.GraphModule) -> list[bool]:
    calls = [resolve(n) for n in gm.graph.nodes]
    return [c.arguments["is_causal"] for c in calls
            if c and c.name == "aten.scaled_dot_product_attention"]  # fmt: skip


class Causal(torch.nn.Module):
    """Attention as textbooks write it, with the mask in a buffer."""

    def __init__(self, fill: float = -torch.inf, offset: int = 0, size: int = 5):
        super().__init__()
        self.fill = fill
        self.register_buffer("keep", torch.ones(1, 1, size, size).tril(offset) > 0)

    def forward(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / 2.0
        keep = self.keep[:, :, : q.shape[-2], : k.shape[-2]]
        scores = scores.masked_fill(torch.logical_not(keep), self.fill)
        return F.softmax(scores, dim=-1) @ v


def test_causal_mask_in_a_buffer():
    model, args = Causal(), heads()
    gm = fxkit.capture(model, args).graph_module
    gm, _ = recomposed(gm, *args)
    assert flags(gm) == [True]


def test_causal_mask_with_an_offset_is_no_flag():
    """With keys from earlier calls each query sees more than `is_causal` would let it."""
    q, k, v = heads(3, 5)
    model = Causal(offset=2, size=5)
    gm = fxkit.capture(model, (q, k, v)).graph_module
    gm, _ = recomposed(gm, q, k, v)
    assert flags(gm) == [False]


def test_minus_infinity_where_a_row_may_be_hidden_is_left():
    def program(q, k, v, drop):
        return torch.softmax((q @ k.mT).masked_fill(drop, -torch.inf), -1) @ v

    drop = torch.rand(5, 5) > 0.5
    gm, result = recomposed(program, *heads(), drop)
    assert flags(gm) == []
    assert "all keys may be hidden" in result.records[1].notes[0]


def test_minus_infinity_in_an_added_mask_is_left_where_it_is_seen():
    def program(q, k, v, drop):
        mask = torch.zeros(5, 5).masked_fill(drop, -torch.inf)
        return torch.softmax(q @ k.mT + mask, -1) @ v

    gm, result = recomposed(program, *heads(), torch.zeros(5, 5) > 0)
    assert flags(gm) == []
    assert "gives NaN" in result.records[1].notes[0]


def test_a_query_that_sees_no_key_keeps_its_numbers():
    least = torch.finfo(torch.float32).min

    def program(q, k, v, drop):
        return torch.softmax((q @ k.mT).masked_fill(drop, least), -1) @ v

    drop = torch.rand(5, 5) > 0.5
    drop[2] = True
    gm, _ = recomposed(program, *heads(), drop)
    assert flags(gm) == [False]


def test_weights_that_are_returned_too_are_left():
    def program(q, k, v):
        weights = torch.softmax(q @ k.mT * 0.5, -1)
        return weights @ v, weights

    gm, result = recomposed(program, *heads())
    assert flags(gm) == []
    assert "used outside of the match" in result.records[1].notes[0]


def test_dropout_in_training_is_left():
    def program(q, k, v):
        return F.dropout(torch.softmax(q @ k.mT * 0.5, -1), 0.5, training=True) @ v

    gm, result = recomposed(program, *heads())
    assert flags(gm) == []
    assert "True" in result.records[1].notes[0]


def test_a_buffer_that_is_written_is_no_constant():
    class Moving(Causal):
        def forward(self, q, k, v):
            result = super().forward(q, k, v)
            self.keep.logical_not_()
            return result

    args = heads()
    gm = fxkit.capture(Moving(fill=-1e30), args).graph_module
    gm, _ = recomposed(gm, *args)
    assert flags(gm) == [False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_whose_softmax_is_taken_in_float32(dtype):
    def program(q, k, v):
        return torch.softmax(q @ k.mT * 0.5, -1, dtype=torch.float32).to(q.dtype) @ v

    args = heads(dtype=dtype)
    gm = fxkit.capture(program, args).graph_module
    expected = program(*args)
    gm, _ = recomposed(gm, *args, numerics=False)
    assert flags(gm) == [False]
    torch.testing.assert_close(gm(*args), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pipeline", ["simplify", "inference"])
def test_attention_in_the_notation_of_einstein_is_found_in_one_run(pipeline: str) -> None:
    def half(q, k, v):
        return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / 8, -1) @ v

    def whole(q, k, v):
        weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / 8, -1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    args = tuple(torch.randn(2, 3, 16, 8) for _ in range(3))
    for program in (half, whole):
        gm = fxkit.symbolic_trace(program)
        PassManager(PIPELINES[pipeline], args=args).run(gm)  # which runs each pass twice
        torch.testing.assert_close(gm(*args), program(*args))
        assert "aten.scaled_dot_product_attention" in format_graph(gm)
