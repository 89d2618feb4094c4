"""``show``, ``list`` and ``report`` as a person calls them."""

import json
import os

import pytest
from support.cli import document, in_process, printed
from support.results import builders
from support.results.planted_progress import plant_block, plant_shared

from benchctl.analysis.analyzed import analyze_directory
from benchctl.cli.outcome import print_outcome, suspects_lines
from benchctl.measure.experiment import Outcome
from benchctl.profile.files import grouped_profiles
from benchctl.profile.load import load_profile
from benchctl.records.schema import GitState, GpuInfo, ResultWarning
from benchctl.records.writers import sole_writer

PROFILES = [entry.name for entries in grouped_profiles().values() for entry in entries]
QUICK = ("flag", "topk-sweep")
MOST_LINES = {"show": 60, "compare": 40}
"""Lines without ``--all``."""


def words(text):
    return " ".join(text.split())


def shown(*arguments, command="show"):
    code, out, err = in_process(command, *arguments)
    assert code == 0, err
    return out


def test_show_prints_headline_runs_cells_sections_sweep_and_findings(tmp_path):
    results = builders.write_results(tmp_path, cells=[{"top_k": 1}, {"top_k": 5}])
    text = words(shown(tmp_path))
    for part in (
        "built · done · 9 of 9 runs done · 3 blocks",
        "engine sim · 4 requests of generated (ee043d0879) · stop forced · seed 7",
        "000-b0-baseline done 0.08000 800.0 10.00 1.000 10.00 10.00 0",
        "guided top_k=5 3 0.1240 ± 0.0%",
        "lvm_forward 4.000",
        "no section is GPU time",
        "guided top_k=5 3 1.55 [1.55, 1.55]",
        "guided top_k=1 took the greedy path",
    ):
        assert part in text
    results.write_profile(builders.PROFILE_YAML.replace("arrival: {", "arrival: {launch_rate_limit: 2.5, "))
    gpus = (GpuInfo(index=0, name="NVIDIA H200"),)
    builders.edit_manifest(results, label="night", git=GitState(sha="0123456789abcdef", is_dirty=True), gpus=gpus)
    text = shown(tmp_path)
    assert " · at most 2.5 launches per second · stop forced" in words(text)
    assert "built · night · done" in text
    assert "benchctl 0.1.0 (0123456789, work tree changed) · host, NVIDIA H200" in text


def test_show_of_an_unfinished_experiment_shows_what_is_planned_running_and_failed(tmp_path):
    results = builders.write_results(tmp_path, state="running")
    first, second, *rest = results.runs()
    builders.edit_run(results, second.path.name, state="failed")
    for run in rest:
        for file in run.path.iterdir():
            file.unlink()
    with sole_writer(tmp_path):
        text = words(shown(tmp_path))
    for part in (
        "built · running · 1 of 6 runs done",
        f"{first.path.name} done",
        f"{second.path.name} failed",
        "005-b2-guided-top_k5 planned - - - - - - -",
    ):
        assert part in text
    assert "Against the baseline" not in text


def test_show_prints_each_doubt_once_as_a_footnote_with_its_runs(tmp_path):
    results = builders.write_results(tmp_path)
    builders.edit_manifest(results, warnings=(ResultWarning(code="fallback", message="generated set"),))
    for run in results.runs()[:5]:
        doubt = ResultWarning(code="sim-lag", message="the simulator lagged")
        builders.edit_run(results, run.path.name, warnings=(doubt,))
    text = shown(tmp_path)
    assert "[1] fallback: generated set\n" in text
    runs = "(000-b0-baseline, 001-b0-guided-top_k5, 002-b1-baseline and 2 more)"
    assert f"[2] sim-lag: the simulator lagged {runs}" in text
    assert text.count("the simulator lagged") == 1


def test_show_of_a_damaged_line_shows_the_rest_then_names_file_and_line_unless_its_run_never_ended(tmp_path):
    results = builders.write_results(tmp_path)
    run = results.runs()[2]
    path = run.path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    code, out, err = in_process("show", tmp_path)
    assert code == 4
    assert f"{path}:8: the line is cut off" in err
    for part in ("002-b1-baseline done, damaged", "baseline 2 (1 left out) 0.08000", "Against the baseline of"):
        assert part in words(out)
    builders.edit_run(results, run.path.name, state="running")
    assert "[1] damaged-line:" in shown(tmp_path)


