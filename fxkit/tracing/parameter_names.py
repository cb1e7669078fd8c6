"""The names of a callable's parameters, and those of placeholders after them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from fxkit.ir.names import distinct_names


def placeholder_names(fn: Callable[..., Any], paths: list[str]) -> list[str]:
    """Name placeholders after the parameters of `fn`: `args[0]['mask']` becomes `batch_mask`."""
    parameters = parameter_names(fn)

    def name(path: str) -> str:
        def parameter(match: re.Match[str]) -> str:
            index = int(match[1])
            return parameters[index] if index < len(parameters) else f"arg_{index}"

        path = re.sub(r"^args\[(\d+)\]", parameter, path)
        return re.sub(r"\W+", "_", path).strip("_") or "arg"

    return distinct_names([name(path) for path in paths])


def parameter_names(fn: Callable[..., Any], *, keywords: bool = False) -> list[str]:
    """Return the names of the positional parameters of `fn`, and with `keywords` of the others."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = [inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if keywords:
        kinds.append(inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]
