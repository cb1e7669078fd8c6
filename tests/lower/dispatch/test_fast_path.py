"""The quick way into a compiled program: used where nothing changed, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxkit
from fxkit.lower.dispatch import fast_path
from fxkit.lower.runtime import binding

pytestmark = pytest.mark.core

X = torch.randn(6, 8)


def warm(fn: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Compile a function, and call it until the quick way is there."""
    program = fxkit.compile(fn)
    program = getattr(program, "program", program)  # of a module
    for _ in range(4):
        program(*args)
    assert program._dispatch.paths
    return program


def check(
    program: Any, fn: Callable[..., Any], *args: Any, slow: int | None, count: list[int]
) -> None:
    """Compare with eager, and say whether the call went the slow way."""
    expected, before = fn(*args), len(count)
    torch.testing.assert_close(program(*args), expected)
    assert slow is None or len(count) - before == slow


def test_the_binding_is_there() -> None:
    assert binding.load() is not None


def test_calls_like_the_first_go_the_quick_way(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2 + 1

    program = warm(fn, X)
    for x in (X, X + 1, torch.randn(6, 8)):
        check(program, fn, x, slow=0, count=slow_ways)
    kept = program(X)
    assert program(X).data_ptr() != kept.data_ptr()
    assert not kept.requires_grad and kept.is_leaf
    assert "calls: 8 fused" in program.report()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_arguments_without_strides_go_the_slow_way(
    layout: torch.layout, has_kernels: bool, slow_ways: list[int]
) -> None:
    def fn(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        product = torch.sparse.mm(matrix, x)
        return product.exp() * 2 if has_kernels else product

    program = fxkit.compile(fn)
    matrix = torch.eye(6).to_sparse(layout=layout)
    for _ in range(4):
        check(program, fn, matrix, X, slow=None, count=slow_ways)
    assert not program._dispatch.paths


@pytest.mark.parametrize(
    "x",
    [
        X.double(), X.half(), X[:5], X.t().contiguous().t(), X.clone().requires_grad_(),
        nn.Parameter(X.clone(), requires_grad=False), X.to_sparse(), X.to("meta"), X[None],
        X.as_subclass(type("Own", (torch.Tensor,), {})),
        torch.randn(12, 8)[::2], 2.0, None, [X],
    ],
    ids=["f64", "f16", "shape", "stride", "grad", "parameter", "sparse", "meta", "rank",
         "subclass", "step", "number", "none", "list"],
)  # fmt: skip
def test_other_arguments_go_the_slow_way(x: Any, slow_ways: list[int]) -> None:
    def fn(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return (x * 2 + 1) if x.layout is torch.strided else x.to_dense() * 3

    program = warm(fn, X)
    check(program, fn, x, slow=1, count=slow_ways)


def test_shapes_that_were_changed_in_place_are_seen(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2 + x.shape[0]

    program = warm(fn, X)
    x = torch.randn(1, 1, 3, 1, 1, 2, 8)
    check(program, fn, x, slow=1, count=slow_ways)
    check(program, fn, x.resize_(6, 8), slow=0, count=slow_ways)
    check(program, fn, x.t_(), slow=1, count=slow_ways)
    check(program, fn, x.t_(), slow=0, count=slow_ways)
    check(program, fn, x.unsqueeze_(0), slow=1, count=slow_ways)
    check(program, fn, x.squeeze_(0), slow=0, count=slow_ways)
    check(program, fn, x.set_(torch.randn(12, 8)[::2]), slow=1, count=slow_ways)


def test_arguments_that_are_one_object_are_told_apart(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + (1 if x is y else y)

    other = torch.randn(6, 8)
    program = warm(fn, X, other)
    check(program, fn, X, other, slow=0, count=slow_ways)
    check(program, fn, X, X, slow=1, count=slow_ways)


def test_keywords_and_counts_go_the_slow_way(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 + 1 if y is None else x - y

    program = warm(fn, X)
    check(program, fn, X, X + 1, slow=1, count=slow_ways)
    assert torch.equal(program(X, y=X + 1), fn(X, X + 1))


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "dispatch": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
    "function": torch.overrides.BaseTorchFunctionMode,
    "set": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_modes_are_seen(mode: Callable[[], Any], slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x @ x.t() if torch.is_grad_enabled() else x @ x.t() + 1
        return y * 2 + 1

    program = warm(fn, X)
    with mode():
        check(program, fn, X, slow=None, count=slow_ways)
        assert program(X).is_inference() is torch.is_inference_mode_enabled()
    check(program, fn, X, slow=0, count=slow_ways)


def test_transforms_and_settings_are_seen(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.ones(8, dtype=torch.get_default_dtype())

    program = warm(fn, X)
    stacked = torch.stack([X, X + 1])
    torch.testing.assert_close(torch.vmap(program)(stacked), torch.vmap(fn)(stacked))
    torch.set_default_dtype(torch.float64)
    try:
        check(program, fn, X, slow=1, count=slow_ways)
    finally:
        torch.set_default_dtype(torch.float32)
    check(program, fn, X, slow=0, count=slow_ways)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_forward_mode_differentiation_is_seen(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2 + 1

    program = warm(fn, X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.randn(6, 8))
        expected = forward_ad.unpack_dual(fn(dual)).tangent
        for _ in range(3):
            torch.testing.assert_close(forward_ad.unpack_dual(program(dual)).tangent, expected)
    check(program, fn, X, slow=0, count=slow_ways)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_tracer_sees_the_program_itself(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2 + 1

    x = X.clone()
    program = warm(fn, x)
    traced = torch.jit.trace(program, x)
    torch.testing.assert_close(traced(X + 1), fn(X + 1))
    check(program, fn, x, slow=0, count=slow_ways)
    fresh = fxkit.compile(fn)
    torch.testing.assert_close(torch.jit.trace(fresh, x)(X + 1), fn(X + 1))


FACTOR = 2.0
ITEMS = [1.0, 2.0]
TABLE = {"a": 1.0}


def test_the_programs_state_is_seen(slow_ways: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inside = 1.0

    class Holder:
        value = 3.0

    holder = Holder()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR + sum(ITEMS) + TABLE["a"] - inside + holder.value

    program = warm(fn, X)
    check(program, fn, X, slow=0, count=slow_ways)
    inside = 2.0
    check(program, fn, X, slow=1, count=slow_ways)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    check(program, fn, X, slow=1, count=slow_ways)
    ITEMS.append(4.0)
    check(program, fn, X, slow=1, count=slow_ways)
    monkeypatch.setitem(TABLE, "a", 7.0)
    check(program, fn, X, slow=1, count=slow_ways)
    holder.value = 9.0
    check(program, fn, X, slow=1, count=slow_ways)
    Holder.value = 1.0
    del holder.value
    check(program, fn, X, slow=1, count=slow_ways)


def test_what_is_exchanged_is_seen(slow_ways: list[int]) -> None:
    class Holder:
        value = 3.0

    class Other:
        value = 4.0

    def inner(x: torch.Tensor, k: float = 2.0, *, j: float = 1.0) -> torch.Tensor:
        return x * k + j

    def another(x: torch.Tensor, k: float = 2.0, *, j: float = 1.0) -> torch.Tensor:
        return x * j - k

    kind = type("Kind", (Holder,), {})
    holder, late = kind(), Holder()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * holder.value + late.value

    program = warm(fn, X)
    check(program, fn, X, slow=0, count=slow_ways)
    for owner, name, new in (
        (inner, "__defaults__", (5.0,)),
        (inner, "__kwdefaults__", {"j": 7.0}),
        (inner, "__code__", another.__code__),
        (late, "__class__", Other),
        (late, "__dict__", {"value": 6.0}),
        (kind, "__bases__", (Other,)),
    ):
        setattr(owner, name, new)
        check(program, fn, X, slow=1, count=slow_ways)
        check(program, fn, X, slow=0, count=slow_ways)


def test_attributes_of_arguments_are_seen(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(x, "gain", 1.0) + 1

    program = warm(fn, X)
    given = X.clone()
    check(program, fn, given, slow=0, count=slow_ways)
    given.gain = 3.0  # type: ignore[attr-defined]
    check(program, fn, given, slow=1, count=slow_ways)
    check(program, fn, X, slow=0, count=slow_ways)


def test_a_global_that_others_write_costs_no_capture(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR + 1

    program = warm(fn, X)
    for number in range(5):
        globals()["written_elsewhere"] = number
        check(program, fn, X, slow=0, count=slow_ways)
    del globals()["written_elsewhere"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))
        self.inner = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(x * self.scale + self.get_buffer("shift")))


@torch.no_grad()
def test_a_modules_parameters_are_seen(slow_ways: list[int]) -> None:
    net = Net()
    program = warm(net, X)
    check(program, net, X, slow=0, count=slow_ways)
    net.scale.mul_(2)
    check(program, net, X, slow=0, count=slow_ways)
    net.load_state_dict(Net().state_dict())
    check(program, net, X, slow=0, count=slow_ways)
    net.scale = nn.Parameter(torch.randn(8))
    check(program, net, X, slow=1, count=slow_ways)
    net.shift = torch.randn(8)
    check(program, net, X, slow=1, count=slow_ways)
    net.inner.weight.data = torch.randn(8)
    check(program, net, X, slow=None, count=slow_ways)
    net.inner = nn.LayerNorm(8, eps=0.5)
    check(program, net, X, slow=1, count=slow_ways)
    handle = net.inner.register_forward_hook(lambda module, args, result: result + 1)
    check(program, net, X, slow=1, count=slow_ways)
    handle.remove()
    check(program, net, X, slow=None, count=slow_ways)
    net.double()
    check(program, net, X.double(), slow=1, count=slow_ways)
    net.eval()
    check(program, net, X.double(), slow=None, count=slow_ways)


@torch.no_grad()
def test_another_size_under_an_unchanged_parameter_is_seen(slow_ways: list[int]) -> None:
    net = Net()
    program = warm(net, X)
    net.scale.data = torch.randn(6, 1)
    check(program, net, X, slow=1, count=slow_ways)


def test_gradients_are_asked_for_at_each_call(slow_ways: list[int]) -> None:
    net = Net().requires_grad_(False)
    program = warm(net, X)
    net.scale.requires_grad_()
    result = program(X)
    assert result.requires_grad
    result.sum().backward()
    assert net.scale.grad is not None


def test_results_of_several_tensors_are_built(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> dict[str, Any]:
        y = x * 2 + 1
        return {"y": y, "pair": (y, x), "n": 3}

    program = warm(fn, X)
    before = len(slow_ways)
    result = program(X)
    assert len(slow_ways) == before
    assert result["pair"][0] is result["y"] and result["pair"][1] is X and result["n"] == 3
    torch.testing.assert_close(result["y"], X * 2 + 1)


def test_each_graph_has_its_way_and_the_last_one_is_first(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1 if x.dtype is torch.float32 else x.exp() - 3

    program = warm(fn, X)
    for _ in range(4):
        program(X.double())
    assert len(program._dispatch.paths) == 2
    for x in (X, X.double(), X, X):
        check(program, fn, x, slow=0, count=slow_ways)
        assert program.captured.whole
        first = program.captured.kept[0].graph_module
        assert program.captured.graph_module is first
        assert ("exp" in str(first.graph)) is (x.dtype is torch.float64)


def test_what_raises_inside_is_left_to_the_program(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        try:
            return (x * 2 + 1).index_select(0, i)
        except IndexError:
            return x

    good, bad = torch.tensor([1, 2]), torch.tensor([1, 99])
    program = warm(fn, X, good)
    check(program, fn, X, good, slow=0, count=slow_ways)
    assert program(X, bad) is X


def test_hooks_on_the_compiled_module_are_called(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    program = warm(fn, X)
    seen = []
    handle = program.compiled_modules[0].register_forward_hook(lambda *args: seen.append(1))
    program(X)
    assert seen == [1]
    handle.remove()
    check(program, fn, X, slow=0, count=slow_ways)


def test_a_compiled_module_is_copied_with_its_parameters() -> None:
    net = Net()
    with torch.no_grad():
        module = fxkit.lower.to_cpp(torch.fx.symbolic_trace(net), (X,))
        other = copy.deepcopy(module)
        for parameter in other.parameters():
            parameter.add_(1)
        torch.testing.assert_close(module(X), net(X))
        torch.testing.assert_close(other(X), other.graph_module(X))
        assert not torch.allclose(other(X), module(X))
        assert other.report().calls == 2
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(X), module(X))


@pytest.mark.parametrize("depth", [60, 300])
def test_programs_of_many_modules(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tables than the binding has room for are looked at by Python."""
    monkeypatch.setattr(fast_path, "_MAX_TABLES", 200)
    net = nn.Sequential(*(nn.ReLU() for _ in range(depth)), nn.Tanh())
    with torch.no_grad():
        compiled = fxkit.compile(net)
        for _ in range(4):
            torch.testing.assert_close(compiled(X), net(X))


def test_each_size_that_is_free_has_its_way(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (x * 2 + y).softmax(-1), x.shape[0]

    program = fxkit.compile(fn, dynamic={"x": 0, "y": 0})
    for rows in (3, 4, 5, 6) * 4:
        program(X[:1].expand(rows, -1).contiguous(), X[:1])
    assert len(program.captured.graphs) == 1 and len(program._dispatch.paths) == 4
    for rows in (5, 3, 6, 4, 4):
        x = torch.randn(rows, 8)
        check(program, fn, x, X[:1], slow=0, count=slow_ways)
        check(program, fn, x, X[:rows], slow=None, count=slow_ways)
        check(program, fn, x.t().contiguous().t(), X[:1], slow=None, count=slow_ways)
    before = len(slow_ways)
    with pytest.raises(RuntimeError, match="must match the size"):
        program(torch.randn(4, 7), torch.randn(4, 8))
    assert len(slow_ways) == before + 1


def test_a_relation_of_symbolic_sizes_is_seen(slow_ways: list[int]) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1 if x.shape[0] > 2 * y.shape[0] else y.exp() - x.sum()

    program = fxkit.compile(fn, dynamic=True)
    sizes = [(7, 3), (8, 3), (6, 3), (9, 5)]
    for rows, others in sizes * 4:
        program(torch.randn(rows, 4), torch.randn(others, 4))
    for rows, others in sizes:
        x, y = torch.randn(rows, 4), torch.randn(others, 4)
        check(program, fn, x, y, slow=0, count=slow_ways)
    check(program, fn, torch.randn(8, 4), torch.randn(5, 4), slow=1, count=slow_ways)


def test_fast_paths_have_a_limit() -> None:
    program = fxkit.compile(lambda x: x * 2 + 1, dynamic=True)
    for rows in (*range(2, 3 + fast_path._MAX_PATHS), 2):
        for _ in range(4):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(program(x), x * 2 + 1)
    assert len(program._dispatch.paths) == fast_path._MAX_PATHS
