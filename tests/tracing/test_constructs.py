"""Every construct of the benchmark suite: whole capture is never silently wrong about one."""

from __future__ import annotations

import pytest

from benchmarks.constructs import CONSTRUCTS
from benchmarks.constructs.judge import Verdict, judge
from benchmarks.constructs.tools import tools

WHOLE = tools(with_peer=False)[0]

IN_PYTHON = frozenset(
    """
    logging_to_a_stream warning_once numpy_in_the_middle random_of_python random_of_numpy clock
    file_that_is_read iterator_that_advances generator_given functional_gradient
    vectorised_map checkpointed_block deep_copy_inside
    """.split()
)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_whole_capture_equals_eager(name: str):
    outcome = judge(CONSTRUCTS[name], WHOLE)
    expected = Verdict.PIECES if name in IN_PYTHON else Verdict.ONE_GRAPH
    assert outcome.verdict is expected, outcome.detail
