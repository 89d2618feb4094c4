"""Where along a curve of loads the difference sits, and findings under each load; simulated in virtual time."""

from typing import Any, Final

from support.results.several import simulated

from benchctl.analysis.analyzed import analyze
from benchctl.analysis.findings import Finding

CURVE: Final[dict[str, Any]] = {
    "blocks": 6,
    "loads_per_server": 1,
    "sweep": {"max_concurrency": [1, 4, 16]},
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 24,
        "input_len": 64,
        "output_len": 16,
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "engine": {"kind": "sim", "options": {}},
    "primary_metrics": ["output_throughput"],
}


def findings(directory, **changes: Any) -> dict[str, Finding]:
    return {each.code: each for each in analyze(simulated(directory, **CURVE | changes)).findings}


def test_a_difference_is_found_at_the_loads_where_it_is(tmp_path):
    finding = findings(tmp_path, variants={"baseline": {}, "narrow": {"server": {"max_num_seqs": 8}}})[
        "place-on-curve"
    ]
    assert finding.sentence.startswith(
        "The change of output_throughput from baseline to narrow sits at max_concurrency=16: +0.0% ["
    )
    assert finding.numbers["ratio_at_4"] == 1
    assert finding.numbers["ratio_at_16"] < 0.7


def test_equal_arms_seldom_differ_on_their_curve(tmp_path):
    changes: dict[str, Any] = {
        "engine": {"kind": "sim", "options": {"noise": "published"}},
        "variants": {"baseline": {}, "same": {}},
        "workload": CURVE["workload"] | {"num_prompts": 8},
        "sweep": {"max_concurrency": [1, 4]},
    }
    codes = [findings(tmp_path / str(seed), seed=seed, **changes) for seed in range(3)]
    # each has a chance of 5 %: two or more of three have one of 0.7 %
    assert sum("place-on-curve" in of_one for of_one in codes) <= 1


def test_each_setting_of_the_server_has_a_curve_and_each_load_a_trend_over_the_settings(tmp_path):
    swept = {"max_concurrency": [4, 16], "max_num_seqs": [2, 3, 4]}
    experiment = simulated(tmp_path, **CURVE | {"sweep": swept, "variants": {"baseline": {}, "narrow": {}}})
    sentences = [each.sentence for each in analyze(experiment).findings]
    curves = [each.partition(" sits")[0].partition(" to ")[2] for each in sentences if " sits at " in each]
    assert curves == [f"narrow max_num_seqs={n}" for n in (2, 3, 4)]
    trends = [each.partition(" from ")[0] for each in sentences if each.startswith("The overhead of")]
    assert trends == [f"The overhead of narrow max_concurrency={n} shrinks with max_num_seqs" for n in (4, 16)]
