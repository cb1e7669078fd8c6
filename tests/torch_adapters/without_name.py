"""Run programs in an interpreter whose torch seems to lack private names, and say what went wrong.

Called as a script with names: each is tried by itself, in a process of its own that is forked once
torch is imported. A name is hidden from fxkit, and with `--delete` it is taken out of torch itself,
unless torch's own tracers and compilers then fail.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[2] / "fxkit"
sys.path.insert(0, str(PACKAGE.parent))


class Block(torch.nn.Module):
    """Linear layers, a norm and dropout, with a part without gradients and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.norm, self.dropout = torch.nn.LayerNorm(8), torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(torch.nn.functional.gelu(self.inner(x))))
        with torch.no_grad():
            shift = hidden.mean()
        return self.outer(hidden + shift) if x.shape[0] > 1 else -self.outer(hidden)


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Take and return nested containers."""
    first, (second, factor) = values["first"], values["rest"]
    return {"sum": [first * factor + second], "relu": (torch.relu(second),)}


def check(fxkit: Any) -> None:
    """Capture, trace, rewrite and compile; results are those of eager, whatever is missing."""
    block, x = Block(), torch.randn(4, 6)
    values = {"first": torch.randn(3), "rest": (torch.randn(3), 2.0)}
    compiled = fxkit.compile(block)
    for size in (4, 4, 1, 4):
        close(compiled(x[:size]), block(x[:size]))
    with torch.no_grad():
        close(compiled(x), block(x))
    grown = x.clone().requires_grad_()
    ours = torch.autograd.grad(compiled(grown).square().sum(), grown)[0]
    close(ours, torch.autograd.grad(block(grown).square().sum(), grown)[0])
    both = fxkit.compile(nested)
    for _ in range(2):
        got, wanted = both(values), nested(values)
        close(got["sum"][0], wanted["sum"][0])
        close(got["relu"][0], wanted["relu"][0])
    for entry in (lambda: fxkit.capture(block, (x,)), lambda: fxkit.symbolic_trace(relus)):
        try:
            program = entry()
        except fxkit.errors.FxkitError:
            continue
        function = block if hasattr(program, "graph_module") else relus
        close(program(x), function(x))
    gm = fxkit.symbolic_trace(relus)
    rule = fxkit.rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x))
    assert fxkit.rewrite(gm, [rule]).count == 1
    close(gm(x), relus(x))


def relus(x: torch.Tensor) -> torch.Tensor:
    """Apply one operator twice."""
    return torch.relu(torch.relu(x)) + 1


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare two results."""
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def hide(name: str) -> None:
    """Let fxkit, which is not imported yet, not find a name."""
    package = types.ModuleType("fxkit")
    package.__path__ = [str(PACKAGE)]
    sys.modules["fxkit"] = package
    names = importlib.import_module("fxkit.torch_adapters.private_names")
    find = names.find

    def find_others(path: str, default: Any = None) -> Any:
        is_hidden = path == name or path.startswith(f"{name}.")
        return default if is_hidden else find(path, default)

    names.find = find_others
    del sys.modules["fxkit"]


def delete(name: str) -> bool:
    """Take a name out of torch; return whether torch still runs programs itself."""
    path, _, last = name.rpartition(".")
    holder: Any = torch
    for part in path.split(".")[1:]:
        holder = getattr(holder, part, None)
    try:
        delattr(holder, last)
    except (AttributeError, TypeError):
        return False
    try:
        block, x = Block(), torch.randn(4, 6, requires_grad=True)
        block(x).sum().backward()
        torch.fx.symbolic_trace(relus)(x)
        with torch.autocast("cpu"), torch.inference_mode():
            block(x.detach())
        torch.compile(block, backend="aot_eager")(x).sum().backward()
    except BaseException:
        return False
    return True


def fault_without(name: str, *, is_deleted: bool) -> str | None:
    """Return what goes wrong without a name, or None."""
    if is_deleted and not delete(name):
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if not is_deleted:
                hide(name)
            check(importlib.import_module("fxkit"))
        except BaseException:
            return traceback.format_exc(limit=-6)
    texts = [str(warning.message) for warning in caught if "fxkit" in str(warning.message)]
    repeated = {text for text in texts if texts.count(text) > 1}
    return f"warns again and again: {repeated}" if repeated else None


def in_child(name: str, *, is_deleted: bool) -> str | None:
    """Try one name in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        fault = fault_without(name, is_deleted=is_deleted)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(fault or "")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        fault = pipe.read()
    _, status = os.waitpid(child, 0)
    return fault or (f"the process ends with status {status}" if status else None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    deletes = "--delete" in sys.argv
    for asked in (argument for argument in sys.argv[1:] if argument != "--delete"):
        found = in_child(asked, is_deleted=deletes)
        if found is not None:
            print(f"== without {asked}\n{found}", flush=True)
