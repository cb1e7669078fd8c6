"""Checkpoints in the graphs of TorchDynamo: parts that a backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint


def with_checkpoints(gm: fx.GraphModule) -> None:
    """Make Dynamo's operators for checkpoints calls of `torch.utils.checkpoint` again, in place.

    Run as it is, that operator computes its part again with other random numbers than before, for
    it leaves them to AOTAutograd: a dropout in it would get a gradient that is not its own.

    Args:
        gm: The graph module that Dynamo gives to a backend.
    """
    operator = torch.ops.higher_order.tag_activation_checkpoint
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        nodes = module.graph.find_nodes(op="call_function", target=operator)
        for node in nodes:
            node.target = run_part
        if nodes:
            module.recompile()


def run_part(part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part of a program, and let a backward compute it again instead of what it needs of it.

    Args:
        part: The part.
        args: What it is given.
        kwargs: What `torch.utils.checkpoint.checkpoint` is given by keyword.
    """
    if not torch.is_grad_enabled():
        return part(*args)
    return checkpoint(part, *args, **kwargs)
