"""The table of how many constructs each tool gets right."""

from __future__ import annotations

from collections import Counter

from benchmarks.constructs import CONSTRUCTS
from benchmarks.constructs.judge import Verdict, judge
from benchmarks.constructs.tools import tools
from fxkit.view.texts.text_table import table


def run(*, with_peer: bool) -> str:
    """Judge every construct by every tool and return the table."""
    rows, wrong = [], []
    for tool in tools(with_peer=with_peer):
        outcomes = {name: judge(make, tool) for name, make in CONSTRUCTS.items()}
        counts = Counter(outcome.verdict for outcome in outcomes.values())
        rows.append([tool.name, *(str(counts[verdict]) for verdict in Verdict)])
        if tool.name == "fxkit whole":
            wrong += [
                f"{tool.name}: {name}: {outcome.verdict.value}: {outcome.detail}"
                for name, outcome in outcomes.items()
                if outcome.verdict is Verdict.WRONG
            ]
    headers = [f"{len(CONSTRUCTS)} constructs", *(verdict.value for verdict in Verdict)]
    return "\n".join([table(headers, rows, align="<>>>>"), *wrong])
