"""Roofs from data sheets: looked up by the names that drivers report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.view import profile
from fxkit.view.profiling import profile_result
from fxkit.view.profiling.known_devices import DEVICES, device_name, find_device, known_peaks
from fxkit.view.profiling.peaks import Peaks


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe 80GB"),
        ("Tesla V100-SXM2-16GB", "NVIDIA V100 SXM2"),
        ("Tesla T4", "NVIDIA T4"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel Xeon Platinum 8480+"),
    ],
)
def test_devices_are_found_by_what_drivers_call_them(reported: str, name: str) -> None:
    found = find_device(reported)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce GTX 1080", "Some CPU"])
def test_other_devices_are_not_guessed(name: str) -> None:
    assert find_device(name) is None


def test_each_line_finds_itself_and_has_sound_figures() -> None:
    for device in DEVICES:
        assert find_device(device.name) is device
        assert 0.1 < device.terabytes < 20
        assert device.teraflops["float32"] > 1
        assert all(rate > 0 for rate in device.teraflops.values())


def test_the_dtype_chooses_the_roof() -> None:
    single, half = known_peaks("H100"), known_peaks("H100", torch.bfloat16)
    assert single.flops_per_second == pytest.approx(66.9e12)
    assert half.flops_per_second == pytest.approx(989.4e12)
    assert half.bytes_per_second == single.bytes_per_second == pytest.approx(3.35e12)
    assert half.how == "data sheet of NVIDIA H100 SXM, bfloat16"
    with pytest.raises(UnsupportedError, match="expected a dtype that the table has for NVIDIA T4"):
        known_peaks("T4", torch.bfloat16)
    with pytest.raises(UnsupportedError, match="expected a device of the table"):
        known_peaks("abacus")


def test_the_processor_says_its_name() -> None:
    assert isinstance(device_name("cpu"), str)
    assert device_name("meta") == ""


def test_a_roofline_has_the_data_sheet_beside_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = profile(fx.symbolic_trace(nn.Linear(16, 32)), (torch.ones(8, 16),), warmup=0, iters=1)
    measured = Peaks(1e11, 1e10, "measured: by hand")
    monkeypatch.setattr(profile_result, "measure_peaks", lambda device: measured)
    monkeypatch.setattr(profile_result, "device_name", lambda device: "AMD EPYC 7763")
    both = found.roofline()
    ET.fromstring(both)
    assert both.count('class="roof') == 2
    assert "in dashes: data sheet of AMD EPYC 7763, float32" in both
    monkeypatch.setattr(profile_result, "device_name", lambda device: "Some CPU")
    assert found.roofline().count('class="roof') == 1
    assert "data sheet of NVIDIA H100 SXM, float32" in found.roofline("H100")
