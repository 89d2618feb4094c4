"""``benchctl micro roofline`` on this CPU, for short times: what is measured, filed and listed."""

import json

import pytest
from support.cli import benchctl

from benchctl.micro.peaks import measure_roofline
from benchctl.records.peaks import best_series

SHORT = ("--device", "cpu", "--rounds", "3", "--size", "64,128", "--buffer-mb", "8", "--value-ms", "2")


@pytest.fixture(scope="module")
def peaks(torch_python):
    return measure_roofline(
        device="cpu", python=torch_python, rounds=3, sizes=(64, 128), buffer_bytes=2**23, least_s=0.002, threads=1,
        dtypes=("bfloat16", "float32", "int4"), all_reduce_ranks=2,
    )  # fmt: skip


def test_every_kernel_has_a_value_of_each_round_at_each_size(peaks):
    assert {len(each.values) for each in peaks.series} == {3}
    memory = f"{2**23}"
    assert {(each.quantity, each.dtype, each.setting) for each in peaks.series} == {
        *(("matmul", dtype, size) for dtype in ("bfloat16", "float32") for size in ("64", "128")),
        ("copy", None, memory),
        ("read", None, memory),
        ("launch", None, "in a row"),
        ("all-reduce-time", None, "8192 x 2"),
        ("all-reduce", None, f"{2**23} x 2"),
    }
    assert best_series(peaks, "matmul", "int4") is None
    assert peaks.unmeasured["int4"].endswith("has no int4")


def test_the_command_files_what_it_measured_and_lists_it(torch_python, tmp_path):
    env = {"BENCHCTL_PEAKS_DIR": str(tmp_path / "peaks")}
    show = ("micro", "roofline", "--show")
    empty = benchctl(*show, cwd=tmp_path, **env)
    assert "contains no peaks yet; 'benchctl micro roofline' measures them" in empty.stdout
    words = ("--python", torch_python, *SHORT, "--dtype", "float32")
    unfiled = benchctl("micro", "roofline", *words, "--no-store", "--json", cwd=tmp_path, **env)
    document = json.loads(unfiled.stdout)
    assert (document["path"], (tmp_path / "peaks").exists()) == (None, False)
    assert {each["peak"] for each in document["best"]} == {"matmul float32", "copy", "read", "launch"}
    measured = benchctl("micro", "roofline", *words, cwd=tmp_path, **env)
    assert measured.returncode == 0, measured.stderr
    (entry,) = json.loads(benchctl(*show, "--json", cwd=tmp_path, **env).stdout)["peaks"]
    assert f"as hardware: {entry['hardware']}\n" in measured.stdout
    again = benchctl("flops", "--wall", "10", "--hardware", "measured", "--json", cwd=tmp_path, **env)
    assert json.loads(again.stdout)["hardware"] == entry["hardware"]
    assert entry["key"] in benchctl(*show, cwd=tmp_path, **env).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "100"), "write multiples of 16"),
        (("--device", "cuda:7"), "cuda:7"),
        (("--python", "/nowhere/python"), "/nowhere/python"),
        (("--device", "cpu", "--dtype", "int4"), "no product of bfloat16"),
    ],
)
def test_what_cannot_be_measured_is_bad_input_with_one_message(torch_python, tmp_path, words, message):
    short = ("--value-ms", "1", "--buffer-mb", "1", "--rounds", "2", "--python", torch_python)
    process = benchctl("micro", "roofline", *short, *words, cwd=tmp_path)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
