"""The cache of a program's graphs: the last used one first, the least recently used one goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fxkit.tracing.graph_cache import MAX_GRAPHS, GraphCache


def cache_of(count: int) -> tuple[GraphCache, list[Any]]:
    cache, entries = GraphCache(), [SimpleNamespace(number=number) for number in range(count)]
    for entry in entries:
        cache.add(entry)
    return cache, entries


def test_what_was_used_last_comes_first():
    cache, (first, second, third) = cache_of(3)
    assert cache.entries == (third, second, first)
    cache.use(first)
    assert cache.entries == (first, third, second)
    cache.use(first)
    assert cache.entries == (first, third, second)


def test_the_least_recently_used_one_is_given_up():
    cache, entries = cache_of(MAX_GRAPHS)
    cache.use(entries[0])
    assert cache.evictions == 0
    assert cache.add(SimpleNamespace(number=-1))
    assert cache.evictions == 1
    assert len(cache.entries) == MAX_GRAPHS
    assert entries[0] in cache.entries
    assert entries[1] not in cache.entries


def test_what_is_given_up_is_not_used_again():
    cache, (first, second) = cache_of(2)
    cache.keep(lambda entry: entry is second)
    cache.use(first)
    assert cache.entries == (second,)
