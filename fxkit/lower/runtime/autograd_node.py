"""The node of autograd for calls of operators of one's own, in C++.

It is the one part that needs torch's headers, which take 10 to 20 seconds to compile, so it is a
library of its own, and nobody waits for it: a process that has asked for many gradients builds it
meanwhile, for itself and for later ones. Without it calls go through `torch.autograd.Function`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sysconfig
import threading
from pathlib import Path

import torch

from fxkit.errors import BuildError
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import is_built, library_path, load
from fxkit.lower.building.toolchain import Linking
from fxkit.lower.runtime import binding

# So many backwards of calls show that it pays to build the node.
MANY = 200

_NAME = "fxkit_autograd_node"
_FUNCTION = "fx_attach_node"

_attached: list[ctypes.CDLL] = []
_started: list[threading.Thread] = []
_asked = itertools.count(1)


def attach() -> bool:
    """Build the node where there is none, and let the binding use it; tell whether it does."""
    native = binding.load()
    if native is None or not _has_headers():
        return False
    if not _attached:
        try:
            path, _ = library_path(_source(), linking=_linking())
            _attach_from(path)
        except (BuildError, OSError, AttributeError):
            return False
    return True


def attach_if_built() -> None:
    """Let the binding use the node, where an earlier process has built it."""
    native = binding.loaded()
    if _attached or native is None or not _has_headers():
        return
    try:
        text, linking = _source(), _linking()
        if is_built(text, linking=linking):
            _attach_from(library_path(text, linking=linking)[0])
    except (BuildError, OSError, AttributeError):
        return


def note_backward() -> None:
    """Count a backward that went through Python; begin to build the node where they are many."""
    if _attached or _started or next(_asked) < MANY or binding.loaded() is None:
        return
    if not _has_headers():
        return
    try:
        _linking()  # in this thread: sysconfig's tables are half full to a second one
    except BuildError:
        return
    thread = threading.Thread(target=attach, name=_NAME)
    _started.append(thread)
    thread.start()


def finish() -> None:
    """Wait for what has been begun, as must be done before a folder goes that it builds in."""
    for thread in _started:
        thread.join()


def _attach_from(path: Path) -> None:
    library = load(path)
    function = getattr(library, _FUNCTION)
    native = binding.loaded()
    if native is not None and not _attached:
        _attached.append(library)
        native.attach_by(ctypes.cast(function, ctypes.c_void_p).value)


def _include() -> Path:
    return Path(torch.__file__).parent / "include"


@functools.cache
def _has_headers() -> bool:
    return (_include() / "torch" / "csrc" / "autograd" / "function.h").exists()


@functools.cache
def _source() -> str:
    return binding.native_text("autograd_node.h", "autograd_node.cpp")


def _linking() -> Linking:
    return _linking_for(toolchain.current().march)


@functools.cache
def _linking_for(march: str) -> Linking:
    folder = _include()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Linking(
        (
            str(folder),
            str(folder / "torch" / "csrc" / "api" / "include"),
            sysconfig.get_paths()["include"],
        ),
        (str(folder.parent / "lib"),),
        ("torch_python", "torch_cpu", "torch", "c10"),
        ("-std=c++20", "-O1", march, "-fvisibility=hidden", abi),
        f"{sysconfig.get_config_var('SOABI')} torch {torch.__version__}",
    )
