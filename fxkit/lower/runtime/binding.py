"""The C binding that runs whole programs in one call: built once, and checked before it is trusted.

It reads tensors where torch keeps them. What it takes for granted of that is found and checked by
`_find_layout` on sample tensors, against what torch itself says; where anything differs, or there
is no compiler or no header of Python's, there is no binding, and programs run in Python.
"""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from fxkit import config
from fxkit.errors import BuildError
from fxkit.ir.modes import is_followed
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import cache_folder, is_built, library_path
from fxkit.lower.building.toolchain import Linking
from fxkit.torch_adapters.autograd_state import DeviceType
from fxkit.torch_adapters.grad_modes import is_any_autocast_enabled
from fxkit.torch_adapters.modes import count_dispatch_modes, count_function_modes
from fxkit.torch_adapters.operators import can_read_keys, dispatch_keys
from fxkit.torch_adapters.tensors import impl_address_of, is_view_of_another

_NAME = "fxkit_binding"
# The first two know neither Python nor torch.
_PARTS = (
    "pool.cpp",
    "kernel_run.cpp",
    "declarations.cpp",
    "tensors.cpp",
    "fingerprint.cpp",
    "program_parts.cpp",
    "program.cpp",
    "entry_parts.cpp",
    "entry.cpp",
    "autograd_node.h",
    "gradient_rules.cpp",
    "calls.cpp",
    "module.cpp",
)


_loaded: list[Any] = []
_started: list[threading.Thread] = []


def start() -> None:
    """Begin to build the binding while something else is done; `load` waits for it.

    A process that ends meanwhile waits too: what was begun is there for the next one.
    """
    if _loaded or _started or config.current().backend == "eager":
        return
    cache_folder()  # which warns of an unfit one, as is best done in this thread
    try:
        linking = _linking()  # in this thread: sysconfig's tables are half full to a second one
    except BuildError:
        return
    thread = threading.Thread(target=_build_ahead, args=(linking,), name=_NAME)
    _started.append(thread)
    thread.start()


def _build_ahead(linking: Linking) -> None:
    try:
        library_path(_source(), linking=linking)
    except (BuildError, OSError):
        return  # `load` finds it again, and does without


def finish() -> None:
    """Wait for what `start` has begun, as must be done before a folder goes that it builds in."""
    for thread in _started:
        thread.join()


def is_awaited() -> bool:
    """Tell whether `load` would wait for a compiler that `start` has begun to run."""
    if _loaded or not any(thread.is_alive() for thread in _started):
        return False
    try:
        return not is_built(_source(), linking=_linking())
    except BuildError:
        return False


def load() -> Any | None:
    """Return the binding; None where there can't be one."""
    if not _loaded and _is_quiet():
        asked = config.current()
        _loaded.extend(_load(asked.cxx, asked.cache_dir))
    return loaded()


def loaded() -> Any | None:
    """Return the binding if it has been loaded already."""
    return _loaded[0] if _loaded else None


def miss() -> Any:
    """Return what a program answers where it does not hold; None without a binding."""
    return _loaded[0].MISS if _loaded else None


@functools.cache
def _load(cxx: str | None, cache_dir: Path) -> tuple[Any, ...]:
    """Return the binding alone, or nothing where a compiler and a cache can't make one.

    Both are read from the configuration further down; here they are the keys of what is kept.
    """
    if not can_read_keys or DeviceType is None:
        return ()
    try:
        path, _ = library_path(_source(), linking=_linking())
        module = _import(path)
    except (BuildError, ImportError, OSError):
        return ()
    if not (_find_layout(module) and all(_is_read_well(module, t) for t in _samples())):
        return ()
    module.limit_memory(config.current().pool_bytes)
    return (module,)


def _is_quiet() -> bool:
    """Tell whether no mode is on that would be taken for the usual state of things."""
    return not (
        count_function_modes()
        or count_dispatch_modes()
        or is_any_autocast_enabled()
        or is_followed()
    )


@functools.cache
def _source() -> str:
    return native_text(*_PARTS)


