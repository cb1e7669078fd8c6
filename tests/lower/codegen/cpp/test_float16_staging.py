"""Elements of float16: their conversions, and loops that walk them in order."""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.lower.building import toolchain
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.codegen.cpp.float16_staging import BLOCK, HALVES, StagedHalves
from tests.lower.kernels import body, compiled_for, halves_of, text_of
from tests.sampling import one_in

Program = Callable[..., Tensor]

_MAP = """
#define MAP(name, T, U) extern "C" void map_##name(U* y, const T* x, long n) { \\
  for (long i = 0; i < n; ++i) y[i] = fx_##name(x[i]); }
typedef unsigned short Half;
MAP(from_f16, Half, float) MAP(from_lone_f16, Half, float)
MAP(to_f16, float, Half) MAP(to_lone_f16, float, Half)
MAP(round_f16, float, float) MAP(round_lone_f16, float, float)
extern "C" void map_widen(float* y, const Half* x, long n) { fx_widen(x, y, n); }
extern "C" void map_narrow(Half* y, const float* x, long n) { fx_narrow(x, y, n); }
"""

# What older processors of the kind have, whose code runs here as well.
_OLDER = {"x86_64": {"f16c": ["-mno-avx512f"], "none": ["-march=x86-64"]}}
PROCESSORS = {"this": [], **_OLDER.get(platform.machine(), {})}


@pytest.fixture(scope="module", params=PROCESSORS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("halves")
    source, binary = folder / "halves.cpp", folder / "halves.so"
    text = [vector_math.BASICS, vector_math.definitions({"fx_f16"}), HALVES, _MAP]
    source.write_text("\n".join(text))
    tools = toolchain.current()
    flags = [*tools.flags, *tools.library_flags, *PROCESSORS[request.param], "-shared"]
    subprocess.run([tools.compiler, *flags, str(source), "-o", str(binary)], check=True)
    return Library(binary)


class Library:
    """Conversions, each mapped over a tensor."""

    def __init__(self, path: Path) -> None:
        self._handle = ctypes.CDLL(str(path))

    def __call__(self, name: str, x: Tensor, y: Tensor, count: int | None = None) -> Tensor:
        pointers = ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr())
        size = ctypes.c_long(x.numel() if count is None else count)
        getattr(self._handle, f"map_{name}")(*pointers, size)
        return y


def all_halves() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)


