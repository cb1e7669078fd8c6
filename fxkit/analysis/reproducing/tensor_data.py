"""Tensors as data: their memory in a safetensors file or as literals, and how they lie in it.

Each storage is kept once, so that tensors that shared memory share it again; strides, offsets and
dtypes are kept, and whatever part of a storage no tensor touches is left out.
"""

from __future__ import annotations

import base64
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fxkit.errors import UnsupportedError
from fxkit.ir.types import contiguous_stride
from fxkit.torch_adapters.tensors import impl_address_of

# Stored under their own dtype; others as bytes.
_DTYPES_OF_SAFETENSORS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
# Offsets stay whole numbers of elements of every dtype when memory is cut at such a boundary.
_ALIGNMENT = 16
# As literals, tensors of more elements than this are written as base64.
_MOST_NUMBERS = 64

# What a script needs to make the tensors.
TENSOR_FUNCTION = '''
@functools.cache
def tensor(name):
    """Return the tensor of this name, always the same object, over its part of the memory."""
    if name not in LAYOUT:
        return DATA[name]
    memory, dtype, size, stride, offset = LAYOUT[name]
    made = torch.empty(0, dtype=dtype, device=DATA[memory].device)
    return made.set_(DATA[memory].untyped_storage(), offset, size, stride)
'''.strip()

# The same where every tensor is all of its memory.
PLAIN_TENSOR_FUNCTION = '''
def tensor(name):
    """Return the tensor of this name, always the same object."""
    return DATA[name]
'''.strip()


@dataclass
class _Memory:
    """The part of one storage that tensors touch, in bytes."""

    storage: torch.UntypedStorage
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.tensors))

    @property
    def is_one_plain_tensor(self) -> bool:
        tensor = next(iter(self.tensors.values()))
        is_dense = tensor.stride() == contiguous_stride(tuple(tensor.shape))
        is_known = tensor.dtype in _DTYPES_OF_SAFETENSORS
        return len(self.tensors) == 1 and is_dense and is_known and not _is_lazy(tensor)

    def span(self) -> tuple[int, int]:
        """Return the first byte that is touched and the one after the last."""
        ends = [_span(tensor) for tensor in self.tensors.values() if tensor.numel()]
        if not ends:
            return 0, 0
        first, last = min(a for a, _ in ends), max(b for _, b in ends)
        first -= first % _ALIGNMENT
        return first, min(last + -last % _ALIGNMENT, self.storage.nbytes())

    def flat(self) -> torch.Tensor:
        """Return what is touched as one axis of a dtype that all tensors in it have, or bytes."""
        first, last = self.span()
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        if dtype not in _DTYPES_OF_SAFETENSORS or (last - first) % dtype.itemsize:
            dtype = torch.uint8
        count = (last - first) // dtype.itemsize
        part = torch.empty(0, dtype=dtype, device=self.device)
        part.set_(self.storage, first // dtype.itemsize, (count,), (1,))
        return part.detach().cpu().clone()


class TensorData:
    """Collects tensors by name, for a script to make again."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        self._taken: set[str] = set()

    def expression(self, tensor: torch.Tensor, wished: str) -> str:
        """Return the expression for a tensor; the same one for the same object.

        Raises:
            UnsupportedError: When it is sparse, quantised, on the meta device, or of a subclass.
        """
        if id(tensor) not in self._names:
            self._add(tensor, wished)
        text = f"tensor({self._names[id(tensor)]!r})"
        if isinstance(tensor, torch.nn.Parameter):
            given = "" if tensor.requires_grad else ", requires_grad=False"
            return f"nn.Parameter({text}{given})"
        if tensor.is_conj():
            text = f"{text}.conj()"
        if tensor.is_neg():
            text = f"torch._neg_view({text})"
        return f"{text}.requires_grad_()" if tensor.requires_grad else text

    def _add(self, tensor: torch.Tensor, wished: str) -> None:
        _check(tensor)
        name = next(
            n for n in itertools.chain([wished], (f"{wished}_{i}" for i in itertools.count(1)))
            if n not in self._taken
        )  # fmt: skip
        self._taken.add(name)
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(
            impl_address_of(storage), _Memory(storage, tensor.device)
        )
        memory.tensors[name] = tensor

    def save(self, file: Path) -> None:
        """Write the memory of all tensors into a safetensors file.

        Raises:
            UnsupportedError: When the package safetensors is not there.
        """
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise UnsupportedError(
                "expected the package safetensors, in which the data is written, got none",
                hint="pip install safetensors",
            ) from error
        save_file(self._blocks(), file)

    def literals(self) -> str:
        """Return a Python dict of the memory of all tensors."""
        rows = [f"    {name!r}: {_literal(block)}," for name, block in self._blocks().items()]
        return "\n".join(["{", *rows, "}"]) if rows else "{}"

    def devices(self) -> dict[str, str]:
        """Return memory → device, for what does not lie on the CPU."""
        memories = self._memories.values()
        return {m.name: str(m.device) for m in memories if m.device.type != "cpu"}

    def layout(self) -> str:
        """Return a Python dict: name → memory, dtype, size, stride, offset; plain ones left out."""
        rows = []
        for memory in self._memories.values():
            if memory.is_one_plain_tensor:
                continue
            first, _ = memory.span()
            for name, tensor in memory.tensors.items():
                offset = tensor.storage_offset() - first // tensor.dtype.itemsize
                offset = offset if tensor.numel() else 0
                row = (memory.name, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)
                rows.append(f"    {name!r}: {row!r},")
        return "\n".join(["{", *rows, "}"]) if rows else "{}"

    def _blocks(self) -> dict[str, torch.Tensor]:
        blocks = {}
        for memory in self._memories.values():
            tensor = next(iter(memory.tensors.values()))
            plain = memory.is_one_plain_tensor
            blocks[memory.name] = tensor.detach().cpu().clone() if plain else memory.flat()
        return blocks


def _check(tensor: torch.Tensor) -> None:
    """Refuse what has no plain memory to keep."""
    plain_classes = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    what = None
    if type(tensor) not in plain_classes:
        what = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        what = f"one of layout {tensor.layout}"
    elif tensor.is_quantized:
        what = "a quantised one"
    elif tensor.device.type == "meta":
        what = "one on the meta device"
    if what is not None:
        raise UnsupportedError(
            f"expected a strided tensor with memory, got {what}",
            hint="give the reproducer dense tensors, or make this one inside of the graph",
        )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    size, first = tensor.dtype.itemsize, int(tensor.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + reach + 1) * size


def _literal(tensor: torch.Tensor) -> str:
    """Return an expression for a contiguous tensor, to the last bit."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.numel():
        return f"torch.empty({shape}, dtype={dtype})"
    data = tensor.reshape(-1).view(torch.uint8)
    first = data[: dtype.itemsize]
    if tensor.numel() > 1 and torch.equal(data.view(-1, dtype.itemsize), first.expand(
            tensor.numel(), dtype.itemsize)):  # fmt: skip
        return f"torch.full({shape}, {_number(tensor.reshape(-1)[0].item())}, dtype={dtype})"
    if tensor.numel() <= _MOST_NUMBERS:
        return f"torch.tensor({_numbers(tensor.tolist())}, dtype={dtype})"
    text = base64.b64encode(bytes(data.tolist())).decode()
    return (
        f"torch.frombuffer(bytearray(base64.b64decode({text!r})), dtype={dtype}).reshape({shape})"
    )


def _numbers(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    return _number(value)


def _number(value: object) -> str:
    return repr(value) if repr(value) not in ("nan", "inf", "-inf") else f'float("{value}")'
