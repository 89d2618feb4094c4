"""The primary metrics that decide: those that the servers of both sides record."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from support.results.builders import edit_run, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import reasons_of, unrecorded_lines, verdict_sentence
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import take_look
from benchctl.analysis.experiment.pairing import deciding_in_plan, parse_side
from benchctl.analysis.planning import power_lines
from benchctl.engines.engine import engine_for
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.report.comparison_tables import footnotes_of
from benchctl.report.documents import document_of

GREEDY = ({"top_k": 1},)
SCATTER = (0.001, -0.001, 0.002, -0.002, 0.001, 0.0)
NO_STEPS = ResultWarning(code="steps-unknown", message="engine 'attach' records no steps")


def equal_servers(path: Path, num_blocks: int = 6) -> ResultDirectory:
    """Two arms whose times differ by nothing but scatter."""
    scatter = (SCATTER * 2)[:num_blocks]
    factors = [{"baseline": 1.0, "guided": math.exp(noise)} for noise in scatter]
    return write_results(path, block_factors=factors, cells=GREEDY)


def lose_steps(
    results: ResultDirectory, warning: ResultWarning, variant: str | None = None, most: int = 99
) -> None:
    """Leave no step of the runs of ``variant``, of at most ``most`` of them, and say why."""
    runs = [run for run in results.plan().runs if variant in (None, run.variant)]
    for planned in runs[:most]:
        (results.run(planned.run_id).path / "steps.jsonl").unlink()
        edit_run(results, planned.run_id, warnings=(warning,))


def compared(results: ResultDirectory, *metrics: str, primary: str | None = None) -> Comparison:
    if primary is not None:
        text = (results.path / "profile.yaml").read_text(encoding="utf-8")
        results.write_profile(f"{text}primary_metrics: {primary}\n")
    a, b = (parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided"))
    return compare_sides(a, b, CompareOptions(metrics=metrics))


def names_deciding(comparison: Comparison) -> list[str]:
    return [metric.metric.name for cell in comparison.cells for metric in cell.deciding]


@pytest.mark.parametrize("variant", [None, "baseline", "guided"])
def test_a_metric_that_a_server_never_records_decides_nothing_and_the_verdict_names_it(tmp_path, variant):
    results = equal_servers(tmp_path)
    lose_steps(results, NO_STEPS, variant)
    comparison = compared(results)
    assert names_deciding(comparison) == ["tpot_ms", "wall_s"]
    assert comparison.num_tests == 2
    assert comparison.verdict == "equivalent"
    assert verdict_sentence(comparison).startswith("equivalent: guided against baseline: 2 of 2 comparisons inside")
    line = "step_ms is not recorded by this server; tpot_ms and wall_s decide"
    assert unrecorded_lines(comparison) == (line,)
    assert line in list(footnotes_of(comparison))
    assert json.loads(msgspec.json.encode(document_of(comparison)["cells"]))[0]["unrecorded_metrics"] == ["step_ms"]


def test_the_verdict_is_that_of_a_profile_that_does_not_list_the_metric(tmp_path):
    without = equal_servers(tmp_path / "without")
    listed = equal_servers(tmp_path / "listed")
    for results in (without, listed):
        lose_steps(results, NO_STEPS)
    a, b = compared(listed), compared(without, primary="[tpot_ms, wall_s]")
    levels = [[(m.metric.name, m.verdict, m.judged_confidence) for m in c.cells[0].deciding] for c in (a, b)]
    assert levels[0] == levels[1]


def test_servers_that_record_every_metric_are_judged_by_all_of_them(tmp_path):
    comparison = compared(equal_servers(tmp_path))
    assert names_deciding(comparison) == ["step_ms", "tpot_ms", "wall_s"]
    assert unrecorded_lines(comparison) == ()
    assert comparison.verdict == "equivalent"


@pytest.mark.parametrize(("most", "code"), [(1, "steps-unknown"), (99, "steps-missing")])
def test_a_metric_that_should_be_there_and_is_missing_leaves_no_verdict_of_equivalence(tmp_path, most, code):
    results = equal_servers(tmp_path)
    lose_steps(results, ResultWarning(code=code, message="no steps"), "guided", most)
    comparison = compared(results)
    assert names_deciding(comparison) == ["step_ms", "tpot_ms", "wall_s"]
    assert comparison.verdict == "inconclusive"


def test_a_metric_that_is_named_stays_and_its_absence_is_the_reason(tmp_path):
    results = equal_servers(tmp_path)
    lose_steps(results, NO_STEPS)
    comparison = compared(results, "step_ms", "wall_s")
    assert names_deciding(comparison) == ["step_ms", "wall_s"]
    assert comparison.verdict == "inconclusive"
    assert reasons_of(comparison) == ("top_k=1: step_ms ? unknown: needs a step log",)


def test_where_no_primary_metric_is_recorded_that_is_the_reason(tmp_path):
    results = equal_servers(tmp_path)
    lose_steps(results, NO_STEPS)
    comparison = compared(results, primary="[step_ms, p95_step_ms]")
    assert comparison.verdict == "inconclusive"
    assert verdict_sentence(comparison) == (
        "inconclusive: guided against baseline: nothing to judge: step_ms and p95_step_ms are not recorded by this "
        "server, and no other primary metric is left; name one with --metrics, such as wall_s"
    )


def test_a_look_waits_for_the_metrics_that_decide_and_for_no_other(tmp_path):
    results = equal_servers(tmp_path)
    rule = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6,))
    primary = ("step_ms", "tpot_ms", "wall_s")
    lose_steps(results, NO_STEPS, "guided", 1)
    partly = take_look(load_experiment(results.path), rule, 6, primary)
    assert not partly.is_precise, "five blocks know step_ms"
    for planned in results.plan().runs:
        (results.run(planned.run_id).path / "steps.jsonl").unlink(missing_ok=True)
    wholly = take_look(load_experiment(results.path), rule, 6, primary)
    assert [width.metric for width in wholly.half_widths] == ["tpot_ms", "wall_s"]
    assert wholly.is_precise


def test_a_look_is_not_precise_while_a_metric_that_should_be_there_is_unknown(tmp_path):
    results = equal_servers(tmp_path)
    rule = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6,))
    lose_steps(results, ResultWarning(code="steps-missing", message="no steps"))
    look = take_look(load_experiment(results.path), rule, 6, ("step_ms", "wall_s"))
    assert {width.metric: width.half_width_frac is None for width in look.half_widths} == {
        "step_ms": True,
        "wall_s": False,
    }
    assert not look.is_precise


def test_a_plan_corrects_for_the_metrics_that_will_decide():
    overrides = ["engine.options.url=http://host:1"]
    profile = load_profile("aa", engine="attach", overrides=overrides, blocks=8)
    has_steps = engine_for("attach").has_steps
    assert set(profile.primary_metrics) - set(deciding_in_plan(profile.primary_metrics, profile, has_steps)) == {
        "step_ms"
    }
    power, assumed = power_lines(profile, None, has_steps), power_lines(profile, None)
    changes = [float(lines[0].partition("±")[2].partition("%")[0]) for lines in (power, assumed)]
    assert changes[0] < changes[1]
    assert "2 corrected tests" in power[0]
    assert "3 corrected tests" in assumed[0]
    assert power[-1] == "step_ms is not recorded by this server; tpot_ms and wall_s decide"
