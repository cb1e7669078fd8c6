"""Layers whose weight MKL has packed: against float64, and after whatever may change a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit.demo.judge import relative_error
from fxkit.lower import to_cpp
from fxkit.lower.autotuning import times as trial_times
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.products import packing_autotune as packing
from fxkit.lower.library_calls import packed_linear as packed
from fxkit.lower.loop_ir.product import Product
from fxkit.lower.runtime import binding

pytestmark = pytest.mark.skipif(not packed.is_available(), reason="no MKL, or no binding")


@pytest.fixture(autouse=True)
def all_are_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(whole_operators, "objection", lambda *_: "the library is faster")
    monkeypatch.setattr(whole_operators, "packing_pays", lambda found, adds_bias: True)
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Layers with and without a bias, whose results one region reads, or nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(17, 130)
        self.narrow = nn.Linear(130, 9, bias=False)
        self.last = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.narrow(F.gelu(self.wide(x)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def is_packed(fast: fxkit.compiling.compiler.Compiled) -> bool:
    module = fast.compiled_modules[0]
    assert isinstance(module, fxkit.lower.CompiledModule)
    return any(node.target is packed.linear for node in module.lowered.graph.nodes)


def check(fast: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
    exact = copy.deepcopy(module).double()(x.double())
    eager, found = module(x), fast(x)
    assert found.stride() == eager.stride()
    assert relative_error(found, exact) <= 2 * max(relative_error(eager, exact), 2.0**-23)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(1, 17), (33, 17), (3, 2, 5, 17), (128, 17), (17,)])
def test_layers_with_packed_weights(shape: tuple[int, ...]) -> None:
    module, x = net(), torch.randn(shape)
    fast = fxkit.compile(module)
    for _ in range(3):
        check(fast, module, x)
    check(fast, module, torch.randn(*shape[:-1], 34)[..., ::2])
    assert is_packed(fast)
    assert "its weight is packed once" in fast.report()


def test_a_layer_alone_is_packed() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(20, 30), torch.randn(40, 20)
    fast = fxkit.compile(module)
    for _ in range(2):
        check(fast, module, x)
    assert is_packed(fast)
    assert id(module.weight) in packed._weights


CHANGES: dict[str, Callable[[Net], object]] = {
    "in place": lambda m: m.wide.weight.mul_(2),
    "through data": lambda m: m.wide.weight.data.mul_(2),
    "one by numpy": lambda m: m.narrow.weight.detach().numpy().__setitem__((3, 4), 50.0),
    "other data": lambda m: setattr(m.wide.weight, "data", torch.randn_like(m.wide.weight)),
    "a bias": lambda m: m.last.bias.data.add_(1),
    "loaded": lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
    "another parameter": lambda m: setattr(m.last, "weight", nn.Parameter(m.last.weight * 3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_weights_is_seen(name: str) -> None:
    module, x = net(), torch.randn(21, 17)
    fast = fxkit.compile(module)
    before = fast(x).clone()
    fast(x)
    CHANGES[name](module)
    assert not torch.allclose(module(x), before)
    check(fast, module, x)
    check(fast, module, x)


def test_special_numbers_stay() -> None:
    module, x = nn.Linear(30, 40), torch.randn(50, 30)
    x[3, 4], x[5, 6], x[7, 8] = torch.nan, torch.inf, 1e-42
    module.weight[9, 10], module.weight[11, 12] = -torch.inf, torch.nan
    fast = fxkit.compile(module)
    fast(x)
    torch.testing.assert_close(fast(x), module(x), equal_nan=True)


def test_gradients_and_other_types_go_another_way() -> None:
    module, x = net(), torch.randn(21, 17)
    fast = fxkit.compile(module, train=False)
    fast(x)
    with torch.enable_grad():
        result = fast(x)
        assert result.requires_grad
        result.sum().backward()
        assert module.wide.weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == module(x).dtype
    many = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(fast)(many), module(many))
    with torch.inference_mode():
        check(fast, module, x)
    module.double()
    assert fast(x.double()).dtype == torch.float64


def test_copies_other_sizes_and_threads() -> None:
    module, other = net(), net()
    other.wide.weight.mul_(-1)
    fast, beside = fxkit.compile(module), fxkit.compile(other)
    for rows in (3, 70, 3, 8, 9, 10, 11):
        x = torch.randn(rows, 17)
        check(fast, module, x)
        check(beside, other, x)
    copied = copy.deepcopy(fast.compiled_modules[-1])
    assert isinstance(copied, nn.Module)
    next(copied.graph_module.parameters()).mul_(3)
    check(fast, module, x)
    torch.testing.assert_close(copied(x), copied.graph_module(x))

    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                check(fast, module, x)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run) for _ in range(4)]:
            done.result()


def test_little_memory_and_weights_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, other = torch.randn(8, 16), torch.randn(24, 16), torch.randn(24, 16)
    for one in (weight, other, weight):
        torch.testing.assert_close(packed.linear(x, one), F.linear(x, one))
    key = id(other)
    assert key in packed._weights
    del other, one
    assert key not in packed._weights
    for rows in range(1, 8):
        packed.linear(x[:rows], weight)
        assert len(packed._weights[id(weight)].packed) <= packed._KEPT
    monkeypatch.setattr(packed, "MOST_BYTES", packed._kept_bytes())
    third = torch.randn(24, 16)
    torch.testing.assert_close(packed.linear(x, third), F.linear(x, third))
    assert not packed._weights[id(third)].packed


def test_what_does_not_fit_raises_as_in_eager() -> None:
    x, weight, bias = torch.randn(8, 16), torch.randn(24, 16), torch.randn(24)
    for args in ((x[:, :5], weight, bias), (x, weight, bias[:3]), (x, weight, bias.double())):
        with pytest.raises(RuntimeError):
            packed.linear(*args)
    torch.testing.assert_close(packed.linear(x, weight[0]), F.linear(x, weight[0]))
    assert packed.linear(x[:0], weight).shape == (0, 24)


def test_nothing_is_packed_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "load", lambda: None)
    product = Product(0, 1, (), 256, 256, 256, (256, 1), (1, 256))
    found = type("Found", (), {"is_convolution": False, "product": product})()
    assert not packing.packing_pays(found, False)


def test_nothing_is_packed_once_the_compiler_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert binding.load() is not None
    monkeypatch.setattr(whole_operators, "packing_pays", packing.packing_pays)
    monkeypatch.setenv("FXKIT_CXX", str(tmp_path / "no-compiler"))
    assert not binding.is_awaited()
    module, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()), torch.randn(128, 256)
    with pytest.warns(UserWarning, match="expected a C\\+\\+ compiler"):
        fast = to_cpp(fx.symbolic_trace(module), (x,))
    check(fast, module, x)


def test_a_trial_is_kept_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(0, 1, (), 128, 96, 64, (64, 1), (1, 64))
    found = type("Found", (), {"is_convolution": False, "product": product})()
    asked = []

    def answer(key: str, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        asked.append(key)
        assert all(seconds > 0 for seconds in measure())
        return (1.0, 1.04 if "True" in key else 1.06)

    monkeypatch.setattr(trial_times, "kept_times", answer)
    assert [packing.packing_pays(found, adds) for adds in (True, False)] == [False, True]
    assert len(set(asked)) == 2
