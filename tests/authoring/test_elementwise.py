"""Authored operators: their values, dtypes, derivatives and registrations."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fxkit
from fxkit.authoring.operators.elementwise import ElementwiseOperator
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.lower.operators.scalar_table import TABLE
from fxkit.passes import DecomposeToAten
from tests.authoring.literature import OPERATORS, halvings, huber, mish, snake, soft_shrink
from tests.sampling import Sample, one_in

by_name = pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: op.__name__)
a_few = pytest.mark.parametrize("operator", OPERATORS[::6], ids=lambda op: op.__name__)


one_of_three = pytest.mark.parametrize("operator", one_in(3, OPERATORS), ids=lambda op: op.__name__)


def operands(operator: ElementwiseOperator, *shape: int, **options: Any) -> list[torch.Tensor]:
    return [torch.randn(*shape, **options) * 2 for _ in operator.definition.tensors]


def composed(operator: ElementwiseOperator, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return operator.composition(*tensors)


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    scale = exact.abs().clamp(min=1)
    return float(((found.double() - exact) / scale).abs().max())


@by_name
def test_values_are_those_of_python_in_float64(operator: ElementwiseOperator) -> None:
    tensors = operands(operator, 37, dtype=torch.float64)
    elements = zip(*(t.tolist() for t in tensors), strict=True)
    expected = torch.tensor([operator.__wrapped__(*e) for e in elements], dtype=torch.float64)
    torch.testing.assert_close(operator(*tensors), expected, rtol=1e-13, atol=1e-13)


@one_of_three
def test_errors_are_at_most_twice_those_of_the_composition(operator: ElementwiseOperator) -> None:
    for shape in ((1,), (7, 33), (3, 1, 65)):
        tensors = operands(operator, *shape)
        exact = operator.reference(*tensors)
        ours, composition = operator(*tensors), composed(operator, tensors)
        assert error_of(ours, exact) <= 2 * error_of(composition, exact) + 2**-23


@pytest.mark.one_in(3)
@a_few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats(operator: ElementwiseOperator, dtype: torch.dtype) -> None:
    tensors = operands(operator, 5, 19, dtype=dtype)
    found, expected = operator(*tensors), composed(operator, tensors)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


@by_name
def test_numbers_that_are_none_and_infinities(operator: ElementwiseOperator) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -1.0, 1.0])
    count = len(operator.definition.tensors)
    pairs = torch.cartesian_prod(*[special] * count).reshape(-1, count).unbind(1)
    torch.testing.assert_close(
        operator(*pairs), composed(operator, pairs), equal_nan=True, rtol=1e-5, atol=1e-5
    )


@pytest.mark.one_in(2)
@a_few
def test_layouts_and_broadcasting(operator: ElementwiseOperator) -> None:
    base = torch.randn(6, 5, 4)
    forms = [base, base.permute(2, 0, 1)[:4, :5].transpose(1, 2)[:4], base[::2, :, 1:], base[0],
             base[:1, :, :1], torch.tensor(0.5), base[:0], base.expand(2, 6, 5, 4)]  # fmt: skip
    count = len(operator.definition.tensors)
    for chosen in itertools.islice(itertools.product(forms, repeat=count), 40):
        try:
            torch.broadcast_shapes(*(t.shape for t in chosen))
        except RuntimeError:
            continue
        found, expected = operator(*chosen), composed(operator, chosen)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)
        if count == 1:
            assert found.stride() == torch.neg(chosen[0]).stride()


@one_of_three
def test_derivatives(operator: ElementwiseOperator) -> None:
    tensors = [t.requires_grad_() for t in operands(operator, 3, 4, dtype=torch.float64)]
    assert torch.autograd.gradcheck(operator, tensors)
    assert torch.autograd.gradgradcheck(operator, tensors)


@pytest.mark.one_in(2)
@a_few
def test_torch_accepts_the_registration(operator: ElementwiseOperator) -> None:
    tensors = tuple(t.requires_grad_() for t in operands(operator, 3, 4))
    torch.library.opcheck(operator.overload, tensors)


@pytest.mark.one_in(2)
@a_few
def test_vmap_is_a_loop(operator: ElementwiseOperator, some: Sample) -> None:
    tensors = operands(operator, 4, 4, 4)
    for dims in some(itertools.product((0, 1, 2, None), repeat=len(tensors)), 4):
        if all(dim is None for dim in dims):
            continue
        pairs = list(zip(tensors, dims, strict=True))
        given = [t if d is not None else t.select(1, 0)[0] for t, d in pairs]
        looped = [
            operator(
                *[t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)]
            )
            for i in range(4)
        ]
        torch.testing.assert_close(torch.vmap(operator, dims)(*given), torch.stack(looped))


@pytest.mark.one_in(3)
@by_name
def test_it_is_one_node_that_the_fuser_takes_in(operator: ElementwiseOperator) -> None:
    tensors = tuple(operands(operator, 8, 16))

    def program(*tensors: torch.Tensor) -> torch.Tensor:
        return operator(*[t + 1 for t in tensors]) * 2

    fast = fxkit.compile(program)
    torch.testing.assert_close(fast(*tensors), program(*tensors))
    (kernel,) = fast.compiled_modules[0].kernels
    assert kernel
    names = [node.target for node in fast.graph_module.graph.nodes]
    assert operator.overload in names


@by_name
def test_aten_spells_it_out(operator: ElementwiseOperator) -> None:
    tensors = tuple(operands(operator, 4, 5))
    gm = fxkit.capture(lambda *ts: operator(*ts) + 1, tensors).graph_module
    fxkit.propagate_types(gm, tensors)
    expected = gm(*tensors)
    spelled = fxkit.PassManager([DecomposeToAten()], args=tensors).run(gm).graph_module
    namespaces = {n.target.namespace for n in spelled.graph.nodes if n.op == "call_function"}
    assert namespaces == {"aten"}
    torch.testing.assert_close(spelled(*tensors), expected)


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32,
          torch.float64)  # fmt: skip


@pytest.mark.parametrize(("one", "other"), one_in(7, DTYPES, DTYPES), ids=str)
def test_integers_and_bools_promote_as_in_torch(one: torch.dtype, other: torch.dtype) -> None:
    @fxkit.operator
    def scaled(x, y):
        return x * 2 + y

    @fxkit.operator
    def is_near(x, y):
        return abs(x - y) < 2 or x == 0

    @fxkit.operator
    def ratio(x, y):
        return x / y

    a, b = ((torch.arange(6) % 3).to(dtype) for dtype in (one, other))
    for x, y in ((a, b), (a[0], b), (a, b[1])):
        assert is_near(x, y).dtype == torch.bool
        assert ratio(x, y).dtype == torch.div(x, y).dtype
        torch.testing.assert_close(ratio(x, y), x / y, equal_nan=True)
        promoted = torch.result_type(x, y)
        assert scaled(x, y).dtype == (torch.int64 if promoted == torch.bool else promoted)
        torch.testing.assert_close(scaled(x, y).double(), x.double() * 2 + y.double())


def test_a_new_number_and_a_new_size_need_no_build() -> None:
    @fxkit.operator
    def ramp(x, width=0.5, height=2.0):
        return height * min(max(x / width, 0.0), 1.0)

    x = torch.randn(10)
    for width, size in itertools.product((0.5, 0.25, 3.0), (10, 11, 64)):
        torch.testing.assert_close(ramp(x[:size], width), 2.0 * (x[:size] / width).clamp(0, 1))
        torch.testing.assert_close(ramp(x, height=width), width * (x / 0.5).clamp(0, 1))
    assert ramp.kernels.builds == 1


def test_numbers_may_stand_for_tensors() -> None:
    x, whole = torch.randn(4), torch.arange(4)
    torch.testing.assert_close(huber(x, 0.5), huber(x, torch.tensor(0.5)))
    assert huber(whole, 0.5).dtype == torch.float32
    assert huber(x.bfloat16(), 0.5).dtype == torch.bfloat16


def test_a_result_is_written_where_it_is_asked_for() -> None:
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    assert soft_shrink(x, out=out) is out
    torch.testing.assert_close(out, soft_shrink(x))
    wide = torch.empty(3, 4, dtype=torch.float64)
    torch.testing.assert_close(soft_shrink(x, out=wide), soft_shrink(x).double())
    with pytest.raises(RuntimeError, match="can't be cast"):
        soft_shrink(x, out=torch.empty(3, 4, dtype=torch.int64))


def test_export_and_compile_keep_it() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mish(x + 1)

    x = torch.randn(3, 5)
    program = torch.export.export(Net(), (x,))
    assert mish.overload in [node.target for node in program.graph.nodes]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), mish(x + 1))
    compiled = torch.compile(lambda x: mish(x * 2), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), mish(x * 2))


def test_a_rule_matches_it() -> None:
    x = torch.randn(3, 5)
    gm = fxkit.symbolic_trace(lambda x: mish(x) * 2)
    fxkit.propagate_types(gm, (x,))
    rule = fxkit.rule(lambda x: mish(x), lambda x: torch.nn.functional.mish(x))
    assert fxkit.rewrite(gm, [rule]).count == 1
    torch.testing.assert_close(gm(x), torch.nn.functional.mish(x) * 2)


def test_a_definition_takes_the_place_of_an_earlier_one_of_its_name() -> None:
    def define(factor: float) -> ElementwiseOperator:
        @fxkit.operator(namespace="again")
        def scaled(x):
            return x * factor

        return scaled

    x = torch.randn(4)
    torch.testing.assert_close(define(2.0)(x), x * 2)
    torch.testing.assert_close(define(3.0)(x), x * 3)
    assert "again.scaled" in TABLE


def test_calls_of_an_earlier_definition_are_refused_and_never_those_of_the_new() -> None:
    def define(function: Any) -> ElementwiseOperator:
        return fxkit.operator(name="redefined", namespace="again")(function)

    def doubled(x):
        return x * 2.0

    def weighted(x, y):
        return x * y

    x = torch.randn(4, requires_grad=True)
    earlier = define(doubled)
    later = define(weighted)
    torch.testing.assert_close(later(x, x), x * x)
    for call in (earlier, earlier.overload):
        with pytest.raises(UnsupportedError, match="newest definition of again::redefined"):
            call(x)


def test_copies_and_pickles_are_the_operator_itself() -> None:
    assert copy.deepcopy(mish) is mish
    assert pickle.loads(pickle.dumps(mish)) is mish


def test_gradients_reach_operands_that_were_broadcast() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.randn(5, requires_grad=True)
    huber(x, y).sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.huber_loss(
        x, y.expand(4, 5), reduction="sum"), (x, y))  # fmt: skip
    torch.testing.assert_close((x.grad, y.grad), expected)


def test_what_is_not_chosen_has_no_say_in_a_derivative() -> None:
    @fxkit.operator
    def safe_log(x):
        return math.log(x) if x > 0 else 0.0 * x

    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    safe_log(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 0.0, 0.5]))


def test_a_loop_that_counts_is_left_where_python_leaves_it() -> None:
    x = torch.tensor([0.5, 1.0, 1.5, 1000.0], dtype=torch.float64)
    expected = [halvings.__wrapped__(v) for v in x.tolist()]
    assert halvings(x).tolist() == expected


def test_operands_by_name() -> None:
    x = torch.randn(4)
    torch.testing.assert_close(snake(x=x, a=2.0), snake(x, 2.0))
    with pytest.raises(TypeError, match=r"snake\(\) missing a required argument: 'x'"):
        snake(a=2.0)
    with pytest.raises(TypeError, match=r"snake\(\) got an unexpected keyword argument 'b'"):
        snake(x, b=2.0)


X = torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, None), "expected a number, as its default is, for a of snake, got NoneType"),
        ((X, "2"), "expected a number, as its default is, for a of snake, got str"),
        ((X, X), "expected a number, as its default is, for a of snake, got Tensor"),
        (([1.0], 2.0), "expected a tensor or a number for x of snake, got list"),
        ((X.cfloat(), 2.0), "expected a real tensor for x of snake, got torch.complex64"),
        ((X.to_sparse(), 2.0), "expected a dense tensor for x of snake, got torch.sparse_coo"),
    ],
)
def test_what_is_no_operand_is_refused(arguments, message) -> None:
    with pytest.raises(UnsupportedError, match=message):
        snake(*arguments)


@fxkit.operator(namespace="several")
def polar(x, y):
    """Radius and angle of a point."""
    return math.hypot(x, y), math.atan2(y, x)


def test_several_results() -> None:
    x, y = torch.randn(2, 6, 5, dtype=torch.float64)
    radius, angle = polar(x, y)
    torch.testing.assert_close((radius, angle), (torch.hypot(x, y), torch.atan2(y, x)))
    operands = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(polar, operands)
    assert torch.autograd.gradgradcheck(polar, operands)
    torch.library.opcheck(polar.overload, operands)
    assert [t.shape for t in torch.vmap(polar)(x, y)] == [x.shape, x.shape]
    out = (torch.empty(6, 5), torch.empty(6, 5, dtype=torch.float64))
    polar(x.detach(), y.detach(), out=out)
    torch.testing.assert_close(out[0], radius.float())


def test_several_results_fuse_with_their_neighbours() -> None:
    x, y = torch.randn(2, 16, 8)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        radius, angle = polar(x * 2, y)
        return radius * torch.cos(angle) + angle

    fast = fxkit.compile(program)
    torch.testing.assert_close(fast(x, y), program(x, y))
    (region,) = fast.compiled_modules[0].regions
    assert region.kernel is not None


def test_a_gradient_of_ones_own_takes_the_place_of_the_derivative() -> None:
    @fxkit.operator(gradient=lambda g, x: g, check_gradient=False)
    def rounded(x):
        return round(x)

    @fxkit.operator(gradient=lambda g, x, s: g * s * math.exp(x * s))
    def power(x, s=2.0):
        return math.exp(x * s)

    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(rounded(x).sum(), x)
    torch.testing.assert_close(slope, torch.ones_like(x))
    assert torch.autograd.gradcheck(power, x)
    assert torch.autograd.gradgradcheck(power, x)


def test_a_wrong_gradient_is_refused() -> None:
    with pytest.raises(NumericsError, match=r"the gradient of wrong with respect to x to be"):

        @fxkit.operator(gradient=lambda g, x: g * x)
        def wrong(x):
            return math.exp(x)

    with pytest.raises(UnsupportedError, match="a gradient of 2 parameters, got 1"):

        @fxkit.operator(gradient=lambda g: g)
        def short(x):
            return math.exp(x)


def test_a_warm_call_goes_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16)
    for _ in range(3):
        expected = soft_shrink(x)
    with monkeypatch.context() as patched:
        patched.setattr(soft_shrink._calls, "run", None)
        torch.testing.assert_close(soft_shrink(x), expected)
    assert soft_shrink(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_not_rounded_to_the_dtype_of_operands(dtype: torch.dtype) -> None:
    x = (torch.randn(500) * 5).to(dtype)
    found = soft_shrink(x, width=0.4)
    near = soft_shrink(x.float(), width=0.4).to(dtype)
    torch.testing.assert_close(found, near, rtol=0, atol=0)
