"""``benchctl micro forward`` from the command line, with torch on the CPU."""

import json
import platform
import re

import pytest
from support.cli import benchctl, only_result
from support.peaks import cpu_peaks, series

from benchctl.records.peaks import PEAKS

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FEW = ("--blocks", 2, "--replays", 8, "--context", 16, "--prompt", 4)


@pytest.fixture
def tiny(tmp_path):
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return directory


@pytest.fixture
def forward(tmp_path, tiny, torch_python):
    """Runs ``benchctl micro forward`` of the tiny model on the CPU."""
    named = ("--model", tiny, "--device", "cpu", "--python", torch_python, "--threads", 1, "--quiet")
    return lambda *words, **env: benchctl("micro", "forward", *named, *words, cwd=tmp_path, **env)


@pytest.mark.slow
def test_passes_on_the_cpu_make_a_directory_that_every_reader_understands(tmp_path, forward):
    run = forward("--batch-size", "1,2", *FEW)
    assert run.returncode == 0, run.stderr
    assert "Forward passes, ms" in run.stdout
    path = only_result(tmp_path)
    shown = benchctl("show", path, cwd=tmp_path).stdout
    assert "engine micro · forward passes of" in shown
    assert not [word for word in ("requests", "TTFT") if word in shown]
    codes = [
        benchctl(*words, path, cwd=tmp_path).returncode for words in (("verify",), ("compare", path), ("report",))
    ]
    assert codes in ([0, 0, 0], [0, 3, 0])
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
    assert run.returncode == 4
    assert "2 runs took less time than their FLOPs and bytes allow, and count nowhere" in run.stderr
    assert "Forward passes, ms" not in run.stdout
    assert "below-floor" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu", "--mode", "graph"), "a CPU has no graphs; leave --mode out"),
        (("--device", "tpu"), "write cpu, or cuda:0 for the first GPU"),
        (("--batch-size", "5,x"), "expected numbers separated by commas, such as 1,2,4"),
        (("--phase", "train"), "choose of decode, prefill, separated by commas"),
        (("--python", "/nowhere/python"), "name an interpreter, such as /path/to/venv/bin/python"),
        (("--model", "nothing"), "unknown model 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(tmp_path, arguments, message):
    run = benchctl("micro", "forward", *arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "results").exists()


def test_run_says_which_command_measures_passes(tmp_path, tiny):
    profile = {"engine": {"kind": "micro"}, "model": str(tiny), "variants": {"eager": {}}, "baseline": "eager"}
    profile["workload"] = {"dataset": "none", "arrival": {"kind": "burst"}}
    (tmp_path / "passes.yaml").write_text(json.dumps(profile), encoding="utf-8")
    run = benchctl("run", "--profile", "passes.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert "'benchctl micro forward' measures such an experiment" in run.stderr
