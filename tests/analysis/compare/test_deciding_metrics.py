"""The primary metrics that decide: those that the servers of both sides record."""

import json
import math

import msgspec
import pytest
from support.results.builders import edit_run, run_ids, write_results
from support.results.comparing import compare_arms

from benchctl.analysis.compare.words import reasons_of, unrecorded_lines, verdict_sentence
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import take_look
from benchctl.analysis.experiment.pairing import deciding_in_plan
from benchctl.analysis.planning import power_lines
from benchctl.engines.engine import engine_for
from benchctl.profile.load import load_profile
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.report.comparison_tables import footnotes_of
from benchctl.report.documents import document_of

ALL = ["step_ms", "tpot_ms", "wall_s"]
RULE = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6,))


def equal_servers(path):
    """Two arms whose times differ by nothing but scatter."""
    factors = [{"baseline": 1.0, "guided": math.exp(e)} for e in (0.001, -0.001, 0.002, -0.002, 0.001, 0.0)]
    return write_results(path, block_factors=factors, cells=({"top_k": 1},))


def lose_steps(results, *variants, code="steps-unknown", most=99):
    """Leave no step of at most ``most`` runs of each variant, and say why."""
    for variant in variants:
        for run_id in run_ids(results, variant)[:most]:
            (results.run(run_id).path / "steps.jsonl").unlink()
            edit_run(results, run_id, warnings=(ResultWarning(code=code, message="no steps"),))


def compared(results, *metrics, primary=None):
    """The comparison, and the names of the metrics that decide it."""
    if primary is not None:
        results.write_profile(f"{results.profile_yaml()}primary_metrics: {primary}\n")
    comparison = compare_arms(results, metrics=metrics)
    return comparison, [metric.metric.name for metric in comparison.cells[0].deciding]


@pytest.mark.parametrize("variants", [("baseline", "guided"), ("baseline",), ("guided",)])
def test_a_metric_that_a_server_never_records_decides_nothing_and_the_verdict_names_it(tmp_path, variants):
    results = equal_servers(tmp_path / "r")
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, unrecorded_lines(comparison)) == ("equivalent", ALL, ())
    lose_steps(results, *variants)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, comparison.num_tests) == ("equivalent", ["tpot_ms", "wall_s"], 2)
    assert verdict_sentence(comparison).startswith("equivalent: guided against baseline: 2 of 2 comparisons inside")
    line = "step_ms is not recorded by this server; tpot_ms and wall_s decide"
    assert unrecorded_lines(comparison) == (line,)
    assert line in list(footnotes_of(comparison))
    assert json.loads(msgspec.json.encode(document_of(comparison)["cells"]))[0]["unrecorded_metrics"] == ["step_ms"]
    without, _ = compared(results, primary="[tpot_ms, wall_s]")
    levels = [[(m.verdict, m.judged_confidence) for m in each.cells[0].deciding] for each in (comparison, without)]
    assert levels[0] == levels[1], "as if the profile did not list it"


@pytest.mark.parametrize(("most", "code"), [(1, "steps-unknown"), (99, "steps-missing")])
def test_a_metric_that_should_be_there_and_is_missing_leaves_no_verdict_of_equivalence(tmp_path, most, code):
    results = equal_servers(tmp_path)
    lose_steps(results, "guided", code=code, most=most)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding) == ("inconclusive", ALL)


def test_a_metric_that_is_named_stays_and_where_no_primary_one_is_recorded_that_is_the_reason(tmp_path):
    results = equal_servers(tmp_path)
    lose_steps(results, "baseline", "guided")
    comparison, deciding = compared(results, "step_ms", "wall_s")
    assert (comparison.verdict, deciding) == ("inconclusive", ["step_ms", "wall_s"])
    assert reasons_of(comparison) == ("top_k=1: step_ms ? unknown: needs a step log",)
    comparison, _ = compared(results, primary="[step_ms, p95_step_ms]")
    assert verdict_sentence(comparison) == (
        "inconclusive: guided against baseline: nothing to judge: step_ms and p95_step_ms are not recorded by this "
        "server, and no other primary metric is left; name one with --metrics, such as wall_s"
    )


def test_a_look_waits_for_the_metrics_that_decide_and_for_no_other(tmp_path):
    def look(results):
        taken = take_look(load_experiment(results.path), RULE, 6, ALL)
        return taken.is_precise, {width.metric: width.half_width_frac is not None for width in taken.half_widths}

    results = equal_servers(tmp_path / "a")
    lose_steps(results, "guided", most=1)
    assert not look(results)[0], "five blocks know step_ms"
    results = equal_servers(tmp_path / "b")
    lose_steps(results, "baseline", "guided")
    assert look(results) == (True, {"tpot_ms": True, "wall_s": True})
    results = equal_servers(tmp_path / "c")
    lose_steps(results, "baseline", "guided", code="steps-missing")
    assert look(results) == (False, {"step_ms": False, "tpot_ms": True, "wall_s": True})


def test_a_plan_corrects_for_the_metrics_that_will_decide():
    profile = load_profile("aa", engine="attach", overrides=["engine.options.url=http://host:1"], blocks=8)
    has_steps = engine_for("attach").has_steps
    deciding = deciding_in_plan(profile.primary_metrics, profile, has_steps)
    assert set(profile.primary_metrics) - set(deciding) == {"step_ms"}
    power, assumed = power_lines(profile, None, has_steps), power_lines(profile, None)
    changes = [float(lines[0].partition("±")[2].partition("%")[0]) for lines in (power, assumed)]
    assert changes[0] < changes[1]
    assert "2 corrected tests" in power[0]
    assert "3 corrected tests" in assumed[0]
    assert power[-1] == "step_ms is not recorded by this server; tpot_ms and wall_s decide"
