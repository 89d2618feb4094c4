"""The verdict on experiments whose truth is known: a small version of ``benchmarks/verdict/verdict_truth.py``.

Streams are named, so that each test sees the same experiments every time; a demand fails where chance would explain
it in less than one of a hundred cases.
"""

import pytest

from benchmarks.verdict import known_truth, shares, verdict_truth


def verdict_shares(num_experiments, **options):
    """Shares of experiments by their verdicts."""
    conditions = known_truth.Made(**options)
    events = (
        {
            "covers": verdict_truth.covers(metrics[i % len(metrics)], conditions.truth),
            "any change": any(metric.verdict in verdict_truth.CHANGES for metric in metrics),
            **{name: metrics[0].verdict == name for name in ("regression", "equivalent")},
        }
        for i, (_, metrics) in enumerate(known_truth.experiments(conditions, num_experiments))
    )
    return shares.row({}, events).shares


@pytest.mark.parametrize(
    ("noise", "num_blocks", "num_experiments"),
    [
        ("gaussian", 6, 200),
        ("heavy tail", 8, 200),
        ("linear drift", 6, 200),
        ("random walk", 8, 200),
        ("AR(1)", 8, 200),
        ("gaussian", 15, 100),
    ],
)
def test_the_interval_covers_the_truth_and_equal_servers_are_told_apart_seldom(noise, num_blocks, num_experiments):
    rates = verdict_shares(num_experiments, noise=noise, num_blocks=num_blocks)
    assert shares.COVERS_AT_LEAST.is_met(rates["covers"])
    assert shares.SELDOM.is_met(rates["any change"])


def test_the_remainder_of_equal_servers_covers_1_whether_answers_end_naturally_or_are_forced():
    rows = list(verdict_truth.remainder(25))
    assert {row.condition["stop"] for row in rows} == {"natural", "forced"}
    assert all(not row.failures for row in rows), [row.cells() for row in rows if row.failures]


def test_fifteen_corrected_tests_are_all_right_nearly_always():
    rates = verdict_shares(100, noise="linear drift", num_arms=6, num_metrics=3, margin_frac=0.0)
    assert shares.COVERS_AT_LEAST.is_met(rates["covers"])
    assert shares.SELDOM.is_met(rates["any change"])


@pytest.mark.parametrize("noise", ["gaussian", "heavy tail", "random walk"])
def test_eight_blocks_find_five_per_cent_at_two_per_cent_of_scatter(noise):
    assert shares.NEARLY_ALWAYS.is_met(verdict_shares(100, noise=noise, change_frac=0.05)["regression"])


@pytest.mark.parametrize("noise", ["two speeds, 10 %, 0.2", "outliers, 10 % by 30 %"])
def test_bad_machines_are_covered_and_equal_servers_on_them_are_told_apart_seldom(noise):
    rates = verdict_shares(200, noise=noise)
    assert shares.COVERS_AT_LEAST.is_met(rates["covers"])
    assert shares.SELDOM.is_met(rates["any change"])


def test_the_robust_estimate_finds_a_change_that_outliers_hide_from_the_mean():
    options = {"noise": "outliers, 10 % by 30 %", "change_frac": 0.05}
    robust = verdict_shares(100, **options)["regression"]
    assert robust.hits > 1.5 * verdict_shares(100, estimator="mean", **options)["regression"].hits


@pytest.mark.parametrize(("num_arms", "num_blocks"), [(3, 6), (5, 7)])
def test_arms_that_share_a_slope_are_covered_also_where_positions_are_not_balanced(num_arms, num_blocks):
    rates = verdict_shares(60, noise="linear drift", num_arms=num_arms, num_blocks=num_blocks, margin_frac=0.0)
    assert shares.COVERS_AT_LEAST.is_met(rates["covers"])
    assert shares.SELDOM.is_met(rates["any change"])


@pytest.mark.parametrize("floor_frac", [0.02, 0.1])
def test_a_noise_floor_makes_no_real_change_equivalent(floor_frac):
    rates = verdict_shares(60, change_frac=0.05, floor_frac=floor_frac)
    assert shares.SELDOM.is_met(rates["equivalent"])
    assert (floor_frac > 0.05) == (rates["regression"].hits == 0)


def test_a_change_inside_the_margin_is_seldom_called_a_regression():
    assert shares.SELDOM.is_met(verdict_shares(100, change_frac=0.01, margin_frac=0.02)["regression"])


def test_no_change_is_called_equivalent_and_two_per_cent_are_not():
    same = verdict_shares(100, ratio_sd=0.003)
    other = verdict_shares(100, ratio_sd=0.003, change_frac=0.02)
    assert shares.NEARLY_ALWAYS.is_met(same["equivalent"])
    assert shares.SELDOM.is_met(other["equivalent"])
    assert shares.NEARLY_ALWAYS.is_met(other["regression"])


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_two_experiments_without_common_blocks_have_an_interval_that_covers(num_blocks):
    conditions = known_truth.Made(num_blocks=num_blocks)
    events = ({"covers": verdict_truth.covers(one, 0.0)} for one in verdict_truth.two_days(conditions, 200, 0.0))
    assert shares.COVERS_AT_LEAST.is_met(shares.row({}, events).shares["covers"])
