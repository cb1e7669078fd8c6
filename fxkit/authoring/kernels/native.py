"""A kernel made of a source with a plain signature: built, loaded, and called on tensors."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxkit.authoring.kernels import sanitizer
from fxkit.authoring.kernels.arguments import WORKSPACE, KernelArguments
from fxkit.authoring.kernels.epilogue import Epilogue
from fxkit.authoring.kernels.execution import InProcess, KernelMemory, isolated
from fxkit.authoring.kernels.source import FOUND, KernelSource
from fxkit.authoring.kernels.wrapper import entry_name, pack_numbers, print_wrapper
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.ir.types import TensorType, contiguous_stride

# Kinds of calls whose results and numbers are kept.
_KEPT = 256

Reference = Callable[..., Any]


@dataclass(frozen=True)
class CallForm:
    """What calls of one kind share.

    Attributes:
        function: The function's name in the library.
        results: Shape, strides and dtype of each result, as the pattern's.
        written: The strides that the function writes them with.
        is_copied: For each operand whether the function reads a copy that is laid out row by row.
        workspace: Bytes.
        numbers: The numbers of the call, packed.
    """

    function: str
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    written: tuple[tuple[int, ...], ...]
    is_copied: tuple[bool, ...]
    workspace: int
    numbers: bytes

    @property
    def is_direct(self) -> bool:
        """Whether the function takes operands and results as they lie."""
        strides = tuple(stride for _, stride, _ in self.results)
        return not any(self.is_copied) and self.written == strides


@dataclass(frozen=True)
class NativeKernel:
    """A function of a source, with what its parameters are given.

    Attributes:
        source: Its text.
        arguments: What its parameters are given.
        dtypes: What its type parameter may be.
        computed: Numbers that the user computes from operands and results, by name.
        workspace: Bytes of workspace, or computes them from operands and results.
        reference: The pattern as a function of torch.
        captures: The pattern's parameters.
        epilogue: What its function does with each element before it stores it, if anything.
    """

    source: KernelSource
    arguments: KernelArguments
    dtypes: tuple[torch.dtype, ...]
    computed: Mapping[str, Callable[..., float | int]]
    workspace: int | Callable[..., int]
    reference: Reference
    captures: tuple[str, ...]
    epilogue: Epilogue | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lock", threading.Lock())
        object.__setattr__(self, "_forms", OrderedDict())

    @property
    def device(self) -> str:
        """The kind of device that it runs on."""
        return "cuda" if self.source.is_cuda else "cpu"

    @functools.cached_property
    def path(self) -> Path:
        """The library, built when it is first asked for; raises `BuildError`."""
        return self.source.build(self.wrapper)[0]

    @functools.cached_property
    def checked_path(self) -> Path:
        """The library with the compiler's sanitizers in it; raises `BuildError`."""
        return self.source.build(self.wrapper, sanitizer.FLAGS)[0]

    @functools.cached_property
    def wrapper(self) -> str:
        """The functions that call the user's."""
        generic = self.arguments.signature.template is not None
        dtypes = self.dtypes if generic else (None,)
        pointer = None if self.source.library is None else FOUND
        return print_wrapper(
            self.arguments,
            dtypes,
            is_cuda=self.source.is_cuda,
            pointer=pointer,
            epilogue=self.epilogue,
        )

    def objection(self, types: Sequence[Any]) -> str | None:
        """Return why it does not take operands of some types, or None."""
        reason = self._objection_to_operands(types)
        return reason or self._objection_to_results(types, self._result_types(types))

    def _objection_to_results(
        self, types: Sequence[Any], results: Sequence[TensorType]
    ) -> str | None:
        """Return why it does not give the pattern's results, or None."""
        generic = {t.dtype for n, t in self._operands(types) if self.arguments.is_generic(n)}
        for name, known in zip(self.arguments.results, results, strict=True):
            wanted = self.arguments.dtype(name)
            if self.arguments.is_generic(name):
                wanted = next(iter(generic), known.dtype)
            if wanted is not None and known.dtype != wanted:
                return f"{name} is of {known.dtype}, and its function writes {wanted}"
        return None

    def _objection_to_operands(self, types: Sequence[Any]) -> str | None:
        generic = {t.dtype for n, t in self._operands(types) if self.arguments.is_generic(n)}
        if len(generic) > 1 or not generic <= set(self.dtypes):
            return f"its operands are of {' and '.join(sorted(map(str, generic)))}"
        for name, known in self._operands(types):
            wanted = self.arguments.dtype(name)
            if wanted is not None and known.dtype != wanted:
                return f"{name} is of {known.dtype}, and its function takes {wanted}"
            if known.device.type != self.device:
                return f"{name} is on {known.device}"
        if self.epilogue is None:
            return None
        return self.epilogue.objection(known for _, known in self._operands(types))

    def _operands(self, values: Sequence[Any]) -> list[tuple[str, Any]]:
        names = self.arguments.operands
        return [(n, v) for n, v in zip(self.captures, values, strict=True) if n in names]

    def __call__(self, *values: Any) -> Any:
        """Call the function on what the pattern's parameters stand for."""
        given = dict(zip(self.captures, values, strict=True))
        operands = [given[name] for name in self.arguments.operands]
        form = self.form(given)
        if form is None:
            return self.reference(*values)
        read = [t.contiguous() if c else t for t, c in zip(operands, form.is_copied, strict=True)]
        like = operands[0]
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
            for (shape, _, dtype), stride in zip(form.results, form.written, strict=True)
        ]
        tensors = [*read, *made]
        names = (*self.arguments.operands, *self.arguments.results)
        if self.arguments.has_workspace:
            tensors.append(torch.empty(form.workspace, dtype=torch.uint8, device=like.device))
            names = (*names, WORKSPACE)
        memory = KernelMemory(names, tuple(tensors), len(read))
        execute = isolated() or InProcess(self.path)
        if execute(form.function, memory, form.numbers, torch.get_num_threads()):
            return self.reference(*values)
        results = tuple(
            tensor
            if tensor.stride() == stride
            else torch.empty_strided(shape, stride, dtype=dtype, device=like.device).copy_(tensor)
            for tensor, (shape, stride, dtype) in zip(made, form.results, strict=True)
        )
        return results[0] if len(results) == 1 else results

    def form(self, given: Mapping[str, Any]) -> CallForm | None:
        """Return what calls with such operands share; None where it does not serve them.

        Args:
            given: What the pattern's parameters stand for: tensors, or types, and numbers.
        """
        key = tuple(_key(given[name]) for name in self.captures)
        forms: OrderedDict[Any, CallForm | None] = self._forms  # type: ignore[attr-defined]
        try:
            return forms[key]
        except KeyError:
            found = self._made_form(given)
        with self._lock:  # type: ignore[attr-defined]
            forms[key] = found
            while len(forms) > _KEPT:
                forms.popitem(last=False)
        return found

    def _made_form(self, given: Mapping[str, Any]) -> CallForm | None:
        arguments = self.arguments
        types = {n: TensorType.of(v) if isinstance(v, torch.Tensor) else v
                 for n, v in given.items()}  # fmt: skip
        values = [types[name] for name in self.captures]
        if self._objection_to_operands(values) is not None:
            return None
        results = self._result_types(values)
        if self._objection_to_results(values, results) is not None:
            return None
        copied = tuple(
            not arguments.takes_strides(n) and not _is_row_major(types[n])
            for n in arguments.operands
        )
        written = tuple(
            tuple(t.stride or ())
            if arguments.takes_strides(n) or _is_row_major(t)
            else tuple(contiguous_stride(t.shape))
            for n, t in zip(arguments.results, results, strict=True)
        )
        told = {n: _meta(types[n], c) for n, c in zip(arguments.operands, copied, strict=True)}
        for name, known, stride in zip(arguments.results, results, written, strict=True):
            told[name] = torch.empty_strided(known.shape, stride, dtype=known.dtype, device="meta")
        numbers = {name: given[name] for name in arguments.numbers}
        computed = {n: _called(f, told, numbers, n) for n, f in self.computed.items()}
        workspace = self.workspace
        if callable(workspace):
            workspace = int(_called(workspace, told, numbers, "workspace"))
        generic = next((t.dtype for n, t in {**types, **told}.items()
                        if n in told and arguments.is_generic(n)), None)  # fmt: skip
        return CallForm(
            entry_name(generic if arguments.signature.template else None),
            tuple((tuple(t.shape), tuple(t.stride or ()), t.dtype) for t in results),
            written,
            copied,
            workspace,
            pack_numbers(arguments, told, {**numbers, **computed}),
        )

    def _result_types(self, values: Sequence[Any]) -> tuple[TensorType, ...]:
        """Return the types of what the pattern computes."""
        from fxkit.torch_adapters.fake_tensors import mode_class

        with torch.no_grad(), mode_class()():
            fakes = [_empty(v, v.device) if isinstance(v, TensorType) else v for v in values]
            made = self.reference(*fakes)
            results = made if isinstance(made, (tuple, list)) else (made,)
            return tuple(TensorType.of(result) for result in results)


