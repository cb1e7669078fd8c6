"""The proof of a kernel: on inputs made for its pattern it computes what that does.

Values, shapes, dtypes, strides and writes to operands are compared over the dtypes that the kernel
claims, over ranks, odd sizes, broadcasting, layouts, empty tensors, NaN, Inf and signed zeros, and
the gradient where it claims one. A kernel with a C++ source runs in a process of its own meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from fxkit.authoring.kernels import sanitizer
from fxkit.authoring.kernels.epilogue_fusion import KernelWithHook
from fxkit.authoring.kernels.execution import Isolated, in_isolation
from fxkit.authoring.kernels.hook_proof import prove_hook
from fxkit.authoring.kernels.native import NativeKernel
from fxkit.errors import FxkitError, NumericsError, UnsupportedError
from fxkit.ir.types import TensorType
from fxkit.patterns.counterexamples import tried, why_refused
from fxkit.patterns.inputs import captures_of, make_operands, operand_cases, pattern_module
from fxkit.patterns.rewriting import Rule

_TRIALS = 48
_HOOK_TRIALS = 2  # of what follows a kernel; each is built

# Sizes at which vectors, blocks and threads leave a rest; for patterns whose operands are alike.
_ODD_SHAPES = ((1,), (17,), (5, 67), (131, 33), (2, 3, 129), (3, 4099))
_NUMBERS: Mapping[type, Any] = {float: 0.75, int: 2, bool: True}
_LAYOUTS = ("as made", "transposed", "every other", "expanded")


class Provable(KernelWithHook, Protocol):
    """What a proof asks of a kernel; see `AuthoredKernel`."""

    rule: Rule
    gradient: Callable[..., Any] | None
    call: Callable[..., Any] | None
    where: Any


def prove_kernel(
    kernel: Provable, device: str = "cpu", *, seed: int = 0, checked: bool = False
) -> int:
    """Hold a kernel to its pattern.

    Args:
        kernel: The kernel.
        device: Where it runs.
        seed: Seed of the random numbers.
        checked: Build the source with sanitizers, which tell the line of a fault.

    Returns:
        How many inputs were compared.

    Raises:
        NumericsError: With the inputs, where the two differ, or the kernel does not serve any.
        UnsupportedError: When a checked build is asked for where there is none.
        BuildError: When the source does not build.
    """
    native = kernel.natives.get(device)
    accepted: list[Mapping[str, Any]] = []
    with _isolation(native, checked) as process:
        compared, reason = _compare_on_cases(kernel, native, device, seed, accepted)
    if not compared:
        raise NumericsError(
            f"expected inputs that {kernel.name} accepts, got none: {reason}",
            hint="give samples= with the shapes and constants that its operands need",
        )
    if process is not None and not process.served:
        raise NumericsError(
            f"expected {kernel.name} to return 0, got another number in all of {compared} calls",
            hint="a function that returns another number leaves the call to torch; is it in the "
            "library?",
        )
    if native is not None and native.arguments.has_hook:
        for values in accepted:
            prove_hook(kernel, values, lambda it: _isolation(it, checked))
    return compared


@contextlib.contextmanager
def _isolation(native: NativeKernel | None, checked: bool) -> Iterator[Isolated | None]:
    if native is None or native.source.is_cuda:
        if checked:
            raise UnsupportedError("expected a C++ source for a checked build, got none")
        yield None
        return
    variables = sanitizer.environment() if checked else None
    path = native.checked_path if checked else native.path
    with in_isolation(path, variables) as process:
        yield process


def _compare_on_cases(
    kernel: Provable,
    native: NativeKernel | None,
    device: str,
    seed: int,
    accepted: list[Mapping[str, Any]],
) -> tuple[int, str]:
    generator = torch.Generator().manual_seed(seed)
    compared, reason = 0, ""
    refused: set[str] = set()
    for case in _cases(kernel, native, seed):
        if compared == _TRIALS:
            break
        if _frozen(case[0]) in refused:
            continue
        values = _operands(kernel, native, case, device, generator)
        program = pattern_module(kernel.rule, values)
        used = captures_of(kernel.rule)
        args = tuple(values[n] for n in used if isinstance(values[n], torch.Tensor))
        try:
            is_accepted, difference = tried(kernel.rule, program, args)
        except NumericsError as error:
            is_accepted, difference = True, error.message
        except FxkitError:
            raise
        except Exception as error:  # a function of the user's own raises what it likes
            is_accepted, difference = True, f"it raises {type(error).__name__}: {error}"
        if difference is not None:
            raise NumericsError(
                f"expected {kernel.name} to compute its pattern, got another result: {difference}",
                source=kernel.rule.file.rpartition("/")[2] or None,
                hint=f"inputs: {_described(values)}{_narrowing(kernel, values)}",
            )
        if is_accepted and kernel.call is not None:
            _check_memory(kernel.name, kernel.call, values)
        compared += is_accepted
        has_elements = all(v.numel() for v in values.values() if isinstance(v, torch.Tensor))
        if is_accepted and has_elements and not case[2] and len(accepted) < _HOOK_TRIALS:
            accepted.append(values)
        if not is_accepted:
            refused.add(_frozen(case[0]))
            reason = reason or why_refused(kernel.rule, program, args)
    return compared, reason


def _check_memory(name: str, call: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise where a function returns memory of an operand, or the same memory twice.

    A graph takes the results of an operator for new memory, to which others may write.
    """
    with torch.no_grad():
        made = call(*values.values())
    taken = {_storage(v): n for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel()}
    for place, result in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
        if not result.numel():
            continue
        owner = taken.setdefault(_storage(result), f"result {place}")
        if owner != f"result {place}":
            raise NumericsError(
                f"expected {name} to return memory of its own, got result {place} in that of "
                f"{owner}",
                hint=f"return a copy, result.clone(); inputs: {_described(values)}",
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_Case = tuple[Mapping[str, Any], torch.dtype | None, tuple[float, ...], str]


def _cases(kernel: Provable, native: NativeKernel | None, seed: int) -> list[_Case]:
    """Return what operands to try; the plainest of each shape comes first."""
    rule = kernel.rule
    dtypes = _claimed(native)
    plain = operand_cases(rule)
    told = [_with_numbers(kernel, sample) for sample, _, _ in plain]
    samples = list({_frozen(sample): sample for sample in told}.values())
    if not any(isinstance(v, tuple) for sample in rule.samples for v in sample.values()):
        names = [n for n, kind in kernel.captures if kind is torch.Tensor]
        others = {n: v for n, v in samples[0].items() if n not in names}
        samples += [{**others, **dict.fromkeys(names, shape)} for shape in _ODD_SHAPES]
    specials = sorted({special for _, _, special in plain}, key=len)
    firsts = [(sample, dtypes[0], (), _LAYOUTS[0]) for sample in samples]
    others = [c for c in itertools.product(samples, dtypes, specials, _LAYOUTS) if c not in firsts]
    random.Random(seed).shuffle(others)
    return [*firsts, *others]


def _with_numbers(kernel: Provable, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample with a number for each of the kernel's that it takes for a tensor."""
    kinds = dict(kernel.captures)
    return {n: _NUMBERS.get(kinds[n], v) if isinstance(v, tuple) else v for n, v in sample.items()}


def _claimed(native: NativeKernel | None) -> tuple[torch.dtype | None, ...]:
    if native is None:
        return (torch.float32, torch.float64)
    return native.dtypes if native.arguments.signature.template is not None else (None,)


def _frozen(sample: Mapping[str, Any]) -> str:
    return repr(sorted(sample.items(), key=lambda item: item[0]))


def _operands(
    kernel: Provable,
    native: NativeKernel | None,
    case: _Case,
    device: str,
    generator: torch.Generator,
) -> dict[str, Any]:
    sample, dtype, specials, layout = case
    values: dict[str, Any] = {}
    for name, kind in kernel.captures:
        own = None if native is None or kind is not torch.Tensor else native.arguments.dtype(name)
        chosen = own or dtype or torch.float32
        value = make_operands(kernel.rule, sample, chosen, specials, generator)[name]
        if isinstance(value, torch.Tensor):
            value = _laid_out(value.detach().to(chosen).to(device), layout)
            if kernel.gradient is not None and not specials and chosen.is_floating_point:
                value.requires_grad_()
        elif kind is not torch.Tensor and isinstance(value, (int, float)):
            value = kind(value)
        values[name] = value
    return values


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same shape in another layout, where it can have that."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "every other" and tensor.dim():
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide = wide.to(tensor.device)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "expanded" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[:1].contiguous().expand(tensor.shape)
    return tensor


def _described(values: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        numbers = f" {value.tolist()}" if value.numel() <= 6 else ""
        return f"{TensorType.of(value)} stride {tuple(value.stride())}{numbers}"

    return ", ".join(f"{name}={one(value)}" for name, value in values.items())


def _narrowing(kernel: Provable, values: Mapping[str, Any]) -> str:
    """Return how operands of several shapes are left out, where nothing says which it takes."""
    shapes = {value.shape for value in values.values() if isinstance(value, torch.Tensor)}
    if kernel.where or len(shapes) < 2:
        return ""
    return "; where= says which operands it takes, as by match.type('x').shape"
