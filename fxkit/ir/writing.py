"""Write files where the user says; where that can't be done, say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxkit.errors import UnsupportedError


@contextmanager
def writing(path: Path, what: str = "path") -> Iterator[None]:
    """Write to a path that the user gave.

    Args:
        path: The path.
        what: What it is: a path, or a folder.

    Raises:
        UnsupportedError: When the body raises `OSError`; the message says why.
    """
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"expected a {what} that can be written, got {str(path)!r}: "
            f"{(error.strerror or str(error)).lower()}",
            hint="choose a path in a folder that exists and is yours, on a disk with room",
        ) from error


def check_file(path: Path) -> None:
    """Check that a file can be written, before any time is spent; what it holds is kept.

    Raises:
        UnsupportedError: When it can't be.
    """
    is_new = not path.exists()
    with writing(path):
        path.open("ab").close()
        if is_new:
            path.unlink()


def check_folder(folder: Path) -> None:
    """Make a folder when it is not there, and check that files can be written to it.

    Raises:
        UnsupportedError: When they can't be.
    """
    with writing(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fxkit"
        probe.touch()
        probe.unlink()