def _empty(known: TensorType, device: Any) -> torch.Tensor:
    stride = known.stride or ()
    return torch.empty_strided(known.shape, stride, dtype=known.dtype, device=device)


def _meta(known: TensorType, is_copied: bool) -> torch.Tensor:
    return _empty(known, "meta").contiguous() if is_copied else _empty(known, "meta")


def _is_row_major(known: TensorType) -> bool:
    """Tell whether elements lie row by row, whatever the strides of axes of one element are."""
    return _empty(known, "meta").is_contiguous()


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, TensorType):
        return value.shape, value.stride, value.dtype, value.device
    return type(value), value


def _called(
    function: Callable[..., Any], tensors: Mapping[str, Any], numbers: Mapping[str, Any], name: str
) -> Any:
    """Call a function of the user's with those of the operands, results and numbers it names."""
    given = {**tensors, **numbers}
    code = function.__code__
    wanted = code.co_varnames[: code.co_argcount]
    unknown = [n for n in wanted if n not in given]
    if unknown:
        raise UnsupportedError(
            f"expected a function of {', '.join(given)} for {name}, got one of {', '.join(unknown)}"
        )
    try:
        made = function(**{n: given[n] for n in wanted})
    except Exception as error:
        raise NumericsError(
            f"what computes {name} raises {type(error).__name__}: {error}; where= can refuse such "
            "operands"
        ) from error
    if not isinstance(made, (int, float)):
        raise NumericsError(f"what computes {name} gives a {type(made).__name__}, and no number")
    return made