def test_show_as_json_is_one_document_even_of_damaged_results(tmp_path):
    results = builders.write_results(tmp_path)
    (results.runs()[5].path / "run.json").unlink()
    (results.runs()[0].path / "requests.jsonl").write_bytes(b"{\n")
    code, out, _ = in_process("show", tmp_path, "--json")
    document = json.loads(out)
    assert (code, document["manifest"]["profile"], document["sweep"][0]["n_blocks"]) == (4, "built", 1)
    assert (len(document["runs"]), document["not_begun"]) == (5, ["005-b2-guided-top_k5"])
    assert len(document["damage"]) == 1


def test_report_prints_what_it_wrote_and_exits_with_damage(tmp_path):
    results = builders.write_results(tmp_path)
    lines = shown(tmp_path, command="report").splitlines()
    assert lines[0] == str(tmp_path / "summary.csv")
    assert {str(tmp_path / "plots" / "per_step_breakdown.png"), f"{tmp_path}/runs/*/result.json (6 runs)"} <= {
        *lines
    }
    assert not [line for line in lines if line.startswith("not drawn: ")]
    (tmp_path / "summary.csv").unlink()
    for run in results.runs():
        (run.path / "run.json").write_text("[]")
    code, out, err = in_process("report", tmp_path)
    assert (code, err.count("expected an object, found list")) == (4, 6)
    assert (tmp_path / "summary.csv").is_file()
    assert "result.json" not in out


def test_list_shows_results_newest_first_and_what_is_none(tmp_path):
    assert shown(tmp_path, command="list") == f"{tmp_path} contains no results yet; 'benchctl run' creates them\n"
    for name, month, state in (("old", "01", "done"), ("new", "02", "failed")):
        results = builders.write_results(tmp_path / "built" / name, state=state)
        builders.edit_manifest(results, created_at=f"2026-{month}-01T00:00:00Z", label=f"the {name}")
    newest = builders.write_results(tmp_path / "loose").manifest()
    for name, content in (("torn", '{"schema_version": 1'), ("later", '{"schema_version": 9}')):
        (tmp_path / "built" / name).mkdir()
        (tmp_path / "built" / name / "manifest.json").write_text(content)
    (tmp_path / "notes" / "more").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    rows = [words(line) for line in shown(tmp_path, command="list").splitlines()[1:]]
    assert rows[0] == "built/new 2026-02-01T00:00:00Z built sim failed 6/6 the new"
    assert sorted(rows[1:3]) == [
        "built/old 2026-01-01T00:00:00Z built sim done 6/6 the old",
        f"loose {newest.created_at} built sim done 6/6",
    ]
    assert rows[3].startswith("built/later unreadable")
    assert rows[4].startswith("built/torn damaged")
    assert rows[5:] == ["notes unreadable not a result directory"]
    assert str(tmp_path / "loose") in shown(tmp_path / "loose", command="list"), "a result directory lists itself"


def test_list_counts_runs_that_are_done_and_survives_damaged_ones_and_its_json_is_one_document(tmp_path):
    results = builders.write_results(tmp_path / "a")
    first, second, third, *_ = results.runs()
    builders.edit_run(results, first.path.name, state="failed")
    (third.path / "run.json").unlink()
    (ours,) = json.loads(shown(tmp_path, "--json", command="list"))["results"]
    expected = {"path": str(results.path), "profile": "built", "num_done": 4, "num_planned": 6, "problem": None}
    expected |= {"verdict": None, "is_simulated": False}
    assert {name: ours[name] for name in expected} == expected
    (second.path / "run.json").write_text("{")
    (tmp_path / "a" / "summary.json").write_text('{"verdict": "regression"}')
    row = words(shown(tmp_path / "a", command="list").splitlines()[1])
    assert f"{results.manifest().created_at} built sim damaged regression 3/6" in row
    (tmp_path / "a" / "summary.json").write_text('{"verdict": ["regression"]}')
    assert "damaged 3/6" in words(shown(tmp_path / "a", command="list"))


