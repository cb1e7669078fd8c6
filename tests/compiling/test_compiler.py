"""`fxkit.compile`: the same results as the program, whatever happens."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxkit
from fxkit.errors import PassError, UnsupportedError
from fxkit.passes import Canonicalise, FixedPoint
from fxkit.tracing.recaptures import RecaptureWarning


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=1.0):
        y = self.norm(F.gelu(self.fc(x)) + x)
        return {"y": y * scale, "top": torch.softmax(y, -1)}


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def assert_same(ours, eager):
    assert type(ours) is type(eager) and ours.keys() == eager.keys()
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value)


@torch.no_grad()
def test_module_with_nested_results_and_new_shapes():
    net = Net()
    fast = fxkit.compile(net)
    for shape in ((4, 8), (4, 8), (2, 3, 8), (4, 8)):
        assert_same(fast(inputs(*shape)), net(inputs(*shape)))
    assert len(fast.compiled_modules) == 2, "one build a shape, and none on coming back"
    assert all(module.regions for module in fast.compiled_modules)


@torch.no_grad()
def test_constant_argument_is_guarded():
    net = Net()
    fast = fxkit.compile(net)
    for scale in (1.0, 2.0, 1.0):
        assert_same(fast(inputs(4, 8), scale=scale), net(inputs(4, 8), scale=scale))


@torch.no_grad()
def test_decorator_with_and_without_options():
    @fxkit.compile
    def plain(x):
        """Double and cut."""
        return torch.relu(x * 2) + 1

    @fxkit.compile(passes=())
    def bare(x):
        return torch.relu(x * 2) + 1

    x = inputs(5, 7)
    assert plain.__name__ == "plain" and plain.__doc__ == "Double and cut."
    assert torch.equal(plain(x), torch.relu(x * 2) + 1)
    assert torch.equal(bare(x), torch.relu(x * 2) + 1)


@torch.no_grad()
def test_parameters_are_read_at_each_call():
    net = Net()
    fast = fxkit.compile(net)
    fast(inputs(4, 8))
    net.norm.weight.add_(1)
    net.fc.weight.mul_(0.5)
    assert_same(fast(inputs(4, 8)), net(inputs(4, 8)))


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_nobody_has_any_more_is_freed(is_trained):
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1))
    fast = fxkit.compile(net)
    with torch.set_grad_enabled(is_trained):
        for _ in range(2):
            fast(inputs(128, 64))
    left = [weakref.ref(found) for found in (net, *net.parameters(), *fast.compiled_modules)]
    del net, fast
    gc.collect()
    assert [found() for found in left] == [None] * len(left)


def test_gradients_are_those_of_eager():
    net = Net()
    fast = fxkit.compile(net)
    x = inputs(4, 8).requires_grad_()
    expected = torch.autograd.grad(net(x)["y"].sum(), [x, *net.parameters()])
    for _ in range(2):
        found = torch.autograd.grad(fast(x)["y"].sum(), [x, *net.parameters()])
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@torch.no_grad()
def test_branch_on_a_value_is_captured_again():
    def f(x):
        return torch.exp(x) * 2 if x.sum() > 0 else torch.tanh(x) - 1

    fast = fxkit.compile(f)
    x = inputs(4, 8).abs()
    for value in (x, -x, x):
        torch.testing.assert_close(fast(value), f(value))


@torch.no_grad()
def test_dropout_follows_the_training_flag():
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU())
    fast = fxkit.compile(net)
    x = inputs(4, 8)
    for training in (True, False, True):
        net.train(training)
        torch.manual_seed(3)
        expected = net(x)
        torch.manual_seed(3)
        torch.testing.assert_close(fast(x), expected)


@torch.no_grad()
def test_written_arguments_are_written():
    def f(x, cache):
        cache.add_(torch.sigmoid(x))
        return torch.tanh(cache) * x

    fast = fxkit.compile(f)
    ours, eager = torch.zeros(4, 8), torch.zeros(4, 8)
    for _ in range(3):
        torch.testing.assert_close(fast(inputs(4, 8), ours), f(inputs(4, 8), eager))
        torch.testing.assert_close(ours, eager)


def test_report_and_explain():
    fast = fxkit.compile(lambda x: torch.exp(x) * 2)
    assert "nothing has been compiled yet" in fast.report()
    with torch.no_grad():
        fast(inputs(64, 64))
        assert "kernel_0" in fast.report()
        assert "f32[64,64] on cpu, got f32[3,64]" in fast.explain(inputs(3, 64))


@pytest.mark.parametrize("is_trained", [False, True])
def test_texts_are_written_once_at_each_call(capsys, is_trained):
    def program(x):
        print("the same")
        print("the same")
        print("positive:", bool(x.sum() > 0), tuple(x.shape))
        return torch.softmax(x.exp() * 2, -1)

    fast = fxkit.compile(program)
    for x in (inputs(4, 8).abs(), inputs(4, 8).abs(), -inputs(4, 8).abs(), inputs(6, 8).abs()):
        for _ in range(3):
            fast(x.requires_grad_(is_trained))
            found = capsys.readouterr()
            program(x)
            assert found == capsys.readouterr()
    assert fast.compiled_modules and (
        is_trained or all(m.report().calls for m in fast.compiled_modules)
    )


def test_what_cannot_be_called_is_refused():
    with pytest.raises(UnsupportedError, match="expected something to call, got int"):
        fxkit.compile(3)


@torch.library.custom_op("fxkit_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    return x[: x.shape[0] // 2].clone()


@halves.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # which is wrong


def test_a_graph_whose_types_are_not_to_be_had_runs_in_eager() -> None:
    def fill(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result.copy_(halves(x))

    compiled = fxkit.compile(fill)
    x = torch.randn(6)
    with pytest.warns(UserWarning, match="captured graph runs in eager"):
        first = compiled(x, torch.empty(3))
    assert torch.equal(first, x[:3])
    assert torch.equal(compiled(x, torch.empty(3)), x[:3])


def test_a_node_whose_type_is_not_to_be_had_costs_that_node_only() -> None:
    def fill(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scaled = torch.tanh(x * 2 + 1)
        added = halves(scaled).add_(other)
        return torch.exp(added + 1) * added

    x = torch.randn(6, 8)
    compiled = fxkit.compile(fill)
    with pytest.warns(UserWarning, match="is compiled as it was recorded"):
        compiled(x, torch.ones(3, 8))
    for factor in (1, 2, 3):
        other = torch.full((3, 8), float(factor))
        torch.testing.assert_close(compiled(x, other), fill(x, other))
    assert "tanh" in compiled.report()
    assert "calls: 0 fused" not in compiled.report()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_that_gives_its_place_another_size() -> None:
    def select(x: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        scaled = torch.tanh(x * 2 + 1)
        chosen = torch.masked_select(scaled, mask, out=out)
        return torch.exp(chosen + 1) * chosen

    x = torch.randn(6, 8)
    masks = [torch.rand(6, 8) > 0.5, torch.zeros(6, 8, dtype=torch.bool), torch.rand(6, 8) > 0.1]
    compiled = fxkit.compile(select)
    for mask in (*masks, *masks):
        ours, eagers = torch.empty(6), torch.empty(6)
        expected = select(x, mask, eagers)
        torch.testing.assert_close(compiled(x, mask, ours), expected)
        torch.testing.assert_close(ours, eagers)
    assert "tanh" in compiled.report()
    assert "calls: 0 fused" not in compiled.report()


def test_another_backend_gets_the_rewritten_graph() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, args: tuple[torch.Tensor, ...]):
        seen.append((gm, args))
        return gm.forward

    net = Net()
    compiled = fxkit.compile(net, backend=backend)
    x = inputs(4, 8).requires_grad_()
    for _ in range(2):
        assert_same(compiled(x), net(x))
    compiled(x)["y"].sum().backward()
    assert x.grad is not None
    ((gm, args),) = seen
    assert isinstance(gm, torch.fx.GraphModule)
    assert any(arg is x or arg.shape == x.shape for arg in args)
    compiled(inputs(2, 8))
    assert len(seen) == 2


def test_the_graph_as_it_is_for_a_backend() -> None:
    @fxkit.compile(backend="eager", dynamic=True)
    def f(x):
        return torch.tanh(x * 1 + 0) * x.shape[0]

    for length in (4, 5, 7):
        x = inputs(length, 8)
        torch.testing.assert_close(f(x), torch.tanh(x) * length, rtol=0, atol=0)
    assert f.report().startswith("nothing")


def test_a_backend_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'eager', got 'inductor'"):
        fxkit.compile(torch.tanh, backend="inductor")  # type: ignore[arg-type]


def test_a_backend_that_returns_nothing_to_call_is_refused() -> None:
    compiled = fxkit.compile(torch.tanh, backend=lambda gm, args: None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"something to call, got NoneType\n.*return gm"):
            compiled(inputs(4, 8))


def test_what_is_no_list_of_passes_is_refused() -> None:
    for passes in (Canonicalise(), FixedPoint(Canonicalise())):
        with pytest.raises(PassError, match=r"expected a list of passes, got .*\n.*write \["):
            fxkit.compile(torch.tanh, passes=passes)  # type: ignore[arg-type]
        with pytest.raises(PassError, match="expected a list of passes"):
            fxkit.compile(passes=passes)  # type: ignore[arg-type]


@torch.no_grad()
def test_addresses_are_read_at_each_call() -> None:
    def program(x, y):
        return x + y if x.data_ptr() == y.data_ptr() else x * y

    compiled = fxkit.compile(program)
    x = inputs(4)
    for y in (x, x, x + 1, x):  # a fake tensor that is asked would warn, and warnings are errors
        assert torch.equal(compiled(x, y), program(x, y))


@torch.no_grad()
def test_what_is_infinite_in_between_stays_so_unless_fast():
    programs = {
        (lambda x: torch.sqrt(x * x)): 1e30,
        (lambda x: torch.log(1 + torch.exp(x))): 200.0,
        (lambda x: torch.log(torch.sigmoid(x))): -200.0,
        (lambda x: x * 1e20 * 1e-20): 1e25,
        (lambda x: (e := torch.exp(x)) / e.sum(-1, keepdim=True)): 150.0,
        (lambda x: x * (x > 0)): -torch.inf,
    }
    for program, value in programs.items():
        x = torch.full((4, 64), value)
        compiled, fast = fxkit.compile(program), fxkit.compile(program, fast=True)
        for _ in range(2):
            assert torch.equal(compiled(x).nan_to_num(7), program(x).nan_to_num(7))
            found = fast(x)
        assert not program(x).isfinite().any() and found.isfinite().all()


def test_a_module_whose_forward_is_compiled_is_captured_for_each_kind_of_input():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    expected = copy.deepcopy(net)
    net.forward = fxkit.compile(net.forward)
    with torch.no_grad():
        for shape in [(2, 4), (2, 3, 4), (4,), (2, 4)]:
            x = torch.randn(shape)
            torch.testing.assert_close(net(x), expected(x))
            assert net.forward.captured.whole, net.forward.explain(x)
        net[0].bias = expected[0].bias = torch.nn.Parameter(torch.ones(4))
        torch.testing.assert_close(net(x), expected(x))


def test_a_compiled_program_inside_of_another_is_watched():
    scale = [2.0]
    inner = fxkit.compile(lambda x: (x * scale[0]).exp())

    @fxkit.compile
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    x = torch.randn(3, 4)
    with torch.no_grad():
        inner(x)
        for factor in (2.0, 2.0, 3.0, 2.0):
            scale[0] = factor
            torch.testing.assert_close(outer(x), (x * factor).exp() + 1)
            torch.testing.assert_close(outer(x[:2]), (x[:2] * factor).exp() + 1)
    assert outer.captured.whole


@fxkit.compile
def named(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * 2


class Scaled(torch.nn.Module):
    """A layer whose class compiles its methods."""

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.flag = flag
        self.linear = torch.nn.Linear(4, 4)

    @fxkit.compile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return y * 2 if self.flag else y + 1

    @staticmethod
    @fxkit.compile
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    @classmethod
    @fxkit.compile
    def raised(cls, x: torch.Tensor) -> torch.Tensor:
        return x.exp() + len(cls.__name__)


class ScaledAgain(Scaled):
    """Calls the compiled method of its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def test_methods_are_bound() -> None:
    x = torch.randn(3, 4)
    nets, again = (Scaled(True), Scaled(False)), ScaledAgain(True)
    for _ in range(3):
        for net in nets:
            y = net.linear(x).tanh()
            torch.testing.assert_close(net(x), y * 2 if net.flag else y + 1)
            net.flag = not net.flag
            torch.testing.assert_close(net.forward(x), y * 2 if net.flag else y + 1)
        torch.testing.assert_close(Scaled.doubled(x), x.exp() * 2)
        torch.testing.assert_close(nets[0].raised(x), x.exp() + 6)
        torch.testing.assert_close(again(x), again.linear(x).tanh() * 6)


