"""What holds a program's state: which of its values are other ones than before."""

from __future__ import annotations

import pytest

from fxkit.tracing.guarding import state_containers as h


@pytest.mark.parametrize("copied", [True, False])
def test_a_name_that_was_never_there_has_not_changed(copied: bool):
    holder = h.NamespaceHolder({"one": 1}, "a module", copied=copied)
    assert holder.add("two") is h.ABSENT
    assert not holder.changes() and holder.difference() is None


def test_names_set_and_deleted_have_changed():
    namespace = {"one": 1, "two": 2}
    holder = h.NamespaceHolder(namespace, "a module")
    assert holder.add("three") is h.ABSENT
    del namespace["one"]
    namespace["three"] = 3
    assert holder.changes() == {"three": 3, "one": h.ABSENT}
