"""Calls that can't be looked into stay in the one graph: once each, in order, never constants."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxkit
from fxkit.tracing.captured import Captured


def _one_graph(fn: Any, *args: Any) -> Captured:
    captured = fxkit.capture(fn, args)
    assert len(captured.graphs) == 1
    return captured


def test_a_random_number_is_drawn_at_each_call_and_feeds_on():
    captured = _one_graph(lambda a: a * (random.random() * 2 + 1), torch.ones(2))
    for seed in (1, 2, 1):
        random.seed(seed)
        expected = torch.ones(2) * (random.random() * 2 + 1)
        random.seed(seed)
        assert torch.equal(captured(torch.ones(2)), expected)
    assert captured.recaptures == 0 and captured.whole and captured.sound
    (call,) = captured.opaque_calls
    assert call.name == "Random.random" and "test_automatic_calls.py" in str(call.source)


def test_finding_types_and_compiling_make_no_calls():
    ours, theirs = itertools.count(), itertools.count()
    rng, twin = random.Random(3), random.Random(3)
    compiled = fxkit.compile(lambda a: a ** next(ours) * rng.random())
    for number in range(6):
        a = torch.full((2,), float(number))
        assert torch.equal(compiled(a), a ** next(theirs) * twin.random())
    assert compiled.captured.whole and compiled.captured.opaque_calls
    fxkit.propagate_types(compiled.captured.graph_module, (torch.ones(2),))
    assert (next(ours), rng.random()) == (next(theirs), twin.random())


def test_numpy_generators_that_the_interpreter_hides():
    ours, theirs = np.random.default_rng(3), np.random.default_rng(3)
    holder = SimpleNamespace(rng=ours)
    captured = Captured(lambda a: a * holder.rng.uniform())
    for _ in range(5):
        assert torch.equal(captured(torch.ones(2)), torch.ones(2) * theirs.uniform())
    assert captured.whole and len(captured.graphs) == 1


def test_a_generator_under_another_name_is_refused():
    rng = np.random.default_rng(3)

    def draw(given: Any) -> float:
        return given.uniform()

    twin = np.random.default_rng(3)
    captured = Captured(lambda a: a * draw(rng))
    for _ in range(4):
        assert torch.equal(captured(torch.ones(2)), torch.ones(2) * twin.uniform())
    assert not captured.whole


def test_arrays_go_through_numpy_without_a_guard():
    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * torch.from_numpy(np.sort(a.detach().numpy(), axis=-1))

    captured = _one_graph(fn, torch.tensor([3.0, 1.0]))
    for values in ([5.0, 4.0], [1.0, 2.0]):
        a = torch.tensor(values)
        assert torch.equal(captured(a), a * a.sort().values)
    assert captured.recaptures == 0 and "tolist" not in captured.graph_module.code


def test_files_are_read_at_each_call(tmp_path: Path):
    path = tmp_path / "scale.json"

    def fn(a: torch.Tensor) -> torch.Tensor:
        with open(path) as file:
            return a * json.load(file)["scale"]

    captured = Captured(fn)
    for scale in (2.0, 2.0, 3.0, 3.0, 2.0):
        path.write_text(json.dumps({"scale": scale}))
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), scale))
    assert captured.whole and len(captured.graphs) == 2


def test_a_file_that_is_not_there_at_first(tmp_path: Path):
    path = tmp_path / "scale.txt"

    def fn(a: torch.Tensor) -> torch.Tensor:
        try:
            with open(path) as file:
                return a * float(file.read())
        except FileNotFoundError:
            return a

    captured = Captured(fn)
    for text in ("", "", "4", "4", ""):
        path.unlink(missing_ok=True)
        if text:
            path.write_text(text)
        assert torch.equal(captured(torch.ones(2)), torch.full((2,), float(text or 1)))


def test_loggers_see_the_line_that_calls_them():
    stream = io.StringIO()
    logger = logging.Logger("automatic")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(filename)s %(funcName)s %(message)s"))
    logger.addHandler(handler)

    def fn(a: torch.Tensor) -> torch.Tensor:
        logger.warning("shape %s", tuple(a.shape))
        return a + 1

    captured = Captured(fn)
    for _ in range(4):
        captured(torch.ones(2))
    assert stream.getvalue() == "test_automatic_calls.py fn shape (2,)\n" * 4
    assert captured.whole and len(captured.graphs) == 1


def test_opaque_calls_run_once_when_a_guard_fails_behind_them():
    source = itertools.count(1)

    def fn(a: torch.Tensor) -> torch.Tensor:
        b = a * next(source)
        return b + 1 if b.sum() > 4 else b - 1

    captured = Captured(fn)
    for count in range(1, 7):
        b = torch.ones(2) * count
        expected = b + 1 if b.sum() > 4 else b - 1
        assert torch.equal(captured(torch.ones(2)), expected)
    assert captured.whole


def test_control_flow_on_an_opaque_number_is_guarded():
    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * 2 if random.random() < 0.5 else a - 1

    captured = Captured(fn)
    for seed in range(8):
        random.seed(seed)
        expected = torch.ones(2) * 2 if random.random() < 0.5 else torch.zeros(2)
        random.seed(seed)
        assert torch.equal(captured(torch.ones(2)), expected)
    assert len(captured.graphs) == 2 and captured.whole


def test_what_an_opaque_call_may_read_is_not_written_after_it():
    class Source:
        level = 0

        def __index__(self) -> int:
            return self.level

    source = Source()

    def fn(a: torch.Tensor) -> torch.Tensor:
        source.level += 1
        time.sleep(source.level * 0)
        return a * os.getpid() * 0 + source.level

    captured = Captured(fn)
    for count in range(1, 5):
        assert torch.equal(captured(torch.ones(1)), torch.tensor([float(count)]))


def test_functions_are_as_before_after_captures_and_errors():
    def fn(a: torch.Tensor) -> torch.Tensor:
        if a.sum() < 0:
            raise KeyError("negative")
        return a * random.random()

    code = fn.__code__
    captured = Captured(fn)
    captured(torch.ones(2))
    captured(torch.ones(2))
    with pytest.raises(KeyError):
        captured(-torch.ones(2))
    assert fn.__code__ is code


def test_modules_with_noise_have_gradients():
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.scale * random.uniform(1, 2)

    module = Noise()
    captured = _one_graph(module, torch.ones(2))
    random.seed(0)
    captured(torch.ones(2)).sum().backward()
    random.seed(0)
    assert torch.allclose(module.scale.grad, torch.full((2,), random.uniform(1, 2)))


def test_attributes_of_opaque_objects_make_a_program_run_in_python():
    memory = memoryview(bytearray(b"\x01"))
    captured = Captured(lambda a: a * memory[0])
    for value in (1, 1, 2, 2, 1):
        memory[0] = value
        assert torch.equal(captured(torch.ones(1)), torch.tensor([float(value)]))
    assert not captured.whole


def test_files_that_numpy_reads_are_no_constants(tmp_path: Path):
    path = tmp_path / "a.npy"
    captured = Captured(lambda a: a * float(np.load(path).sum()))
    for value in (1.0, 1.0, 3.0, 1.0):
        np.save(path, np.array([value]))
        assert torch.equal(captured(torch.ones(1)), torch.tensor([value]))


def test_functions_that_c_code_calls_are_not_overlooked():
    captured = Captured(lambda a: a * next(iter(time.time, None)))
    captured(torch.ones(1, dtype=torch.float64))
    first = captured(torch.ones(1, dtype=torch.float64))
    assert captured(torch.ones(1, dtype=torch.float64)) > first


def test_the_code_of_a_graph_calls_what_was_made_for_torchs_own_functions():
    generator = torch.Generator().manual_seed(3)
    gm = fxkit.capture(
        lambda x: x * torch.rand(3, generator=generator), (torch.ones(3),)
    ).graph_module
    state = generator.get_state()
    found = gm(torch.ones(3))
    generator.set_state(state)
    assert torch.equal(found, torch.rand(3, generator=generator))


def _filled(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    x[0].uniform_(generator=generator)
    return x * 2


DRAWS: dict[str, Any] = {
    "randn": lambda x, g: x * torch.randn(3, generator=g),
    "bernoulli": lambda x, g: (x * 0.5).bernoulli(generator=g),
    "multinomial": lambda x, g: x.exp().multinomial(2, generator=g),
    "into a new one": lambda x, g: torch.empty_like(x).normal_(generator=g) * x,
    "into an argument": _filled,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_a_generator_go_on_as_in_eager(name: str) -> None:
    program, generator = DRAWS[name], torch.Generator()

    def results(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        generator.manual_seed(1)
        inputs = [torch.ones(3) for _ in range(3)]
        return [*(run(x, generator) for x in inputs), *inputs]

    captured = fxkit.capture(program, (torch.ones(3), generator))
    for found, expected in zip(results(captured), results(program), strict=True):
        assert torch.equal(found, expected)
    assert captured.recaptures == 0


COUNT = {"calls": 0}


class OwnGenerator(nn.Module):
    """Draws from a generator that it keeps."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.own = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3, generator=self.own)


