"""Views between kernels: which of them nobody makes, and that the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxkit.lower import to_cpp
from fxkit.lower.compiling.piece import Piece, kernel_of
from fxkit.lower.compiling.view_values import views_for_kernels

X = torch.randn(6, 4, 8)


def kernel(x: torch.Tensor) -> torch.Tensor:
    """Something that is a kernel of its own: a row operator takes nothing in along another axis."""
    return F.softmax(x * 2 + 1, -1)


def through(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: kernel(view(kernel(x)))


VIEWS: dict[str, tuple[Callable[[torch.Tensor], Any], set[str] | None]] = {
    "view": (lambda x: x.view(8, 24), {"view"}),
    "reshape": (lambda x: x.reshape(24, 8), {"reshape"}),
    "two": (lambda x: x.view(24, 8).unsqueeze(0).squeeze(0).view(4, 48), None),
    "a reshape that copies": (lambda x: x.transpose(0, 1).reshape(24, 8), set()),
    "transpose": (lambda x: x.transpose(0, 2), None),
    "permute": (lambda x: torch.permute(x, (2, 0, 1)), None),
    "a slice": (lambda x: x[1:], set()),
}


@pytest.mark.parametrize(("view", "names"), VIEWS.values(), ids=VIEWS.keys())
def test_views_between_kernels(view: Callable[[torch.Tensor], Any], names: set[str] | None) -> None:
    fn = through(view)
    module = to_cpp(fx.symbolic_trace(fn), (X,))
    for x in (X, X + 1):
        torch.testing.assert_close(module(x), fn(x))
    program = module.native_program
    assert (program.calls, program.stand_ins) == (2, 0)
    views = views_for_kernels(module._plan.graph, lambda node: kernel_of(node) is not None)
    assert names is None or {node.name for node in views} == names


def test_a_view_that_others_use_is_made() -> None:
    def fn(x: torch.Tensor) -> Any:
        a = kernel(x)
        b = a.transpose(0, 1)
        return kernel(b), b, a

    module = to_cpp(fx.symbolic_trace(fn), (X,))
    results = module(X)
    torch.testing.assert_close(results, fn(X))
    assert results[1].data_ptr() == results[2].data_ptr()
    results[1].add_(1)
    torch.testing.assert_close(results[2], fn(X)[2] + 1)


def test_views_of_inputs_and_across_other_nodes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = kernel(x.transpose(0, 1))
        b = a.sort(0).values
        return kernel(b.transpose(1, 2)) + kernel(a.transpose(1, 2))

    module = to_cpp(fx.symbolic_trace(fn), (X,))
    torch.testing.assert_close(module(X), fn(X))
    assert module.native_program.calls == 1


def test_a_view_stands_in_where_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = through(lambda x: x.transpose(0, 1))
    module = to_cpp(fx.symbolic_trace(fn), (X,))
    for call in module._plan.calls.values():
        call._function = None  # as if it had not been built
    kernels = [node for node in module._plan.graph.nodes if kernel_of(node) is not None]
    views = views_for_kernels(module._plan.graph, lambda node: kernel_of(node) is not None)
    inputs = [(node, 0) for node in module._plan.graph.nodes if node.op == "placeholder"]
    piece = Piece(module.graph_module, kernels, inputs, [(kernels[-1], 0)], views)
    torch.testing.assert_close(piece(module.graph_module, [X]), (fn(X),))


def test_what_moves_to_the_device_that_it_is_on_is_read_as_it_is() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.to("cpu").mT.to(torch.device("cpu"), torch.float32).exp()

    module = to_cpp(fx.symbolic_trace(fn), (X,))
    assert any(region.kernel for region in module.regions)
    torch.testing.assert_close(module(X), fn(X))
