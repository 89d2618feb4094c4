"""What tests of real engines take for an experiment that ended well, and what they do not."""

import subprocess

import pytest
from support.results.builders import edit_run, write_results
from support.servers.real_engines import assert_compared, assert_ended

from benchctl.records.schema import ResultWarning


def ended(code):
    return subprocess.CompletedProcess(args=(), returncode=code, stdout="what was printed", stderr="")


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r")


def suspect(results, *codes):
    warnings = tuple(ResultWarning(code=code, message=code) for code in codes)
    edit_run(results, "000-b0-baseline", state="suspect", warnings=warnings)


def test_runs_that_are_done_ended_well(results):
    assert_ended(ended(0), results.path)


def test_a_client_that_was_late_on_a_busy_machine_is_no_fault_of_the_engine(results):
    suspect(results, "arrival-times-unreliable", "client-cpu", "client-bunching", "underfilled-batch")
    assert_ended(ended(4), results.path)


@pytest.mark.parametrize(
    "codes",
    [
        ("check-failed",),
        ("arrival-times-unreliable", "failed-requests"),
        ("arrival-times-unreliable", "steps-missing"),
        ("other",),
    ],
)
def test_any_other_doubt_is_a_failure(results, codes):
    suspect(results, *codes)
    with pytest.raises(AssertionError, match="what was printed"):
        assert_ended(ended(4), results.path)


@pytest.mark.parametrize(
    ("state", "code"), [("failed", 4), ("running", 0), ("done", 4), ("suspect", 0), ("done", 5)]
)
def test_a_run_that_did_not_end_or_an_exit_code_that_is_not_its_own_is_a_failure(results, state, code):
    late = (ResultWarning(code="arrival-times-unreliable", message="late"),) if state == "suspect" else ()
    edit_run(results, "000-b0-baseline", state=state, warnings=late)
    with pytest.raises(AssertionError, match="what was printed"):
        assert_ended(ended(code), results.path)


def test_a_sweep_that_can_be_compared_has_a_verdict_in_every_cell(results):
    assert_compared(results.path)


def test_a_sweep_whose_comparison_is_refused_is_a_failure(results):
    for run_id in ("001-b0-guided-top_k5", "003-b1-guided-top_k5", "005-b2-guided-top_k5"):
        config = results.run(run_id).read().effective_config
        edit_run(results, run_id, effective_config=config | {"server.x": 1})
    with pytest.raises(AssertionError, match=r"server\.x: absent against 1"):
        assert_compared(results.path)
