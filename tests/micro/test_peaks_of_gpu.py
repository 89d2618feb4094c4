"""The kernels of a GPU and their clock, held without one: each call takes a microsecond of a pretended clock."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.fake_passes import A100, info_of

from benchctl.micro.peaks import default_buffer_bytes

PROGRAM = Path(__file__).parent / "programs" / "peaks_without_device.py"


@pytest.fixture(scope="module")
def answer(torch_python):
    process = subprocess.run([torch_python, PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def medians(answer, quantity):
    series = (each for each in answer["peaks"]["series"] if each["quantity"] == quantity)
    return {(each.get("dtype"), each["setting"]): sorted(each["values"])[1] for each in series}


def test_a_rate_is_the_work_of_a_call_over_the_time_between_two_events(answer) -> None:
    products = medians(answer, "matmul")
    assert {dtype for dtype, _ in products} == {"bfloat16", "float16", "float32", "fp8", "int8"}
    for (_, size), rate in products.items():
        assert rate == pytest.approx(2 * int(size) ** 3 / 1e-6)
    buffer_bytes = 2 * 2**30
    assert medians(answer, "copy") == {(None, str(buffer_bytes)): pytest.approx(2 * buffer_bytes / 1e-6)}
    assert medians(answer, "read") == {(None, str(buffer_bytes)): pytest.approx(buffer_bytes / 1e-6)}


def test_launches_are_timed_by_the_host_in_a_row_waited_for_and_in_a_graph(answer) -> None:
    launches = medians(answer, "launch")
    assert [setting for _, setting in launches] == ["in a row", "and wait", "in a graph"]
    assert all(seconds > 0 for seconds in launches.values())


def test_the_graph_is_captured_once_after_a_warm_up_on_a_side_stream(answer) -> None:
    notes = answer["notes"]
    assert notes.count("capture") == 1
    assert notes[: notes.index("capture")].count("wait for stream") == 2


def test_a_single_gpu_has_no_all_reduce(answer) -> None:
    peaks = answer["peaks"]
    assert "all-reduce" not in {each["quantity"] for each in peaks["series"]}
    assert peaks["unmeasured"] == {}


def test_buffers_are_well_beyond_the_cache_and_a_part_of_what_is_free() -> None:
    info = msgspec.structs.replace(info_of(A100), device="cuda:0", cache_bytes=50 * 2**20, free_bytes=80 * 2**30)
    assert default_buffer_bytes(info) == 2 * 2**30
    assert default_buffer_bytes(msgspec.structs.replace(info, cache_bytes=2**30)) == 8 * 2**30
    assert default_buffer_bytes(msgspec.structs.replace(info, free_bytes=2**30)) == 2**27
