"""Programs that `torch.compile` has a part in: what it was given is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxkit
from fxkit.torch_adapters.compilers import run_as_written


class Counted:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: torch.fx.GraphModule, args: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return gm.forward


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def whole(backend: Counted) -> Any:
    return torch.compile(layers(), backend=backend)


def in_place(backend: Counted) -> Any:
    model = layers()
    model.compile(backend=backend)
    return model


def inner(backend: Counted) -> Any:
    model = layers()
    model[0] = torch.compile(model[0], backend=backend)
    return model


def inner_in_place(backend: Counted) -> Any:
    model = layers()
    model[2].compile(backend=backend)
    return model


def function(backend: Counted) -> Any:
    return torch.compile(lambda x: x.relu() + 1, backend=backend)


def called(backend: Counted) -> Any:
    compiled = function(backend)
    return lambda x: compiled(x * 3) * 2


PROGRAMS = [whole, in_place, inner, inner_in_place, function, called]


@pytest.mark.parametrize("make", PROGRAMS)
def test_what_was_compiled_is_recorded(make: Callable[[Counted], Any]) -> None:
    backend = Counted()
    program, x = make(backend), torch.randn(4, 8)
    captured = fxkit.capture(program, (x,))
    compiled = fxkit.compile(program)
    with torch.no_grad():
        found = [captured(x), compiled(x), compiled(x), compiled(torch.cat((x, x)))[:4]]
        assert not backend.count
        expected = program(x)
        make(other := Counted())(x)
    assert backend.count == other.count  # torch's compiler is there again
    assert not any("opaque" in str(node.target) for node in captured.graph_module.graph.nodes)
    for one in found:
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("make", PROGRAMS[:4])
def test_modes_and_weights_are_those_of_the_model_inside(make: Callable[[Counted], Any]) -> None:
    program, x = make(Counted()), torch.randn(4, 8)
    compiled = fxkit.compile(program)
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
        for parameter in program.parameters():
            parameter.mul_(2)
        program.train()
        torch.testing.assert_close(compiled(x), program(x))


def test_a_compiled_model_is_quantised() -> None:
    program, x = whole(Counted()), torch.randn(4, 8)
    quantized = fxkit.quantize(program, fxkit.quantization.int8_dynamic(), [(x,)])
    with torch.no_grad():
        assert (quantized(x) - program(x)).abs().max() < 0.05


def test_names_are_those_of_the_model_inside() -> None:
    program, x = whole(Counted()), torch.randn(4, 8)
    captured = [fxkit.capture(it, (x,)) for it in (program, layers())]
    names = [[node.name for node in it.nodes] for it in captured]
    assert names[0] == names[1]
    config = fxkit.quantization.QuantizationConfig(
        fxkit.quantization.int8_dynamic(), by_module={"2": None}
    )
    quantized: Any = fxkit.quantize(program, config, [(x,)])
    kinds = [str(node.target) for node in quantized.nodes]
    assert sum("quantize_per_token" in kind for kind in kinds) == 2  # to integers, and back


def test_hooks_of_the_compiled_module_run() -> None:
    program, x = whole(Counted()), torch.randn(4, 8)
    program.register_forward_hook(lambda module, args, result: result + 7)
    with torch.no_grad():
        captured = fxkit.capture(program, (x,))
        torch.testing.assert_close(captured(x), program._orig_mod(x) + 7)


@pytest.mark.parametrize("make", PROGRAMS)
def test_placeholders_follow_what_was_compiled(make: Callable[[Counted], Any]) -> None:
    backend = Counted()
    program, x = make(backend), torch.randn(4, 8)
    traced = fxkit.symbolic_trace(program)
    with torch.no_grad():
        found = traced(x)
        assert not backend.count
        torch.testing.assert_close(found, program(x))


def test_a_refusal_names_the_passes_of_a_quantised_program() -> None:
    quantized = fxkit.quantize(layers(), fxkit.quantization.int8_dynamic(), [(torch.randn(4, 8),)])
    with pytest.raises(fxkit.errors.CaptureError, match="quantize_operands") as caught:
        torch.vmap(quantized)(torch.randn(3, 4, 8))
    assert len(caught.value.message) < 400 and caught.value.hint


def test_the_compiler_is_back_when_all_threads_have_left() -> None:
    backend, x = Counted(), torch.randn(4)
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    both, one_left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with run_as_written():
            both.wait()
        one_left.set()

    def second() -> None:
        with run_as_written():
            both.wait()
            one_left.wait()
            compiled(x)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not backend.count
    compiled(x)
    assert backend.count == 1
