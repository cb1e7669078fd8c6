"""torch's fake tensors behind one door: modes that compute types only, and what they raise."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxkit.torch_adapters.dynamo_config import call_with_settings
from fxkit.torch_adapters.fake_tensors import (
    kernels_in_python,
    mode_class,
    reading_errors,
    source_class,
    suggested_format,
)
from fxkit.torch_adapters.operators import HigherOrderOperator, higher_order_fakes, schema_of


@contextmanager
def fake_mode(shape_env: Any = None) -> Iterator[Any]:
    """Enter a mode in which operators compute types only, on inputs that may still be real."""
    with new_fake_mode(shape_env) as mode, without_log():
        yield mode


def new_fake_mode(shape_env: Any = None) -> Any:
    """Return a mode to enter; sizes that data decide become symbols when it has a `ShapeEnv`."""
    if shape_env is not None:
        return _mode_class()(allow_non_fake_inputs=True, shape_env=shape_env)
    return call_with_settings(_mode_class(), allow_non_fake_inputs=True)


def as_fake(mode: Any, tensor: torch.Tensor) -> Any:
    """Return the fake of a real tensor; its sizes stay numbers."""
    source = _unnamed() if mode.shape_env is None else None
    return mode.from_tensor(tensor, static_shapes=True, source=source, trace=False)


@functools.cache
def _unnamed() -> Any:
    """Return a name for tensors; torch 2.13 imports TorchDynamo to make one where none is given."""
    kind = source_class()
    if kind is None:
        return None

    class Unnamed(kind):
        name = "unnamed"  # type: ignore[assignment]

    return Unnamed()


@contextmanager
def entered(mode: Any) -> Iterator[None]:
    """Enter a mode; where sizes may be symbols, kernels in Python go before those for ints."""
    if mode.shape_env is None:
        with mode:
            yield
        return
    with mode, kernels_in_python():
        yield


@functools.cache
def _mode_class() -> Any:
    FakeTensorMode = mode_class()
    # torch wraps it to hide it from TorchDynamo, and imports that for it.
    wrapped = FakeTensorMode.__torch_dispatch__
    dispatch = getattr(wrapped, "__wrapped__", wrapped)
    settled = functools.partial(call_with_settings, dispatch)

    class FaithfulMode(FakeTensorMode):
        """torch's mode, with results put right where its kernels give others, or refuse."""

        # torch looks up how `cond` and its like run by the very class of a mode.
        supports_higher_order_operators = True

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            # Else the address is 0, and whoever reads there ends the process.
            self._allow_unsafe_data_ptr_access = False

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            is_higher = isinstance(func, HigherOrderOperator)
            if is_higher and func not in higher_order_fakes():
                rule = func.python_key_table.get(FakeTensorMode)
                if rule is None:
                    raise TypeError(f"torch has no fake tensors for {func.name()}")
                return rule(self, *args, **(kwargs or {}))
            result = self._torchs_result(func, types, args, kwargs)
            mended = _MENDED.get(func)
            if mended is not None:
                return mended(self, result, args)
            is_loop = (
                not is_higher and _is_pointwise(func) and "memory_format" not in (kwargs or {})
            )
            return _unconverted(self, result, args) if is_loop else result

        def _torchs_result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            run = dispatch if self.shape_env is not None else settled
            try:
                return run(self, func, types, args, kwargs)
            except ValueError:
                if func is not torch.ops.aten.view_copy.default:
                    raise
            # torch 2.11 refuses to copy what no view shows, which its kernel does.
            with self:
                dense = args[0].clone(memory_format=torch.contiguous_format)
            return run(self, func, types, (dense, *args[1:]), kwargs)

    return FaithfulMode


@functools.cache
def _is_pointwise(operator: Any) -> bool:
    """Tell whether an operator makes each element of a new tensor from those in its place."""
    return torch.Tag.pointwise in operator.tags and not schema_of(operator).is_mutable


