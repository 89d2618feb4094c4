"""``show``, ``list`` and ``report`` as a person calls them."""

import json
import os

import msgspec
import pytest
import typer
from support.results import builders
from typer.testing import CliRunner

from benchctl.cli.commands import results
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.records.schema import GitState, GpuInfo, ResultWarning
from benchctl.records.writers import sole_writer

app = typer.Typer()
app.command("show")(results.show)
app.command("list")(results.list_results)
app.command("report")(results.report)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(text):
    return " ".join(text.split())


def test_show_prints_headline_runs_cells_sections_sweep_and_findings(tmp_path):
    builders.write_results(tmp_path, cells=[{"top_k": 1}, {"top_k": 5}])
    result = call("show", tmp_path)
    assert result.exit_code == 0
    text = words(result.output)
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
    assert "Notes" not in text


def test_show_names_the_limit_of_launches(tmp_path):
    results = builders.write_results(tmp_path / "r")
    limited = builders.PROFILE_YAML.replace("arrival: {", "arrival: {launch_rate_limit: 2.5, ")
    assert limited != builders.PROFILE_YAML
    results.write_profile(limited)
    assert " · at most 2.5 launches per second · stop forced" in words(call("show", results.path).output)


def test_show_says_with_which_code_on_which_device_under_which_label(tmp_path):
    results = builders.write_results(tmp_path)
    manifest = msgspec.structs.replace(
        results.manifest(),
        label="night",
        git=GitState(sha="0123456789abcdef", is_dirty=True),
        gpus=(GpuInfo(index=0, name="NVIDIA H200"),),
    )
    results.write_manifest(manifest)
    text = call("show", tmp_path).output
    assert "built · night · done" in text
    assert "benchctl 0.1.0 (0123456789, work tree changed) · host, NVIDIA H200" in text


def test_show_of_an_unfinished_experiment_shows_what_is_planned_running_and_failed(tmp_path):
    results = builders.write_results(tmp_path, state="running")
    first, second, *rest = results.runs()
    second.write(msgspec.structs.replace(second.read(), state="failed"))
    for run in rest:
        for file in run.path.iterdir():
            file.unlink()
    with sole_writer(tmp_path):
        result = call("show", tmp_path)
    text = words(result.output)
    assert result.exit_code == 0
    assert "built · running · 1 of 6 runs done" in text
    assert f"{first.path.name} done" in text
    assert f"{second.path.name} failed" in text
    assert "005-b2-guided-top_k5 planned - - - - - - -" in text
    assert "Against the baseline" not in text


def test_show_of_an_experiment_before_its_first_run_shows_the_plan(tmp_path):
    results = builders.write_results(tmp_path, state="planned")
    for run in results.runs():
        (run.path / "run.json").unlink()
    text = call("show", tmp_path).output
    assert "0 of 6 runs done" in text
    assert "Cells" not in text


def test_show_prints_each_doubt_once_as_a_footnote_with_its_runs(tmp_path):
    results = builders.write_results(tmp_path)
    doubt = ResultWarning(code="sim-lag", message="the simulator lagged")
    results.write_manifest(
        msgspec.structs.replace(
            results.manifest(), warnings=(ResultWarning(code="fallback", message="generated set"),)
        )
    )
    for run in results.runs()[:5]:
        run.write(msgspec.structs.replace(run.read(), warnings=(doubt,)))
    text = call("show", tmp_path).output
    assert "[1] fallback: generated set\n" in text
    assert (
        "[2] sim-lag: the simulator lagged (000-b0-baseline, 001-b0-guided-top_k5, 002-b1-baseline and 2 more)"
        in text
    )
    assert text.count("the simulator lagged") == 1
    row = next(line for line in text.splitlines() if line.startswith("000-b0-baseline"))
    assert row.split()[-1] == "2"


def test_show_of_a_damaged_line_shows_the_rest_then_names_file_and_line(tmp_path):
    results = builders.write_results(tmp_path)
    path = results.runs()[2].path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    result = call("show", tmp_path)
    assert isinstance(result.exception, RecordError)
    assert result.exception.exit_code == 4
    assert f"{path}:8: the line is cut off" in str(result.exception)
    assert "002-b1-baseline done, damaged" in words(result.output)
    assert "baseline 2 (1 left out) 0.08000" in words(result.output)
    assert "Against the baseline of the same block" in result.output


def test_a_torn_line_of_a_run_that_never_ended_is_a_footnote_and_no_error(tmp_path):
    results = builders.write_results(tmp_path)
    run = results.runs()[2]
    run.write(msgspec.structs.replace(run.read(), state="running"))
    path = run.path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    result = call("show", tmp_path)
    assert result.exit_code == 0
    assert "[1] damaged-line:" in result.output


