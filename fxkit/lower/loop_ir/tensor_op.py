"""Values of the loop IR that are made of whole tensors, such as a product of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

import torch


class Numbers(Protocol):
    """Replaces the numbers of a kernel, as by those that are known only at run time."""

    def one(self, value: int) -> int:
        """Return what stands for a number."""
        ...

    def all_of(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return what stands for each of several numbers."""
        ...


class TensorOp(ABC):
    """The detail of an instruction that is made of whole tensors: what all of a family shares.

    A kernel has at most one such instruction, its first. Details are frozen dataclasses, each with
    a text for `print(kernel)`.

    Attributes:
        functions: Those of fxkit's own functions that the family's text calls.
        dtype: That of the value.
    """

    __slots__ = ()

    functions: ClassVar[frozenset[str]] = frozenset()
    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    @abstractmethod
    def op(self) -> str:
        """The name of the instruction."""

    @property
    def way(self) -> str:
        """How it is computed, which says what prints it; the instruction's name if in one way."""
        return self.op

    @property
    @abstractmethod
    def terms(self) -> int:
        """Number of multiplications."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """Estimate of the operations for one point, where an addition or a load is one."""

    @abstractmethod
    def renumbered(self, numbers: Numbers) -> Self:
        """Return it with its sizes and strides replaced."""

    @abstractmethod
    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute it by torch itself: what its text is held to.

        Args:
            memory: Of each buffer of the kernel, all that lies there, as one dimension.

        Returns:
            The value at each point of the kernel, in the order of points.
        """
