"""TorchDynamo's assembler, which lets the calls of a function go through a hook."""

from __future__ import annotations

from typing import Any

from fxkit.torch_adapters.private_names import find, private

_MODULE = "torch._dynamo.bytecode_transformation"
_HOOKS = "keeping calls that can't be looked into as nodes"
_EAGER = "programs that make such calls run in eager"
_NAMES = tuple(
    private(f"{_MODULE}.{name}", _HOOKS, _EAGER)
    for name in ("cleaned_instructions", "create_instruction", "transform_code_object")
)


def find_assembler() -> Any:
    """Return the module with the assembler, or None."""
    return None if any(name.get() is None for name in _NAMES) else find(_MODULE)
