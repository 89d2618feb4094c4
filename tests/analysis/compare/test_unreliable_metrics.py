"""Metrics that a run calls unreliable decide nothing; the others go on deciding."""

import pytest
from support.results.builders import edit_run, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.metric import Rules, compare_metric, judge_together
from benchctl.analysis.compare.words import reasons_of
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.statistics.estimate import unpaired_ratio
from benchctl.records.schema import ResultWarning

BLOCKS = tuple({"baseline": 1.0, "guided": factor} for factor in (1.0, 1.001, 0.999, 1.002, 1.0, 0.998))
IN_BURSTS = ResultWarning(code="client-bunching", message="tokens reached the client in bursts")
LAGGING = ResultWarning(code="sim-lag", message="the simulator was late")


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=BLOCKS)


def compare(results, *metrics):
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    return compare_sides(*sides, CompareOptions(metrics=metrics))


def verdicts_of(comparison):
    return {metric.metric.name: metric.verdict for metric in comparison.cells[0].metrics}


def warn(results, warning, variant="guided"):
    """Attach a warning to the first run of a variant."""
    name = next(run.path.name for run in results.runs() if run.read().variant == variant)
    edit_run(results, name, warnings=(warning,))


@pytest.mark.parametrize("variant", ["baseline", "guided"])
def test_bursts_in_one_run_of_either_side_keep_what_the_client_timed_from_deciding(results, variant):
    before = compare(results, "tpot_ms", "ttft_ms", "step_ms")
    assert verdicts_of(before)["tpot_ms"] == "regression"
    warn(results, IN_BURSTS, variant)
    after = compare(results, "tpot_ms", "ttft_ms")
    assert (after.verdict, after.exit_code) == ("inconclusive", 3)
    assert any("in bursts in 1 of 12 runs" in reason for reason in reasons_of(after))


def test_steps_and_wall_time_go_on_deciding(results):
    before = verdicts_of(compare(results))
    warn(results, IN_BURSTS)
    after = verdicts_of(compare(results))
    changed = {name for name, verdict in before.items() if after[name] != verdict}
    assert {"tpot_ms", "itl_ms", "ttft_ms", "p50_itl_ms"} <= changed
    assert all(name.endswith(("ttft_ms", "itl_ms", "tpot_ms")) for name in changed)
    assert (after["step_ms"], after["wall_s"]) == ("regression", "regression")


def test_the_interval_of_an_unreliable_metric_stays(results):
    def estimate_of(comparison):
        return next(m for m in comparison.cells[0].metrics if m.metric.name == "tpot_ms").estimate

    before = estimate_of(compare(results))
    warn(results, IN_BURSTS)
    assert estimate_of(compare(results)) == before


def test_other_warnings_take_no_metric_away(results):
    before = verdicts_of(compare(results))
    warn(results, LAGGING)
    assert verdicts_of(compare(results)) == before


def test_a_limit_of_the_values_comes_first_in_the_reason_after_the_correction_for_several_tests():
    rules = Rules(margin_frac=0.01, confidence=0.95, is_paired=False, noise={})
    a, b = (1.0, 1.02, 0.98, 1.01, 0.99, 1.0), (1.01, 1.03, 0.99, 1.0, 1.0, 1.02)
    metrics = [
        compare_metric(name, "deciding", (a, b), rules, unpaired_ratio(a, b, 0.95), limits=limits)
        for name, limits in (("tpot_ms", ("2 of 12 runs do not count",)), ("step_ms", ()))
    ]
    ((limited, other),) = judge_together([metrics], 0.95)
    assert limited.judged_confidence > 0.95
    assert limited.reason == f"2 of 12 runs do not count; {other.reason}"
    assert other.reason.startswith("the interval reaches across")
