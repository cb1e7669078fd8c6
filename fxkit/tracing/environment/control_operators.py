"""The control operators of torch: calls that are given functions, which Dynamo traces."""

from __future__ import annotations

import inspect

import torch

CONTROL = frozenset(
    function for name in ("cond", "while_loop") if (function := getattr(torch, name, None))
)
CODES = frozenset(inspect.unwrap(function).__code__ for function in CONTROL)
