"""What a kernel computes, by torch itself: what printed kernels and emitted ones are held to.

Every instruction is evaluated at all points of the box at once, as a tensor that broadcasts to it.
It is slow and plain, and shares nothing with the printers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel, Store
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS


def interpret(
    kernel: Kernel, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> bool:
    """Compute a kernel.

    Args:
        kernel: The kernel.
        inputs: A tensor for each of its input buffers, with the layout that it was made for.
        outputs: A tensor for each of its output buffers, which is written.

    Returns:
        Whether all its checks hold; where not, what it wrote is void.

    Raises:
        IndexError: When a load or a store leaves its tensor.
    """
    return _Interpreter(kernel, [flat_memory(t) for t in (*inputs, *outputs)]).run()


def scalar_value(instruction: Instruction, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what a cast, a rounding or a scalar function gives for tensors of operands."""
    if instruction.op == "cast":
        return operands[0].to(instruction.dtype)
    if instruction.op == "round":
        return operands[0].to(instruction.detail).to(instruction.dtype)
    return SCALAR_FUNCTIONS[instruction.op].reference(*operands).to(instruction.dtype)


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor from its first element to its last, as one dimension."""
    span = 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((span if tensor.numel() else 0,), (1,))


class _Interpreter:
    def __init__(self, kernel: Kernel, memory: list[torch.Tensor]) -> None:
        self._kernel = kernel
        self._memory = memory
        self._values: list[torch.Tensor] = []
        self._holds = True

    def run(self) -> bool:
        for instruction in self._kernel.body:
            self._values.append(self._value(instruction))
        for store in self._kernel.stores:
            if store.is_sum:
                self._sum(store)
                continue
            value = self._values[store.value].to(self._memory[store.access.buffer].dtype)
            where = self._where(store.access, store.value)
            self._memory[store.access.buffer][where] = value.expand(where.shape)
        return self._holds

    def _sum(self, store: Store) -> None:
        """Write the sum over all rows."""
        rank = len(self._kernel.sizes)
        outer = list(range(rank - self._kernel.row_rank))
        value = self._values[store.value].expand(self._kernel.sizes)
        memory = self._memory[store.access.buffer]
        memory[self._address(store.access)] = _sum(value, outer).to(memory.dtype)

    def _where(self, access: Access, value: int) -> torch.Tensor:
        """Return the addresses of a store: one for each point, or one a row for a row scalar."""
        where = self._address(access)
        return torch.broadcast_to(
            where, torch.broadcast_shapes(where.shape, self._values[value].shape)
        )

    def _address(self, access: Access, indices: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        rank = len(self._kernel.sizes)
        result = torch.full((1,) * rank, access.offset)
        for axis, (size, stride) in enumerate(zip(self._kernel.sizes, access.strides, strict=True)):
            if stride:
                shape = [size if d == axis else 1 for d in range(rank)]
                result = result + (torch.arange(size) * stride).view(shape)
        for index, scale in zip(indices, access.scales, strict=True):
            result = result + index * scale
        return result

    def _value(self, instruction: Instruction) -> torch.Tensor:
        operands = [self._values[o] for o in instruction.operands]
        if instruction.op == "index":
            return self._address(instruction.detail).to(instruction.dtype)
        if instruction.op == "const":
            shape = (1,) * len(self._kernel.sizes)
            return torch.full(shape, instruction.detail.value, dtype=instruction.dtype)
        if instruction.op == "load":
            return self._load(instruction, operands)
        if instruction.is_tensor_op:
            return instruction.detail.evaluated(self._memory).reshape(self._kernel.sizes)
        if instruction.is_reduction:
            return self._reduced(instruction, operands[0])
        if instruction.is_scan:
            row = (*operands[0].shape[:-1], self._kernel.sizes[-1])
            scan = _SCANS[instruction.op.removeprefix("scan_")]
            return scan(operands[0].expand(row)).to(instruction.dtype)
        if instruction.op == "check":
            self._holds = self._holds and bool(operands[0].all())
            return operands[0]
        return scalar_value(instruction, operands)

    def _load(self, instruction: Instruction, operands: list[torch.Tensor]) -> torch.Tensor:
        memory = self._memory[instruction.detail.buffer]
        where = self._address(instruction.detail, operands[: len(instruction.indices)])
        if instruction.guard is None:
            return self._read(memory, where).to(instruction.dtype)
        where, guard = torch.broadcast_tensors(where, operands[-1])
        otherwise = instruction.detail.otherwise.value
        result = torch.full(where.shape, otherwise, dtype=instruction.dtype)
        result[guard] = self._read(memory, where[guard]).to(instruction.dtype)
        return result

    def _read(self, memory: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        if bool(((where < 0) | (where >= memory.numel())).any()):
            raise IndexError(f"expected addresses in [0, {memory.numel()}), got {where.unique()}")
        return memory[where]

    def _reduced(self, instruction: Instruction, operand: torch.Tensor) -> torch.Tensor:
        rank = len(self._kernel.sizes)
        wide = torch.broadcast_to(
            operand,
            [
                size if d >= rank - self._kernel.row_rank else given
                for d, (size, given) in enumerate(
                    zip(self._kernel.sizes, operand.shape, strict=True)
                )
            ],
        )
        dims = list(range(rank - self._kernel.row_rank, rank))
        reduce = _MONOIDS[instruction.op.removeprefix("reduce_")]
        return reduce(wide, dims).to(instruction.dtype)


def _product(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    for dim in dims:
        x = x.prod(dim, keepdim=True)
    return x


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    wider = torch.float64 if x.dtype == torch.float32 else x.dtype
    return x.to(wider).sum(dims, keepdim=True)


_MONOIDS: dict[str, Callable[[torch.Tensor, list[int]], torch.Tensor]] = {
    "add": _sum,
    "mul": _product,
    "max": lambda x, dims: x.amax(dims, keepdim=True),
    "min": lambda x, dims: x.amin(dims, keepdim=True),
    "and": lambda x, dims: x.amin(dims, keepdim=True),
    "or": lambda x, dims: x.amax(dims, keepdim=True),
}


_SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x.cumsum(-1),
    "mul": lambda x: x.cumprod(-1),
    "max": lambda x: x.cummax(-1).values,
    "min": lambda x: x.cummin(-1).values,
    "logaddexp": lambda x: x.logcumsumexp(-1),
}
