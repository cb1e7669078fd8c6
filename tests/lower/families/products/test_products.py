"""Matrix products in kernels: alone, with what follows, in any layout, and when torch is faster."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import fxkit
from fxkit import config
from fxkit.lower import to_cpp
from fxkit.lower.autotuning import times as trial_times
from fxkit.lower.building.build import build
from fxkit.lower.compiling import whole_operators
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families.products import autotune as product_trial
from fxkit.lower.families.products.matrices import matrix_product
from fxkit.lower.families.products.regions import alone
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.product import Product
from tests.lower.kernels import beside_float64, rand
from tests.sampling import examples


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch):
    """Compute each product in a kernel, also where torch's library is faster."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def lowered(program, *args):
    """Lower a program, hold it to float64, and return the names in each region with a kernel."""
    compiled, found, eager, exact = beside_float64(program, *args)
    bound = 2 * (eager - exact).norm() + 1e-6 * exact.norm()
    assert (found - exact).norm() <= bound
    return [r.nodes for r in compiled.regions if r.kernel]


CASES = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (7, 40), (60, 40), (60,)),
    "linear of a vector": (lambda x, w: F.linear(x, w), (40,), (100, 40)),
    "linear of a batch": (lambda x, w: F.linear(x, w), (2, 3, 5, 40), (50, 40)),
    "linear across a batch": (lambda x, w: F.linear(x.transpose(0, 1), w), (3, 5, 40), (50, 40)),
    "one row": (lambda x, w: F.linear(x, w), (1, 700), (33, 700)),
    "three rows": (lambda x, w: F.linear(x, w), (3, 33), (33, 33)),
    "four rows": (lambda x, w: F.linear(x, w), (4, 250), (99, 250)),
    "one row across": (lambda x, w: x @ w, (1, 701), (701, 2304)),
    "three rows across": (lambda x, w: x @ w, (3, 33), (33, 1007)),
    "four rows across": (lambda x, w, b: torch.addmm(b, x, w), (4, 250), (250, 513), (513,)),
    "two rows across, turned": (lambda x, w: x.t() @ w[:, 1:], (98, 2), (98, 300)),
    "two rows across, odd sizes": (lambda x, w, b: (x @ w + b).sin(), (2, 301), (301, 515), (515,)),
    "one row across, very wide": (lambda x, w: x @ w, (1, 41), (41, 5003)),
    "rows across, of a batch": (lambda x, w: torch.bmm(x, w), (5, 1, 40), (5, 40, 256)),
    "one column": (lambda x, w: x @ w, (30, 40), (40, 1)),
    "one term": (lambda x, w: x @ w, (30, 1), (1, 70)),
    "mm": (lambda x, w: torch.mm(x, w), (30, 200), (200, 48)),
    "wide": (lambda x, w: x @ w, (10, 20), (20, 500)),
    "deep": (lambda x, w: x @ w, (50, 1000), (1000, 50)),
    "tall": (lambda x, w: x @ w, (800, 20), (20, 30)),
    "left transposed": (lambda x, w: x.t() @ w, (200, 30), (200, 100)),
    "both transposed": (lambda x, w: x.t() @ w.t(), (200, 30), (100, 200)),
    "every other row": (lambda x, w: x[::2] @ w[:, ::3], (30, 20), (20, 100)),
    "bmm": (lambda x, w: torch.bmm(x, w), (5, 30, 20), (5, 20, 60)),
    "attention scores": (lambda q, k: q @ k.transpose(-1, -2), (2, 3, 17, 8), (2, 3, 21, 8)),
    "repeated left": (lambda x, w: x @ w, (7, 40), (3, 40, 9)),
    "repeated right": (lambda x, w: x @ w, (4, 3, 7, 40), (3, 40, 9)),
    "batches that broadcast": (lambda x, w: x @ w, (2, 1, 7, 40), (3, 40, 9)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (7, 40), (40, 9), (9,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_products(name):
    program, *shapes = CASES[name]
    names = lowered(program, *(rand(*s) for s in shapes))
    assert len(names) == 1


FOLLOWED = {
    "an activation": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (2, 5, 40), (60, 40), (60,)),
    "a residual": (lambda x, w, y: F.linear(x, w) + y, (2, 5, 40), (60, 40), (2, 5, 60)),
    "its own operand": (lambda x, w: torch.relu(F.linear(x, w)) * x, (9, 60), (60, 60)),
    "a row": (lambda x, w, y: x @ w * y - 1, (9, 40), (40, 60), (60,)),
    "a column": (lambda x, w, y: x @ w * y - 1, (9, 40), (40, 60), (9, 1)),
    "a broadcast batch": (lambda x, w, y: x @ w + y, (4, 9, 40), (40, 60), (9, 60)),
    "scores and a mask": (
        lambda q, k, m: q @ k.mT * 0.5 + m,
        (2, 3, 17, 8),
        (2, 3, 21, 8),
        (17, 21),
    ),
    "twice the product": (lambda x, w: (y := x @ w) * torch.sigmoid(y), (9, 40), (40, 60)),
    "a transposed tensor": (lambda x, w, y: x @ w + y.t(), (9, 40), (40, 60), (60, 9)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_follows_a_product_is_computed_with_it(name):
    program, *shapes = FOLLOWED[name]
    names = lowered(program, *(rand(*s) for s in shapes))
    assert len(names) == 1
    assert len(names[0]) >= 2


APART = {
    "a reduction": (lambda x, w: torch.softmax(x @ w, -1), (9, 40), (40, 60)),
    "another order": (lambda x, w, y: (x @ w).t() * y + 1, (9, 40), (40, 60), (60, 9)),
    "a repetition": (lambda x, w, y: (x @ w).unsqueeze(0) * y, (9, 40), (40, 60), (3, 9, 60)),
}


@pytest.mark.parametrize("name", APART)
def test_what_does_not_fit_is_computed_after_it(name):
    program, *shapes = APART[name]
    names = lowered(program, *(rand(*s) for s in shapes))
    assert ("matmul",) in names


def test_a_product_that_others_read_is_written():
    def program(x, w):
        y = x @ w
        return torch.relu(y) + y.sum(0)

    lowered(program, rand(9, 40), rand(40, 60))


def test_nothing_is_read_after_it_was_written():
    def program(x, w, y):
        z = x @ w
        x.mul_(2)
        return torch.relu(z) + y

    args = (rand(9, 40), rand(40, 60), rand(9, 60))
    gm = fxkit.capture(program, tuple(a.clone() for a in args)).graph_module
    compiled = to_cpp(gm, args)
    with torch.no_grad():
        torch.testing.assert_close(compiled(args[0].clone(), *args[1:]), program(*args))


def test_parameters_are_read_at_each_call():
    net = torch.nn.Linear(40, 60)
    gm = fx.symbolic_trace(net)
    x = rand(9, 40)
    compiled = to_cpp(gm, (x,))
    with torch.no_grad():
        net.weight.data.mul_(3)
        torch.testing.assert_close(compiled(x), net(x))


def test_infinities_and_nan_go_through():
    x, w = rand(9, 40), rand(60, 40)
    x[0, 0], x[1, 1], w[2, 2] = torch.inf, torch.nan, -torch.inf
    gm = fx.symbolic_trace(lambda x, w: F.linear(x, w) * 2)
    with torch.no_grad():
        torch.testing.assert_close(to_cpp(gm, (x, w))(x, w), gm(x, w), equal_nan=True)


LEFT = {
    "another dtype": (lambda x, w: x.bfloat16() @ w.bfloat16(), (9, 40), (40, 60)),
    "a vector": (lambda x, w: x @ w, (9, 40), (40,)),
    "factors": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5), (60,), (9, 40), (40, 60)),
    "a bias that is no row": (lambda b, x, w: torch.addmm(b, x, w), (9, 1), (9, 40), (40, 60)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_products_are_left_to_torch_with_a_reason(name):
    program, *shapes = LEFT[name]
    args = tuple(rand(*s) for s in shapes)
    compiled = to_cpp(fx.symbolic_trace(program), args)
    reasons = [r.reason for r in compiled.regions if r.nodes[0] in ("matmul", "addmm")]
    assert all(reasons)
    assert len(reasons) == 1


def kernel_of(gm, *args):
    """Return the kernel of a graph that is one product."""
    to_cpp(gm, args)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    return alone(matrix_product(node, gm)).kernel


def built(kernel):
    """Build a kernel of three buffers; return its function."""
    function = build(print_unit({"k": kernel}, None)).handle.k
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long]
    return function


@examples(4, of=12)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 110), st.integers(1, 420)),
    layout=st.tuples(st.booleans(), st.booleans()),
    repeated=st.sampled_from(["none", "left", "right"]),
)
def test_any_sizes(batch, sizes, layout, repeated):
    rows, columns, depth = sizes
    left = [1] * len(batch) if repeated == "left" else batch
    right = [] if repeated == "right" else batch
    x = rand(*left, depth, rows).mT if layout[0] else rand(*left, rows, depth)
    y = rand(*right, columns, depth).mT if layout[1] else rand(*right, depth, columns)
    gm = fx.symbolic_trace(lambda x, y: x @ y)
    kernel = kernel_of(gm, x, y)
    expected = [torch.empty((x @ y).numel())]
    assert interpret(kernel, [x, y], expected)
    found = torch.empty_like(expected[0])
    function = built(kernel)
    function(x.data_ptr(), y.data_ptr(), found.data_ptr(), 2)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_are_the_same_with_any_number_of_threads(rows):
    x, y = rand(rows, 1000), rand(1000, 600)
    gm = fx.symbolic_trace(lambda x, y: x @ y)
    function, found = built(kernel_of(gm, x, y)), []
    for threads in (1, 2, 3):
        out = torch.empty(rows, 600)
        function(x.data_ptr(), y.data_ptr(), out.data_ptr(), threads)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_row_times_a_matrix_is_worth_several_threads():
    compiled = to_cpp(fx.symbolic_trace(lambda x, w: x @ w), (rand(1, 768), rand(768, 768)))
    (call,) = (n.target for n in compiled.lowered.graph.nodes if hasattr(n.target, "is_parallel"))
    assert call.is_parallel


