"""Several load points on one server, in virtual time: what they carry over is named, in values and in ratios."""

from typing import Any, Final

import pytest
from support.results.several import simulated

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze
from benchctl.report.experiment_tables import carry_over_table

LADDER: Final[dict[str, Any]] = {
    "blocks": 8,
    "loads_per_server": 1,
    "per_server": "ladder",
    "sweep": {"max_concurrency": [1, 4, 16]},
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 32,
        "prompts_per_slot": 2,
        "input_len": 64,
        "output_len": 16,
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "primary_metrics": ["step_ms"],
}


def analyzed(directory, a: dict[str, Any], b: dict[str, Any]) -> AnalyzedExperiment:
    variants = {"baseline": {"server": a}, "same": {"server": b}}
    return analyze(simulated(directory, **LADDER | {"variants": variants}))


def alarms(analysis: AnalyzedExperiment) -> list[str]:
    return [each.message for each in analysis.warnings if each.code == "ladder-carry-over"]


def test_what_both_arms_carry_over_is_in_their_values_and_not_in_their_ratio(tmp_path):
    analysis = analyzed(tmp_path, {"aftermath": 0.03}, {"aftermath": 0.03})
    (message,) = alarms(analysis)
    assert message.startswith("step_ms changes by +2.")
    assert "after a larger load, against after a smaller one (p 0.00" in message
    table = carry_over_table(analysis)
    assert table is not None
    assert [row["metric"] for row in table.rows] == ["step_ms", "ratio of step_ms"]
    assert table.rows[0]["after_larger"].value == pytest.approx(0.03, abs=0.005)


def test_what_one_arm_carries_over_makes_the_ratio_depend_on_the_order(tmp_path):
    messages = alarms(analyzed(tmp_path, {}, {"aftermath": 0.03}))
    assert any(each.startswith("ratio of step_ms changes by +") for each in messages)


def test_servers_that_carry_nothing_over_raise_no_alarm_and_fresh_ones_are_not_tested(tmp_path):
    analysis = analyzed(tmp_path / "ladder", {}, {})
    assert alarms(analysis) == []
    assert set(analysis.carry_over) == {"step_ms", "ratio of step_ms"}
    fresh = LADDER | {"per_server": "fresh", "blocks": 2}
    assert analyze(simulated(tmp_path / "fresh", **fresh)).carry_over == {}
