"""Files and folders that can't be written are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxkit.errors import UnsupportedError
from fxkit.ir.writing import check_file, check_folder, writing


def test_a_check_leaves_no_trace(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    check_file(old)
    check_file(new)
    assert old.read_text() == "kept" and not new.exists()
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for refused in (file / "inner", tmp_path / "none" / "inner", tmp_path):
        with pytest.raises(UnsupportedError, match="expected a path that can be written"):
            check_file(refused)
    with pytest.raises(UnsupportedError, match="expected a folder that can be written") as caught:
        check_folder(file / "inner")
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        raise ZeroDivisionError
