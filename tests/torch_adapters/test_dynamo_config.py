"""Types are found without importing TorchDynamo, and with it where it is there or needed."""

from __future__ import annotations

import subprocess

import pytest

PROGRAM = """
import sys, threading
import torch, torch.nn.functional as F
from torch import fx
{before}
import fxkit
def program(x):
    return torch.softmax(F.layer_norm(F.gelu(x.exp() * 2 + 1), (8,)), -1).sum(0)
gm = fx.symbolic_trace(program)
fxkit.propagate_types(gm, (torch.zeros(4, 8),))
print([str(type_) for type_ in map(fxkit.ir.types.type_of, gm.graph.nodes)][-2])
{after}
"""

AFTER = """
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
assert "_dynamo" not in vars(torch)
from torch._prims_common import wrappers
assert not hasattr(torch.exp, "__dynamo_disable")
import torch._dynamo
assert torch._dynamo.config.fake_tensor_cache_enabled is True
import torch._dynamo.source
compiled = torch.compile(program, backend="eager")
assert torch.equal(compiled(torch.ones(4, 8)), program(torch.ones(4, 8)))
fxkit.propagate_types(gm, (torch.zeros(5, 8),))
"""

BEFORE = "import torch._dynamo; torch._dynamo.config.fake_tensor_cache_enabled = False"

NEEDED = """
from fxkit.torch_adapters.dynamo_config import call_with_settings
def more(): return torch._dynamo.is_compiling(), torch._dynamo.config.verbose
assert call_with_settings(more) == (False, False)
assert "torch._dynamo" in sys.modules
"""

OTHERS = """
from fxkit.torch_adapters import dynamo_config
seen = []
def elsewhere():
    import torch._dynamo
    seen.append(torch._dynamo.optimize)
def wait():
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(0.2)
    assert not seen
    return thread
dynamo_config.call_with_settings(wait).join()
assert seen
"""


def run(before: str, after: str, python: list[str]) -> str:
    done = subprocess.run(
        [*python, "-W", "error", "-c", PROGRAM.format(before=before, after=after)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [("", AFTER), (BEFORE, ""), ("", NEEDED), ("", OTHERS)],
    ids=["left alone", "there before", "needed", "another thread"],
)
def test_dynamo_is_imported_only_where_it_is_needed(
    before: str, after: str, bare_python: list[str]
) -> None:
    assert run(before, after, bare_python).strip() == "f32[8]"
