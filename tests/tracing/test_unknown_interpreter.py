"""On an interpreter that nothing is known of, whole capture guards more or refuses: never wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import fxkit
from benchmarks.constructs import CONSTRUCTS, python, state
from benchmarks.constructs.judge import Verdict, judge
from benchmarks.constructs.tools import tools
from fxkit.tracing.bytecode import decoding
from fxkit.tracing.bytecode.code_names import names_in
from fxkit.tracing.guarding import dict_versions

pytestmark = pytest.mark.core

WHOLE = tools(with_peer=False)[0]
UNKNOWN = SimpleNamespace(version_info=(3, 99, 0, "final", 0), implementation=sys.implementation)
QUICK = {name for name in CONSTRUCTS if hasattr(state, name) or hasattr(python, name)}
QUICK -= {"logging_to_a_stream", "warning_once", "dict_and_namedtuple_output"}
# Those that hook the calls of the program.
HOOKED = frozenset(
    """
    logging_to_a_stream numpy_in_the_middle random_of_python random_of_numpy clock file_that_is_read
    iterator_that_advances generator_given warning_once checkpointed_block deep_copy_inside
    """.split()
)
IMPORTED_THERE = """
import sys
import torch, numpy
sys.version_info = (3, 99, 0, "final", 0)
import fxkit

class Net(torch.nn.Module):
    scale = 1.0
    def forward(self, a):
        self.last = a * self.scale
        return self.last + 1

net, a = Net(), torch.ones(2)
program = fxkit.capture(net, (a,))
for scale in (1.0, 1.0, 5.0, 2, 5.0):
    net.scale = scale
    got, last = program(a), net.last
    want = net(a)
    assert torch.equal(got, want) and torch.equal(last, net.last), scale
"""


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names_in.cache_clear()
    monkeypatch.setattr(decoding, "sys", UNKNOWN)  # pytest asks it as well: not for all
    monkeypatch.setattr(dict_versions, "sys", UNKNOWN)
    yield
    names_in.cache_clear()


def test_nothing_is_taken_for_known():
    assert not dict_versions.is_counted()
    assert not decoding.is_known()
    assert not decoding.can_read(test_nothing_is_taken_for_known.__code__)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.sweep) for name in CONSTRUCTS],
)
def test_capture_equals_eager(name: str):
    outcome = judge(CONSTRUCTS[name], WHOLE)
    expected = Verdict.PIECES if name in HOOKED else Verdict.ONE_GRAPH
    assert outcome.verdict is expected, outcome.detail


def test_imports_and_captures_there(bare_python: list[str]):
    done = subprocess.run(
        [*bare_python, "-W", "ignore", "-c", IMPORTED_THERE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_compiled_program_notices_what_is_set_on_an_object():
    class Net(torch.nn.Module):
        scale = 1.0

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.scale

    net, a = Net(), torch.ones(2)
    fast = fxkit.compile(net)
    for scale in (1.0, 1.0, 1.0, 2.0, 2, 3.0, 1.0):
        net.scale = scale
        assert torch.equal(fast(a), net(a))
    net.another = 1  # which it does not read
    assert torch.equal(fast(a), net(a))
    del net.scale
    assert torch.equal(fast(a), net(a))