def _unconverted(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result of short floats out as its kernel does, which reads them as they are.

    torch's rules convert them first, and no longer see where they are expanded.
    """
    tensors = [operand for operand in args if isinstance(operand, torch.Tensor)]
    dtype = tensors[0].dtype if tensors else None
    if dtype not in _SHORT or len(tensors) not in _LOOPS or not isinstance(result, torch.Tensor):
        return result
    is_alike = all(tensor.dtype == dtype for tensor in tensors[1:])
    is_expanded = is_alike and any(map(_is_expanded, tensors))
    return _as_sum(mode, result, args) if is_expanded else result


_SHORT = (torch.bfloat16, torch.float16)

# Operators of so many tensors, in whose place any other's result is laid out alike.
_LOOPS: dict[int, Callable[..., torch.Tensor]] = {1: torch.neg, 2: torch.add, 3: torch.addcmul}


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())


def _dense(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out contiguous where the operand is, else as `_suggested` does."""
    return (_contiguous if args[0].is_contiguous() else _suggested)(mode, result, args)


def _suggested(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out channels last where the operand's strides are of that kind."""
    return _laid_out(suggested_format(args[0]), mode, result)


def _complex_angles(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    return _contiguous(mode, result, args) if args[0].is_complex() else result


def _contiguous(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    return _laid_out(torch.contiguous_format, mode, result)


def _laid_out(layout: torch.memory_format, mode: Any, result: Any) -> Any:
    def made(tensor: torch.Tensor) -> torch.Tensor:
        is_of_kind = layout is torch.contiguous_format or tensor.dim() in (4, 5)
        if tensor.device.type != "cpu" or not is_of_kind:
            return tensor
        return torch.empty_like(tensor, memory_format=layout)

    with mode:
        if isinstance(result, torch.Tensor):
            return made(result)
        return tuple(made(it) if isinstance(it, torch.Tensor) else it for it in result)


def _like_first(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out as the first operand where it has its shape: a loss for each element."""
    if result.device.type != "cpu" or result.shape != args[0].shape:
        return result
    with mode:
        return torch.empty_like(args[0], dtype=result.dtype)


def _by_second(mend: Callable[..., Any]) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
    """Return what goes by the second operand as another goes by the first."""
    return lambda mode, result, args: mend(mode, result, args[1:])


def _packed(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Let lengths decide how many rows are packed, and count those of each step in integers.

    torch says both results have the dtype of the operand, and one of them has its shape.
    """
    padded, counts = args[0], result[1]
    rows = mode.shape_env.create_unbacked_symint()
    torch._check(rows >= 0)
    with mode:
        return (
            padded.new_empty((rows, *padded.shape[2:])),
            torch.empty(counts.shape, dtype=torch.int64, device="cpu"),
        )


def _as_scaled(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay float32 out as its product with a power of two, which is contiguous."""
    if result.device.type != "cpu" or result.dtype != torch.float32:
        return result
    with mode:
        return args[0] * torch.pow(2.0, args[1])


def _rolled(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out as what joins the two parts that change places, axis by axis."""
    image, shifts, *dims = args
    is_known = all(isinstance(number, int) for number in (*image.shape, *shifts))
    if image.device.type != "cpu" or not dims or not dims[0] or not is_known or not image.numel():
        return result
    with mode:
        for shift, dim in zip(shifts, dims[0], strict=True):
            size = image.shape[dim]
            start = -shift % size
            parts = (image.narrow(dim, start, size - start), image.narrow(dim, 0, start))
            image = torch.cat(parts, dim)
    return image


def _as_sum(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out as a sum of the operands, of which torch says what its kernels do.

    Only operands of another dtype than the common one are converted before.
    """
    tensors = [operand for operand in args if isinstance(operand, torch.Tensor)]
    if result.device.type != "cpu":
        return result
    common = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    if result.is_floating_point() and not common.is_floating_point:
        common = result.dtype
    with mode:
        alike = [torch.empty_strided(t.shape, t.stride(), dtype=torch.float32) for t in tensors]
        read = [
            like if tensor.dtype == common else like.double().float()
            for like, tensor in zip(alike, tensors, strict=True)
        ]
        return torch.empty_like(_LOOPS[len(tensors)](*read), dtype=result.dtype)


def _as_reversed_sum(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Lay a result out as the sum of the second operand and the first."""
    return _as_sum(mode, result, args[1::-1])


def _typed_as_first(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
    """Give a result the dtype of the first operand, not the common one."""
    with mode:
        return result.to(args[0].dtype)


def _fits(part: Callable[..., torch.Tensor]) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
    """Return what sees whether the second operand has the shape of the part that it replaces."""

    def checked(mode: Any, result: Any, args: tuple[Any, ...]) -> Any:
        base, source, *where = args
        with mode:
            replaced = part(base, *where)
        if source.shape != replaced.shape:
            raise RuntimeError(
                f"expected a source of the shape {tuple(replaced.shape)} of what it replaces, "
                f"got {tuple(source.shape)}"
            )
        return result

    return checked


# Operators of which torch 2.11 or 2.13 says that results are otherwise laid out, or of another
# dtype, than its kernels make them, or takes operands that its kernels refuse.
_MENDED: dict[Any, Callable[[Any, Any, tuple[Any, ...]], Any]] = {
    torch.ops.aten._log_softmax_backward_data.default: _contiguous,
    torch.ops.aten._native_batch_norm_legit.default: _dense,
    torch.ops.aten._native_batch_norm_legit.no_stats: _dense,
    torch.ops.aten._native_batch_norm_legit_functional.default: _dense,
    torch.ops.aten._native_batch_norm_legit_no_training.default: _dense,
    torch.ops.aten._pack_padded_sequence.default: _packed,
    torch.ops.aten.angle.default: _complex_angles,
    torch.ops.aten.batch_norm_backward.default: _by_second(_suggested),
    torch.ops.aten.binary_cross_entropy.default: _like_first,
    torch.ops.aten.binary_cross_entropy_backward.default: _by_second(_like_first),
    torch.ops.aten.channel_shuffle.default: _suggested,
    torch.ops.aten.clamp.Tensor: _as_sum,
    torch.ops.aten.copysign.Tensor: _as_sum,
    torch.ops.aten.diagonal_scatter.default: _fits(torch.ops.aten.diagonal.default),
    torch.ops.aten.div.Tensor_mode: _as_sum,
    torch.ops.aten.floor_divide.default: _as_sum,
    torch.ops.aten.glu_backward.default: _contiguous,
    torch.ops.aten.hardswish_backward.default: _as_sum,
    torch.ops.aten.hardtanh_backward.default: _as_sum,
    torch.ops.aten.heaviside.default: _as_sum,
    torch.ops.aten.huber_loss.default: _typed_as_first,
    torch.ops.aten.huber_loss_backward.default: _contiguous,
    torch.ops.aten.ldexp.Tensor: _as_scaled,
    torch.ops.aten.leaky_relu_backward.default: _as_reversed_sum,
    torch.ops.aten.log_sigmoid_forward.default: _contiguous,
    torch.ops.aten.logaddexp.default: _as_sum,
    torch.ops.aten.logaddexp2.default: _as_sum,
    torch.ops.aten.logical_and.default: _as_sum,
    torch.ops.aten.logical_or.default: _as_sum,
    torch.ops.aten.logical_xor.default: _as_sum,
    torch.ops.aten.logit_backward.default: _as_sum,
    torch.ops.aten.max_unpool2d.default: _suggested,
    torch.ops.aten.mse_loss_backward.default: _contiguous,
    torch.ops.aten.native_batch_norm.default: _dense,
    torch.ops.aten.native_batch_norm_backward.default: _by_second(_suggested),
    torch.ops.aten.native_channel_shuffle.default: _suggested,
    torch.ops.aten.native_dropout_backward.default: _as_sum,
    torch.ops.aten.native_layer_norm_backward.default: _contiguous,
    torch.ops.aten.normal.Tensor_Tensor: _contiguous,
    torch.ops.aten.pow.Scalar: _contiguous,
    torch.ops.aten.reflection_pad2d.default: _suggested,
    torch.ops.aten.reflection_pad2d_backward.default: _by_second(_suggested),
    torch.ops.aten.reflection_pad3d.default: _suggested,
    torch.ops.aten.reflection_pad3d_backward.default: _by_second(_suggested),
    torch.ops.aten.replication_pad2d.default: _suggested,
    torch.ops.aten.replication_pad2d_backward.default: _by_second(_suggested),
    torch.ops.aten.replication_pad3d.default: _suggested,
    torch.ops.aten.replication_pad3d_backward.default: _by_second(_suggested),
    torch.ops.aten.roll.default: _rolled,
    torch.ops.aten.rrelu_with_noise.default: _contiguous,
    torch.ops.aten.rsub.Tensor: _as_reversed_sum,
    torch.ops.aten.select_scatter.default: _fits(torch.ops.aten.select.int),
    torch.ops.aten.slice_scatter.default: _fits(torch.ops.aten.slice.Tensor),
    torch.ops.aten.smooth_l1_loss_backward.default: _contiguous,
    torch.ops.aten.soft_margin_loss.default: _typed_as_first,
    torch.ops.aten.special_xlog1py.default: _as_sum,
    torch.ops.aten.threshold_backward.default: _as_reversed_sum,
    torch.ops.aten.xlogy.Tensor: _as_sum,
}


@contextmanager
def without_log() -> Iterator[None]:
    """Keep torch from logging what it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def is_about_memory(error: BaseException) -> bool:
    """Tell whether a call failed for want of a tensor's memory: its address, or an array of it."""
    return any(words in str(error) for words in _ABOUT_MEMORY)


_ABOUT_MEMORY = (
    "Cannot access data pointer of Tensor",
    ".numpy() is not supported for tensor subclasses",
)


def is_about_data(error: BaseException) -> bool:
    """Tell whether an operator failed for want of the numbers in a tensor."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (*reading_errors(), GuardOnDataDependentSymNode))


def holds_constant(value: Any) -> bool:
    """Tell whether a fake tensor knows its numbers after all."""
    return isinstance(value, torch.Tensor) and getattr(value, "constant", None) is not None


def is_of_mode(tensor: torch.Tensor, mode: Any) -> bool:
    """Tell whether a tensor is a fake one of this mode."""
    return getattr(tensor, "fake_mode", None) is mode


def tensors_of(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
