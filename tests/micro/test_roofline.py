"""``benchctl micro roofline`` on this CPU, for short times: what is measured, filed and listed."""

import json

import pytest
from support.cli import benchctl

from benchctl.micro.peaks import measure_roofline
from benchctl.records.peaks import best_series, hardware_of

SHORT = ("--device", "cpu", "--rounds", "3", "--size", "64,128", "--buffer-mb", "8", "--value-ms", "2")


@pytest.fixture(scope="module")
def peaks(torch_python):
    return measure_roofline(
        device="cpu", python=torch_python, rounds=3, sizes=(64, 128), buffer_bytes=2**23, least_s=0.002, threads=1,
        dtypes=("bfloat16", "float32", "int4"), all_reduce_ranks=2,
    )  # fmt: skip


def test_every_kernel_has_a_value_of_each_round_at_each_size(peaks) -> None:
    settings = {(each.quantity, each.dtype, each.setting): len(each.values) for each in peaks.series}
    memory = f"{2**23}"
    assert settings == {
        ("matmul", "bfloat16", "64"): 3,
        ("matmul", "bfloat16", "128"): 3,
        ("matmul", "float32", "64"): 3,
        ("matmul", "float32", "128"): 3,
        ("copy", None, memory): 3,
        ("read", None, memory): 3,
        ("launch", None, "in a row"): 3,
        ("all-reduce-time", None, "8192 x 2"): 3,
        ("all-reduce", None, f"{2**23} x 2"): 3,
    }


def test_arithmetic_that_the_device_does_not_have_is_left_out_with_the_reason(peaks) -> None:
    assert best_series(peaks, "matmul", "int4") is None
    assert peaks.unmeasured["int4"].endswith("has no int4")


def test_rates_of_a_cpu_lie_between_what_any_and_what_no_cpu_does(peaks) -> None:
    """From a core that shares its time with others to the fastest machine on the market."""
    hardware = hardware_of(peaks)
    assert 1e7 < best_series(peaks, "matmul", "float32").median < 1e14
    assert 1e8 < hardware.bandwidth_bytes_per_s < 1e13
    assert 1e-8 < best_series(peaks, "launch").median < 1e-3
    assert 1e6 < hardware.link_bytes_per_s < 1e13
    assert hardware.memory_bytes > 2**28


def test_a_buffer_that_fits_into_the_cache_is_a_warning(peaks) -> None:
    if peaks.cache_bytes is None or peaks.cache_bytes * 4 <= peaks.buffer_bytes:
        pytest.skip(f"a last-level cache of {peaks.cache_bytes} bytes is too small for this")
    assert "peak-of-cache" in [warning.code for warning in peaks.warnings]


def test_the_command_files_what_it_measured_and_lists_it(torch_python, tmp_path) -> None:
    env = {"BENCHCTL_PEAKS_DIR": str(tmp_path / "peaks")}
    empty = benchctl("micro", "roofline", "--show", cwd=tmp_path, **env)
    assert "contains no peaks yet; 'benchctl micro roofline' measures them" in empty.stdout
    measured = benchctl("micro", "roofline", "--python", torch_python, *SHORT, cwd=tmp_path, **env)
    assert measured.returncode == 0, measured.stderr
    assert "matmul bfloat16" in measured.stdout
    assert "as hardware: " in measured.stdout
    shown = benchctl("micro", "roofline", "--show", "--json", cwd=tmp_path, **env)
    (entry,) = json.loads(shown.stdout)["peaks"]
    assert f"as hardware: {entry['hardware']}\n" in measured.stdout
    again = benchctl("flops", "--wall", "10", "--hardware", "measured", "--json", cwd=tmp_path, **env)
    assert json.loads(again.stdout)["hardware"] == entry["hardware"]
    table = benchctl("micro", "roofline", "--show", cwd=tmp_path, **env)
    assert entry["key"] in table.stdout


def test_nothing_is_filed_where_the_command_line_says_so(torch_python, tmp_path) -> None:
    env = {"BENCHCTL_PEAKS_DIR": str(tmp_path / "peaks")}
    words = ("--no-store", "--json", "--dtype", "float32")
    process = benchctl("micro", "roofline", "--python", torch_python, *SHORT, *words, cwd=tmp_path, **env)
    document = json.loads(process.stdout)
    assert document["path"] is None
    assert {each["peak"] for each in document["best"]} == {"matmul float32", "copy", "read", "launch"}
    assert not (tmp_path / "peaks").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "100"), "write multiples of 16"),
        (("--device", "cuda:7"), "cuda:7"),
        (("--python", "/nowhere/python"), "/nowhere/python"),
        (("--device", "cpu", "--dtype", "int4"), "no product of bfloat16"),
    ],
)
def test_what_cannot_be_measured_is_bad_input_with_one_message(torch_python, tmp_path, words, message) -> None:
    named = words if "--python" in words else ("--python", torch_python, *words)
    process = benchctl(
        "micro", "roofline", "--value-ms", "1", "--buffer-mb", "1", "--rounds", "2", *named, cwd=tmp_path
    )
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