def test_modules_in_a_class_are_not_bound() -> None:
    class Holder:
        act = fxkit.compile(torch.nn.Tanh())

    assert Holder().act is Holder.act


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_programs_are_copied_and_pickled(again: Callable[[Any], Any]) -> None:
    x = torch.randn(3, 4)
    program = fxkit.compile(torch.nn.Linear(4, 4), fast=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    net.act = fxkit.compile(net[0])
    for _ in range(2):
        other = again(program)
        assert other.program._options == program.program._options
        torch.testing.assert_close(other(x), program(x))
        with torch.no_grad():
            other.captured.fn.weight.add_(1)
        assert not torch.equal(other(x), program(x))
        twin = again(net)
        assert twin.act.captured.fn is twin[0] is not net[0]
        torch.testing.assert_close(twin(x), net(x))


def test_named_programs_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(named)) is named
    other = copy.deepcopy(named)
    assert other is not named and other.captured.fn is named.captured.fn
    third = pickle.loads(pickle.dumps(other))
    assert third is not named and third.captured.fn is named.captured.fn


def by_inference(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.is_inference() else x - 1


def by_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_leaf else x * 3


def by_version(x: torch.Tensor) -> torch.Tensor:
    return x * (2 + x._version)


def _histories() -> list[torch.Tensor]:
    """Return tensors of one type that were made in different ways."""
    leaf = torch.ones(4, requires_grad=True)
    with torch.inference_mode():
        made = torch.ones(4) * 1
    written = torch.ones(4).add_(1)
    return [torch.ones(4), made, written, leaf, leaf * 1, (torch.ones(2, 4) * leaf)[0]]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", [by_inference, by_leaf, by_version])
def test_what_a_program_asks_about_the_history_of_a_tensor(
    program: Callable[[torch.Tensor], torch.Tensor], dynamic: bool | None
) -> None:
    compiled = fxkit.compile(program, dynamic=dynamic)
    histories = [x for x in _histories() if not (program is by_version and x.is_inference())]
    for x in histories * 2:
        torch.testing.assert_close(compiled(x), program(x))


def test_a_view_made_without_gradients_whose_base_was_written_to() -> None:
    base = torch.ones(6, 6, requires_grad=True)
    with torch.no_grad():
        view = base[:3]
        view.mul_(2)
        assert torch.equal(fxkit.compile(lambda x: x * 2 + 1)(view), view * 2 + 1)


def test_inputs_that_get_another_shape(recwarn: pytest.WarningsRecorder) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.unsqueeze_(0)
        x.t_()
        return x * 2

    compiled = fxkit.compile(program)
    for _ in range(2):
        x = torch.randn(4)
        same = x.clone()
        torch.testing.assert_close(compiled(x), program(same))
        assert x.shape == same.shape == (4, 1)
    assert not recwarn.list


def test_a_block_that_is_checkpointed_after_a_plain_call() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))
    compiled = fxkit.compile(net)
    for is_checkpointed in (False, False, True, True, False):
        found = []
        for program in (net, compiled):
            torch.manual_seed(1)
            x = torch.randn(512, 256).requires_grad_()
            y = checkpoint(program, x, use_reentrant=False) if is_checkpointed else program(x)
            y.square().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0])


