"""Gradients of calls by the node of autograd in C++, against those by Python."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fxkit
from fxkit.lower.runtime import autograd_node, binding

# torch imports rules of its own for tangents, by what it calls deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@fxkit.operator(namespace="gradient_calls")
def swish(x, beta=1.0):
    return x / (1.0 + math.exp(-x * beta))


@fxkit.operator(namespace="gradient_calls")
def curve(x, y, width=0.5):
    return x * math.tanh(y) + width * x * x if x > y else y * y * x


@fxkit.operator(namespace="gradient_calls")
def polar(x, y):
    return math.sqrt(x * x + y * y + 1.0), math.atan2(y, x)


@fxkit.operator(namespace="gradient_calls")
def halves(x):
    return x * x, x > 0.5


@fxkit.row_operator(namespace="gradient_calls")
def rms_norm(row, weight, eps=1e-6):
    scale = 1 / math.sqrt(row.mean(lambda x: x * x) + eps)
    return [x * scale * w for x, w in zip(row, weight, strict=True)]


@fxkit.row_operator(namespace="gradient_calls")
def log_sum(row, scale: float):
    top = max(row)
    return (top + math.log(sum(math.exp(x - top) for x in row))) * scale


@pytest.fixture(autouse=True)
def node() -> None:
    if not autograd_node.attach():
        pytest.skip("no compiler, or no headers of torch")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def warm(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator until its programs are known."""
    operator(*args, **kwargs)
    return operator(*args, **kwargs)


def is_in_c(result: torch.Tensor) -> bool:
    return type(result.grad_fn).__name__ == "CppFunction"


@pytest.fixture
def in_python() -> Iterator[Callable[[], None]]:
    """Turn the node off for the rest of the test."""
    native = binding.loaded()
    assert native is not None and autograd_node._attached
    yield lambda: native.attach_by(0)
    autograd_node._attached.clear()
    assert autograd_node.attach()


