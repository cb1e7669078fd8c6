"""Whether a graph is for a GPU; imports nothing heavy, as every graph is asked."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx


def is_on_gpu(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
    """Tell whether an input or a parameter of a graph is on a GPU."""
    tensors = itertools.chain(args, gm.parameters(), gm.buffers())
    return any(isinstance(t, torch.Tensor) and t.device.type == "cuda" for t in tensors)
