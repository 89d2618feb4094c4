"""From an A/A experiment to the margin of the next comparison: real runs, real files."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl

pytestmark = pytest.mark.slow
SMALL = [
    *("--quiet", "--set", "workload.num_prompts=1", "--set", "workload.output_len=8"),
    *("--set", "workload.samples_per_prompt=2", "--set", "primary_metrics=[step_ms]"),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A place where an A/A experiment on the noisy simulator was measured, and what it said."""
    cwd = tmp_path_factory.mktemp("machine")
    done = benchctl(
        "run", "--profile", "aa", "--blocks", "6", *SMALL, cwd=cwd, BENCHCTL_NOISE_DIR=str(cwd / "noise")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd, done.stdout


def on(cwd: Path, *args: object) -> tuple[int, str, str]:
    done = benchctl(*args, cwd=cwd, BENCHCTL_NOISE_DIR=str(cwd / "noise"))
    return done.returncode, done.stdout, done.stderr


def test_an_experiment_of_one_server_says_where_its_noise_is(stored: tuple[Path, str]) -> None:
    cwd, said = stored
    assert "noise of this machine stored: benchctl noise show" in said
    _, listed, _ = on(cwd, "noise", "list", "--json")
    (entry,) = json.loads(listed)["noise"]
    assert (entry["engine"], entry["metrics"]["step_ms"]["num_blocks"]) == ("sim", 6)


def test_the_next_experiment_plans_and_is_judged_with_the_noise_on_file(stored: tuple[Path, str]) -> None:
    cwd, _ = stored
    code, said, _ = on(cwd, "run", "--profile", "topk-sweep", *SMALL, "--blocks", "6", "--set", "sweep.top_k=[2]")
    assert code == 0
    assert "between blocks (A/A of" in said
    (path,) = (found for found in (cwd / "results" / "topk-sweep").iterdir() if not found.is_symlink())
    noise = json.loads((path / "noise.json").read_text())
    floor = noise["metrics"]["step_ms"]["floor_frac"]
    codes = [w["code"] for w in json.loads((path / "manifest.json").read_text())["warnings"]]
    assert not [code for code in codes if code.startswith("noise-")]
    _, compared, _ = on(cwd, "compare", f"{path}:baseline", f"{path}:guided", "--json")
    document = json.loads(compared)
    assert document["noise"]["step_ms"]["floor_frac"] == floor
    assert document["noise"]["step_ms"]["floor_frac"] > 0.01
    _, table, _ = on(cwd, "compare", f"{path}:baseline", f"{path}:guided")
    assert "noise floor A/A: step_ms" in table
    assert f"; from {document['noise_source']}" in table
    assert document["noise_source"].startswith(f"{path / 'noise.json'}, measured in {noise['source']} on ")
    assert "noise.json" in json.loads((path / "digests.json").read_text())["files"]
    assert "(a change is called beyond it)" in table


def test_a_server_with_other_options_has_no_noise_on_file_yet(stored: tuple[Path, str]) -> None:
    _, said, _ = on(stored[0], "run", "--profile", "topk-sweep", "--engine", "sim-exact", "--dry-run", *SMALL)
    assert "(assumed: no A/A on file)" in said


def test_the_noise_of_another_workload_is_taken_along_with_a_doubt(stored: tuple[Path, str]) -> None:
    cwd, _ = stored
    other = ["--blocks", "1", "--set", "workload.output_len=9", "--set", "sweep.top_k=[2]", "--output-dir", "other"]
    code, _, warned = on(cwd, "run", "--profile", "topk-sweep", *SMALL, *other)
    assert code == 0
    assert "had another request set" in warned
    (path,) = (found for found in (cwd / "other" / "topk-sweep").iterdir() if not found.is_symlink())
    assert (path / "noise.json").is_file()
    warnings = json.loads((path / "manifest.json").read_text())["warnings"]
    assert "noise-of-another-workload" in [warning["code"] for warning in warnings]


def test_an_experiment_can_keep_its_noise_out_of_the_store(tmp_path: Path) -> None:
    args = ["run", "--profile", "aa", "--engine", "sim-exact", "--blocks", "6", "--no-store-noise", *SMALL]
    code, said, _ = on(tmp_path, *args)
    assert code == 0
    assert "noise of this machine" not in said
    assert not (tmp_path / "noise").exists()
    (path,) = (found for found in (tmp_path / "results" / "aa").iterdir() if not found.is_symlink())
    code, added, _ = on(tmp_path, "noise", "add", str(path))
    assert code == 0
    assert "stored: " in added


def test_too_few_blocks_store_nothing_and_say_so(tmp_path: Path) -> None:
    code, _, warned = on(tmp_path, "run", "--profile", "aa", "--engine", "sim-exact", "--quick", *SMALL)
    assert code == 0
    assert "the noise was not stored" in warned
    assert "at least 6" in warned


def test_noise_of_another_server_is_named_with_the_way_to_measure_the_right_one(
    stored: tuple[Path, str],
) -> None:
    cwd, _ = stored
    options = ["ci-smoke", "--engine", "sim-exact", *SMALL]
    code, _, stderr = on(cwd, "run", *options, "--blocks", "1")
    assert code == 0
    said = [line for line in stderr.splitlines() if "no A/A experiment of this server" in line]
    (sentence, remedy) = said[0].removeprefix("warning: ").split("; measure the right one ")
    assert remedy == "with --aa behind the same 'benchctl run'"
    assert "of this machine there is sim" in sentence
    assert "with qwen2.5-7b (other options of the server; aa of 20" in sentence
    _, compared, _ = on(cwd, "compare", cwd / "results" / "ci-smoke" / "latest")
    assert f"no noise floor: {sentence}" in compared
    code, measured, stderr = on(cwd, "run", *options, "--aa", "--blocks", "6", "--quiet")
    assert code == 0, stderr
    assert "noise of this machine stored: " in measured
    assert "more blocks" not in measured.partition("Verdicts")[2]
    code, _, stderr = on(cwd, "run", *options, "--blocks", "1")
    assert code == 0
    assert "no A/A experiment" not in stderr
    codes = {w["code"] for w in json.loads((cwd / "results/ci-smoke/latest/manifest.json").read_text())["warnings"]}
    assert not [code for code in codes if code.startswith("noise-")]