CALLS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, float]]] = [
    (swish, ((33,),), {}),
    (swish, ((),), {"beta": 2.0}),
    (curve, ((5, 7), (5, 7)), {}),
    (curve, ((5, 1), (3, 1, 7)), {"width": 0.25}),
    (curve, ((4,), ()), {}),
    (polar, ((6, 5), (5,)), {}),
    (rms_norm, ((3, 4, 9), (9,)), {}),
    (log_sum, ((4, 9), (4,)), {}),
    (log_sum, ((4, 9), ()), {}),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("operator", "shapes", "numbers"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_python(
    operator: Any,
    shapes: Any,
    numbers: Any,
    dtype: torch.dtype,
    in_python: Callable[[], None],
) -> None:
    operands = [leaf(*shape, dtype=dtype) for shape in shapes]

    def gradients(is_native: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = warm(operator, *operands, **numbers)
        results = found if isinstance(found, tuple) else (found,)
        assert all(is_in_c(result) == is_native for result in results)
        grads = [torch.randn_like(result) for result in results]
        return [*map(torch.Tensor.detach, results), *torch.autograd.grad(results, operands, grads)]

    ours = gradients(is_native=True)
    in_python()
    for one, other in zip(ours, gradients(is_native=False), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("operator", "shapes", "numbers"), CALLS)
def test_derivatives_are_those_of_differences(operator: Any, shapes: Any, numbers: Any) -> None:
    operands = [leaf(*shape, dtype=torch.float64) for shape in shapes]
    warm(operator, *operands, **numbers)

    def call(*given: torch.Tensor) -> Any:
        return operator(*given, **numbers)

    assert torch.autograd.gradcheck(call, operands)
    assert torch.autograd.gradgradcheck(call, operands)


def test_a_process_that_only_trains_has_the_node_too() -> None:
    @fxkit.operator(namespace="gradient_calls", name="only_trained")
    def only_trained(x):
        return x * x * x

    x = leaf(9)
    only_trained(x).sum().backward()
    assert is_in_c(only_trained(x))


def test_derivatives_of_high_order() -> None:
    x = leaf(17, dtype=torch.float64)
    y = warm(swish, x)
    expected = x * torch.sigmoid(x)
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad(expected.sum(), x, create_graph=True)
        torch.testing.assert_close(y, expected)
        assert y.requires_grad


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    @fxkit.operator(namespace="gradient_calls", name="partly")
    def partly(x, y):
        return x * x * y

    x, y = leaf(5), torch.randn(5)
    warm(partly, x, y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x * y)
    assert y.grad is None
    assert set(partly._registration._gradients) == {"x"}


def test_numbers_may_stand_for_operands() -> None:
    x = leaf(5)
    found = warm(curve, x, 0.25)
    assert is_in_c(found)
    torch.testing.assert_close(found, curve.composition(x, 0.25))
    (ours,) = torch.autograd.grad(found.sum(), x)
    (expected,) = torch.autograd.grad(curve.composition(x, 0.25).sum(), x)
    torch.testing.assert_close(ours, expected)


def test_a_number_is_that_of_its_own_call() -> None:
    x = leaf(5)
    for number in (0.5, 2.0, 0.5):
        warm(swish, x, number)
    results = [swish(x, number) for number in (0.5, 2.0)]
    for result, number in zip(results, (0.5, 2.0), strict=True):
        (ours,) = torch.autograd.grad(result.sum(), x)
        (expected,) = torch.autograd.grad((x * torch.sigmoid(x * number)).sum(), x)
        torch.testing.assert_close(ours, expected)


def test_gradients_of_all_layouts() -> None:
    x = leaf(6, 4)
    weights = [
        torch.randn(4, 6).t(),
        torch.randn(1, 4).expand(6, 4),
        torch.tensor(1.5).expand(6, 4),
        torch.randn(6, 8)[:, ::2],
        torch.randn(6, 4),
    ]
    for weight in weights:
        (ours,) = torch.autograd.grad(warm(swish, x), x, weight)
        (expected,) = torch.autograd.grad(swish.composition(x), x, weight)
        torch.testing.assert_close(ours, expected)
    warm(swish, x).sum().backward()


def test_a_result_without_a_gradient_counts_as_zero() -> None:
    x, y = leaf(5), leaf(5)
    length, angle = warm(polar, x, y)
    ours = torch.autograd.grad(length.sum(), (x, y), retain_graph=True)
    expected = torch.autograd.grad(polar.composition(x, y)[0].sum(), (x, y))
    torch.testing.assert_close(ours, expected)
    ours = torch.autograd.grad(angle.sum(), (x, y))
    expected = torch.autograd.grad(polar.composition(x, y)[1].sum(), (x, y))
    torch.testing.assert_close(ours, expected)


def test_results_that_are_no_floats_have_no_gradient() -> None:
    x = leaf(5)
    square, is_large = warm(halves, x)
    assert square.requires_grad and not is_large.requires_grad
    (found,) = torch.autograd.grad(square.sum(), x)
    torch.testing.assert_close(found, 2 * x.detach())


def test_operands_of_several_dtypes() -> None:
    x, y = leaf(5), leaf(5, dtype=torch.float64)
    whole = torch.arange(5)
    found = warm(curve, x, y)
    assert found.dtype == torch.float64
    gradients = torch.autograd.grad(found.sum(), (x, y))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float64]
    (found,) = torch.autograd.grad(warm(curve, x, whole).sum(), x)
    (expected,) = torch.autograd.grad(curve.composition(x, whole).sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_graph_is_used_once_unless_it_is_kept() -> None:
    x = leaf(5)
    loss = warm(swish, x).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(first, x.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_change_in_place_is_found() -> None:
    x = leaf(5)
    middle = x * 2
    warm(swish, middle)
    loss = swish(middle).sum()
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_result_may_be_changed_in_place() -> None:
    x = leaf(5)
    warm(swish, x)
    found = swish(x)
    found.mul_(3).add_(1)
    (ours,) = torch.autograd.grad(found.sum(), x)
    (expected,) = torch.autograd.grad((swish.composition(x) * 3 + 1).sum(), x)
    torch.testing.assert_close(ours, expected)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2)


def test_hooks_of_tensors_and_nodes_run() -> None:
    x, seen = leaf(5), list[str]()
    warm(swish, x)
    middle = x * 1
    found = swish(middle)
    found.register_hook(lambda grad: seen.append("result") or grad * 2)
    middle.register_hook(lambda grad: seen.append("operand"))
    node = found.grad_fn
    assert node is not None and node.name() == "swishBackward"
    node.register_hook(lambda inputs, outputs: seen.append("after"))
    node.register_prehook(lambda outputs: seen.append("before"))
    found.retain_grad()
    found.sum().backward()
    assert seen == ["result", "before", "after", "operand"]
    assert torch.equal(found.grad, torch.full((5,), 2.0))
    assert node.next_functions[0][0] is middle.grad_fn


def test_hooks_of_saved_tensors_run() -> None:
    x = leaf(5)
    warm(swish, x).sum().backward()
    expected, x.grad = x.grad, None
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.to(torch.float64)

    with saved_tensors_hooks(pack, lambda tensor: tensor.to(torch.float32)):
        loss = swish(x).sum()
    assert any(tensor is x for tensor in packed)
    loss.backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("when", ["pack", "unpack"])
def test_an_exception_of_a_hook_arrives(when: str) -> None:
    x = leaf(5)
    warm(swish, x).sum().backward()

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise KeyError(when)

    def passes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    hooks = (fails, passes) if when == "pack" else (passes, fails)
    with pytest.raises(KeyError, match=when), saved_tensors_hooks(*hooks):
        swish(x).sum().backward()
    warm(swish, x).sum().backward()


def test_an_exception_in_a_gradient_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    @fxkit.operator(namespace="gradient_calls", name="failing")
    def failing(x):
        return x * x

    x = leaf(5)
    warm(failing, x)

    def fails(by: str) -> Any:
        raise LookupError(by)

    monkeypatch.setattr(failing._registration, "gradient", fails)
    for _ in range(2):
        with pytest.raises(LookupError, match="x"):
            failing(x).sum().backward()
    monkeypatch.undo()
    failing(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_modes_without_gradients() -> None:
    x = leaf(5)
    warm(swish, x)
    with torch.no_grad():
        assert not swish(x).requires_grad
    with torch.inference_mode():
        assert swish(x).is_inference()
    with torch.inference_mode():
        inferred = torch.randn(5)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        curve(x, inferred)
    assert not swish(x.detach()).requires_grad


def test_views_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.randn(8))
    (2 * warm(swish, parameter)).sum().backward()
    torch.testing.assert_close(parameter.grad, 2 * torch.func.grad(
        lambda x: (x * torch.sigmoid(x)).sum())(parameter.detach()))  # fmt: skip
    base = leaf(4, 4)
    for view in (base.t(), base[1], base.diagonal()):
        (ours,) = torch.autograd.grad(warm(swish, view).sum(), base)
        (expected,) = torch.autograd.grad(swish.composition(view).sum(), base)
        torch.testing.assert_close(ours, expected)


def test_anomalies_name_the_call() -> None:
    x = torch.zeros(3, requires_grad=True)

    @fxkit.operator(namespace="gradient_calls", name="rooted")
    def rooted(x):
        return math.sqrt(x) * 0.0

    warm(rooted, x)
    with (
        pytest.warns(UserWarning, match="Error detected in rootedBackward"),
        pytest.raises(RuntimeError, match=r"rootedBackward.*returned nan"),
        torch.autograd.set_detect_anomaly(True),
    ):
        rooted(x).sum().backward()


def test_many_gradients_at_once() -> None:
    x, grads = leaf(5), torch.randn(3, 5)
    (ours,) = torch.autograd.grad(warm(swish, x), x, grads, is_grads_batched=True)
    for one, grad in zip(ours, grads, strict=True):
        (expected,) = torch.autograd.grad(swish.composition(x), x, grad)
        torch.testing.assert_close(one, expected)


def test_transforms_and_forward_mode_go_their_own_way() -> None:
    x = leaf(5)
    warm(swish, x)
    expected = torch.autograd.grad(swish.composition(x).sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: swish(x).sum())(x), expected)
    diagonal = torch.func.jacrev(swish)(x).diagonal()
    torch.testing.assert_close(diagonal, expected)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: swish(x)))(x.detach())
    torch.testing.assert_close(per_sample, expected)
    tangent = torch.func.jvp(swish, (x.detach(),), (torch.ones(5),))[1]
    torch.testing.assert_close(tangent, expected)
    hessian = torch.func.hessian(lambda x: swish(x).sum())(x.detach())
    second = torch.func.hessian(lambda x: (x * torch.sigmoid(x)).sum())(x.detach())
    torch.testing.assert_close(hessian, second)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(5))
        unpacked = torch.autograd.forward_ad.unpack_dual(swish(dual))
        torch.testing.assert_close(unpacked.tangent, expected)


