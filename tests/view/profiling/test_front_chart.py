"""Latency against a metric as a picture: valid, complete, and safe for odd values."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fxkit.view.profiling.front_chart import FrontPoint, front_chart


def elements(points: list[FrontPoint], at_least: float, name: str) -> list[ElementTree.Element]:
    picture = ElementTree.fromstring(str(front_chart(points, at_least, "a < b & c")))
    return [one for one in picture.iter() if one.tag.endswith(name)]


def test_each_program_is_a_dot_with_its_words() -> None:
    points = [
        FrontPoint(2e-3, 120.0, "float32", is_on_front=True),
        FrontPoint(1e-3, 30.0, "all <int8>", is_on_front=True, is_answer=True),
        FrontPoint(1.5e-3, 10.0, "all int4"),
    ]
    dots = elements(points, 25.0, "circle")
    assert [one.get("class") for one in dots] == ["c-contraction", "peak", "dot"]
    titles = [one.text for one in elements(points, 25.0, "title")]
    assert titles[1] == "all <int8>\n1 ms, metric 30"
    heights = [float(one.get("cy") or 0) for one in dots]
    assert heights[0] < heights[1] < heights[2]
    assert len([one for one in elements(points, 25.0, "path") if one.get("class") == "roof"]) == 1


@pytest.mark.parametrize("metric", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_odd_metrics_stay_in_the_picture(metric: float) -> None:
    points = [FrontPoint(1e-3, metric, "float32", is_on_front=True, is_answer=True)]
    (dot,) = elements(points, 0.0, "circle")
    assert 0 <= float(dot.get("cy") or -1) <= 460
