"""The environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxkit import config
from fxkit.errors import UnsupportedError


def test_defaults():
    found = config.current({"HOME": "/nowhere"})
    assert found.cache_dir == Path.home() / ".cache" / "fxkit"
    assert (found.cxx, found.backend, found.max_rewrites) == (None, "cpp", None)
    assert found.cpu_level == "native"


def test_variables_are_read():
    found = config.current(
        {
            "FXKIT_CACHE_DIR": "/var/kernels",
            "FXKIT_CXX": "clang++",
            "CXX": "g++",
            "FXKIT_BACKEND": "eager",
            "FXKIT_MAX_REWRITES": "3",
            "FXKIT_CPU_LEVEL": "avx2",
            "FXKIT_DUMP": "/var/stages",
        }
    )
    expected = config.Config(
        Path("/var/kernels"), "clang++", "eager", 3, cpu_level="avx2", dump=Path("/var/stages")
    )
    assert found == expected


def test_common_variables_are_followed():
    found = config.current({"XDG_CACHE_HOME": "/xdg", "CXX": "g++-12"})
    assert (found.cache_dir, found.cxx) == (Path("/xdg/fxkit"), "g++-12")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FXKIT_BACKEND", "cuda", "one of cpp, eager, got 'cuda'"),
        ("FXKIT_MAX_REWRITES", "-1", "a count, got '-1'"),
        ("FXKIT_CPU_LEVEL", "avx", "one of native, avx512, avx2, baseline, got 'avx'"),
    ],
)
def test_impossible_values_are_refused(name, value, message):
    with pytest.raises(UnsupportedError, match=message):
        config.current({name: value})


def test_only_config_reads_the_environment():
    root = Path(config.__file__).parent
    readers = [
        path.name
        for path in root.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv(" in path.read_text()
    ]
    assert readers == ["config.py"]