def test_show_as_json_is_one_document_even_of_damaged_results(tmp_path):
    results = builders.write_results(tmp_path)
    (results.runs()[5].path / "run.json").unlink()
    (results.runs()[0].path / "requests.jsonl").write_bytes(b"{\n")
    result = call("show", tmp_path, "--json")
    document = json.loads(result.stdout)
    assert isinstance(result.exception, RecordError)
    assert document["manifest"]["profile"] == "built"
    assert len(document["runs"]) == 5
    assert document["not_begun"] == ["005-b2-guided-top_k5"]
    assert document["sweep"][0]["n_blocks"] == 1
    assert len(document["damage"]) == 1
    assert {"cells", "findings", "warnings", "definitions", "path"} <= set(document)


@pytest.mark.parametrize("command", ["show", "report"])
def test_what_is_no_result_directory_is_refused(tmp_path, command):
    result = call(command, tmp_path)
    assert isinstance(result.exception, UsageError)
    assert "has no manifest.json" in str(result.exception)


def test_report_prints_what_it_wrote_and_what_it_could_not_draw(tmp_path):
    builders.write_results(tmp_path)
    result = call("report", tmp_path)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == str(tmp_path / "summary.csv")
    assert str(tmp_path / "plots" / "per_step_breakdown.png") in lines
    assert f"{tmp_path}/runs/*/result.json (6 runs)" in lines
    assert lines[-1].startswith("not drawn: topk_sweep.png: no variant has finished runs")


def test_report_of_damaged_results_writes_the_rest_and_exits_with_the_damage(tmp_path):
    results = builders.write_results(tmp_path)
    for run in results.runs():
        (run.path / "run.json").write_text("[]")
    result = call("report", tmp_path)
    assert isinstance(result.exception, InvalidDataError)
    assert str(result.exception).count("expected an object, found list") == 6
    assert (tmp_path / "summary.csv").is_file()
    assert "result.json" not in result.output


def test_list_shows_results_newest_first_and_what_is_none(tmp_path):
    for name, created, state in (
        ("old", "2026-01-01T00:00:00Z", "done"),
        ("new", "2026-02-01T00:00:00Z", "failed"),
    ):
        results = builders.write_results(tmp_path / "built" / name, state=state)
        results.write_manifest(msgspec.structs.replace(results.manifest(), created_at=created, label=f"the {name}"))
    newest = builders.write_results(tmp_path / "loose").manifest()
    (tmp_path / "built" / "torn").mkdir()
    (tmp_path / "built" / "torn" / "manifest.json").write_text('{"schema_version": 1')
    (tmp_path / "built" / "later").mkdir()
    (tmp_path / "built" / "later" / "manifest.json").write_text('{"schema_version": 9}')
    (tmp_path / "notes" / "more").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    result = call("list", tmp_path)
    assert result.exit_code == 0
    rows = [words(line) for line in result.output.splitlines()[1:]]
    assert rows[0] == "built/new 2026-02-01T00:00:00Z built sim failed 6/6 the new"
    assert sorted(rows[1:3]) == [
        "built/old 2026-01-01T00:00:00Z built sim done 6/6 the old",
        f"loose {newest.created_at} built sim done 6/6",
    ]
    assert rows[3].startswith("built/later unreadable")
    assert "schema_version 9 is newer than 3" in rows[3]
    assert rows[4].startswith("built/torn damaged")
    assert rows[5] == "notes unreadable not a result directory"
    assert len(rows) == 6


def test_list_counts_runs_that_are_done_and_survives_damaged_ones(tmp_path):
    results = builders.write_results(tmp_path / "a")
    runs = results.runs()
    runs[0].write(msgspec.structs.replace(runs[0].read(), state="failed"))
    (runs[1].path / "run.json").write_text("{")
    (runs[2].path / "run.json").unlink()
    (row,) = call("list", tmp_path).output.splitlines()[1:]
    assert words(row).startswith(
        f"a {results.manifest().created_at} built sim damaged 3/6 {runs[1].path / 'run.json'}: "
    )


def test_list_as_json_is_one_document(tmp_path):
    builders.write_results(tmp_path / "a")
    (tmp_path / "b").mkdir()
    document = json.loads(call("list", tmp_path, "--json").stdout)
    assert document["root"] == str(tmp_path)
    known, foreign = document["results"]
    assert (known["profile"], known["num_done"], known["num_planned"], known["problem"]) == ("built", 6, 6, None)
    assert foreign["path"] == str(tmp_path / "b")
    assert foreign["problem"] == "not a result directory"


def test_list_of_a_result_directory_lists_itself(tmp_path):
    builders.write_results(tmp_path)
    assert str(tmp_path) in call("list", tmp_path).output


def test_list_of_an_empty_root_says_so(tmp_path):
    assert call("list", tmp_path).output == f"{tmp_path} contains no results yet; 'benchctl run' creates them\n"


def test_list_of_a_missing_root_is_a_usage_error(tmp_path):
    result = call("list", tmp_path / "nowhere")
    assert isinstance(result.exception, UsageError)
    assert f"{tmp_path / 'nowhere'} is not a directory" in str(result.exception)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_list_survives_a_directory_it_may_not_read(tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    assert "not a result directory" in call("list", tmp_path).output