def test_an_experiment_in_progress_says_how_many_of_its_blocks_are_done_and_on_how_many_nodes(tmp_path):
    results = plant_shared(tmp_path / "shared", 4)
    plant_block(results, 0, num_ended=6, node="n01")
    plant_block(results, 1, num_ended=3, is_running=True, node="n02")
    assert "running 9/24 1 of 4 blocks done · 2 nodes" in words(printed("list", tmp_path))
    (entry,) = document("list", tmp_path)["results"]
    assert (entry["num_blocks_done"], entry["num_blocks"], entry["nodes"]) == (1, 4, ["n01", "n02"])
    headline = "ci-smoke · running · 9 of 24 runs done in 1 whole block on 2 nodes · 4 blocks"
    assert printed("show", results.path).startswith(headline)


@pytest.mark.usefixtures("without_pictures")
def test_runs_that_were_cut_off_before_they_could_note_a_reason_are_counted_without_one(tmp_path, capsys):
    results = builders.write_results(tmp_path)
    print_outcome(results.path, Outcome(num_done=5, num_failed=1, num_suspect=0, num_skipped=0))
    assert "warning: 1 run failed\nwarning: measure what is left with: " in capsys.readouterr().err


def test_suspect_runs_are_told_by_what_their_doubts_cost(tmp_path):
    results = builders.write_results(tmp_path)

    def told(**codes_by_run):
        for run_id, codes in codes_by_run.items():
            warnings = tuple(ResultWarning(code=code, message=code) for code in codes)
            builders.edit_run(results, run_id, state="suspect", warnings=warnings)
        return suspects_lines(analyze_directory(tmp_path))

    late, busy = ("gpu-sampler-missing", "arrival-times-unreliable"), ("client-cpu", "arrival-times-unreliable")
    (line,) = told(**{"000-b0-baseline": late, "002-b1-baseline": busy})
    assert line.startswith(
        "2 runs are suspect (arrival-times-unreliable in 2, client-cpu in 1): times of the client are excluded"
    )
    assert "times of the server (step_ms) are not" in line
    assert "--allow-suspect" in line
    first, second = told(**{"002-b1-baseline": ("arrival-times-unreliable", "steps-damaged")})
    assert first.startswith("1 run is suspect (arrival-times-unreliable in 1): times of the client are excluded")
    assert second.endswith("their results are not reliable; see Notes")


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in PROFILES]
)
def test_output_on_every_profile_is_at_most_120_characters_wide_and_60_lines_long(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "")
    engine = () if load_profile(name).engine.kind == "sim" else ("--engine", "sim")
    few = ("--set", "workload.num_prompts=4", "--output", tmp_path / "r")
    code, *texts = in_process("simulate", "--profile", name, *engine, *few)
    if code == 2:
        pytest.skip(f"the simulator cannot: {texts[1]}")
    for command, most in MOST_LINES.items():
        _, out, err = in_process(command, tmp_path / "r")
        assert len(out.splitlines()) <= most, command
        texts += [out, err, in_process(command, tmp_path / "r", "--all")[1]]
    wide = [line for text in texts for line in text.splitlines() if len(line) > 120]
    assert [line for line in wide if os.fspath(tmp_path) not in line] == []


def test_show_begins_with_the_verdict_and_then_with_runs_that_are_not_done(tmp_path):
    factors = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))
    results = builders.write_results(tmp_path, block_factors=factors)
    builders.edit_run(results, "011-b5-guided-top_k5", state="suspect")
    lines = shown(tmp_path).splitlines()
    assert lines[4].startswith("inconclusive: guided against baseline")
    runs = lines.index("Runs")
    assert lines[runs + 2].split()[1] == "suspect"
    assert "… 4 more runs: --all" in lines[runs:]
    assert runs < next(number for number, line in enumerate(lines) if line.startswith("Cells, "))
    everything = shown(tmp_path, "--all")
    assert everything.count("-baseline ") == 6
    assert "more with --all" not in everything
