"""Peaks of accelerators and the names they go by."""

import pytest

from benchctl.costs.hardware import HARDWARE, hardware_for, hardware_or_none
from benchctl.errors import UsageError


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_is_known_by_its_table_name_and_by_its_drivers_name(name: str, device: str) -> None:
    assert hardware_for(name) is HARDWARE[device]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-SXM2-16GB",
        "",
    ],
)
def test_a_slice_or_a_relative_of_a_known_device_is_unknown(name: str) -> None:
    assert hardware_or_none(name) is None
    with pytest.raises(UsageError, match=r"unknown hardware .*: name one of h100-sxm, .*mi300x"):
        hardware_for(name)


def test_the_peaks_that_published_utilisations_refer_to() -> None:
    h100 = hardware_for("h100-sxm")
    assert h100.peak_flops_per_s == 989.4e12
    assert h100.bandwidth_bytes_per_s == 3.35e12
    assert hardware_for("a100-sxm").peak_flops_per_s == 312e12
    assert hardware_for("a100-sxm").bandwidth_bytes_per_s == 2.039e12


def test_every_device_says_where_its_numbers_come_from() -> None:
    for name, device in HARDWARE.items():
        assert device.name == name
        assert device.source
        # The ridge of every current device lies between 100 and 600 FLOPs for each byte.
        assert 100 < device.peak_flops_per_s / device.bandwidth_bytes_per_s < 600
