"""What the data sheets say that devices can do at most: without sparsity, at the rated clock.

Sources: the vendors' data sheets and architecture papers of each device. A processor's figure is
cores × base clock × operations a cycle (two fused multiply-adds of the vector unit), and channels ×
rate × 8 bytes for its memory; turbo clocks and fewer threads make both differ from what one sees.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxkit import cpu_info
from fxkit.errors import UnsupportedError
from fxkit.view.profiling.peaks import Peaks


@dataclass(frozen=True)
class Device:
    """One line of the table.

    Attributes:
        name: As its vendor calls it.
        pattern: A regular expression for the names that drivers report, in lower case.
        terabytes: Bytes a second of its memory, in 10^12.
        teraflops: Operations a second, in 10^12, by dtype: `float32`, `tf32`, `bfloat16`, ...
    """

    name: str
    pattern: str
    terabytes: float
    teraflops: Mapping[str, float]


def _device(
    name: str, pattern: str, terabytes: float, fp32: float, half: float, **more: float
) -> Device:
    rates = {"float32": fp32, "float16": half, "bfloat16": half, **more}
    return Device(name, pattern, terabytes, {key: rate for key, rate in rates.items() if rate})


# Where several match, the first counts.
DEVICES = (
    _device("NVIDIA H200", r"h200", 4.8, 66.9, 989.4, tf32=494.7, float64=33.5, float8=1978.9),
    _device("NVIDIA H100 PCIe", r"h100.*pcie", 2.0, 51.2, 756.4, tf32=378.0, float64=25.6),
    _device("NVIDIA H100 SXM", r"h100", 3.35, 66.9, 989.4, tf32=494.7, float64=33.5, float8=1978.9),
    _device(
        "NVIDIA A100 PCIe 80GB",
        r"a100.*pcie.*80|a100.*80.*pcie",
        1.935,
        19.5,
        312.0,
        tf32=156.0,
        float64=9.7,
    ),
    _device("NVIDIA A100 80GB", r"a100.*80", 2.039, 19.5, 312.0, tf32=156.0, float64=9.7),
    _device("NVIDIA A100 40GB", r"a100", 1.555, 19.5, 312.0, tf32=156.0, float64=9.7),
    _device("NVIDIA V100 PCIe", r"v100.*pcie", 0.9, 14.0, 112.0, bfloat16=0, float64=7.0),
    _device("NVIDIA V100 SXM2", r"v100", 0.9, 15.7, 125.0, bfloat16=0, float64=7.8),
    _device("NVIDIA T4", r"\bt4\b", 0.32, 8.1, 65.0, bfloat16=0),
    _device("NVIDIA L40S", r"l40s", 0.864, 91.6, 362.0, tf32=183.0),
    _device("NVIDIA L4", r"\bl4\b", 0.3, 30.3, 121.0, tf32=60.0),
    _device("NVIDIA A10", r"\ba10\b", 0.6, 31.2, 125.0, tf32=62.5),
    _device("NVIDIA RTX A6000", r"rtx a6000", 0.768, 38.7, 154.8, tf32=77.4),
    _device("NVIDIA GeForce RTX 4090", r"rtx 4090", 1.008, 82.6, 165.2, tf32=82.6),
    _device("NVIDIA GeForce RTX 3090", r"rtx 3090(?! ti)", 0.936, 35.6, 71.0, tf32=35.6),
    _device("AMD Instinct MI300X", r"mi300x", 5.3, 163.4, 1307.4, tf32=653.7, float64=81.7),
    _device("AMD Instinct MI250X", r"mi250x", 3.277, 47.9, 383.0, float64=47.9),
    _device("Intel Xeon Platinum 8480+", r"platinum 8480", 0.307, 7.17, 0, float64=3.58),
    _device("Intel Xeon Platinum 8380", r"platinum 8380", 0.205, 5.89, 0, float64=2.94),
    _device("AMD EPYC 9654", r"epyc 9654", 0.461, 7.37, 0, float64=3.69),
    _device("AMD EPYC 7763", r"epyc 7763", 0.205, 5.02, 0, float64=2.51),
)
"""The table."""


def known_peaks(device: str, dtype: torch.dtype | str = torch.float32) -> Peaks:
    """Look a device up.

    Args:
        device: Its name, or a part of it: `"H100"`, `"NVIDIA A100-SXM4-80GB"`.
        dtype: Of the products; `"tf32"` for float32 that may be rounded.

    Raises:
        UnsupportedError: The table does not have the device, or not that dtype of it.
    """
    found = find_device(device)
    if found is None:
        raise UnsupportedError(
            f"expected a device of the table, got {device!r}",
            hint=f"the table has: {', '.join(entry.name for entry in DEVICES)}",
        )
    kind = str(dtype).removeprefix("torch.")
    if kind not in found.teraflops:
        raise UnsupportedError(
            f"expected a dtype that the table has for {found.name}, got {kind}",
            hint=f"it has: {', '.join(found.teraflops)}",
        )
    how = f"data sheet of {found.name}, {kind}"
    return Peaks(found.teraflops[kind] * 1e12, found.terabytes * 1e12, how)


def find_device(name: str) -> Device | None:
    """Return the line of the table for a name as drivers report it, or None."""
    return next((device for device in DEVICES if re.search(device.pattern, name.lower())), None)


def device_name(device: torch.device | str) -> str:
    """Return what a device calls itself; "" when it does not say."""
    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    if where.type != "cpu":
        return ""
    return cpu_info.model_name(platform.processor())
