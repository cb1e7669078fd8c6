"""`fxkit.kernel`: a user's own source in the place of a pattern, proven and timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.authoring.kernels import readiness, trial
from fxkit.errors import BuildError, FxkitError, NumericsError, UnsupportedError

HEAD = "#include <cstdint>\n#include <cmath>\n"
SHIFT = HEAD + (
    'extern "C" void shift(const float* x, float* out, int64_t out_numel) {\n'
    "  for (int64_t i = 0; i < out_numel; ++i) BODY;\n}\n"
)


def shift(x: Tensor) -> Tensor:
    return torch.tanh(x) + 0.25


def shifting(body: str = "out[i] = std::tanh(x[i]) + 0.25f", **options: object):
    return fxkit.kernel(shift, cpp=SHIFT.replace("BODY", body), **options)  # type: ignore[arg-type]


def row_sums(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scaled = x * scale
    return scaled.sum(1), scaled.amax(1)


ROW_SUMS = (
    HEAD
    + """
template <typename T>
void row_sums(const T* x, const int64_t* x_sizes, int64_t x_stride_0, int64_t x_stride_1, T scale,
              T* sums, T* tops, double* workspace, int64_t columns) {
  for (int64_t r = 0; r < x_sizes[0]; ++r) {
    double sum = 0;
    T top = -INFINITY;
    for (int64_t i = 0; i < columns; ++i) workspace[i] = x[r * x_stride_0 + i * x_stride_1] * scale;
    for (int64_t i = 0; i < columns; ++i) {
      sum += workspace[i];
      if (workspace[i] > top || workspace[i] != workspace[i]) top = (T)workspace[i];
      if (top != top) { sum = top; break; }
    }
    sums[r] = (T)sum;
    tops[r] = top;
  }
}
"""
)


def is_matrix(match: fxkit.patterns.match_results.Match) -> bool:
    shape = match.type("x").shape
    return len(shape) == 2 and shape[1] > 0


def summing(**options: object):
    return fxkit.kernel(
        row_sums,
        cpp=ROW_SUMS,
        numbers={"columns": lambda x: x.shape[1]},
        workspace=lambda x: 8 * x.shape[1],
        where=is_matrix,
        always=True,
        **options,  # type: ignore[arg-type]
    )


def test_a_kernel_computes_its_pattern_and_is_called_like_it() -> None:
    kernel = shifting()
    for x in (torch.randn(5, 7), torch.randn(0, 3), torch.tensor(1.0), torch.randn(4, 6).t(),
              torch.tensor([float("nan"), float("inf"), -0.0])):  # fmt: skip
        torch.testing.assert_close(kernel(x), shift(x), equal_nan=True)
        assert kernel(x).stride() == shift(x).stride()
    wide = torch.randn(3, dtype=torch.float64)
    assert torch.equal(kernel(wide), shift(wide))  # by the pattern: its function takes float32
    asking = torch.randn(3, requires_grad=True)
    assert kernel(asking).requires_grad  # likewise


def test_a_proof_runs_over_shapes_layouts_and_special_numbers() -> None:
    assert shifting().prove() == 48
    assert summing().prove() == 48


FAULTS = {
    "off by one": ("if (i) out[i] = std::tanh(x[i]) + 0.25f", "to be written whole"),
    "behind the end": (
        "out[i] = std::tanh(x[i]) + 0.25f; out[out_numel] = 0", "writes to results only",
    ),
    "reads astray": (
        "out[i] = std::tanh(x[i + 5000]) + 0.25f", "reads outside of the memory",
    ),
    "wrong element": ("out[i] = std::tanh(x[out_numel - 1 - i]) + 0.25f", "error of at most"),
    "NaN dropped": ("out[i] = x[i] == x[i] ? std::tanh(x[i]) + 0.25f : 0.f", "error of at most"),
    "an operand is written": (
        "out[i] = std::tanh(x[i]) + 0.25f; ((float*)x)[i] = 0", "writes to x",
    ),
    "uninitialised": ("out[i] += std::tanh(x[i]) + 0.25f", "to be written whole"),
    "ends the process": ("std::abort()", "dies by SIGABRT"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_proof_finds_a_planted_fault(fault: str) -> None:
    body, told = FAULTS[fault]
    source = f"#include <cstdlib>\n{SHIFT.replace('BODY', f'{{ {body}; }}')}"
    kernel = fxkit.kernel(shift, cpp=source)
    with pytest.raises(NumericsError, match=told) as caught:
        kernel.prove()
    assert "inputs: x=f32[" in str(caught.value)


def test_a_wrong_stride_is_found() -> None:
    source = ROW_SUMS.replace("i * x_stride_1", "i")
    kernel = fxkit.kernel(
        row_sums,
        cpp=source,
        numbers={"columns": lambda x: x.shape[1]},
        workspace=lambda x: 8 * x.shape[1],
        where=is_matrix,
    )
    with pytest.raises(NumericsError, match="expected row_sums to compute its pattern"):
        kernel.prove()


def compiled(fn, kernel, *args):
    program = fxkit.compile(fn, kernels=[kernel])
    with torch.no_grad():
        program(*args)
        return program, program(*args)


def test_compile_puts_a_kernel_in_the_place_of_its_pattern() -> None:
    x = torch.randn(33, 65)
    program, result = compiled(lambda x: sum(row_sums(x.tanh(), 0.25)), summing(), x)
    torch.testing.assert_close(result, sum(row_sums(x.tanh(), 0.25)))
    assert "kernel row_sums used at mul, sum_1, amax" in program.report()
    assert "without a trial" in program.report()
    names = [node.name for node in program.lowered.graph.nodes]
    assert "row_sums" in names and len([n for n in names if n.startswith("region")]) == 2


@pytest.mark.parametrize(("seconds", "wins"), [((1e-6, 2e-6), True), ((3e-6, 2e-6), False)])
def test_the_faster_one_stays_and_the_report_has_both_times(
    seconds: tuple[float, float], wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial.times, "kept_times", lambda key, measure, texts: seconds)
    x = torch.randn(9, 5)
    program, result = compiled(lambda x: shift(x) * 2, shifting(), x)
    torch.testing.assert_close(result, shift(x) * 2)
    used = "used" if wins else "left out"
    assert f"kernel shift {used} at tanh, add" in program.report()
    assert f"{seconds[0] * 1e6:.1f} us, fxkit's kernels 2.0 us" in program.report()
    (found,) = program.compiled_modules[-1].report().trials
    assert found.is_used == wins and (found.seconds, found.own_seconds) == seconds


def test_trials_compile_both_and_time_them() -> None:
    slow = shifting("for (int k = 0; k < 2000; ++k) out[i] = std::tanh(x[i] + 0 * k) + 0.25f")
    x = torch.randn(64, 64)
    program, result = compiled(shift, slow, x)
    torch.testing.assert_close(result, shift(x))
    (found,) = program.compiled_modules[-1].report().trials
    assert not found.is_used and found.seconds > found.own_seconds > 0


def test_a_kernel_that_fails_its_proof_is_left_out_with_its_reason() -> None:
    wrong = shifting("out[i] = std::tanh(x[i]) + 0.26f")
    x = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="kernel shift is left out: expected shift to compute"):
        program, result = compiled(shift, wrong, x)
    torch.testing.assert_close(result, shift(x))
    assert "kernel shift left out: expected shift to compute its pattern" in program.report()


def test_a_source_that_does_not_compile_is_left_out_with_the_line_of_the_users_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "shift.cpp").write_text(SHIFT.replace("BODY", "out[i] = nowhere"))
    kernel = fxkit.kernel(shift, cpp=tmp_path / "shift.cpp")
    with pytest.raises(BuildError, match=r"shift.cpp:4:\d+: error: .nowhere. was not declared"):
        kernel.prove()
    with pytest.warns(UserWarning, match="shift.cpp:4"):
        program, _ = compiled(shift, kernel, torch.randn(4))
    assert "kernel shift left out: expected the compiler to accept" in program.report()


def test_a_proof_is_kept_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert readiness.objection_to(shifting(samples=({"x": (3, 4)},)), "cpu") is None
    monkeypatch.setattr(readiness, "prove_kernel", lambda *_: pytest.fail("it is proven"))
    assert readiness.objection_to(shifting(samples=({"x": (3, 4)},)), "cpu") is None


def test_headers_beside_the_source_count(tmp_path: Path) -> None:
    (tmp_path / "amount.h").write_text("constexpr float amount = 0.25f;\n")
    text = '#include "amount.h"\n' + SHIFT.replace("BODY", "out[i] = std::tanh(x[i]) + amount")
    (tmp_path / "shift.cpp").write_text(text)
    x = torch.randn(5)
    torch.testing.assert_close(fxkit.kernel(shift, cpp=tmp_path / "shift.cpp")(x), shift(x))
    (tmp_path / "amount.h").write_text("constexpr float amount = 1.25f;\n")
    torch.testing.assert_close(fxkit.kernel(shift, cpp=tmp_path / "shift.cpp")(x), shift(x) + 1)


def test_registered_kernels_are_looked_for_in_every_program() -> None:
    kernel = fxkit.register_kernel(shifting(always=True))
    try:
        program = fxkit.compile(shift)
        with torch.no_grad():
            program(torch.randn(6))
        assert "kernel shift used at tanh, add" in program.report()
    finally:
        fxkit.authoring.kernels.unregister_kernel(kernel)
    assert fxkit.authoring.kernels.registered() == ()


def test_a_kernel_without_a_gradient_is_not_used_where_one_is_asked_for() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    program = fxkit.compile(shift, kernels=[shifting(always=True)])
    program(x).sum().backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)
    assert "kernel shift left out at add: %add asks for a gradient" in program.report()


def test_calls_of_kernels_that_fail_are_counted() -> None:
    text = SHIFT.replace('"C" void', '"C" int').replace(
        "BODY;", "BODY;\n  return out_numel > 1000;"
    )
    kernel = fxkit.kernel(
        shift, cpp=text.replace("BODY", "out[i] = std::tanh(x[i]) + 0.25f"), always=True
    )
    program, x = fxkit.compile(shift, kernels=[kernel]), torch.randn(40, 60)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(program(x), shift(x))
    report = program.compiled_modules[-1].report()
    assert report.stand_ins == report.calls > 0
    assert f"torch stood in {report.stand_ins} times for kernels" in str(report)


REFUSED = {
    "there is no": {"cpp": "nowhere.cpp"},
    "expected a source or call=": {},
    "expected the operand x to be constant": {"cpp": "void f(float* x, float* out) {}"},
    "expected a parameter that is an operand": {
        "cpp": "void f(const float* x, float* out, int rows) {}"
    },
    "expected parameters for x, out, got no x": {"cpp": "void f(float* out) {}"},
    "expected a pointer for each of the pattern's 1": {"cpp": "void f(const float* x) {}"},
    "expected a function 'g' in the text": {
        "cpp": "void f(const float* x, float* out) {}", "function": "g",
    },
    "expected a pointer or a number": {"cpp": "void f(const float** x, float* out) {}"},
    "expected a pointer to elements": {"cpp": "void f(const text* x, float* out) {}"},
    "expected const int64_t\\* x_sizes": {
        "cpp": "void f(const float* x, float* out, int x_sizes) {}"
    },
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_refused_is_refused_at_once(told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        fxkit.kernel(shift, **REFUSED[told])  # type: ignore[arg-type]


def test_compile_takes_kernels_only() -> None:
    with pytest.raises(UnsupportedError, match="expected kernels, got function"):
        fxkit.compile(shift, kernels=[shift])  # type: ignore[list-item]
    assert issubclass(UnsupportedError, FxkitError)


def test_places_of_one_form_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def kept(key: str, measure: object, texts: object) -> tuple[float, float]:
        measured.append(key)
        return 1e-6, 2e-6

    monkeypatch.setattr(trial.times, "kept_times", kept)
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3))

    def program(x: Tensor) -> Tensor:
        for layer in layers:
            x = shift(layer(x))
        return x + shift(x[:, :2]).sum()

    with torch.no_grad():
        compiled(program, shifting(), torch.randn(9, 5))
    assert len(measured) > 3 and len(set(measured)) == 2


WRONG_NUMBERS = {
    "raises IndexError: tuple index out of range": lambda x: x.numel() // x.shape[-1],
    "gives a Size, and no number": lambda x: x.shape,
    "gives a NoneType, and no number": lambda x: None,
}


@pytest.mark.parametrize("told", WRONG_NUMBERS)
def test_a_function_of_numbers_that_fails_is_named(told: str) -> None:
    source = SHIFT.replace("int64_t out_numel", "int64_t out_numel, int64_t rows")
    kernel = fxkit.kernel(
        shift,
        cpp=source.replace("BODY", "out[i] = std::tanh(x[i]) + 0.25f"),
        numbers={"rows": WRONG_NUMBERS[told]},
    )
    with pytest.raises(NumericsError, match=f"what computes rows {told}") as caught:
        kernel.prove()
    assert "inputs: x=f32[" in str(caught.value)