def _drawing() -> dict[str, tuple[Any, Any, Callable[[], Any]]]:
    """Return programs, what they are given beside a tensor, and what tells of their generators."""
    given, own, python = torch.Generator(), torch.Generator(), random.Random(0)
    numpys = np.random.RandomState(0)
    return {
        "argument": (DRAWS["randn"], (given,), lambda: given.get_state().tolist()),
        "attribute": (OwnGenerator(own), (), lambda: own.get_state().tolist()),
        "Python": (lambda x: x * random.random(), (), random.getstate),
        "object": (lambda x: x * python.random(), (), python.getstate),
        "NumPy": (lambda x: x * numpys.rand(), (), lambda: numpys.get_state()[1].tolist()),  # type: ignore[index]
    }


@pytest.mark.parametrize("name", _drawing())
def test_capture_draws_once(name: str) -> None:
    random.seed(0)
    program, args, state = _drawing()[name]
    program(torch.ones(3), *args)
    expected = state()
    random.seed(0)
    program, args, state = _drawing()[name]
    fxkit.capture(program, (torch.ones(3), *args))
    assert state() == expected


def test_what_the_program_counts_is_nothing_to_a_function_in_c() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        COUNT["calls"] += 1
        return x * random.random()

    captured = fxkit.capture(program, (torch.ones(3),))
    before = COUNT["calls"]
    captured(torch.ones(3))
    assert COUNT["calls"] == before + 1
