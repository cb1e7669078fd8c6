"""The cache of built kernels, and what goes wrong with caches and compilers."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fxkit import cpu_info
from fxkit.errors import BuildError
from fxkit.lower.autotuning import kept_times
from fxkit.lower.building import build as build_module
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import Order, build, cache_folder, is_built, library_path
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.runtime import binding

SOURCE = 'extern "C" long answer() { return %d; }\n'
ALONE = toolchain.Linking()
LINKED = toolchain.Linking(libraries=("m",), identity="linked with torch")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "_REPLACEMENTS", {})
    yield tmp_path / "cache" / "kernels"


def answer(number: int) -> int:
    return build(SOURCE % number).handle.answer()


def test_a_library_is_built_once(cache: Path) -> None:
    first, second = build(SOURCE % 1), build(SOURCE % 1)
    assert (first.handle.answer(), first.cache_hit, second.cache_hit) == (1, False, True)
    assert first.path == second.path and first.path.parent == cache
    assert build(SOURCE % 2).path != first.path


def test_folder_and_library_are_the_users_own(cache: Path) -> None:
    library = build(SOURCE % 3)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.path.stat().st_mode) == 0o700
    assert not list(cache.glob("build-*"))


SHARED_LOOP = """
extern "C" void doubled(float* values, long length) {
  #pragma omp parallel for
  for (long i = 0; i < length; ++i) values[i] *= 2;
}
"""


@pytest.mark.skipif(not toolchain.current().bare_link, reason="links as the compiler likes")
def test_a_kernel_is_not_linked_with_the_library_of_cxx(cache: Path) -> None:
    library = build(SHARED_LOOP)
    values = (ctypes.c_float * 3)(1, 2, 3)
    library.handle.doubled(values, ctypes.c_long(3))
    assert list(values) == [2, 4, 6]
    assert b"libstdc++" not in library.path.read_bytes()


COPIES = """
extern "C" void* memmove(void*, const void*, unsigned long);
extern "C" void copied(char* to, const char* from, long count) { memmove(to, from, count); }
"""


@pytest.mark.skipif(not toolchain.current().bare_link, reason="links as the compiler likes")
def test_what_calls_the_library_of_c_is_linked_with_it(cache: Path) -> None:
    library, alone = build(COPIES), build(SHARED_LOOP)
    room = ctypes.create_string_buffer(4)
    library.handle.copied(room, b"abc", ctypes.c_long(3))
    assert room.value == b"abc"
    assert b"libc.so" in library.path.read_bytes()
    assert b"libc.so" not in alone.path.read_bytes()


def test_a_text_with_headers_may_throw(cache: Path) -> None:
    library = build(
        "#include <stdexcept>\n#include <string>\n"
        'extern "C" int length(const char* text) {\n'
        "  try { throw std::runtime_error(text); }\n"
        "  catch (const std::runtime_error& e) { return std::string(e.what()).size(); }\n}\n"
    )
    assert library.handle.length(b"three") == 5


LANES_IN_A_VECTOR = """
extern "C" int lanes() {
#if defined(__AVX512F__)
  return 16;
#elif defined(__AVX2__)
  return 8;
#else
  return 4;
#endif
}
"""


@pytest.mark.parametrize(
    ("level", "lanes"), list(zip(cpu_info.known_levels(), (4, 8, 16), strict=False))
)
def test_each_level_has_kernels_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, level: str, lanes: int
) -> None:
    monkeypatch.delenv("FXKIT_CPU_LEVEL", raising=False)
    native, times = build(LANES_IN_A_VECTOR), kept_times.times_path("trials")
    monkeypatch.setenv("FXKIT_CPU_LEVEL", level)
    assert not is_built(LANES_IN_A_VECTOR)
    library = build(LANES_IN_A_VECTOR)
    assert library.handle.lanes() == lanes and library.path != native.path
    assert kept_times.times_path("trials") != times
    assert not matrix_unit.is_available()
    assert binding._linking().flags[1] == toolchain.current().march != "-march=native"


def test_the_key_holds_all_that_matters() -> None:
    tools, alone = toolchain.current(), toolchain.Linking()
    orders = [
        Order((SOURCE,), tools, alone),
        Order((SOURCE + " ",), tools, alone),
        Order((SOURCE, ""), tools, alone),
        Order((SOURCE,), replace(tools, flags=(*tools.flags, "-g")), alone),
        Order((SOURCE,), replace(tools, identity=tools.identity + " "), alone),
        Order((SOURCE,), tools, replace(alone, libraries=("c10",))),
        Order((SOURCE,), tools, replace(alone, flags=("-O0",))),
        Order((SOURCE,), tools, replace(alone, identity="another Python")),
    ]
    assert len({order.key for order in orders}) == len(orders)
    assert orders[0].key == Order((SOURCE,), toolchain.current(), toolchain.Linking()).key
    import torch

    assert torch.__version__ in tools.identity


DAMAGES = {
    "another file": lambda content: b"\x7fELF but no more",
    "nothing": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "cut off near the end": lambda content: content[:-1],
    "one bit": lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_library_is_built_again(
    cache: Path, damage: Callable[[bytes], bytes], request: pytest.FixtureRequest
) -> None:
    """It is not even loaded: that may kill the process."""
    number = 40 + list(DAMAGES).index(request.node.callspec.id)
    path = build(SOURCE % number).path
    sound = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(sound))
    path.chmod(0o700)
    library = build(SOURCE % number)
    assert (library.handle.answer(), library.cache_hit) == (number, False)
    assert len(path.read_bytes()) == len(sound)


def test_a_library_that_others_may_write_is_not_loaded(cache: Path) -> None:
    path = build(SOURCE % 5).path
    path.chmod(0o777)
    assert not build(SOURCE % 5).cache_hit
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_link_in_place_of_a_library_is_not_followed(cache: Path) -> None:
    path = build(SOURCE % 6).path
    moved = cache / "elsewhere.so"
    path.rename(moved)
    path.symlink_to(moved)
    assert not build(SOURCE % 6).cache_hit
    assert not path.is_symlink()


def _folder_for_others(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def _link(cache: Path) -> None:
    (cache.parent.parent / "target").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(cache.parent.parent / "target")


def _file(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_folder_for_others, "others may write to it"), (_link, "symbolic link"), (_file, "exists")],
)
def test_an_unfit_folder_is_replaced(cache: Path, spoil: object, words: str) -> None:
    spoil(cache)  # type: ignore[operator]
    with pytest.warns(UserWarning, match=words) as caught:
        assert answer(7) == 7
    text = str(caught[0].message)
    assert str(cache) in text and "hint:" in text and "expected" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(SOURCE % 7).cache_hit
    replacement = cache_folder()
    assert replacement != cache
    assert stat.S_IMODE(replacement.stat().st_mode) == 0o700


def test_a_foreign_folder_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True, mode=0o700)
    user = os.getuid()
    objection = build_module._objection
    monkeypatch.setattr(
        build_module, "_objection",
        lambda folder: f"it belongs to user {user + 1}" if folder == cache else objection(folder),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="belongs to user"):
        assert answer(8) == 8


def test_ownership_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert build_module._objection(tmp_path) is None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "belongs to user" in str(build_module._objection(tmp_path))


def test_a_folder_that_cannot_be_written_is_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    real = build_module.tempfile.mkdtemp

    def refuse(prefix: str = "", dir: Path | None = None) -> str:
        if dir == cache:
            raise PermissionError(13, "Permission denied")
        return real(prefix=prefix, dir=dir)

    monkeypatch.setattr(build_module.tempfile, "mkdtemp", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert answer(9) == 9


def test_a_full_disk_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_module._compile

    def full(order: Order, name: str, workplace: Path) -> Path:
        if workplace.parent == cache:
            raise build_module._failure("error: No space left on device", cache, name)
        return real(order, name, workplace)

    monkeypatch.setattr(build_module, "_compile", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert answer(10) == 10


ways = pytest.mark.parametrize("linking", [LINKED, ALONE], ids=["load_inline", "directly"])


def made(text: str, linking: toolchain.Linking) -> ctypes.CDLL:
    return build_module.load(library_path(text, linking=linking)[0])


@ways
def test_a_failing_compiler_is_quoted(cache: Path, linking: toolchain.Linking) -> None:
    with pytest.raises(BuildError, match="error:") as caught:
        made('extern "C" int broken() { return nothing; }', linking)
    error = caught.value
    assert "nothing" in error.message
    assert error.command and "main.cpp" in error.command
    assert error.log and "nothing" in Path(error.log).read_text()
    assert not list(cache.glob("build-*"))
    assert made(SOURCE % 11, linking).answer() == 11


@ways
def test_a_library_that_does_not_load_is_a_build_error(
    cache: Path, linking: toolchain.Linking
) -> None:
    """As the binding's, where torch has not got a function that it calls."""
    text = 'extern "C" long nowhere(); extern "C" long f() { return nowhere(); }'
    with pytest.raises(BuildError, match="undefined symbol: nowhere"):
        made(text, linking)
    assert not list(cache.glob("build-*"))
    assert not build_module._REPLACEMENTS


