"""Products of 8-bit integers: exact for all sizes and numbers."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fxkit
from fxkit import cpu_info
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import build
from fxkit.lower.compiling import multiply_integers, whole_operators
from fxkit.lower.families.integer_products.autotune import pairs_fit_into_16_bits
from fxkit.lower.families.integer_products.custom_op import integer_product, operator
from fxkit.lower.families.integer_products.printer import IntegerProductPrinter
from fxkit.quantization.affine import signal_to_noise
from tests.sampling import examples


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """Let kernels compute each product, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def exact(left: Tensor, right: Tensor, zeros: Tensor | int) -> Tensor:
    return ((left.long() - zeros) @ right.long()).to(torch.int32)


def integers(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    limits = torch.iinfo(dtype)
    if kind == "random":
        return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)
    return torch.full(shape, limits.min if kind == "least" else limits.max, dtype=dtype)


KINDS = st.sampled_from(["random", "random", "least", "largest"])


@examples(8, of=40)
@given(
    st.sampled_from([1, 2, 3, 4, 5, 7, 12, 13, 16, 31, 33, 48, 64, 70, 390]),
    st.sampled_from([1, 2, 3, 5, 31, 63, 64, 65, 130, 1023, 1030]),
    st.sampled_from([1, 3, 9, 16, 25, 63, 64, 65, 130]),
    st.sampled_from([torch.int8, torch.uint8]),
    st.tuples(KINDS, KINDS),
    st.booleans(),
    st.sampled_from([None, 0, 3, -128, 255]),
)
def test_sums_are_exact(rows, depth, columns, dtype, kinds, is_turned, zero):
    left = integers((rows, depth), dtype, kinds[0])
    right = integers((columns, depth) if is_turned else (depth, columns), torch.int8, kinds[1])
    zeros = torch.randint(-128, 256, (rows, 1), dtype=torch.int32) if zero is None else None

    def program(left, right, zeros):
        factors = right.t() if is_turned else right
        return operator()(left, factors, zeros, zero or 0)

    compiled = fxkit.compile(program)
    compiled(left, right, zeros)  # the first call runs the program itself
    found = compiled(left, right, zeros)
    assert "fx_integer_product<" in compiled.compiled_modules[-1].source
    factors = right.t() if is_turned else right
    expected = exact(left, factors, zeros if zeros is not None else zero or 0)
    assert torch.equal(found, expected)
    assert torch.equal(integer_product(left, factors, zeros, zero or 0), expected)


def test_rows_may_lie_apart():
    left = integers((9, 200), torch.int8, "random")[:, 60:130]
    right = integers((70, 90), torch.int8, "random")[:, ::2]
    compiled = fxkit.compile(lambda left, right: operator()(left, right, None, 5))
    for _ in range(2):
        assert torch.equal(compiled(left, right), exact(left, right, 5))


def test_terms_that_lie_apart_are_left_to_torch():
    left, right = (integers((40, 40), torch.int8, "random") for _ in range(2))
    compiled = fxkit.compile(lambda left, right: operator()(left.t(), right, None, 5))
    for _ in range(2):
        assert torch.equal(compiled(left, right), exact(left.t(), right, 5))
    (module,) = compiled.compiled_modules
    assert "do not lie side by side" in str(module.report())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [127, -128, 64, -64])
@pytest.mark.parametrize("rows", [13, 40])
def test_pairs_that_may_leave_16_bits_are_summed_exactly(rows, first):
    """Kernels have to see where a pair sums up to more than 128, times the largest byte 32640."""
    left = integers((rows, 96), torch.uint8, "largest")
    compiled = fxkit.compile(lambda left, weight: operator()(left, weight.t()))
    for second in (0, 1, 2, 63, 64, 65, 127, -1, -64, -65, -128):
        for place in (0, 30, 62, 94):
            weight = torch.zeros(70, 96, dtype=torch.int8)
            weight[69, place : place + 2] = torch.tensor([first, second])
            compiled(left, weight)
            assert torch.equal(compiled(left, weight), exact(left, weight.t(), 0))


