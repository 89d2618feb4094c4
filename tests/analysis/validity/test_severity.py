"""Which warning is told first: the one that decided."""

from support.results.builders import edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import SUSPECT_CODES, by_severity
from benchctl.report.experiment_tables import footnotes


def warnings(*codes):
    return [ResultWarning(code=code, message=code) for code in codes]


def test_what_makes_a_run_suspect_comes_first_and_what_is_merely_absent_last():
    found = warnings(
        "gpu-sampler-missing", "event-loop-stalls", "arrival-times-unreliable", "underfilled-batch", "check-failed"
    )
    ordered = [warning.code for warning in by_severity(found)]
    assert ordered == [
        "arrival-times-unreliable",
        "check-failed",
        "event-loop-stalls",
        "underfilled-batch",
        "gpu-sampler-missing",
    ]


def test_every_doubt_comes_before_a_code_that_nobody_has_heard_of():
    for code in SUSPECT_CODES:
        assert [warning.code for warning in by_severity(warnings("new", code))] == [code, "new"]


def test_equal_ones_keep_the_order_in_which_they_were_found():
    found = warnings("b", "a", "b")
    assert by_severity(found) == tuple(found)


def test_notes_of_a_directory_begin_with_what_decided(tmp_path):
    results = write_results(tmp_path / "r")
    edit_run(results, "000-b0-baseline", warnings=tuple(warnings("gpu-sampler-missing", "event-loop-stalls")))
    edit_run(results, "002-b1-baseline", state="suspect", warnings=tuple(warnings("arrival-times-unreliable")))
    codes = [note.code for note in footnotes(analyze_directory(results.path))]
    assert codes[:2] == ["arrival-times-unreliable", "event-loop-stalls"]
    assert codes[-1] == "gpu-sampler-missing"
