"""The commands of benchctl micro on the CPU: forward passes and measured peaks."""

import json
import platform
import re
from functools import partial

import msgspec
import pytest
from support.cli import benchctl, document, only_result, printed, refusal
from support.fake_passes import A100, CPU, info_of
from support.peaks import cpu_peaks, gpu_peaks, series

from benchctl.errors import UsageError
from benchctl.micro.peaks import (
    default_buffer_bytes,
    judged_peaks,
    measure_roofline,
    peak_warnings,
)
from benchctl.records.peaks import PEAKS

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FEW = ("--blocks", 2, "--replays", 8, "--context", 16, "--prompt", 4)


@pytest.fixture
def forward(tmp_path, torch_python):
    """Runs ``benchctl micro forward`` of the tiny model on the CPU."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    named = ("--model", tmp_path / "tiny", "--device", "cpu", "--python", torch_python, "--threads", 1, "--quiet")
    return lambda *words, **env: benchctl("micro", "forward", *named, *words, cwd=tmp_path, **env)


@pytest.mark.slow
def test_passes_on_the_cpu_make_a_directory_that_every_reader_understands(tmp_path, forward):
    run = forward("--batch-size", "1,2", *FEW)
    assert run.returncode == 0, run.stderr
    assert "Forward passes, ms" in run.stdout
    path = only_result(tmp_path)
    text = printed("show", path, cwd=tmp_path)
    assert "engine micro · forward passes of" in text
    assert not [word for word in ("requests", "TTFT") if word in text]
    codes = [benchctl(word, path, *more, cwd=tmp_path).returncode for word, *more in (["verify"], ["report"])]
    assert (codes, benchctl("compare", path, path, cwd=tmp_path).returncode in {0, 3}) == ([0, 0], True)
    assert re.search(r"<h2[^>]*>Forward passes</h2>", (path / "report.html").read_text(encoding="utf-8"))
    assert "8/8" in benchctl("list", "results", cwd=tmp_path).stdout
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in path.glob("runs/*/run.json")]
    assert {run["effective_config"]["server.operators"] for run in runs} == {3 + 14 * TINY["num_hidden_layers"]}


@pytest.mark.slow
def test_a_pass_faster_than_its_device_ends_with_exit_code_4_and_no_table_has_it(tmp_path, forward, monkeypatch):
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    slow_memory = (series("matmul", 1e12, dtype="float32"), series("read", 1e3))
    PEAKS.add(cpu_peaks(host=platform.node(), cache_bytes=1, series=slow_memory))
    run = forward("--batch-size", 1, "--phase", "decode", *FEW)
    assert (run.returncode, "Forward passes, ms" in run.stdout) == (4, False)
    assert "2 runs took less time than their FLOPs and bytes allow, and count nowhere" in run.stderr


def test_every_kernel_has_a_value_of_each_round_at_each_size(torch_python):
    peaks = measure_roofline(
        device="cpu", python=torch_python, rounds=2, sizes=(16, 32), buffer_bytes=2**20, least_s=0.001, threads=1,
        dtypes=("bfloat16", "float32", "int4"), all_reduce_ranks=2,
    )  # fmt: skip
    assert {len(each.values) for each in peaks.series} == {2}
    memory = f"{2**20}"
    assert {(each.quantity, each.dtype, each.setting) for each in peaks.series} == {
        *(("matmul", dtype, size) for dtype in ("bfloat16", "float32") for size in ("16", "32")),
        ("copy", None, memory),
        ("read", None, memory),
        ("launch", None, "in a row"),
        ("all-reduce-time", None, "8192 x 2"),
        ("all-reduce", None, f"{2**20} x 2"),
    }
    assert peaks.unmeasured["int4"].endswith("has no int4")


def test_the_command_files_what_it_measured_and_lists_it(torch_python, tmp_path):
    env = {"BENCHCTL_PEAKS_DIR": str(tmp_path / "peaks")}
    roofline = partial(benchctl, "micro", "roofline", cwd=tmp_path, **env)
    assert "contains no peaks yet; 'benchctl micro roofline' measures them" in roofline("--show").stdout
    words = ("--python", torch_python, "--device", "cpu", "--rounds", 3, "--size", "64,128", "--buffer-mb", 8)
    words += ("--value-ms", 2, "--dtype", "float32")
    unfiled = json.loads(roofline(*words, "--no-store", "--json").stdout)
    assert (unfiled["path"], (tmp_path / "peaks").exists()) == (None, False)
    assert {each["peak"] for each in unfiled["best"]} == {"matmul float32", "copy", "read", "launch"}
    measured = roofline(*words)
    (entry,) = json.loads(roofline("--show", "--json").stdout)["peaks"]
    assert f"as hardware: {entry['hardware']}\n" in measured.stdout
    again = document("flops", "--wall", "10", "--hardware", "measured", cwd=tmp_path, **env)
    assert again["hardware"] == entry["hardware"]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("forward", ("--device", "cpu", "--mode", "graph"), "a CPU has no graphs; leave --mode out"),
        ("forward", ("--device", "tpu"), "write cpu, or cuda:0 for the first GPU"),
        ("forward", ("--batch-size", "5,x"), "expected numbers separated by commas, such as 1,2,4"),
        ("forward", ("--phase", "train"), "choose of decode, prefill, separated by commas"),
        ("forward", ("--python", "/nowhere/python"), "name an interpreter, such as /path/to/venv/bin/python"),
        ("forward", ("--model", "nothing"), "unknown model 'nothing'"),
        ("roofline", ("--size", "100"), "write multiples of 16"),
        ("roofline", ("--device", "cuda:7"), "cuda:7"),
        ("roofline", ("--python", "/nowhere/python"), "/nowhere/python"),
        ("roofline", ("--device", "cpu", "--dtype", "int4", "--value-ms", "1"), "no product of bfloat16"),
        ("bonus", ("--device", "cpu", "--batch-size", "0"), "--batch-size '0': each must be from 1 up"),
        ("bonus", ("--device", "cpu", "--context", "x"), "--context 'x': expected numbers separated by commas"),
        ("bonus", ("--device", "cpu", "--mode", "graph"), "graph"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(tmp_path, command, words, message):
    assert message in refusal("micro", command, *words, cwd=tmp_path)
    assert not (tmp_path / "results").exists()


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


@pytest.mark.parametrize(
    ("changes", "buffer_bytes"), [({}, 2**31), ({"cache_bytes": 2**30}, 2**33), ({"free_bytes": 2**30}, 2**27)]
)
def test_buffers_are_well_beyond_the_cache_and_a_part_of_what_is_free(changes, buffer_bytes):
    device = {"device": "cuda:0", "cache_bytes": 50 * 2**20, "free_bytes": 80 * 2**30}
    assert default_buffer_bytes(msgspec.structs.replace(info_of(A100), **device | changes)) == buffer_bytes
