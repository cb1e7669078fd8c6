"""Refusals of kernels: each with its line and hint, and nothing of a refused source runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit import cli
from fxkit.authoring.kernels import sanitizer
from fxkit.errors import BuildError, FxkitError, NumericsError, UnsupportedError
from fxkit.lower.building import toolchain

SHIFT = """#include <cstdint>
#include <cmath>
void shift(const float* x, float* out, int64_t out_numel) {
  for (int64_t i = 0; i < out_numel; ++i)
    out[i] = x[i] + 0.25f;
}
"""
WITH_ROWS = SHIFT.replace("out_numel)", "out_numel, int64_t rows)")
GENERIC = SHIFT.replace("void", "template <class T> void").replace("float*", "T*")


def shift(x: Tensor) -> Tensor:
    return x + 0.25


# What is given → what is told, and the hint; at once, before anything is read or built.
AT_ONCE: dict[str, tuple[dict[str, Any], str, str]] = {
    "samples of no parameter": (
        {"samples": [{"q": (3,)}]}, "expected samples for x, got some for q",
        'samples=[{"x": (3, 4)}]',
    ),
    "samples that are no mappings": (
        {"samples": [(3,)]}, "expected samples= to list mappings", 'samples=[{"x": (3, 4)}]',
    ),
    "one sample in the place of several": (
        {"samples": {"x": (3,)}}, "expected samples= to list mappings", 'samples=[{"x": (3, 4)}]',
    ),
    "a number that no parameter takes": (
        {"numbers": {"rowz": lambda x: 1}}, "got none named rowz", "add int64_t rowz",
    ),
    "a number of what is not there": (
        {"cpp": WITH_ROWS, "numbers": {"rows": lambda y: 1}},
        "expected a function of x, out for rows, got one of y", "names of the operands",
    ),
    "a number that is no function": (
        {"cpp": WITH_ROWS, "numbers": {"rows": 3}}, "to give a function for each name", "lambda x",
    ),
    "dtypes by name": (
        {"cpp": GENERIC, "dtypes": ("float32",)}, "expected dtypes= to list dtypes", "float64",
    ),
    "dtypes without a type in C++": (
        {"cpp": GENERIC, "dtypes": (torch.complex64,)}, "expected dtypes= to list", "float64",
    ),
    "flags in one text": ({"flags": "-O1"}, "expected flags= to be several", 'flags=("-O3",)'),
    "workspace less than none": ({"workspace": -1}, "expected workspace= to be bytes", "lambda"),
    "workspace that nobody takes": (
        {"workspace": 8}, "expected a parameter that takes the workspace", "add char* workspace",
    ),
    "a call that is none": ({"cpp": None, "call": 3}, "call= to be a function", "leave it out"),
    "a gradient that is none": ({"gradient": 3}, "gradient= to be a function", "leave it out"),
    "a name that is no text": ({"name": 3}, "expected name= to be a text", "leave it out"),
    "a source that is no text": ({"cpp": 3}, "expected cpp= to be a text", "leave it out"),
    "a missing file": ({"cpp": "gone.cpp"}, "there is no", "paths begin at the file"),
    "a missing library": (
        {"cpp": None, "library": "gone.so", "signature": "void f(const float* x, float* out)"},
        "expected a library, got gone.so", "paths begin at the file",
    ),
    "a function that is not there": (
        {"function": "g"}, "expected a function 'g' in the text", "function='name'",
    ),
    "more results than the pattern has": (
        {"results": ("a", "b")}, "each of the pattern's 1 result(s), got a, b", "results=",
    ),
    "an operand that is written": (
        {"cpp": SHIFT.replace("const float", "float")}, "the operand x to be constant",
        "write const float* x",
    ),
    "no parameter for an operand": (
        {"cpp": SHIFT.replace("const float* x, ", "")}, "expected parameters for x, out, got no x",
        "has the name of the pattern's parameter",
    ),
}  # fmt: skip
WITH_A_LINE = ("rowz", "for rows, got", "takes the workspace", "got a, b", "constant", "got no x")


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_refusal_at_once_has_a_hint_and_the_line_of_the_function(name: str) -> None:
    options, told, hint = AT_ONCE[name]
    with pytest.raises(UnsupportedError, match=re.escape(told)) as caught:
        fxkit.kernel(shift, **{"cpp": SHIFT, **options})
    assert hint in (caught.value.hint or "")
    if any(part in told for part in WITH_A_LINE):
        assert caught.value.source == "the text:3 in shift"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shift.cpp").write_bytes(bytes(range(256)))
    with pytest.raises(UnsupportedError, match="expected the text of a kernel, got shift"):
        fxkit.kernel(shift, cpp=tmp_path / "shift.cpp")


IN_THE_PROOF: dict[str, tuple[dict[str, Any], str]] = {
    "a result of another dtype": (
        {"cpp": SHIFT.replace(" float* out", " double* out")},
        "out is of torch.float32, and its function writes torch.float64",
    ),
    "a call that returns another dtype": (
        {"cpp": None, "call": lambda x: (x + 0.25).double()}, "of type f32[3,4]",
    ),
    "a call that returns another shape": (
        {"cpp": None, "call": lambda x: (x + 0.25)[None]}, "got f32[1,3,4]",
    ),
    "a call that returns more": (
        {"cpp": None, "call": lambda x: (x + 0.25, x)}, "return 1 tensor(s), got Tensor, Tensor",
    ),
    "a call that returns nothing": (
        {"cpp": None, "call": lambda x: None}, "to return 1 tensor(s), got NoneType",
    ),
    "a call that raises": ({"cpp": None, "call": lambda x: 1 / 0}, "raises ZeroDivisionError"),
    "a call of more operands": ({"cpp": None, "call": lambda x, y: x}, "missing 1 required"),
    "a gradient of fewer operands": ({"gradient": lambda g: g}, "takes 1 positional argument"),
    "more gradients than operands": (
        {"gradient": lambda g, x: (g, g)}, "expected 1 gradient(s), one for each operand",
    ),
    "a gradient of another shape": ({"gradient": lambda g, x: g[:1]}, "invalid gradient"),
    "a number that can not be computed": (
        {"cpp": WITH_ROWS, "numbers": {"rows": lambda x: x.shape[7]}}, "index out of range",
    ),
    "a declaration alone": (
        {"cpp": "void shift(const float* x, float* out)\n;"}, "does not load: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_THE_PROOF)
def test_a_kernel_that_does_not_fit_is_refused_by_its_proof(name: str) -> None:
    options, told = IN_THE_PROOF[name]
    kernel = fxkit.kernel(shift, **{"cpp": SHIFT, **options})
    with pytest.raises(FxkitError, match=re.escape(told)) as caught:
        kernel.prove()
    assert caught.value.hint


has_sanitizers = pytest.mark.skipif(
    not sanitizer.runtimes(toolchain.current().compiler), reason="there is no libasan"
)

# Body of the loop → what the checked build says of it.
ASTRAY = {
    "out[i + 1] = x[i] + 0.25f;": (
        "got a write of 4 bytes at shift.cpp:5 in shift: 0 bytes behind the memory of out"
    ),
    "out[i] = x[i - 1] + 0.25f;": (
        "got a read of 4 bytes at shift.cpp:5 in shift: 4 bytes before the memory of x"
    ),
    "((float*)x)[i] = 0;": "got a write at shift.cpp:5 in shift: byte 0 of x",
    "float part[4]; part[i] = x[i]; out[i] = part[i] + 0.25f;": (
        "got undefined behaviour at shift.cpp:5: index 4 out of bounds for type 'float [4]'"
    ),
    "float* heap = new float[2]; out[i] = x[i] + heap[i % 2 + 2]; delete[] heap;": (
        "at shift.cpp:5"
    ),
}


@pytest.mark.one_in(2)
@has_sanitizers
@pytest.mark.parametrize("body", ASTRAY)
def test_a_checked_build_tells_the_line_that_leaves_its_memory(body: str, tmp_path: Path) -> None:
    text = SHIFT.replace("\n    out[i] = x[i] + 0.25f;", f" {{\n    {body} }}")
    (tmp_path / "shift.cpp").write_text(text)
    kernel = fxkit.kernel(shift, cpp=tmp_path / "shift.cpp")
    with pytest.raises(NumericsError, match=re.escape(ASTRAY[body])) as caught:
        kernel.prove(checked=True)
    assert "inputs: x=f32[3,4]" in (caught.value.hint or "")


@has_sanitizers
def test_a_kernel_without_fault_holds_in_a_checked_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shift.cpp").write_text(SHIFT)
    (tmp_path / "mine.py").write_text(
        "import fxkit\n"
        "def shift(x):\n    return x + 0.25\n"
        "kernel = fxkit.kernel(shift, cpp='shift.cpp')\n"
    )
    assert cli.main(["prove-kernels", str(tmp_path / "mine.py"), "--checked"]) == 0
    assert capsys.readouterr().out == "shift on cpu: holds on 48 inputs\n"


def test_a_checked_build_needs_a_source_and_sanitizers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"expected a C\+\+ source for a checked build"):
        fxkit.kernel(shift, call=shift).prove(checked=True)
    monkeypatch.setattr(sanitizer, "runtimes", lambda compiler: ())
    with pytest.raises(UnsupportedError, match="expected a compiler with AddressSanitizer"):
        fxkit.kernel(shift, cpp=SHIFT).prove(checked=True)


def marked(marker: Path) -> str:
    """Return a text whose library leaves a mark when it is loaded."""
    return (
        f'#include <cstdio>\nstatic bool marks = (fclose(fopen("{marker}", "w")), true);\n{SHIFT}'
    )


def refuse_signature(text: str) -> None:
    with pytest.raises(UnsupportedError):
        fxkit.kernel(shift, cpp=text.replace("const float", "float"))


def refuse_option(text: str) -> None:
    with pytest.raises(UnsupportedError):
        fxkit.kernel(shift, cpp=text, flags="-O1")


def refuse_to_build(text: str) -> None:
    with pytest.raises(BuildError, match=r"kernel:7:\d+: error: .nowhere. was not declared"):
        fxkit.kernel(shift, cpp=text.replace("0.25f", "nowhere")).prove()


def refuse_operands(text: str) -> None:
    kernel = fxkit.kernel(shift, cpp=text)
    wide = torch.randn(3, dtype=torch.float64)
    assert torch.equal(kernel(wide), wide + 0.25)


@pytest.mark.parametrize(
    "refuse", [refuse_signature, refuse_option, refuse_to_build, refuse_operands]
)
def test_nothing_of_a_refused_source_runs(refuse: Callable[[str], None], tmp_path: Path) -> None:
    refuse(marked(tmp_path / "mark"))
    assert not (tmp_path / "mark").exists()


def test_a_kernel_whose_proof_fails_runs_in_a_process_of_its_own_alone(tmp_path: Path) -> None:
    marker = tmp_path / "mark"
    text = marked(marker).replace("0.25f", "0.5f")
    kernel = fxkit.kernel(shift, cpp=text)
    program = fxkit.compile(shift, kernels=[kernel])
    x = torch.randn(5)
    with pytest.warns(UserWarning, match="kernel shift is left out"), torch.no_grad():
        program(x)
    marker.unlink()  # the proof's process has left it
    with torch.no_grad():
        torch.testing.assert_close(program(x), shift(x))
    assert not marker.exists()
    assert str(kernel.natives["cpu"].path) not in Path("/proc/self/maps").read_text()


def test_a_fault_of_a_signature_is_told_in_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "libact.so").touch()
    with pytest.raises(UnsupportedError, match="got long n") as caught:
        fxkit.kernel(
            lambda x: x.relu(),
            library=tmp_path / "libact.so",
            signature="void act(const float* x, float* out, long n)",
        )
    assert "from:  the signature for libact.so:1 in act" in str(caught.value)


def test_a_kernel_of_numbers_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected an operand that is a tensor, got x as"):
        fxkit.kernel(lambda x: x.tanh(), cpp="void f(float x, float* out, long out_numel) {}")


def test_a_call_with_other_arguments_tells_the_kernel() -> None:
    kernel = fxkit.kernel(lambda x, y: x * y, call=torch.mul, name="times")
    for args in ((), (torch.ones(2),), (torch.ones(2),) * 3):
        with pytest.raises(TypeError, match=r"times\(x, y\): (missing|too many)"):
            kernel(*args)


def test_an_empty_text_is_no_file() -> None:
    with pytest.raises(UnsupportedError, match="the text of a kernel, got '', and there is no"):
        fxkit.kernel(lambda x: x.tanh(), cpp="")


def test_operands_that_broadcast_are_left_out_by_where() -> None:
    text = """
    void scaled(const float* x, const float* y, float* out, long x_numel) {
      for (long i = 0; i < x_numel; ++i) out[i] = x[i] * y[i];
    }"""
    kernel = fxkit.kernel(lambda x, y: x * y, name="scaled", cpp=text)
    with pytest.raises(NumericsError) as caught:
        kernel.prove()
    assert "where= says which operands it takes" in (caught.value.hint or "")

    def alike(match: Any) -> bool:
        return match.type("x").shape == match.type("y").shape

    wrong = text.replace("x[i] *", "x[i] +")
    narrowed = fxkit.kernel(lambda x, y: x * y, name="scaled", cpp=wrong, where=alike)
    with pytest.raises(NumericsError) as caught:
        narrowed.prove()
    assert "where=" not in (caught.value.hint or "")
