"""Suspect runs count where somebody says so, and then a comparison never hides that they do."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import typer
from support.results.builders import edit_requests, edit_run, write_results
from typer.testing import CliRunner

import benchctl.measure
from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.commands.compare import compare as compare_command
from benchctl.records.record import RequestError, RunFailure
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES

SEVEN = ({"baseline": 1.0, "guided": 1.0},) * 7
GUIDED = "001-b0-guided-top_k5"
IN_BURSTS = ResultWarning(code="client-bunching", message="tokens came in bursts")

app = typer.Typer()
app.command()(compare_command)


def doubt(code):
    return ResultWarning(code=code, message=f"{code} it was")


def suspect(results, run_id, *codes):
    edit_run(results, run_id, state="suspect", warnings=(*(doubt(code) for code in codes), IN_BURSTS))


def compare(results, **options):
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    return compare_sides(*sides, CompareOptions(**options))


def messages(comparison, code):
    return [warning.message for warning in comparison.warnings if warning.code == code]


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=SEVEN)


@pytest.mark.parametrize("code", sorted(SUSPECT_CODES - CLIENT_SUSPECT_CODES - {"check-failed"}))
def test_a_suspect_run_counts_if_asked_for_whatever_made_it_suspect(results, code):
    suspect(results, GUIDED, code)
    left_out, counted = compare(results), compare(results, allow_suspect=True)
    assert (left_out.cells[0].num_blocks, counted.cells[0].num_blocks) == (6, 7)
    assert messages(counted, "excluded-block") == messages(left_out, "suspect-counted") == []
    assert messages(counted, code) == [f"{code} it was"]


@pytest.mark.parametrize("code", sorted(CLIENT_SUSPECT_CODES))
def test_where_the_client_is_in_doubt_its_times_do_not_count_and_those_of_the_server_do(results, code):
    suspect(results, GUIDED, code)
    left_out, counted = compare(results), compare(results, allow_suspect=True)
    blocks = [
        {metric.metric.name: metric.estimate.num_blocks for metric in comparison.cells[0].deciding}
        for comparison in (left_out, counted)
    ]
    assert blocks == [{"step_ms": 7, "wall_s": 6, "tpot_ms": 6}, {"step_ms": 7, "wall_s": 7, "tpot_ms": 7}]
    (message,) = messages(left_out, "client-times-excluded")
    assert message.startswith(
        "guided top_k=5: times that the client measured in block 0 do not count, those of the server do"
    )
    assert f"the first: {GUIDED}: {code}: {code} it was" in message
    assert ("lighter load" in message) == (code in {"slots-idle", "sends-delayed", "rate-missed"})
    assert messages(left_out, "excluded-block") == messages(counted, "client-times-excluded") == []


def test_that_times_of_the_client_do_not_count_is_the_first_reason_where_they_decide_nothing(tmp_path):
    shaken = tuple({"baseline": 1.0 + 0.05 * (i % 3), "guided": (1 + 0.07 * (i * i % 4)) / 1.55} for i in range(7))
    results = write_results(tmp_path / "r", block_factors=shaken)
    suspect(results, GUIDED, "arrival-times-unreliable")
    reasons = {metric.metric.name: metric.reason for metric in compare(results).cells[0].deciding}
    assert reasons["wall_s"].startswith("the client's times of 1 of 14 runs do not count; ")
    assert "; the interval reaches across the margin of 1%" in reasons["wall_s"]
    assert reasons["step_ms"].startswith("the interval reaches across the margin of 1%")


def test_tables_and_comparison_count_the_same_blocks_where_the_client_is_in_doubt(results):
    suspect(results, GUIDED, "arrival-times-unreliable")
    (row,), cell = analyze_directory(results.path).sweep, compare(results).cells[0]
    estimates = {metric.metric.name: metric.estimate for metric in cell.metrics}
    for quantity, name in (("wall", "wall_s"), ("step_ms", "step_ms"), ("tok_per_s", "output_throughput")):
        assert row.estimates[quantity].num_blocks == estimates[name].num_blocks
        assert row.estimates[quantity].ratio == estimates[name].ratio


def test_suspect_runs_that_count_are_told_side_by_side_with_the_codes_of_their_doubts(results):
    for run in results.runs():
        if "baseline" in run.path.name:
            suspect(results, run.path.name, "sends-delayed", "arrival-times-unreliable")
    suspect(results, GUIDED, "client-cpu")
    (message,) = messages(compare(results, allow_suspect=True), "suspect-counted")
    assert message.startswith(
        "suspect runs are counted (--allow-suspect): 7 of 7 runs of baseline "
        "(arrival-times-unreliable, sends-delayed) and 1 of 7 runs of guided (client-cpu); "
    )


def test_a_side_without_suspect_runs_is_not_named(results):
    suspect(results, GUIDED, "client-cpu")
    (message,) = messages(compare(results, allow_suspect=True), "suspect-counted")
    assert "1 of 7 runs of guided (client-cpu)" in message
    assert "baseline" not in message


def test_a_run_that_serves_many_cells_is_counted_once(tmp_path):
    results = write_results(tmp_path / "r", cells=({"top_k": 2}, {"top_k": 5}))
    suspect(results, "000-b0-baseline", "arrival-times-unreliable")
    (message,) = messages(compare(results, allow_suspect=True), "suspect-counted")
    assert "1 of 3 runs of baseline (arrival-times-unreliable)" in message


@pytest.mark.parametrize(
    ("warnings", "codes"),
    [((), "no reason recorded"), ((doubt("throttled"), IN_BURSTS), "client-bunching, throttled")],
)
def test_a_run_that_is_suspect_for_an_unknown_reason_is_told_with_all_that_is_known(results, warnings, codes):
    edit_run(results, GUIDED, state="suspect", warnings=warnings)
    assert f"of guided ({codes})" in messages(compare(results, allow_suspect=True), "suspect-counted")[0]


def test_where_no_run_is_suspect_the_option_changes_nothing(results):
    assert compare(results, allow_suspect=True) == compare(results)


def test_a_run_that_failed_never_counts(results):
    edit_run(results, GUIDED, state="failed", failure=RunFailure(cause="server-died", message="killed"))
    counted = compare(results, allow_suspect=True)
    assert counted.cells[0].num_blocks == 6
    assert messages(counted, "excluded-block") == [f"block 0 is left out: {GUIDED}: failed (server-died): killed"]


def test_failed_requests_of_a_suspect_run_that_counts_must_be_allowed_too(results):
    suspect(results, GUIDED, "arrival-times-unreliable", "failed-requests")
    gone = RequestError(kind="reset", message="gone")
    edit_requests(results, GUIDED, lambda r: r if r.index else msgspec.structs.replace(r, error=gone))
    edit_run(results, GUIDED, num_completed=3, num_failed=1)
    assert compare(results, allow_suspect=True).verdict == "invalid"
    both = compare(results, allow_suspect=True, allow_failed=True)
    assert (both.verdict, both.cells[0].num_blocks) == ("regression", 7)


def test_a_failed_check_makes_a_comparison_invalid_also_where_suspect_runs_count(results):
    edit_requests(results, GUIDED, lambda r: r if r.index else None)
    suspect(results, GUIDED, "check-failed")
    assert compare(results, allow_suspect=True).exit_code == 4


def test_a_suspect_run_that_cannot_be_read_whole_does_not_count(results):
    path = results.run(GUIDED).path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    suspect(results, GUIDED, "arrival-times-unreliable")
    counted = compare(results, allow_suspect=True)
    assert counted.cells[0].num_blocks == 6
    (message,) = messages(counted, "excluded-block")
    assert "suspect, and cannot be read completely: " in message
    assert "steps.jsonl:8: the line is cut off" in message


def test_table_markdown_and_document_show_that_suspect_runs_count(results):
    suspect(results, GUIDED, "arrival-times-unreliable")
    sides = (f"{results.path}:baseline", f"{results.path}:guided")
    forms = [
        CliRunner().invoke(app, [*sides, "--allow-suspect", *form]) for form in ([], ["--markdown"], ["--json"])
    ]
    table, markdown, document = forms
    assert {form.exit_code for form in forms} == {1}
    counts = "1 of 7 runs of guided (arrival-times-unreliable)"
    assert f"warning: suspect runs are counted (--allow-suspect): {counts}" in table.stdout
    assert f"- warning: suspect runs are counted (--allow-suspect): {counts}" in markdown.stdout
    warnings = {warning["code"]: warning["message"] for warning in json.loads(document.stdout)["warnings"]}
    assert counts in warnings["suspect-counted"]
    assert warnings["arrival-times-unreliable"] == "arrival-times-unreliable it was"
    plain = CliRunner().invoke(app, sides)
    assert "times that the client measured in block 0 do not count, those of the server do" in plain.stdout
    assert "arrival-times-unreliable: arrival-times-unreliable it was" in plain.stdout


def test_every_code_with_which_a_measurement_doubts_itself_is_known():
    room = Path(next(iter(benchctl.measure.__path__)))
    text = "".join(file.read_text() for file in room.rglob("*.py"))
    codes = set(re.findall(r'\.suspect\(\s*"([\w-]+)"', text))
    assert {"failed-requests", "warmup-failed"} <= codes <= SUSPECT_CODES
    assert CLIENT_SUSPECT_CODES < SUSPECT_CODES