def test_autocast_and_out_go_their_own_way() -> None:
    x = leaf(5)
    warm(swish, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(swish(x), swish.composition(x))
    with pytest.raises(RuntimeError, match="without gradients"):
        swish(x, out=torch.empty(5))


def test_checkpoints_compute_it_again() -> None:
    x = leaf(5)
    warm(swish, x)
    expected = torch.autograd.grad(swish(x * 2).sum(), x)[0]
    found = checkpoint(lambda x: swish(x * 2), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], expected)


def test_it_works_under_torch_compile() -> None:
    x = leaf(7)
    warm(swish, x)
    expected = torch.autograd.grad(swish(x * 2).sum(), x)[0]
    compiled = torch.compile(lambda x: swish(x * 2).sum(), backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


def test_compiled_autograd_keeps_it() -> None:
    x, y = leaf(7), leaf(7)
    warm(curve, x, y)
    expected = torch.autograd.grad(curve(x, y).sum(), (x, y))
    loss = curve(x, y).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    torch.testing.assert_close((x.grad, y.grad), expected)


def test_subclasses_go_their_own_way() -> None:
    class Tagged(torch.Tensor):
        pass

    x = leaf(5)
    warm(swish, x)
    tagged = x.detach().as_subclass(Tagged).requires_grad_()
    found = swish(tagged)
    assert isinstance(found, Tagged)
    found.sum().backward()
    (expected,) = torch.autograd.grad(swish.composition(x).sum(), x)
    torch.testing.assert_close(tagged.grad.as_subclass(torch.Tensor), expected)


def test_nothing_is_kept_of_a_graph() -> None:
    x = leaf(1000)
    warm(swish, x).sum().backward()

    def work(rounds: int) -> int:
        for _ in range(rounds):
            swish(swish(x * 1)).sum().backward()
            swish(swish(x * 1))
        return len(gc.get_objects())

    work(5)
    gc.collect()
    gc.disable()
    try:
        before = work(1)
        assert work(200) - before < 20
    finally:
        gc.enable()


def test_what_is_kept_for_a_backward_is_let_go() -> None:
    x = leaf(16)
    warm(swish, x)
    middle = x * 2
    gone = weakref.ref(middle)
    found = swish(middle).sum()
    del middle
    found.backward()
    assert gone() is None and found.grad_fn is not None


def test_a_long_chain_is_let_go_without_recursion() -> None:
    x = leaf(3)
    warm(swish, x)
    y = x
    for _ in range(50_000):
        y = swish(y)
    del y


def test_backwards_of_many_threads() -> None:
    shared = leaf(257)
    warm(swish, shared).sum().backward()
    (expected,) = torch.autograd.grad(swish(shared).sum(), shared)
    shared.grad = None
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                (found,) = torch.autograd.grad(swish(shared).sum(), shared)
                assert torch.equal(found, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_graph_in_two_threads() -> None:
    x = leaf(257)
    y = swish(x * 2)
    losses = [y.sum() for _ in range(4)]
    threads = [
        threading.Thread(target=loss.backward, kwargs={"retain_graph": True}) for loss in losses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (expected,) = torch.autograd.grad(swish.composition(x * 2).sum(), x)
    torch.testing.assert_close(x.grad, 4 * expected)
