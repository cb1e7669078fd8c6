"""See a graph, its costs, and what a pass did: trees, drawings, profiles, differences, reports."""

from __future__ import annotations

from fxkit.view.differences.diffing import GraphDiff, diff
from fxkit.view.differences.graph_states import TimelineView
from fxkit.view.differences.pass_timeline import timeline
from fxkit.view.drawings.drawing import GraphView, draw
from fxkit.view.drawings.module_tree import Tree, tree
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.profiling.profiler import profile
from fxkit.view.reports.report_page import Report

__all__ = [
    "GraphDiff",
    "GraphView",
    "Profile",
    "Report",
    "TimelineView",
    "Tree",
    "diff",
    "draw",
    "profile",
    "timeline",
    "tree",
]