def native_text(*parts: str) -> str:
    """Return the text of parts of what is written in C++ here, one after the other."""
    folder = Path(__file__).parent / "native"
    return "\n".join((folder / part).read_text() for part in parts)


def _linking() -> Linking:
    """Return what the binding is linked with; raise BuildError where there is no compiler."""
    tools = toolchain.current()
    return _linking_for(tools.march, tools.openmp)


@functools.cache
def _linking_for(march: str, openmp: tuple[str, ...]) -> Linking:
    return Linking(
        (sysconfig.get_paths()["include"],),
        (str(Path(torch.__file__).parent / "lib"),),
        ("torch_python", "torch_cpu", "c10"),
        ("-O1", march, "-fno-exceptions", "-fno-rtti", *openmp),
        str(sysconfig.get_config_var("SOABI")),
    )


def _import(path: Path) -> Any:
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"expected an extension module, got {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _samples() -> Iterator[torch.Tensor]:
    with torch.inference_mode(False):
        yield torch.zeros(2, 3)
        yield torch.zeros(3, 5, dtype=torch.bfloat16).t()[1:]
        yield torch.zeros((), dtype=torch.int64)
        yield torch.zeros(0, 4, dtype=torch.bool)
        yield torch.zeros(4, requires_grad=True)
        yield torch.nn.Parameter(torch.zeros(1, 2, 1, 1), requires_grad=False)
        yield torch.zeros(4, dtype=torch.complex64).conj()
        yield torch.zeros(2, device="meta")
        yield torch.zeros(4, dtype=torch.complex64).conj().imag
    with torch.inference_mode():
        yield torch.zeros(7, dtype=torch.float64)


def _find_layout(module: Any) -> bool:
    samples = list(_samples())
    described = tuple((t, impl_address_of(t), keys_of(t), _has_autograd(t)) for t in samples)
    with torch.inference_mode(False):
        if module.read_local_keys() != (0, 0):
            return False
    with torch.inference_mode():
        inference = module.read_local_keys()
    keys = (keys_of(samples[0]), keys_of(samples[-1]))
    classes = (torch.Tensor, torch.nn.Parameter)
    return module.find_layout(*classes, described, keys, inference)


def _has_autograd(tensor: torch.Tensor) -> bool | None:
    """Tell whether a tensor has metadata of autograd; None where that is not known."""
    if tensor.requires_grad:
        return True
    return None if isinstance(tensor, torch.nn.Parameter) or is_view_of_another(tensor) else False


def keys_of(tensor: torch.Tensor) -> int:
    """Return a tensor's dispatch keys as a number."""
    return dispatch_keys(tensor)


def _is_read_well(module: Any, tensor: torch.Tensor) -> bool:
    """Tell whether the binding reads of a tensor what torch says."""
    if tensor.device.type != "cpu":
        return True
    found = module.describe(tensor)
    expected = (
        module.describe(torch.empty(0, dtype=tensor.dtype))[0],
        tuple(tensor.shape),
        tensor.stride(),
        tensor.data_ptr(),
        tensor.requires_grad,
    )
    return found == expected


@functools.cache
def code_of(dtype: torch.dtype) -> int:
    """Return torch's number for a dtype, as the binding reads it."""
    if not _loaded:
        raise LookupError("the binding")
    with torch.inference_mode(False):
        return _loaded[0].describe(torch.empty(0, dtype=dtype, device="cpu"))[0]


def can_read(device: torch.device) -> bool:
    """Tell whether the binding can check that a tensor is on a device."""
    if device.type == "cpu":
        return True
    return device.type == "cuda" and device.index is not None and torch.cuda.is_available()


@functools.cache
def place_of(device: torch.device) -> tuple[int, int, int, int]:
    """Return a device as the binding knows it: kind, index, keys of its tensors, of inference's."""
    with torch.inference_mode(False):
        plain = keys_of(torch.empty(0, device=device))
    with torch.inference_mode():
        inference = keys_of(torch.empty(0, device=device))
    return DeviceType.CUDA.value, device.index, plain, inference
