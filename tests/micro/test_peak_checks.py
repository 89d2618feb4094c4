"""Limits of measured peaks: more than a device can do, a cache's bandwidth, rounds that differ, a busy machine."""

import msgspec
import pytest
from support.peaks import cpu_peaks, gpu_peaks, series

from benchctl.errors import UsageError
from benchctl.micro.peaks import best_of_each, data_sheet_peaks, judged_peaks, peak_warnings, unit_of
from benchctl.micro.worker import WorkerInfo


def codes(peaks):
    return [warning.code for warning in peak_warnings(peaks)]


def test_peaks_below_the_data_sheet_on_a_quiet_machine_have_no_warnings() -> None:
    assert codes(cpu_peaks()) == []
    assert codes(gpu_peaks()) == []


@pytest.mark.parametrize(
    ("rates", "where"),
    [({"bfloat16": 1020e12}, "matmul bfloat16"), ({"read": 3.5e12}, "read"), ({"fp8": 2.1e15}, "matmul fp8")],
)
def test_more_than_the_data_sheet_is_impossible_and_says_how_much_more(rates, where) -> None:
    (warning,) = peak_warnings(gpu_peaks(**rates))
    assert (warning.code, warning.where) == ("peak-above-data-sheet", where)
    assert "% above the" in warning.message
    assert "h100-sxm's data sheet" in warning.message


@pytest.mark.parametrize("rates", [{"bfloat16": 1018e12}, {"read": 3.44e12}])
def test_three_percent_above_a_data_sheet_is_its_rounding(rates) -> None:
    assert codes(gpu_peaks(**rates)) == []


def test_a_cpu_and_an_unknown_gpu_have_no_data_sheet() -> None:
    assert data_sheet_peaks(cpu_peaks()) == {}
    assert data_sheet_peaks(gpu_peaks(device="NVIDIA A10")) == {}
    assert data_sheet_peaks(gpu_peaks())["matmul", "fp8"] == 1978.9e12


def test_small_buffers_measure_the_cache() -> None:
    assert codes(cpu_peaks(buffer_bytes=64 * 2**20)) == ["peak-of-cache"]


def test_rounds_that_differ_and_a_busy_machine_are_warnings() -> None:
    steady = cpu_peaks().series
    unsteady = series("read", 10e9, 48e9, 49e9, 60e9, 80e9, 20e9, 15e9, 16e9)
    peaks = cpu_peaks(series=(*steady[:4], unsteady), busy_frac=0.4)
    assert codes(peaks) == ["peak-unsteady", "peak-on-busy-machine"]


def test_each_peak_is_one_row_and_every_way_of_launching_too() -> None:
    launches = (series("launch", 5e-6, setting="in a row"), series("launch", 1e-6, setting="in a graph"))
    peaks = cpu_peaks(series=(*cpu_peaks().series[:5], *launches))
    rows = [(each.quantity, each.dtype, each.setting) for each in best_of_each(peaks)]
    assert rows[:2] == [("matmul", "bfloat16", "1024"), ("matmul", "float32", "1024")]
    assert [setting for _, _, setting in rows[-2:]] == ["in a row", "in a graph"]


def test_rates_are_read_in_units_of_their_size() -> None:
    assert unit_of(series("matmul", 2e12)) == ("TFLOP/s", 1e12)
    assert unit_of(series("matmul", 2e11)) == ("GFLOP/s", 1e9)
    assert unit_of(series("read", 2e11)) == ("GB/s", 1e9)
    assert unit_of(series("launch", 2e-6)) == ("us", 1e-6)


INFO = WorkerInfo(
    python="python",
    python_version="3.12",
    torch_version="2.13.0+cpu",
    device="cpu",
    device_name="AMD EPYC",
    num_threads=2,
    float32_precision="highest",
    free_bytes=1,
    total_bytes=25_000_000_000,
    cache_bytes=32 * 2**20,
)


def answer(**changes):
    document = msgspec.to_builtins(cpu_peaks())
    names = ("series", "buffer_bytes")
    return {"num_devices": 1, "unmeasured": {}, **{name: document[name] for name in names}, **changes}


def test_an_answer_of_a_worker_becomes_judged_peaks_of_this_machine() -> None:
    peaks = judged_peaks(INFO, answer(), busy_frac=0.5)
    assert (peaks.kind, peaks.device, peaks.threads) == ("cpu", "AMD EPYC", 2)
    assert [warning.code for warning in peaks.warnings] == ["peak-on-busy-machine"]
    assert peaks.series == cpu_peaks().series


def test_a_device_without_any_product_has_no_peaks_and_the_error_says_why() -> None:
    lacking = answer(series=answer()["series"][3:], unmeasured={"fp8": "not on this device"})
    with pytest.raises(UsageError, match=r"no product of bfloat16, .* was measured; fp8: not on this device"):
        judged_peaks(INFO, lacking, busy_frac=None)
