"""Memory that is kept between calls: never seen by two at once, given back, and bounded."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.running import binding
from fxkit.lower.running.scratch import ALIGNMENT, plan_scratch

X = torch.randn(512, 1024)
BYTES = X.nbytes


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    native = binding.load()
    fxkit.trim()
    limit = fxkit.memory_stats().limit_bytes
    yield
    assert native is not None
    native.limit_memory(limit)


@pytest.fixture(scope="module")
def double() -> Any:
    return to_cpp(fx.symbolic_trace(lambda x: x * 2 + 1), (X,))


def test_a_block_is_used_again_when_its_result_is_gone(double: Any) -> None:
    used = fxkit.memory_stats().used_bytes
    first = double(X)
    assert fxkit.memory_stats().used_bytes - used >= BYTES
    pointer = first.data_ptr()
    second = double(X)
    assert second.data_ptr() != pointer
    del first
    stats = fxkit.memory_stats()
    assert stats.kept_bytes >= BYTES
    third = double(X + 1)
    assert third.data_ptr() == pointer
    assert fxkit.memory_stats().reused == stats.reused + 1
    torch.testing.assert_close(second, X * 2 + 1)
    torch.testing.assert_close(third, (X + 1) * 2 + 1)
    assert fxkit.memory_stats().peak_bytes >= 2 * BYTES


def test_whatever_refers_to_a_result_keeps_it(double: Any) -> None:
    weight = torch.ones(512, 1024, requires_grad=True)
    keepers = [
        double(X)[3],
        double(X).numpy(),
        torch.from_dlpack(double(X)),
        double(X).detach().view(-1)[5:],
        double(X) * weight,
        double(X).untyped_storage(),
        double(X).unsqueeze(0).add_(1),
    ]
    pointers = {double(X + 1).data_ptr() for _ in range(3)}
    assert len(pointers) == 1
    expected = X * 2 + 1
    torch.testing.assert_close(keepers[0], expected[3])
    torch.testing.assert_close(torch.from_numpy(keepers[1]), expected)
    torch.testing.assert_close(keepers[2], expected)
    torch.testing.assert_close(keepers[3], expected.view(-1)[5:])
    keepers[4].sum().backward()
    torch.testing.assert_close(weight.grad, expected)
    torch.testing.assert_close(keepers[6][0], expected + 1)


def test_trim_gives_all_back_that_is_kept(double: Any) -> None:
    alive = double(X)
    double(X)
    kept = fxkit.memory_stats().kept_bytes
    assert kept >= BYTES
    assert fxkit.trim() == kept
    assert fxkit.memory_stats().kept_bytes == 0
    torch.testing.assert_close(alive, X * 2 + 1)


def test_what_is_kept_is_bounded(double: Any) -> None:
    native = binding.load()
    assert native is not None
    native.limit_memory(BYTES + BYTES // 4)
    results = [double(X) for _ in range(4)]
    dropped = fxkit.memory_stats().dropped
    results.clear()
    stats = fxkit.memory_stats()
    assert stats.kept_bytes <= stats.limit_bytes == BYTES + BYTES // 4
    assert stats.dropped == dropped + 3
    native.limit_memory(0)
    assert fxkit.memory_stats().kept_bytes == 0
    torch.testing.assert_close(double(X), X * 2 + 1)


def test_the_bound_is_read_from_the_environment() -> None:
    code = """
import torch, fxkit
from torch import fx
x = torch.randn(512, 1024)
module = fxkit.lower.to_cpp(fx.symbolic_trace(lambda x: x * 2 + 1), (x,))
module(x)
stats = fxkit.memory_stats()
assert (stats.limit_bytes, stats.kept_bytes, stats.dropped) == (0, 0, 1), stats
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**__import__("os").environ, "FXKIT_POOL_MB": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_pooled_result_does_not_grow_in_place(double: Any) -> None:
    result = double(X)
    with pytest.raises(RuntimeError, match="resize"):
        result.resize_(1024, 1024)
    assert result.resize_(4, 4).shape == (4, 4)


def test_results_die_on_any_thread(double: Any) -> None:
    used = fxkit.memory_stats().used_bytes
    results = [double(X) for _ in range(6)]
    threads = [threading.Thread(target=results.pop) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fxkit.memory_stats().used_bytes == used


def test_where_memory_is_exhausted_eagers_error_is_raised() -> None:
    code = """
import resource, torch, fxkit
from torch import fx
x = torch.ones(1).expand(1 << 16, 1 << 14)
small = torch.randn(512, 1024)
double = lambda x: x * 2 + 1
module = fxkit.lower.to_cpp(fx.symbolic_trace(double), (x,))
other = fxkit.lower.to_cpp(fx.symbolic_trace(double), (small,))
other(small)
assert fxkit.memory_stats().kept_bytes
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
for call in (module, double):
    try:
        call(x)
    except RuntimeError as error:
        print(str(error).split("you tried")[0][-60:].split("]")[-1])
    else:
        raise AssertionError("there was memory")
torch.testing.assert_close(other(small), double(small))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, eagers = done.stdout.splitlines()
    assert ours == eagers and "allocate" in ours


def test_scratch_of_values_that_live_at_once_is_apart() -> None:
    import random

    generator = random.Random(0)
    for _ in range(200):
        births = sorted(generator.randrange(30) for _ in range(generator.randrange(1, 40)))
        lives = [(generator.randrange(0, 5000), b, b + generator.randrange(6)) for b in births]
        size, offsets = plan_scratch(lives)
        places = [(o, o + n, b, last) for (n, b, last), o in zip(lives, offsets, strict=True)]
        for i, (start, end, born, last) in enumerate(places):
            assert end <= size and start % ALIGNMENT == 0
            for start2, end2, born2, last2 in places[:i]:
                apart = end <= start2 or end2 <= start
                assert apart or last < born2 or last2 < born


def test_scratch_is_used_again() -> None:
    chain = [(1000, step, step + 1) for step in range(50)]
    assert plan_scratch(chain)[0] == 2 * 1024
    assert plan_scratch([]) == (0, [])