def test_torch_builds_what_is_linked_with_it_and_no_kernels(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    names = []
    real = cpp_extension.load_inline

    def load_inline(name: str, *args: object, **kwargs: object) -> object:
        names.append(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    assert answer(20) == 20
    assert not names
    assert made(SOURCE % 20, LINKED).answer() == 20
    assert len(names) == 1


def test_the_compiler_alone_serves_where_ninja_is_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build_module.shutil.which
    monkeypatch.setattr(
        build_module.shutil, "which", lambda name: None if name == "ninja" else real(name)
    )
    assert made(SOURCE % 12, LINKED).answer() == 12


def test_torchs_precompiled_header_survives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    removals = []
    monkeypatch.setattr(build_module, "_has_precompiled_header", lambda: True)
    monkeypatch.setattr(
        cpp_extension, "remove_extension_h_precompiler_headers", lambda: removals.append(1)
    )
    assert made(SOURCE % 13, LINKED).answer() == 13
    assert not removals


def test_no_compiler_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXKIT_CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler") as caught:
        build(SOURCE % 14)
    assert caught.value.hint and "install g++" in caught.value.hint


def test_threads_build_one_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    real = build_module._compile
    monkeypatch.setattr(build_module, "_compile", lambda *args: (builds.append(1), real(*args))[1])
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(answer(15))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [15] * 4
    assert len(builds) == 1


def test_a_killed_builder_blocks_nobody(cache: Path) -> None:
    """A process that dies while it builds leaves no lock behind, neither ours nor torch's."""
    code = f"""
import os
from fxkit.lower.building import build
build._compile = lambda *args: os._exit(1)
build.build({SOURCE % 16!r})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 1
    assert answer(16) == 16


def test_what_killed_builds_left_behind_is_removed_in_time(cache: Path) -> None:
    cache.mkdir(mode=0o700, parents=True)
    for name, age in (("build-old", 7200), ("build-new", 60)):
        (cache / name).mkdir()
        (cache / name / "main.cpp").touch()
        then = time.time() - age
        os.utime(cache / name, (then, then))
    answer(19)
    assert [path.name for path in cache.glob("build-*")] == ["build-new"]


def test_what_is_built_can_be_asked_without_building_it(cache: Path) -> None:
    assert not is_built(SOURCE % 20)
    path = build(SOURCE % 20).path
    assert is_built(SOURCE % 20) and not is_built(SOURCE % 21)
    path.unlink()  # the process has its file mapped
    path.write_bytes(b"no library")
    assert not is_built(SOURCE % 20)


def test_two_texts_make_one_library(cache: Path) -> None:
    texts = 'extern "C" long one() { return 1; }\n', 'extern "C" long two() { return 2; }\n'
    library = build(*texts)
    assert (library.handle.one(), library.handle.two()) == (1, 2)
    assert build(*texts).cache_hit
    assert not list(cache.glob("build-*"))


def test_one_of_two_texts_that_fails_is_quoted(cache: Path) -> None:
    with pytest.raises(BuildError, match="nothing"):
        build(SOURCE % 17, 'extern "C" int broken() { return nothing; }')
    assert not list(cache.glob("build-*"))


def test_a_lock_that_is_never_given_back_is_passed_by(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(build_module, "_LOCK_SECONDS", 0.1)
    order = Order((SOURCE % 18,), toolchain.current(), toolchain.Linking())
    with open(cache_folder() / f"lock-{order.key[:2]}", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert answer(18) == 18


def test_nowhere_to_build_is_a_build_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, order: Order) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "_build_into", full)
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(BuildError, match="can be built in") as caught,
    ):
        build(SOURCE % 19)
    assert "FXKIT_CACHE_DIR" in str(caught.value)


def test_a_library_finds_torchs_openmp(cache: Path) -> None:
    source = """
extern "C" int omp_get_num_threads();
extern "C" long team(long threads) {
  long found = 0;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    found = omp_get_num_threads();
  }
  return found;
}
"""
    library = build(source)
    assert library.handle.team(ctypes.c_long(2)) == 2