def product_of(rows, columns, depth):
    return Product(0, 1, (), rows, columns, depth, (depth, 1), (columns, 1))


class TestTrial:
    def test_small_products_are_not_timed(self, monkeypatch):
        monkeypatch.setattr(product_trial, "_measured", lambda *_: pytest.fail("timed"))
        assert product_trial.objection(product_of(10, 10, 10)) is None

    def test_the_faster_one_is_taken_and_remembered(self, monkeypatch, tmp_path):
        timed = []

        def measured(product, threads):
            timed.append(product)
            return (2.0, 1.0) if product.columns == 100 else (1.0, 2.0)

        monkeypatch.setattr(product_trial, "_measured", measured)
        with config.using_cache_dir(tmp_path):
            for _ in range(2):
                reason = product_trial.objection(product_of(1000, 100, 1000))
                assert "torch's library multiplies [1000, 1000] @ [1000, 100]" in reason
                assert product_trial.objection(product_of(100, 101, 1000)) is None
            assert len(timed) == 2
            (file,) = (tmp_path / "kernels").glob("trials-*.json")
            assert len(json.loads(file.read_text())) == 2

    @pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": ["b", "c"]}', "\0"])
    def test_a_damaged_file_is_measured_again(self, monkeypatch, tmp_path, text):
        monkeypatch.setattr(product_trial, "_measured", lambda *_: (1.0, 2.0))
        with config.using_cache_dir(tmp_path):
            product_trial.objection(product_of(100, 100, 1000))
            (file,) = (tmp_path / "kernels").glob("trials-*.json")
            file.write_text(text)
            trial_times._known_in.cache_clear()
            assert product_trial.objection(product_of(100, 100, 1000)) is None

    def test_a_product_is_timed(self, tmp_path):
        with config.using_cache_dir(tmp_path):
            kernel, library = product_trial._measured(product_of(50, 100, 60), 1)
        assert 0 < kernel < 1
        assert 0 < library < 1

    def test_a_matrix_that_few_rows_are_multiplied_by_is_read_from_memory(self, monkeypatch):
        pushed = []
        monkeypatch.setattr(product_trial, "push_out", lambda matrix: pushed.append(matrix.shape))
        product_trial._measured(product_of(1, 1024, 600), 1)
        assert set(pushed) == {(1, 600, 1024)}
        pushed.clear()
        product_trial._measured(product_of(1, 100, 600), 1)
        product_trial._measured(product_of(8, 100, 600), 1)
        product_trial._measured(product_of(65, 1024, 600), 1)
        assert not pushed

    @pytest.mark.parametrize(("inside", "decides"), [(1.04, "outside"), (1.2, "inside")])
    def test_of_some_rows_a_kernel_is_about_as_fast_in_the_caches_too(
        self, monkeypatch, inside, decides
    ):
        times = {"outside": (1.0, 2.0), "inside": (inside, 1.0)}

        def fastest(*_, before=None):
            return times["inside" if before is None else "outside"]

        monkeypatch.setattr(trial_times, "fastest", fastest)
        assert product_trial._measured(product_of(12, 1024, 600), 1) == times[decides]

    def test_without_a_compiler_torch_computes_them(self, monkeypatch):
        monkeypatch.setenv("FXKIT_CXX", "no-such-compiler")
        assert "expected a C++ compiler" in product_trial.objection(product_of(100, 100, 1000))