def test_hooks_are_given_what_eager_saves() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).exp() * x

    compiled = fxkit.compile(program)
    for is_hooked in (False, False, True):
        seen: list[list[torch.Tensor]] = []
        for called in (program, compiled):
            x, saved = torch.ones(4, requires_grad=True), []
            seen.append(saved)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            )
            with hooks if is_hooked else contextlib.nullcontext():
                called(x).sum().backward()
        torch.testing.assert_close(seen[1], seen[0])
        assert bool(seen[0]) == is_hooked


def test_zeros_without_memory_are_for_eager() -> None:
    """Torch's gradient of `sgn` is such a tensor: it has elements, and no address."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * y + torch.tanh(x)

    compiled = fxkit.compile(program)
    zeros = torch._efficientzerotensor((300, 300))  # type: ignore[attr-defined]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(300, 300)
            assert torch.equal(compiled(x, zeros), program(x, zeros))
            assert torch.allclose(compiled(x, x), program(x, x), atol=1e-6)
    for _ in range(3):
        x, y = (torch.randn(400, 400, requires_grad=True) for _ in range(2))
        found, right = (
            torch.autograd.grad(run(x, y).sgn().sum() + x.sum(), (x, y))
            for run in (compiled, program)
        )
        assert all(map(torch.equal, found, right))


class _Counted(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_programs_calls() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin() + x.sum()

    compiled, x = fxkit.compile(program), torch.randn(3)
    for _ in range(3):
        with _Counted() as mode:
            found = compiled(x)
        assert mode.names == ["mul", "sin", "sum", "add"]
        assert torch.allclose(found, compiled(x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_expanded_input_of_a_norm_in_training(dynamic: bool | None) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, None, None, True) * 2

    compiled = fxkit.compile(program, dynamic=dynamic)
    for size in (40, 50, 40):
        x = torch.randn(1, 3, 1, size).expand(2, 3, size, size)
        assert torch.allclose(compiled(x), program(x), atol=1e-5)


def test_graphs_that_differ_in_a_number_share_kernels() -> None:
    def program(x: torch.Tensor, weight: float) -> torch.Tensor:
        return (x.exp() * weight + x.tanh() * (1 - weight)).sigmoid().softmax(-1)

    compiled, x = fxkit.compile(program), torch.randn(64, 300)
    with pytest.warns(RecaptureWarning, match=r"may be a tensor instead, torch\.tensor"):
        for position in range(12):
            weight = 0.05 * position + 0.01
            for _ in range(2):
                assert torch.allclose(compiled(x, weight), program(x, weight), atol=1e-6)
    sources = {module.source for module in compiled.compiled_modules}
    assert len(compiled.compiled_modules) == 8 and len(sources) == 2 and compiled.builds <= 1
    for position in range(12):
        weight = torch.tensor(0.05 * position)
        assert torch.allclose(compiled(x, weight), program(x, weight), atol=1e-6)
    assert len(compiled.compiled_modules) == 9


def test_a_captured_program_keeps_its_attributes_to_itself() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    captured = fxkit.capture(fn, (torch.ones(3),))
    fxkit.rewrite(captured.graph_module, fxkit.rule(lambda x: x * 2, lambda x: x * 3))
    vars(fn)["_options"] = {}  # as any function may have
    for program, factor in ((captured, 3), (fn, 2)):
        fast = fxkit.compile(program)
        for size in (3, 3, 4):
            assert torch.equal(fast(torch.ones(size)), torch.full((size,), float(factor)))
        assert len(fast.compiled_modules) == 2