def test_halves_are_exact_where_pairs_fit():
    left = integers((70, 390), torch.int8, "random")
    weight = integers((130, 390), torch.int8, "random") // 2
    compiled = fxkit.compile(lambda left, weight: operator()(left, weight.t(), None, 7))
    for _ in range(2):
        assert torch.equal(compiled(left, weight), exact(left, weight.t(), 7))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [3, 13, 40])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("kind", ["random", "largest", "least"])
def test_vnni_of_processors_without_avx512(rows, dtype, kind):
    """Their instructions are no level of x86-64: kernels are built for them by hand."""
    if "avx_vnni" not in (cpu_info.info_line("flags") or "").split():
        pytest.skip("the processor has no AVX-VNNI")
    tools = toolchain.current()
    flags = [one for one in tools.flags if not one.startswith("-march=")]
    tools = replace(tools, flags=(*flags, "-march=x86-64-v3", "-mavxvnni"))
    text = """
extern "C" void fx_sums(const KIND char* a, const signed char* b, int* sums, long rows,
                        long depth) {
  fx_integer_product<false>(a, depth, b, 1, depth, rows, 49, depth, fx_zeros{nullptr, 0, 5}, sums);
}"""
    text = text.replace("KIND", "signed" if dtype.is_signed else "unsigned")
    left, right = integers((rows, 390), dtype, kind), integers((49, 390), torch.int8, kind)
    sums = torch.empty(rows, 64, dtype=torch.int32)
    library = build("\n".join([*IntegerProductPrinter.texts(), text]), tools=tools)
    pointers = [ctypes.c_void_p(one.data_ptr()) for one in (left, right, sums)]
    library.handle.fx_sums(*pointers, ctypes.c_long(rows), ctypes.c_long(390))
    assert torch.equal(sums[:, :49], exact(left, right.t(), 5))


def test_autotuning_knows_weights_whose_pairs_fit():
    weight = integers((5, 33), torch.int8, "random") // 2
    assert pairs_fit_into_16_bits(weight)
    for first, second, fits in [
        (127, 1, True),
        (127, 2, False),
        (-128, 0, True),
        (-128, -1, False),
    ]:
        weight[3, 20:22] = torch.tensor([first, second])
        assert pairs_fit_into_16_bits(weight) is fits
    assert pairs_fit_into_16_bits(weight[:, 20:21]) and pairs_fit_into_16_bits(weight[:0])


@pytest.mark.parametrize("kind", ["random", "largest"])
def test_the_operator_itself_is_exact_for_any_strides(kind):
    def laid_out(rows: int, columns: int) -> list[Tensor]:
        wide = integers((2 * rows, 3 * columns), torch.int8, kind)
        one = integers((rows * columns,), torch.int8, kind)
        return [
            wide[::2, ::3],
            wide[:rows, :columns].clone(),
            wide[:rows, :columns].t().contiguous().t(),
            wide[:1, :columns].expand(rows, columns),
            wide[:rows, :1].expand(rows, columns),
            one.as_strided((rows, columns), (1, 1) if rows == 1 else (1, rows)),
        ]

    for rows, terms, columns in [(1, 64, 64), (17, 40, 9), (5, 1, 3), (4, 7, 1), (0, 3, 2)]:
        for left in laid_out(rows, terms):
            for right in laid_out(terms, columns):
                assert torch.equal(integer_product(left, right, None, 5), exact(left, right, 5))


def _layered(activation):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 77), torch.nn.Linear(77, 64)

    def program(x):
        return second(activation(first(x)))

    return program, torch.randn(21, 64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "activation",
    [
        F.gelu,
        torch.tanh,
        F.silu,
        lambda x: torch.exp(x) * torch.sigmoid(x + 1),
        lambda x: x.exp().sin(),
    ],
    ids=["gelu", "tanh", "silu", "two", "nested"],
)
def test_functions_before_bytes_are_computed_in_lanes(activation, monkeypatch):
    monkeypatch.setattr(multiply_integers, "reason_to_stay_float", lambda *_, **__: None)
    program, x = _layered(activation)
    quantized = fxkit.quantize(program, fxkit.quantization.int8_static(), [(x,)])
    compiled = fxkit.compile(quantized)
    with torch.no_grad():
        compiled(x)
        found, expected = compiled(x), quantized(x)
    assert signal_to_noise(expected, found) > 60
    assert "#if FX_WIDE > 1" in compiled.compiled_modules[-1].source
