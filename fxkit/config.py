"""The environment variables that fxkit reads: all of them, and nowhere else.

| variable | default | meaning |
|---|---|---|
| `FXKIT_CACHE_DIR` | `$XDG_CACHE_HOME/fxkit` or `~/.cache/fxkit` | where built kernels are kept |
| `FXKIT_CXX` | `$CXX`, else `g++`, else `c++` | the C++ compiler |
| `FXKIT_BACKEND` | `cpp` | `eager` turns code generation off |
| `FXKIT_CPU_LEVEL` | `native` | the most that kernels use: `avx512`, `avx2` or `baseline` |
| `FXKIT_MAX_REWRITES` | unlimited | how many rewrites may be applied in one run: for bisecting |
| `FXKIT_POOL_MB` | `1024` | memory in MB that is kept for the next call; 0 keeps none |
| `FXKIT_DUMP` | off | folder that every stage of each compile is written to, as text |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxkit.errors import UnsupportedError

BACKENDS = ("cpp", "eager")
CPU_LEVELS = ("native", "avx512", "avx2", "baseline")


@dataclass(frozen=True)
class Config:
    """What the environment asks for, at the moment it is read.

    Attributes:
        cache_dir: Folder that holds the built kernels.
        cxx: The C++ compiler asked for, or None to look for one on the PATH.
        backend: `cpp` or `eager`.
        max_rewrites: Bound on rewrites in one run, or None.
        pool_bytes: Bound on the memory that is kept for the next call, in bytes.
        dump: Folder for the stages of each compile, or None.
        cpu_level: Instruction sets that kernels may use: `native` for all that the processor has.
    """

    cache_dir: Path
    cxx: str | None
    backend: str
    max_rewrites: int | None
    pool_bytes: int = 1024 << 20
    cpu_level: str = CPU_LEVELS[0]
    dump: Path | None = None


def current(environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration from the environment.

    Args:
        environ: Variables to read; the process's own when left out.

    Raises:
        UnsupportedError: When a variable holds a value that it can't have.
    """
    env = os.environ if environ is None else environ
    return Config(
        cache_dir=_cache_dir(env),
        cxx=env.get("FXKIT_CXX") or env.get("CXX") or None,
        backend=_choice(env, "FXKIT_BACKEND", BACKENDS),
        max_rewrites=_count(env, "FXKIT_MAX_REWRITES"),
        pool_bytes=(1024 if (kept := _count(env, "FXKIT_POOL_MB")) is None else kept) << 20,
        cpu_level=_choice(env, "FXKIT_CPU_LEVEL", CPU_LEVELS),
        dump=Path(env["FXKIT_DUMP"]).expanduser() if env.get("FXKIT_DUMP") else None,
    )


def cpu_level() -> str:
    """Return `current().cpu_level` alone: kernels are printed by it, line by line.

    Raises:
        UnsupportedError: When the variable holds no level.
    """
    return _choice(os.environ, "FXKIT_CPU_LEVEL", CPU_LEVELS)


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: that of this one, with `variables` set in it."""
    return {**os.environ, **variables}


@contextmanager
def using_cache_dir(folder: Path) -> Iterator[None]:
    """Keep built kernels in another folder inside the block, for the whole process."""
    before = os.environ.get("FXKIT_CACHE_DIR")
    os.environ["FXKIT_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FXKIT_CACHE_DIR"]
        else:
            os.environ["FXKIT_CACHE_DIR"] = before


def _cache_dir(env: Mapping[str, str]) -> Path:
    if env.get("FXKIT_CACHE_DIR"):
        return Path(env["FXKIT_CACHE_DIR"]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxkit"


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = env.get(name) or choices[0]
    if value not in choices:
        raise UnsupportedError(
            f"expected {name} to be one of {', '.join(choices)}, got {value!r}",
            hint=f"unset {name} to get {choices[0]!r}",
        )
    return value


def _count(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not value.isdigit():
        raise UnsupportedError(
            f"expected {name} to be a count, got {value!r}", hint=f"unset {name} for the default"
        )
    return int(value)
