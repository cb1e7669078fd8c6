"""Every construct of the benchmark suite: whole capture is never silently wrong about one."""

from __future__ import annotations

import pytest

from benchmarks.constructs import CONSTRUCTS
from benchmarks.constructs.judge import Verdict, judge
from benchmarks.constructs.tools import tools

pytestmark = pytest.mark.core

WHOLE = tools(with_peer=False)[0]

IN_PYTHON = frozenset(
    """
    warning_once checkpointed_block deep_copy_inside
    """.split()
)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_whole_capture_equals_eager(name: str):
    outcome = judge(CONSTRUCTS[name], WHOLE)
    expected = Verdict.PIECES if name in IN_PYTHON else Verdict.ONE_GRAPH
    assert outcome.verdict is expected, outcome.detail
