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


def test_peaks_that_the_user_states_are_a_device() -> None:
    device = hardware_for("my-cpu:1.5:80")
    assert (device.name, device.peak_flops_per_s, device.bandwidth_bytes_per_s) == ("my-cpu:1.5:80", 1.5e12, 80e9)
    assert device.memory_bytes is None
    assert hardware_for("my-cpu:1.5:80:64").memory_bytes == 64e9
    assert device.source == "stated by the user"


@pytest.mark.parametrize("text", ["cpu:fast:80", "cpu:0:80", "cpu:1.5:-1", ":1:1", "cpu:1:2:3:4", "cpu:nan:1"])
def test_stated_peaks_that_are_not_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"give a name and two positive numbers, .*such as cpu:1\.5:80"):
        hardware_for(text)


def test_a_precision_without_faster_products_has_the_peak_of_bfloat16() -> None:
    a100, b200 = hardware_for("a100-sxm"), hardware_for("b200")
    assert a100.peak_of("fp8") == a100.peak_of("bfloat16") == 312e12
    assert a100.peak_of("int8") == 624e12
    assert hardware_for("h100-sxm").peak_of("fp4") == hardware_for("h100-sxm").peak_of("fp8") == 1978.9e12
    assert b200.peak_of("fp4") == 9000e12
    assert hardware_for("NVIDIA RTX PRO 6000 Blackwell Workstation Edition").name == "rtx-pro-6000"


def test_devices_that_share_layers_have_the_sum_of_their_peaks() -> None:
    four = hardware_for("h100-sxm").times(4)
    assert four.name == "4 x h100-sxm"
    assert four.peak_of("fp8") == 4 * 1978.9e12
    assert four.bandwidth_bytes_per_s == 4 * 3350e9
