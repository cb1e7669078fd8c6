"""What this machine builds with: compiler, flags, C library, processor."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fxkit import config, cpu_info
from fxkit.errors import BuildError

# Same numbers as eager: no contraction, no re-association. Floating-point traps and errno, which
# nothing reads, would stop the compiler from making vector code. Threaded jumps turn selections in
# a loop into masks that cost more; unrolled loops wait less for their own results. What else -O3
# does would double the time of compiling, and makes no measured kernel faster. The sine and the
# cosine of one number are not merged into a call that has no vector version. Straight-line code is
# left as it is: for processors without AVX-512, g++ 12 makes vectors of it in which a comparison
# that holds counts as -1, and no measured kernel gains by them.
FLAGS = (
    "-O2",
    "-fvect-cost-model=dynamic",
    "-funswitch-loops",
    "-fsplit-loops",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-thread-jumps",
    "-funroll-loops",
    "-fno-builtin-sin",
    "-fno-builtin-cos",
    "-fno-tree-slp-vectorize",
)

# For many processors that have vectors of 64 bytes, compilers choose those of 32 by themselves:
# what computes much then takes 1.3 times as long. Without AVX, g++ 12 moves eight bytes through
# registers of MMX and leaves them in use, so that the next numbers of x87 are NaN, as those of
# `torch.fmod` and of `long double`.
_ON_X86 = ("-mprefer-vector-width=512", "-mno-mmx")


# A third of a small kernel's build went into reading the C++ library, which each loop that threads
# share asks for by the name of its handler of exceptions; kernels throw none.
_NO_EXCEPTIONS = ("-fno-exceptions",)
_NO_LIBRARY = ("-nostdlib",)
_C_ALONE = (*_NO_LIBRARY, "-lm", "-lc", "-lgcc")


@dataclass(frozen=True)
class Toolchain:
    """A compiler and how it is called.

    Attributes:
        compiler: Path of the C++ compiler.
        flags: Flags for compiling.
        glibc: Version of the C library where it has vector functions, else None.
        identity: Text that differs wherever a kernel built elsewhere might not fit.
        library_flags: Flags that make an object fit into a library.
        bare_flags: More flags for compiling what uses neither a header nor the C++ library.
        bare_link: Flags for linking that.
        bare_link_alone: Flags for linking that where it calls nothing of a library.
    """

    compiler: str
    flags: tuple[str, ...]
    glibc: tuple[int, int] | None
    identity: str
    library_flags: tuple[str, ...] = ("-fPIC",)
    bare_flags: tuple[str, ...] = ()
    bare_link: tuple[str, ...] = ()
    bare_link_alone: tuple[str, ...] = ()

    @property
    def march(self) -> str:
        """The flag that says which processor the code is for."""
        return next(flag for flag in self.flags if flag.startswith("-march="))

    @property
    def openmp(self) -> tuple[str, ...]:
        """The flags for loops that threads share, or that are told to be vectors."""
        return tuple(flag for flag in self.flags if flag.startswith("-fopenmp"))


@dataclass(frozen=True)
class Linking:
    """What a library needs besides its own text.

    Attributes:
        includes: Folders of headers.
        folders: Folders of libraries.
        libraries: Names of libraries.
        flags: Flags for compiling in place of the toolchain's; its own where there are none.
        identity: Text that differs wherever a library built elsewhere might not fit.
    """

    includes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    identity: str = ""

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Flags for the linker."""
        return (*(f"-L{f}" for f in self.folders), *(f"-l{name}" for name in self.libraries))


def current() -> Toolchain:
    """Return the toolchain that the configuration asks for.

    Raises:
        BuildError: When there is no C++ compiler.
        UnsupportedError: When the processor lacks the level that is asked for.
    """
    return _toolchain(config.current().cxx, cpu_info.march())


def has_compiler() -> bool:
    """Tell whether there is a C++ compiler, and kernels are not turned off."""
    if config.current().backend == "eager":
        return False
    try:
        current()
    except BuildError:
        return False
    return True


@functools.cache
def _toolchain(asked: str | None, march: str) -> Toolchain:
    names = (asked,) if asked else ("g++", "c++")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(
            f"expected a C++ compiler, got none: looked for {' and '.join(names)} on the PATH",
            hint="install g++, or point FXKIT_CXX at a compiler",
        )
    openmp = "-fopenmp" if _shares_openmp(found) else "-fopenmp-simd"
    on_x86 = _ON_X86 if platform.machine() == "x86_64" else ()
    flags = (*FLAGS, f"-march={march}", *on_x86, openmp)
    tools = Toolchain(found, flags, vector_library(), identity_of(found))
    if platform.system() != "Linux" or _is_clang(found):
        return tools
    return replace(
        tools, bare_flags=_NO_EXCEPTIONS, bare_link=_C_ALONE, bare_link_alone=_NO_LIBRARY
    )


def identity_of(compiler: str) -> str:
    """Identify compiler, processor and torch without starting the compiler."""
    binary = Path(compiler).resolve()
    state = binary.stat()
    return "\n".join(
        [
            f"{binary} {state.st_size} {state.st_mtime_ns}",
            platform.machine(),
            _processor(),
            torch.__version__,
            os.confstr("CS_GNU_LIBC_VERSION") or "" if platform.system() == "Linux" else "",
        ]
    )


def _processor() -> str:
    """Return what the processor can do, as far as the system tells."""
    if cpu_info.info() is None:
        return platform.processor()
    lines = cpu_info.info_line("model name"), cpu_info.info_line("flags", "Features")
    return "\n".join(line for line in lines if line is not None)


def vector_library() -> tuple[int, int] | None:
    """Return the version of glibc on x86-64, whose libmvec has vector functions, else None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    found = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    return (int(found[1]), int(found[2])) if found else None


def _shares_openmp(compiler: str) -> bool:
    """Tell whether a kernel's threads can be those of the OpenMP runtime that torch has loaded.

    A kernel is not linked with a runtime of its own: its calls find torch's. Two runtimes in one
    process would each start a full set of threads.
    """
    return not _is_clang(compiler) and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def _is_clang(compiler: str) -> bool:
    return "clang" in Path(compiler).resolve().name
