"""Where calls come from, read off the interpreter's stack."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType

import torch
from torch import nn

from fxkit.tracing.recorder.frames import Frames, Location, format_frame, is_user_file, source_text


class Probe(nn.Module):
    frames: Frames
    seen: list[Location]

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.frames.locate(sys._getframe()))
        self.seen.append(self.frames.locate(sys._getframe()))
        return a


def _probed(net: nn.Module, probe: Probe, names: dict[int, str]) -> list[Location]:
    probe.frames, probe.seen = Frames(sys._getframe(), names), []
    net(torch.ones(1))
    probe.frames.forget()
    return probe.seen


def test_modules_and_lines():
    probe = Probe()
    net = nn.Sequential(nn.Identity(), probe)
    names = {id(net): "", id(probe): "1"}
    first, second = _probed(net, probe, names)
    assert first.modules == {"": ("", nn.Sequential), "1": ("1", Probe)}
    line = Probe.forward.__code__.co_firstlineno
    assert source_text(first.trace) == f"test_frames.py:{line + 1} in forward"
    assert source_text(second.trace) == f"test_frames.py:{line + 2} in forward"
    assert first.trace is not None and "self.seen.append" in first.trace


def test_module_without_a_name():
    probe = Probe()
    first, _ = _probed(probe, probe, {})
    assert list(first.modules) == ["Probe"]


def test_handlers_are_noticed():
    def handles() -> bool:
        frames = Frames(sys._getframe(1), {})
        with contextlib.suppress(ValueError):
            frames.locate(sys._getframe())
        return frames.may_catch

    def plain() -> bool:
        frames = Frames(sys._getframe(1), {})
        frames.locate(sys._getframe())
        return frames.may_catch

    assert handles() and not plain()


def test_files_of_torch_and_of_this_package_are_not_the_users():
    assert is_user_file(__file__)
    assert not is_user_file(nn.Linear.forward.__code__.co_filename)
    assert not is_user_file(Frames.locate.__code__.co_filename)


def test_the_form_is_that_of_a_traceback():
    frame: FrameType = sys._getframe()
    text = format_frame(frame)
    assert text.splitlines()[0].startswith(f'  File "{__file__}", line ')
    assert text.splitlines()[1] == "    text = format_frame(frame)"
    assert source_text(None) is None
