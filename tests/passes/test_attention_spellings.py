"""Attention as people spell it: each spelling becomes the operator, and gives the same numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.ir.printer import format_graph
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import INFERENCE, LOWERING, SIMPLIFY, TRAINING

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 8, 4


def split(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return x.view(BATCH, TOKENS, heads, -1).transpose(1, 2)


def min_gpt(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.split(HEADS * WIDTH, dim=2))
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    keep = torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS)
    scores = scores.masked_fill(keep == 0, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.1, False) @ v


def bert(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.view(BATCH, TOKENS, HEADS, WIDTH).permute(0, 2, 1, 3) for t in x.chunk(3, -1))
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH)
    scores = scores + (1.0 - tokens[:, None, None, :]) * torch.finfo(torch.float32).min
    return torch.matmul(F.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous()


def distil_bert(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    scores = torch.matmul(q / math.sqrt(WIDTH), k.transpose(2, 3))
    hidden = (tokens == 0).view(BATCH, 1, 1, TOKENS).expand_as(scores)
    scores = scores.masked_fill(hidden, torch.tensor(torch.finfo(scores.dtype).min))
    return torch.matmul(F.softmax(scores, dim=-1), v)


def t5(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    scores = torch.matmul(q, k.transpose(3, 2))
    place = torch.arange(TOKENS)
    bias = (place[None, :] - place[:, None]).clamp(0, 3).float()[None, None]
    scores += bias + (1 - tokens[:, None, None, :]) * -1e9
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def vit(x: torch.Tensor) -> torch.Tensor:
    qkv = x.reshape(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    weights = (q * WIDTH**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).reshape(BATCH, TOKENS, HEADS * WIDTH)


def swin(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = x.reshape(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    scores = (q * WIDTH**-0.5) @ k.transpose(-2, -1)
    return (scores + bias.permute(2, 0, 1).contiguous().unsqueeze(0)).softmax(-1) @ v


def alibi(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    place = torch.arange(TOKENS)
    bias = 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None] * (place[None, :] - place[:, None])
    future = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(WIDTH) + bias + future, -1) @ v


def mpt(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    future = torch.ones(TOKENS, TOKENS).tril().logical_not()
    scores = q @ k.transpose(-2, -1) * 0.5 + bias.permute(2, 0, 1)
    return torch.softmax(scores.masked_fill(future, -1e9), -1) @ v


def grouped(x: torch.Tensor) -> torch.Tensor:
    q, k, v = split(x, 6), split(x[..., :16], 2), split(x[..., 16:32], 2)
    k, v = (t.repeat_interleave(3, dim=1) for t in (k, v))
    return torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8), dim=-1) @ v


def where_future(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.where(future, -1e9, q @ k.mT / 2).softmax(-1) @ v


def where_kept(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return torch.where(keep, q @ k.mT / 2, torch.tensor([-torch.inf])).softmax(-1) @ v


def permuted_keys(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    return torch.matmul(torch.matmul(q, k.permute(0, 1, 3, 2)).div(2.0).softmax(-1), v)


def whisper(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.view(BATCH, TOKENS, HEADS, WIDTH) for t in x.chunk(3, -1))
    q, k = q.permute(0, 2, 1, 3) * WIDTH**-0.25, k.permute(0, 2, 3, 1) * WIDTH**-0.25
    return F.softmax(q @ k, dim=-1) @ v.permute(0, 2, 1, 3)


def columns(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.view(BATCH, TOKENS, HEADS, WIDTH) for t in x.chunk(3, -1))
    scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1)
    return F.softmax(scores / 2, -1) @ v.permute(0, 2, 1, 3)


def tutorial(x: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    scale = torch.sqrt(torch.tensor(k.shape[-1], dtype=q.dtype))
    return torch.nn.Softmax(dim=-1)(q @ k.transpose(-2, -1) / scale) @ v


def einsum(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.view(BATCH, TOKENS, HEADS, WIDTH) for t in x.chunk(3, -1))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * 0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def subtracted(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    q, k, v = map(split, x.chunk(3, -1))
    scores = q @ k.mT * 0.5 - 10000.0 * (1 - tokens[:, None, None, :])
    return scores.softmax(-1) @ v


def one_head(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.chunk(3, -1)
    keep = torch.tril(torch.ones(TOKENS, TOKENS))
    scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(keep == 0, -1e30)
    return F.softmax(scores, -1) @ v


def fairseq(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (split(t).reshape(BATCH * HEADS, TOKENS, WIDTH) for t in x.chunk(3, -1))
    scores = torch.bmm(q * 0.5, k.transpose(1, 2))
    scores += torch.full((TOKENS, TOKENS), -1e9).triu(1).unsqueeze(0)
    return torch.bmm(F.softmax(scores, dim=-1), v).view(BATCH, HEADS, TOKENS, WIDTH)


def flat_heads(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (split(t).reshape(BATCH * HEADS, TOKENS, WIDTH) for t in x.chunk(3, -1))
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / 2, dim=-1), v)


X = torch.randn(BATCH, TOKENS, 3 * HEADS * WIDTH, generator=torch.Generator().manual_seed(0))
KEPT = torch.ones(BATCH, TOKENS)
KEPT[1, -3:] = 0
BIAS = torch.linspace(-1, 1, TOKENS * TOKENS * HEADS).view(TOKENS, TOKENS, HEADS)
SPELLINGS: dict[Callable[..., Any], tuple[torch.Tensor, ...]] = {
    min_gpt: (X,), bert: (X, KEPT), distil_bert: (X, KEPT), t5: (X, KEPT), vit: (X,),
    swin: (X, BIAS), alibi: (X,), mpt: (X, BIAS), grouped: (X,), where_future: (X,),
    where_kept: (X,), permuted_keys: (X,), whisper: (X,), columns: (X,), tutorial: (X,),
    einsum: (X,), subtracted: (X, KEPT), one_head: (X,), fairseq: (X,), flat_heads: (X,),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.__name__)
def test_a_spelling_becomes_the_operator(spelling: Callable[..., torch.Tensor]) -> None:
    args = SPELLINGS[spelling]
    expected = spelling(*args)
    gm = fxkit.capture(spelling, args).graph_module
    PassManager(SIMPLIFY, args=args).run(gm)  # which runs each pass twice
    assert "aten.scaled_dot_product_attention" in format_graph(gm)
    got = gm(*args)
    got = got[0] if isinstance(got, (tuple, list)) else got
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)


def test_attention_of_matrices_is_left_where_gradients_are_asked_for() -> None:
    gm = fxkit.capture(flat_heads, (X,)).graph_module
    PassManager(TRAINING, args=(X,)).run(gm)
    assert "aten.scaled_dot_product_attention" not in format_graph(gm)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def random_attention(choices: random.Random) -> Callable[..., torch.Tensor]:
    """Return a program of q, k, v of one shape that attends in a way that somebody might."""
    pick = choices.choice
    rank, dim = pick([3, 4, 4]), pick([-1, -1, -1, -2])
    product = pick([torch.bmm, torch.matmul]) if rank == 3 else torch.matmul
    factor = pick([0.5, 1.0, 2, torch.tensor(0.5), torch.tensor([0.25])])
    scaled = pick([lambda t: t * factor, lambda t: t / factor])
    before, after = pick([(scaled, _same), (_same, scaled), (_same, _same)])
    swap = [*range(rank - 2), -1, -2]
    turned = pick(
        [lambda t: t.transpose(-2, -1), lambda t: t.mT, lambda t: t.permute(swap),
         lambda t: t.mT * factor, lambda t: t.transpose(0, -1)]
    )  # fmt: skip
    fill = pick([-1e9, -1e4, -1.0, -torch.inf, torch.tensor(-1e30), 0.0])
    drop = pick(
        [torch.ones(5, 5).triu(1) > 0, torch.ones(5, 5) > 0, torch.arange(5) > 2,
         (torch.arange(25) % 3 > 0).view(5, 5)]
    )  # fmt: skip
    bias = pick([torch.randn(5, 5), torch.randn(5), torch.tensor(1.0), torch.randn(1, 1, 5)])
    steps = choices.sample(
        [
            lambda s: s + bias, lambda s: s - bias, lambda s: s + bias + 1.0,
            lambda s: s.masked_fill(drop, fill), lambda s: torch.where(drop, fill, s),
            lambda s: torch.where(drop, s, fill), lambda s: s.masked_fill(drop.expand_as(s), fill),
            lambda s: s + torch.zeros(5, 5).masked_fill(drop, fill), lambda s: s.clone().add_(bias),
        ],
        pick([0, 1, 1, 2, 2, 3]),
    )  # fmt: skip
    escapes = choices.random() < 0.1

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        scores = after(product(before(q), turned(k)))
        for step in steps:
            scores = step(scores)
        weights = torch.softmax(scores, dim)
        return (product(weights, v), weights) if escapes else product(weights, v) + 0

    program.shape = (5, 5, 5) if rank == 3 else (5, 3, 5, 5)  # type: ignore[attr-defined]
    return program


def check_random_attention(seed: int) -> bool:
    """Run passes over a random program, each twice; tell whether attention was found in it."""
    torch.manual_seed(seed)
    choices = random.Random(seed)
    program: Any = random_attention(choices)
    args = tuple(torch.randn(program.shape) for _ in range(3))
    expected = program(*args)
    gm = fxkit.capture(program, args).graph_module
    pipeline = choices.choice([SIMPLIFY, INFERENCE, LOWERING])
    PassManager(pipeline, args=args).run(gm)  # which runs each pass twice
    got = gm(*args)
    got = got if isinstance(expected, tuple) or not isinstance(got, (tuple, list)) else got[0]
    torch.testing.assert_close(got, expected, equal_nan=True)
    return "aten.scaled_dot_product_attention" in format_graph(gm)


def test_random_attention_stays_right() -> None:
    found = [check_random_attention(seed) for seed in range(12)]
    assert any(found) and not all(found)


@pytest.mark.sweep
def test_500_programs_with_attention_stay_right() -> None:
    for seed in range(100, 600):
        check_random_attention(seed)
