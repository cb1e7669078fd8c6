"""Drives a page in headless Chromium: what a script there found out, and the picture."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--force-device-scale-factor=1"
).split()


def drive(page: str, script: str, folder: Path, *, fragment: str = "") -> Any:
    """Open a page, run a script that ends in `return value`, and give that value back."""
    path = folder / "driven.html"
    driver = (
        "<script>window.addEventListener('load', () => { let result;"
        f"try {{ result = (() => {{ {script} }})(); }} catch (e) {{ result = String(e.stack); }}"
        "document.title = JSON.stringify(result); });</script></body>"
    )
    path.write_text(page.replace("</body>", driver), encoding="utf-8")
    text = _run(["--window-size=1280,900", "--dump-dom", f"{path.as_uri()}#{fragment}"], folder)
    title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
    assert title is not None
    return json.loads(html.unescape(title[1]))


def picture(page: str, fragment: str, folder: Path, *, size: tuple[int, int]) -> Picture:
    """Open a page with what its address asks for, and take its picture."""
    path, image = folder / "pictured.html", folder / "picture.png"
    path.write_text(page, encoding="utf-8")
    window = f"--window-size={size[0]},{size[1]}"
    shot = f"--screenshot={image}"
    _run([window, shot, "--virtual-time-budget=2000", f"{path.as_uri()}#{fragment}"], folder)
    return Picture(image.read_bytes())


def _run(arguments: list[str], folder: Path) -> str:
    command = ["chromium", *_FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


class Picture:
    """The pixels of a PNG of eight bits a channel, without interlacing."""

    def __init__(self, content: bytes) -> None:
        self.width, self.height, depth, kind = struct.unpack(">IIBB", content[16:26])
        assert (depth, kind) in ((8, 2), (8, 6))
        self._step = 3 if kind == 2 else 4
        data, at = b"", 8
        while at < len(content):
            size = struct.unpack(">I", content[at : at + 4])[0]
            if content[at + 4 : at + 8] == b"IDAT":
                data += content[at + 8 : at + 8 + size]
            at += 12 + size
        self._rows = self._unfiltered(zlib.decompress(data))

    def colour(self, x: int, y: int) -> str:
        """Return the colour of a pixel as `#rrggbb`."""
        at = x * self._step
        return "#" + self._rows[y][at : at + 3].hex()

    def colours(self) -> set[str]:
        """Return all colours of the picture."""
        return {self.colour(x, y) for y in range(self.height) for x in range(self.width)}

    def _unfiltered(self, data: bytes) -> list[bytearray]:
        size, step = self.width * self._step, self._step
        rows: list[bytearray] = []
        above = bytearray(size)
        for y in range(self.height):
            kind, *line = data[y * (size + 1) : (y + 1) * (size + 1)]
            row = bytearray(line)
            for i in range(size if kind else 0):
                left = row[i - step] if i >= step else 0
                corner = above[i - step] if i >= step else 0
                row[i] = (row[i] + _predicted(kind, left, above[i], corner)) & 255
            rows.append(row)
            above = row
        return rows


def _predicted(kind: int, left: int, above: int, corner: int) -> int:
    """Return what a PNG filter adds: nothing, left, above, their mean, or Paeth's choice."""
    if kind == 4:
        guess = left + above - corner
        return min((left, above, corner), key=lambda value: abs(guess - value))
    return (0, left, above, (left + above) // 2)[kind]
