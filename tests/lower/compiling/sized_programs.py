"""Programs that are called with several sizes, and those sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

SIZES = [(3, 7), (4, 11), (5, 16), (2, 13), (9, 20), (2, 70), (33, 4)]


def bert() -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        vocab_size=50, max_position_embeddings=80,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    return lambda ids: model(ids).last_hidden_state


def gpt2() -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=80, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2Model(config).eval()
    return lambda ids: model(ids).last_hidden_state


def mlp() -> Callable[..., Any]:
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 7)).eval()


def function(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: fn


def ids(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (batch, length)),)


def vectors(*width: int) -> Callable[[int, int], tuple[torch.Tensor, ...]]:
    return lambda batch, length: (torch.randn(batch, length, *width),)


PROGRAMS: dict[str, tuple[Callable[[], Callable[..., Any]], Any]] = {
    "bert": (bert, ids),
    "gpt2": (gpt2, ids),
    "mlp": (mlp, vectors(24)),
    "softmax": (function(lambda x: torch.softmax(x * 0.5, -1)), vectors()),
    "layer norm": (function(lambda x: F.layer_norm(x * 2, (32,)) + x.mean(1, True)), vectors(32)),
    "turned": (
        function(lambda x, y: torch.relu(x.t() + y) * x.sum()),
        lambda a, b: (torch.randn(a, b), torch.randn(b, a)),
    ),
    "shifted": (function(lambda x: torch.cat([x[:, 1:], x[:, :1] * 2], 1).tanh()), vectors(5)),
    "attention": (
        function(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True) + 1),
        lambda a, b: (torch.randn(a, 2, b, 16),),
    ),
}  # fmt: skip
