"""Measured peaks: the best median of a kernel's sizes, and hardware whose name states all of them."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.peaks import H100, cpu_peaks, gpu_peaks, series

from benchctl.costs.hardware import HARDWARE, hardware_for
from benchctl.errors import RecordError, SchemaVersionError, UsageError
from benchctl.records.files import write_json_atomic
from benchctl.records.peaks import (
    PEAKS,
    best_series,
    hardware_of,
    product_flops_per_s,
)
from benchctl.steptime.features import all_reduce_us

RATE = st.floats(1e9, 1e16)


def test_a_peak_is_that_of_the_size_with_the_best_median() -> None:
    peaks = cpu_peaks()
    best = best_series(peaks, "matmul", "bfloat16")
    assert (best.setting, best.median) == ("1024", 0.8e12)
    assert product_flops_per_s(peaks, "float32") == 0.2e12
    assert best_series(peaks, "all-reduce") is None


def test_the_shortest_time_is_the_best_and_launches_in_a_row_are_the_launch_time() -> None:
    peaks = cpu_peaks(
        series=(
            *cpu_peaks().series[:5],
            series("all-reduce-time", 9e-6, 9e-6),
            series("all-reduce-time", 7e-6, 7e-6),
            series("launch", 5e-6, 5e-6, setting="in a row"),
            series("launch", 1e-6, 1e-6, setting="in a graph"),
        )
    )
    assert best_series(peaks, "all-reduce-time").median == 7e-6
    assert best_series(peaks, "launch").setting == "in a row"


def test_measured_hardware_takes_the_faster_of_copy_and_read_and_the_memory_of_the_device() -> None:
    hardware = hardware_of(cpu_peaks())
    assert hardware.name == "amd-epyc-2-threads:0.8:48:25:measured=20261122T190501Z"
    assert (hardware.peak_flops_per_s, hardware.bandwidth_bytes_per_s) == (0.8e12, 48e9)
    assert hardware.memory_bytes == 25_000_000_000
    assert hardware.device == "amd-epyc-2-threads"
    assert hardware.title == "amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)"
    assert hardware.source == "measured at 20261122T190501Z"


def test_a_gpu_of_the_table_keeps_its_name_its_faster_arithmetic_and_its_measured_link() -> None:
    hardware = hardware_of(gpu_peaks())
    assert hardware.device == "h100-sxm"
    assert hardware.peak_of("fp8") == 1500e12
    assert hardware.link_bytes_per_s == 390e9
    sheet = hardware_for("h100-sxm")
    # The times of vLLM's kernels belong to the device, whatever its link was measured to reach.
    assert all_reduce_us(1e6, hardware, 4) != all_reduce_us(1e6, replace(hardware, name="a100-sxm"), 4)
    assert all_reduce_us(1e6, replace(hardware, link_bytes_per_s=450e9), 4) == all_reduce_us(1e6, sheet, 4)


@given(bfloat16=RATE, read=RATE, fp8=RATE, link=RATE)
def test_the_name_of_measured_hardware_says_all_of_it_to_five_digits(bfloat16, read, fp8, link) -> None:
    hardware = hardware_of(gpu_peaks(bfloat16, read, fp8, link))
    assert hardware_for(hardware.name) == hardware
    pairs = (
        (hardware.peak_flops_per_s, bfloat16),
        (hardware.bandwidth_bytes_per_s, max(read, 2.9e12)),
        (hardware.peak_of("fp8"), max(fp8, bfloat16)),
        (hardware.link_bytes_per_s, link),
    )
    assert all(stated == pytest.approx(measured, rel=1e-4) for stated, measured in pairs)


def test_devices_together_have_the_sum_of_measured_peaks_and_their_time() -> None:
    two = hardware_of(cpu_peaks()).times(2)
    assert two.peak_flops_per_s == 1.6e12
    assert two.title == "2 x amd-epyc-2-threads (peaks measured 2026-11-22 19:05 UTC)"


def test_a_data_sheet_has_no_time_and_its_title_is_its_name() -> None:
    assert all(
        device.measured_at is None and device.title == device.device == device.name for device in HARDWARE.values()
    )


@pytest.mark.parametrize(
    "text",
    ["cpu:1:2:measured=today", "cpu:1:2:fp7=3", "cpu:1:2:fp8=0", "cpu:1:2:link=fast", "cpu:1:fp8=3:measured="],
)
def test_stated_peaks_with_parts_that_mean_nothing_are_refused(text) -> None:
    with pytest.raises(UsageError, match="give a name and two positive numbers"):
        hardware_for(text)


def test_measured_is_no_device_where_nothing_resolves_it() -> None:
    with pytest.raises(UsageError, match="'measured' once 'benchctl micro roofline' has measured them"):
        hardware_for("measured")


def test_peaks_of_a_directory_are_read_as_they_were_written(tmp_path) -> None:
    assert PEAKS.in_results(tmp_path) is None
    write_json_atomic(tmp_path / PEAKS.file, gpu_peaks())
    assert PEAKS.in_results(tmp_path) == gpu_peaks()


def test_damaged_newer_and_incomplete_peaks_are_refused_with_a_remedy(tmp_path) -> None:
    path, document = tmp_path / PEAKS.file, msgspec.to_builtins(cpu_peaks())
    path.write_text("{")
    with pytest.raises(RecordError, match="remove the file, or measure with 'benchctl micro roofline'"):
        PEAKS.read(path)
    path.write_text(json.dumps(document | {"schema_version": 99}))
    with pytest.raises(SchemaVersionError):
        PEAKS.read(path)
    path.write_text(json.dumps(document | {"series": document["series"][3:]}))
    with pytest.raises(RecordError, match="no product of bfloat16, float16, float32 was measured"):
        PEAKS.read(path)
    path.write_text(json.dumps(document | {"series": document["series"][:3]}))
    with pytest.raises(RecordError, match="neither a copy nor a read was measured"):
        PEAKS.read(path)


def test_the_spread_is_that_of_the_middle_half() -> None:
    assert series("read", 100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 500.0).spread_frac == 4 / 104


def test_a_device_is_named_as_its_driver_does_and_found_in_the_table() -> None:
    assert gpu_peaks().device == H100
    assert hardware_of(gpu_peaks(device="NVIDIA A10")).device == "nvidia-a10"
