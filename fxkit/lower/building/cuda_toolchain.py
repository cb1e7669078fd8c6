"""What kernels for a GPU are built with: nvcc, its flags, and the GPUs that the result serves."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import torch

from fxkit.errors import BuildError
from fxkit.lower.building.toolchain import Toolchain, identity_of

# Same numbers as eager: what is not written as one operation is rounded as two.
FLAGS = ("-std=c++17", "-O3", "--fmad=false", "-diag-suppress=177,550")

# Where there is no GPU to ask: for those of compute capability 8 and 9, and for later ones.
CAPABILITIES = ("80", "90")

_USUAL_PLACE = Path("/usr/local/cuda/bin/nvcc")


def current(gpu: torch.device | None = None) -> Toolchain:
    """Return nvcc with its flags for the GPU that is there.

    Args:
        gpu: The GPU, where there are several kinds; the current one when left out.

    Raises:
        BuildError: When there is no nvcc.
    """
    compiler = nvcc()
    if compiler is None:
        raise BuildError(
            f"expected nvcc, got none: looked in CUDA_HOME, on the PATH and for {_USUAL_PLACE}",
            hint="install the CUDA toolkit, or put its bin folder on the PATH",
        )
    return for_capability(compiler, _capability(gpu))


@functools.cache
def for_capability(compiler: str, capability: str | None) -> Toolchain:
    """Return nvcc at a path with its flags for a compute capability; see `targets`."""
    # The language is named, since the text lies in a file that another compiler could read too.
    library = ("-x", "cu", "-Xcompiler", "-fPIC")
    return Toolchain(compiler, (*FLAGS, *targets(capability)), None, identity_of(compiler), library)


def nvcc() -> str | None:
    """Return the path of nvcc, or None."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is not None and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or (str(_USUAL_PLACE) if _USUAL_PLACE.exists() else None)


def targets(capability: str | None) -> tuple[str, ...]:
    """Return nvcc's flags for a compute capability such as "90"; for usual ones when not known."""
    if capability is not None:
        return ("-gencode", f"arch=compute_{capability},code=sm_{capability}")
    last = CAPABILITIES[-1]
    flags = [f"arch=compute_{c},code=sm_{c}" for c in CAPABILITIES]
    flags.append(f"arch=compute_{last},code=compute_{last}")
    return tuple(part for flag in flags for part in ("-gencode", flag))


def _capability(gpu: torch.device | None) -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(gpu)
    return f"{major}{minor}"
