"""What is told of suspect runs at the end of an experiment."""

import pytest
from support.results.builders import edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.cli.outcome import suspects_lines
from benchctl.records.schema import ResultWarning


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r")


def suspect(results, run_id, *codes):
    warnings = tuple(ResultWarning(code=code, message=code) for code in codes)
    edit_run(results, run_id, state="suspect", warnings=warnings)


def told(results):
    return suspects_lines(analyze_directory(results.path))


def test_runs_that_are_done_need_no_word(results):
    assert told(results) == []


def test_a_late_client_costs_what_it_timed_and_the_way_to_count_it_is_named(results):
    suspect(results, "000-b0-baseline", "gpu-sampler-missing", "arrival-times-unreliable")
    suspect(results, "002-b1-baseline", "client-cpu", "arrival-times-unreliable")
    (line,) = told(results)
    assert line.startswith(
        "2 runs are suspect (arrival-times-unreliable in 2, client-cpu in 1): times of the client are excluded"
    )
    assert "times of the server (step_ms) are not" in line
    assert "--allow-suspect" in line
    assert "gpu-sampler-missing" not in line


def test_other_doubts_are_told_for_themselves(results):
    suspect(results, "000-b0-baseline", "arrival-times-unreliable")
    suspect(results, "002-b1-baseline", "arrival-times-unreliable", "steps-damaged")
    first, second = told(results)
    assert first.startswith("1 run is suspect (arrival-times-unreliable in 1): times of the client are excluded")
    assert second.startswith("1 run is suspect (")
    assert second.endswith("their results are not reliable; see Notes")
