"""Patterns written out to the plain patterns that they stand for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxkit.patterns.language import any_of, named, optional, repeated
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.templates import pattern
from fxkit.patterns.variants import plain_variants


def operators(found: Pattern) -> list[str]:
    return [operation.operator.removeprefix("aten.") for operation in found.operations]


def test_plain_pattern_is_its_only_variant() -> None:
    (only,) = plain_variants(pattern(lambda x: torch.exp(x) + 1))
    assert operators(only) == ["exp", "add"]


def test_every_choice_is_taken() -> None:
    wanted = pattern(lambda x: optional(torch.neg)(any_of(torch.relu, F.gelu)(x)) + 1)
    assert [operators(found) for found in plain_variants(wanted)] == [
        ["relu", "neg", "add"], ["gelu", "neg", "add"], ["relu", "add"], ["gelu", "add"],
    ]  # fmt: skip


def test_a_choice_that_is_used_twice_is_one_choice() -> None:
    def before(x):
        either = any_of(torch.exp, torch.sin)(x)
        return either / either.sum()

    assert [operators(found) for found in plain_variants(pattern(before))] == [
        ["exp", "sum", "div"], ["sin", "sum", "div"],
    ]  # fmt: skip


def test_chains_have_their_shortest_length_and_one_more() -> None:
    wanted = pattern(lambda x: repeated(lambda v: torch.relu(v) * 2, at_least=2)(x))
    assert [operators(found) for found in plain_variants(wanted)] == [
        ["relu", "mul"] * 2, ["relu", "mul"] * 3,
    ]  # fmt: skip
    bounded = pattern(lambda x: repeated(torch.relu, 2, 2)(x))
    assert [operators(found) for found in plain_variants(bounded)] == [["relu", "relu"]]


def test_names_are_dropped() -> None:
    (only,) = plain_variants(pattern(lambda x: named(torch.exp(x), "e") * 2))
    assert operators(only) == ["exp", "mul"]


def test_too_many_variants_are_sampled_the_same_way_each_time() -> None:
    def before(x):
        for _ in range(8):
            x = any_of(torch.exp, torch.sin)(x)
        return x

    first = [operators(found) for found in plain_variants(pattern(before), limit=10)]
    assert len(first) == 10
    assert first == [operators(found) for found in plain_variants(pattern(before), limit=10)]


def test_what_several_results_share_is_one_operation() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = x * 2
        return doubled.exp(), doubled.tanh()

    (only,) = plain_variants(pattern(two))
    first, second = only.outputs
    assert first.arguments["self"] is second.arguments["self"]  # type: ignore[union-attr]