@functools.cache
def boundaries() -> Tensor:
    """Return the floats about each half, and about each number between two of them."""
    halves = all_halves().float()
    finite = halves[halves.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    largest = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 2.0**115, 3e38, torch.inf])
    tiny = torch.tensor([1e-45, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-14, 0.0])
    special = torch.cat([largest, tiny])
    found = torch.cat([finite, middle, special, -special])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    spread = torch.arange(-(2**31), 2**31, 10007, dtype=torch.int64).to(torch.int32)
    return torch.cat(
        [found, found.nextafter(up), found.nextafter(down), spread.view(torch.float32)]
    )


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """Return room for some elements that begins at a multiple of 64 bytes."""
    room = torch.full((count + 64,), 7, dtype=dtype)
    return room[-room.data_ptr() % 64 // room.itemsize :][:count]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    bits = torch.int16 if found.dtype == torch.float16 else torch.int32
    both_nan = found.isnan() & expected.isnan()
    return bool((both_nan | (found.view(bits) == expected.view(bits))).all())


@pytest.mark.parametrize("name", ["from_f16", "from_lone_f16", "widen"])
def test_every_half_as_a_float(library: Library, name: str) -> None:
    x = all_halves()
    assert same_bits(library(name, x, aligned(x.numel(), torch.float32)), x.float())


@pytest.mark.parametrize("name", ["to_f16", "to_lone_f16", "narrow"])
def test_floats_become_the_nearest_halves(library: Library, name: str) -> None:
    values = boundaries()
    x = aligned(values.numel(), torch.float32).copy_(values)
    assert same_bits(library(name, x, torch.empty_like(x, dtype=torch.float16)), x.half())


@pytest.mark.parametrize("name", ["round_f16", "round_lone_f16"])
def test_floats_are_rounded_as_halves_are(library: Library, name: str) -> None:
    x = boundaries()
    assert same_bits(library(name, x, torch.empty_like(x)), x.half().float())


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 17, 31, 40, 47, 63])
def test_nothing_is_touched_beside_the_elements(library: Library, count: int) -> None:
    for shift in range(3):
        halves, floats = torch.randn(80).half(), aligned(80, torch.float32)
        library("widen", halves[shift:], floats, count)
        assert torch.equal(floats[:count], halves[shift : shift + count].float())
        assert bool((floats[-(-count // 16) * 16 :] == 7).all())  # whole vectors, as there is room
        floats, halves = floats.copy_(torch.randn(80)), torch.full((80,), 7.0).half()
        library("narrow", floats, halves[shift:], count)
        assert torch.equal(halves[shift : shift + count], floats[:count].half())
        assert bool((halves[:shift] == 7).all() and (halves[shift + count :] == 7).all())


EXACT: dict[str, Program] = {
    "add": lambda x, y: x + y,
    "chain": lambda x, y: (x * y + 1.5) * y - x.abs(),
    "choice": lambda x, y: torch.where(x > y, -x, y * 2),
    "bounded": lambda x, y: torch.relu(x).clamp(max=3.0) + y,
    "root": lambda x, y: x.abs().sqrt() / y,
    "wider": lambda x, y: x.float() * y,
    "back": lambda x, y: (x.float() * 3 + y).half(),
    "compare": lambda x, y: x * 2 > y,
    "turned": lambda x, y: x.view(256, 256).t() * 3 + y.view(256, 256),
    "flipped": lambda x, y: x.flip(0) * 3 + y,
    "joined": lambda x, y: torch.cat([x * 3, y + 1], -1) * 3,
    "padded": lambda x, y: F.pad(x.view(16, 4096), (5, 300)) * 3 + 1,
    "strided": lambda x, y: x[::2] * 3 + y[1::2],
    "column": lambda x, y: x.view(256, 256) * 3 + y.view(256, 256)[:, :1],
    "row": lambda x, y: x.view(-1, 8) * 3 + y[:8],
    "stacked": lambda x, y: torch.stack([x * 3, y + 1]) * 3,
    "gathered": lambda x, y: x[torch.arange(65535, -1, -1)] * 3 + y,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EXACT)
def test_every_half_is_computed_with_as_in_eager(name: str) -> None:
    x = all_halves()
    for y in (x.flip(0).roll(7).clone(), halves_of(2**16), torch.full_like(x, -0.0)):
        found, expected = compiled_for(EXACT[name], x, y)(x, y), EXACT[name](x, y)
        assert found.dtype == expected.dtype
        if expected.dtype == torch.bool:
            assert torch.equal(found, expected)
        else:
            assert same_bits(found.contiguous(), expected.contiguous())


ROWS: dict[str, Program] = {
    "softmax": lambda x, y: torch.softmax(x * 2 + y, -1),
    "layer_norm": lambda x, y: F.layer_norm(x + y, x.shape[-1:]),
    "rms_norm": lambda x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * y,
    "extrema": lambda x, y: x.amax(-1, keepdim=True) - (x * y).amin(-1, keepdim=True) + y,
    "total": lambda x, y: (x * y).sum(),
    "down": lambda x, y: (x * y).sum(0),
    "largest_down": lambda x, y: (x * y).amax(0),
    "summed_up": lambda x, y: torch.cumsum(x * y, -1),
    "gelu": lambda x, y: F.gelu(x) * F.gelu(y),
    "waves": lambda x, y: torch.sin(x * 9) + torch.cos(y),
    "both": lambda x, y: torch.stack([(x + y).softmax(-1), (x * y).float().cumsum(-1).half()]),
}


@pytest.mark.parametrize(("length", "name"), one_in(3, [5, 32, 257, 1024, 1058, 5000], ROWS))
def test_rows_of_every_length(name: str, length: int) -> None:
    x, y = halves_of(5, length), halves_of(5, length, seed=1)
    x[3, -1], y[4, length // 2] = 30, -30
    found, expected = compiled_for(ROWS[name], x, y)(x, y), ROWS[name](x, y)
    exact = ROWS[name](x.double(), y.double())
    if name == "both":
        exact[1] = (x * y).double().cumsum(-1)
    assert found.dtype == expected.dtype
    error, allowed = (found - exact).abs().max(), (expected - exact).abs().max()
    assert error <= 2 * allowed + 1e-3 * exact.abs().max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", [0, 255, 256, 511])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_met_everywhere(place: int, special: float) -> None:
    x, y = halves_of(3, 512), halves_of(3, 512, seed=1)
    x[1, place] = special
    for name in ("softmax", "layer_norm", "rms_norm", "extrema", "down", "largest_down"):
        found, expected = compiled_for(ROWS[name], x, y)(x, y), ROWS[name](x, y)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())


def test_what_is_walked_in_order_is_converted_apart() -> None:
    x = halves_of(8, 5000)
    text = body(text_of(lambda x, y: x * y + x, x, x))
    assert text.count("fx_widen(") == 2 and text.count("fx_narrow(") == 1
    assert f"base += {BLOCK}" in text and "fx_from" not in text and "fx_to" not in text
    assert body(text_of(lambda x: torch.softmax(x, -1), x[:, :200])).count("fx_widen(") >= 1
    text = body(text_of(lambda x, y: torch.cat([x * 2, y], -1) * 3, x, x))
    assert text.count("fx_widen(") == 2  # each part of the row reads one of the two
    assert "fx_widen(&x" in body(text_of(lambda x, y: x.t() * 2 + y, x, x.t().contiguous()))
    assert "fx_widen(&x" in body(text_of(lambda x, y: F.gelu(x + y), halves_of(99, 7), x[0, :7]))


def test_what_is_not_walked_in_order_is_converted_in_the_loop() -> None:
    x = halves_of(8, 5000)
    assert "fx_from_f16(p0[" in body(text_of(lambda x: x[:, ::2] * 3, x))
    assert "fx_from_lone_f16(" in body(text_of(lambda x, y: x * y[:, :1], x, x))
    text = text_of(lambda x: x * 3 + 1, x.float())
    assert "f16" not in text and "fx_widen" not in text


def test_what_an_index_says_is_read_in_a_loop_of_its_own() -> None:
    x, index = halves_of(8, 500), torch.arange(500)
    text = text_of(lambda x, i: x[:, i] * 3, x, index)
    assert "fx_from_lone_f16(p1[" in text and "fx_from_f16(p" not in text
    assert text.index("fx_from_lone_f16(p1[") < text.rindex("#pragma omp simd")
    module = compiled_for(lambda x, i: x[:, i] * 3, x, index)
    for wrong in (500, -501):
        index[7] = wrong
        with pytest.raises(IndexError):
            module(x, index)


def test_what_a_row_does_not_have_is_not_read() -> None:
    x = halves_of(6, 5000)
    text = body(text_of(lambda x, y: torch.stack([x * 2, y + 1]), x, x))
    assert text.count(") fx_widen(") == 2


def test_arrays_hold_whole_vectors() -> None:
    halves = StagedHalves("base", "stop", "j", {})
    assert not halves
    assert halves.read("&p0[base]") == halves.read("&p0[base]") == "h0[j - base]"
    assert halves.write("&p1[base]") == "h1[j - base]"
    assert halves.before("n", 17) == [
        "alignas(64) float h0[32];",
        "alignas(64) float h1[32];",
        "fx_widen(&p0[base], h0, n);",
    ]
    assert halves.after("n") == ["fx_narrow(h1, &p1[base], n);"]
    assert halves
    halves = StagedHalves("0", "n", "j", {3: "float"})
    assert halves and halves.kept(3) == "k3[j]"
    assert halves.before("n", 16) == ["alignas(64) float k3[16];"]


@torch.no_grad()
def test_symbolic_sizes_and_none() -> None:
    rows = fxkit.compile(ROWS["layer_norm"], dynamic=True)
    pointwise = fxkit.compile(EXACT["chain"], dynamic=True)
    down = fxkit.compile(ROWS["down"], dynamic=True)
    for count, length in ((3, 512), (7, 512), (64, 514), (5, 33), (9, 777), (0, 512), (1, 2)):
        x, y = halves_of(count, length), halves_of(count, length, seed=1)
        assert torch.allclose(rows(x, y), ROWS["layer_norm"](x, y), rtol=4e-3, atol=4e-3)
        assert torch.allclose(down(x, y), ROWS["down"](x, y), rtol=4e-3, atol=4e-3)
        assert same_bits(pointwise(x, y), EXACT["chain"](x, y))
