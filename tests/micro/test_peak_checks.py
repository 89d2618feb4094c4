"""Limits of measured peaks, and the kernels of a GPU and their clock, held without one."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.fake_passes import A100, CPU, info_of
from support.peaks import cpu_peaks, gpu_peaks, series

from benchctl.errors import UsageError
from benchctl.micro.peaks import (
    best_of_each,
    data_sheet_peaks,
    default_buffer_bytes,
    judged_peaks,
    peak_warnings,
    unit_of,
)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        (cpu_peaks(), []),
        (gpu_peaks(), []),
        (gpu_peaks(bfloat16=1018e12), []),  # three percent above a data sheet are its rounding
        (gpu_peaks(read=3.44e12), []),
        (cpu_peaks(buffer_bytes=64 * 2**20), ["peak-of-cache"]),
        (
            cpu_peaks(
                series=(*cpu_peaks().series[:4], series("read", 10e9, 48e9, 49e9, 60e9, 80e9, 20e9, 15e9, 16e9)),
                busy_frac=0.4,
            ),
            ["peak-unsteady", "peak-on-busy-machine"],
        ),
    ],
    ids=["cpu", "gpu", "arithmetic", "memory", "cache", "unsteady"],
)
def test_peaks_of_a_cache_rounds_that_differ_and_a_busy_machine_are_warnings(peaks, expected):
    assert [warning.code for warning in peak_warnings(peaks)] == expected


@pytest.mark.parametrize(
    ("rates", "where"),
    [({"bfloat16": 1020e12}, "matmul bfloat16"), ({"read": 3.5e12}, "read"), ({"fp8": 2.1e15}, "matmul fp8")],
)
def test_more_than_the_data_sheet_is_impossible_and_says_how_much_more(rates, where):
    (warning,) = peak_warnings(gpu_peaks(**rates))
    assert (warning.code, warning.where) == ("peak-above-data-sheet", where)
    assert "% above the" in warning.message
    assert "h100-sxm's data sheet" in warning.message


def test_a_cpu_and_an_unknown_gpu_have_no_data_sheet():
    assert data_sheet_peaks(cpu_peaks()) == {}
    assert data_sheet_peaks(gpu_peaks(device="NVIDIA A10")) == {}
    assert data_sheet_peaks(gpu_peaks())["matmul", "fp8"] == 1978.9e12


def test_each_peak_is_one_row_and_every_way_of_launching_too():
    launches = (series("launch", 5e-6, setting="in a row"), series("launch", 1e-6, setting="in a graph"))
    peaks = cpu_peaks(series=(*cpu_peaks().series[:5], *launches))
    rows = [(each.quantity, each.dtype, each.setting) for each in best_of_each(peaks)]
    assert rows[:2] == [("matmul", "bfloat16", "1024"), ("matmul", "float32", "1024")]
    assert [setting for _, _, setting in rows[-2:]] == ["in a row", "in a graph"]


def test_rates_are_read_in_units_of_their_size():
    assert unit_of(series("matmul", 2e12)) == ("TFLOP/s", 1e12)
    assert unit_of(series("matmul", 2e11)) == ("GFLOP/s", 1e9)
    assert unit_of(series("read", 2e11)) == ("GB/s", 1e9)
    assert unit_of(series("launch", 2e-6)) == ("us", 1e-6)


INFO = msgspec.structs.replace(info_of(CPU), num_threads=2, total_bytes=25_000_000_000, cache_bytes=32 * 2**20)


def answer(**changes):
    document = msgspec.to_builtins(cpu_peaks())
    names = ("series", "buffer_bytes")
    return {"num_devices": 1, "unmeasured": {}, **{name: document[name] for name in names}, **changes}


def test_an_answer_of_a_worker_becomes_judged_peaks_of_this_machine():
    peaks = judged_peaks(INFO, answer(), busy_frac=0.5)
    assert (peaks.kind, peaks.device, peaks.threads) == ("cpu", "AMD EPYC", 2)
    assert [warning.code for warning in peaks.warnings] == ["peak-on-busy-machine"]
    assert peaks.series == cpu_peaks().series


def test_a_device_without_any_product_has_no_peaks_and_the_error_says_why():
    lacking = answer(series=answer()["series"][3:], unmeasured={"fp8": "not on this device"})
    with pytest.raises(UsageError, match=r"no product of bfloat16, .* was measured; fp8: not on this device"):
        judged_peaks(INFO, lacking, busy_frac=None)


PROGRAM = Path(__file__).parent / "programs" / "peaks_without_device.py"


@pytest.fixture(scope="module")
def gpu_answer(torch_python):
    process = subprocess.run([torch_python, PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def medians(gpu_answer, quantity):
    series = (each for each in gpu_answer["peaks"]["series"] if each["quantity"] == quantity)
    return {(each.get("dtype"), each["setting"]): sorted(each["values"])[1] for each in series}


def test_a_rate_is_the_work_of_a_call_over_the_time_between_two_events(gpu_answer):
    products = medians(gpu_answer, "matmul")
    assert {dtype for dtype, _ in products} == {"bfloat16", "float16", "float32", "fp8", "int8"}
    for (_, size), rate in products.items():
        assert rate == pytest.approx(2 * int(size) ** 3 / 1e-6)
    buffer_bytes = 2 * 2**30
    assert medians(gpu_answer, "copy") == {(None, str(buffer_bytes)): pytest.approx(2 * buffer_bytes / 1e-6)}
    assert medians(gpu_answer, "read") == {(None, str(buffer_bytes)): pytest.approx(buffer_bytes / 1e-6)}


def test_launches_are_timed_by_the_host_in_a_row_waited_for_and_in_a_graph_that_is_captured_once(gpu_answer):
    launches = medians(gpu_answer, "launch")
    assert [setting for _, setting in launches] == ["in a row", "and wait", "in a graph"]
    assert min(launches.values()) > 0
    notes = gpu_answer["notes"]
    assert notes.count("capture") == 1
    assert notes[: notes.index("capture")].count("wait for stream") == 2  # after a warm-up on a side stream
    peaks = gpu_answer["peaks"]
    assert "all-reduce" not in {each["quantity"] for each in peaks["series"]}
    assert peaks["unmeasured"] == {}


@pytest.mark.parametrize(
    ("changes", "buffer_bytes"), [({}, 2**31), ({"cache_bytes": 2**30}, 2**33), ({"free_bytes": 2**30}, 2**27)]
)
def test_buffers_are_well_beyond_the_cache_and_a_part_of_what_is_free(changes, buffer_bytes):
    device = {"device": "cuda:0", "cache_bytes": 50 * 2**20, "free_bytes": 80 * 2**30}
    assert default_buffer_bytes(msgspec.structs.replace(info_of(A100), **device | changes)) == buffer_bytes
