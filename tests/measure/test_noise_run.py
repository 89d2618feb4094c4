"""From an A/A experiment to the margin of the next comparison: real files of simulated runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import WITHOUT_SERVERS, benchctl

SMALL = [
    *("--quiet", "--set", "workload.num_prompts=1", "--set", "workload.output_len=8"),
    *("--set", "workload.samples_per_prompt=2", "--set", "primary_metrics=[step_ms]"),
]


@pytest.fixture(name="on")
def _on(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs benchctl on a machine with a store of noise of its own."""

    def on(*args: object, store: str = "noise") -> tuple[int, str, str]:
        where = {"BENCHCTL_NOISE_DIR": str(tmp_path / store)}
        done = benchctl(*args, cwd=tmp_path, **where, **WITHOUT_SERVERS)
        return done.returncode, done.stdout, done.stderr

    return on


def warnings_of(path: Path) -> list[str]:
    return [warning["code"] for warning in json.loads((path / "manifest.json").read_text())["warnings"]]


def test_an_aa_experiment_stores_its_noise_with_which_the_next_one_plans_and_is_judged(tmp_path, on) -> None:
    code, said, _ = on("run", "--profile", "aa", "--blocks", "6", *SMALL)
    assert code == 0
    assert "noise of this machine stored: benchctl noise show" in said
    (entry,) = json.loads(on("noise", "list", "--json")[1])["noise"]
    assert (entry["engine"], entry["metrics"]["step_ms"]["num_blocks"]) == ("sim", 6)

    code, said, _ = on("run", "--profile", "topk-sweep", *SMALL, "--blocks", "6", "--set", "sweep.top_k=[2]")
    assert code == 0
    assert "between blocks (A/A of" in said
    path = tmp_path / "results" / "topk-sweep" / "latest"
    noise = json.loads((path / "noise.json").read_text())
    assert not [code for code in warnings_of(path) if code.startswith("noise-")]
    sides = (f"{path}:baseline", f"{path}:guided")
    document = json.loads(on("compare", *sides, "--json")[1])
    floor = document["noise"]["step_ms"]["floor_frac"]
    assert floor == noise["metrics"]["step_ms"]["floor_frac"] > 0.01
    assert document["noise_source"].startswith(f"{path / 'noise.json'}, measured in {noise['source']} on ")
    table = on("compare", *sides)[1]
    for text in (
        "noise floor A/A: step_ms",
        f"; from {document['noise_source']}",
        "(a change is called beyond it)",
    ):
        assert text in table
    assert "noise.json" in json.loads((path / "digests.json").read_text())["files"]

    exact = on("run", "--profile", "topk-sweep", "--engine", "sim-exact", "--dry-run", *SMALL)
    assert "(assumed: no A/A on file)" in exact[1], "a server with other options"
    other = ["--blocks", "1", "--set", "workload.output_len=9", "--set", "sweep.top_k=[2]", "--output-dir", "other"]
    assert "had another request set" in on("run", "--profile", "topk-sweep", *SMALL, *other)[2]
    path = tmp_path / "other" / "topk-sweep" / "latest"
    assert (path / "noise.json").is_file()
    assert "noise-of-another-workload" in warnings_of(path)


def test_an_experiment_can_keep_its_noise_out_of_the_store_and_too_few_blocks_store_nothing(tmp_path, on) -> None:
    args = ["run", "--profile", "aa", "--engine", "sim-exact", *SMALL]
    code, said, _ = on(*args, "--blocks", "6", "--no-store-noise")
    assert code == 0
    assert "noise of this machine" not in said
    assert not (tmp_path / "noise").exists()
    assert "stored: " in on("noise", "add", tmp_path / "results" / "aa" / "latest")[1]
    code, _, warned = on(*args, "--quick")
    assert code == 0
    assert "the noise was not stored" in warned
    assert "at least 6" in warned


def test_noise_of_another_server_is_named_with_the_way_to_measure_the_right_one(tmp_path, on) -> None:
    assert on("run", "--profile", "aa", "--blocks", "6", *SMALL)[0] == 0
    options = ["run", "ci-smoke", "--engine", "sim-exact", *SMALL]
    code, _, stderr = on(*options, "--blocks", "1")
    assert code == 0
    said = next(line for line in stderr.splitlines() if "no A/A experiment of this server" in line)
    (sentence, remedy) = said.removeprefix("warning: ").split("; measure the right one ")
    assert remedy == "with --aa behind the same 'benchctl run'"
    assert "of this machine there is sim" in sentence
    assert "with qwen2.5-7b (other options of the server; aa of 20" in sentence
    latest = tmp_path / "results" / "ci-smoke" / "latest"
    assert f"no noise floor: {sentence}" in on("compare", latest)[1]
    code, measured, stderr = on(*options, "--aa", "--blocks", "6")
    assert code == 0, stderr
    assert "noise of this machine stored: " in measured
    assert "more blocks" not in measured.partition("Verdicts")[2]
    code, _, stderr = on(*options, "--blocks", "1")
    assert (code, "no A/A experiment" in stderr) == (0, False)
    assert not [code for code in warnings_of(latest) if code.startswith("noise-")]
