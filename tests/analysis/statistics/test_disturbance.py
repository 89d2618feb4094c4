"""Disturbances by neighbours: planted ones are found, absent ones are hardly ever claimed."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from benchctl.analysis.statistics.decide import (
    ALPHA,
    Finding,
    Share,
    blocks_to_decide,
    confidence_of_claims,
    finding_of,
    loses_runs,
    margins_of,
)
from benchctl.analysis.statistics.estimate import RatioEstimate, estimate_paired

NUM_EXPERIMENTS = 2_000
MOST_FALSE = round(NUM_EXPERIMENTS * ALPHA + 3 * math.sqrt(NUM_EXPERIMENTS * ALPHA * (1 - ALPHA)))
"""False claims of a rule that makes them in exactly one of a hundred, with three standard deviations of luck."""
MARGINS = margins_of(0.01)
SCATTER = 0.02
Logs = NDArray[np.float64]


def estimate(differences: Logs, num_claims: int = 1) -> RatioEstimate:
    """The estimate of a check whose arms alternate in their order, and whose second run takes 1 % longer."""
    positions = [1 if block % 2 else -1 for block in range(len(differences))]
    drifting = differences + 0.01 * np.array(positions)
    return estimate_paired([float(d) for d in drifting], confidence_of_claims(num_claims), positions)


def scattered(stream: np.random.Generator, kind: str, num_blocks: int) -> Logs:
    """Block log-ratios without a disturbance: normal ones, or ones with outliers."""
    if kind == "normal":
        return stream.normal(0.0, SCATTER, num_blocks)
    return stream.standard_t(3, num_blocks) * SCATTER


@pytest.mark.parametrize(("kind", "num_blocks"), [("normal", 6), ("normal", 8), ("outliers", 6), ("outliers", 8)])
def test_of_checks_without_a_disturbance_at_most_one_in_a_hundred_claims_one(kind: str, num_blocks: int) -> None:
    stream = np.random.default_rng(19)
    checks = (estimate(scattered(stream, kind, num_blocks)) for _ in range(NUM_EXPERIMENTS))
    claims = [finding_of(check, MARGINS) == "disturbed" for check in checks]
    assert sum(claims) <= MOST_FALSE


def test_claims_of_three_metrics_together_are_as_rare() -> None:
    stream = np.random.default_rng(20)
    num_claiming = 0
    for _ in range(NUM_EXPERIMENTS):
        shared = stream.normal(0.0, SCATTER, 6)
        metrics = [0.7 * shared + 0.7 * stream.normal(0.0, SCATTER, 6) for _ in range(3)]
        num_claiming += any(
            finding_of(estimate(metric, num_claims=3), MARGINS) == "disturbed" for metric in metrics
        )
    assert num_claiming <= MOST_FALSE


@pytest.mark.parametrize(("effect", "num_blocks"), [(0.03, 6), (0.2, 8)])
def test_the_interval_holds_a_planted_effect_in_ninety_nine_of_a_hundred_checks(
    effect: float, num_blocks: int
) -> None:
    stream, num_missed = np.random.default_rng(21), 0
    for _ in range(NUM_EXPERIMENTS):
        low, high = estimate(stream.normal(effect, SCATTER, num_blocks)).log_interval or (0.0, 0.0)
        num_missed += not low <= effect <= high
    assert num_missed <= MOST_FALSE


def test_a_planted_disturbance_of_twice_the_scatter_is_found() -> None:
    stream = np.random.default_rng(22)
    findings = [finding_of(estimate(stream.normal(2 * SCATTER, SCATTER, 12)), MARGINS) for _ in range(300)]
    assert findings.count("disturbed") > 0.95 * len(findings)


@pytest.mark.parametrize(
    ("centre", "spread", "floor_frac", "finding"),
    [
        (0.10, 0.001, 0.0, "disturbed"),
        (-0.10, 0.001, 0.0, "disturbed"),
        (0.005, 0.0001, 0.0, "undisturbed"),  # beyond chance, and too small to matter
        (0.0, 0.05, 0.0, "undecided"),
        (0.05, 0.001, 0.10, "undecided"),  # below the noise floor, and not within the threshold
        (0.15, 0.001, 0.10, "disturbed"),
    ],
)
def test_a_disturbance_is_beyond_chance_and_beyond_the_margin(
    centre: float, spread: float, floor_frac: float, finding: Finding
) -> None:
    logs = centre + spread * np.array([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
    assert finding_of(estimate_paired(list(logs), 0.99), margins_of(0.01, floor_frac)) == finding


def test_a_single_block_decides_nothing() -> None:
    assert finding_of(estimate_paired([0.5], 0.99), MARGINS) == "undecided"
    assert blocks_to_decide(estimate_paired([0.5], 0.99), MARGINS, 0.99) is None


@pytest.mark.parametrize("centre", [0.03, 0.001])
def test_as_many_blocks_as_are_named_decide_and_a_quarter_fewer_do_not(centre: float) -> None:
    half = 0.04 if centre > 0.01 else 0.02
    pattern = np.array([-1.0, 1.0])
    first = estimate_paired(list(centre + half * np.tile(pattern, 3)), 0.99, estimator="mean")
    needed = blocks_to_decide(first, MARGINS, 0.99)
    assert needed is not None
    assert needed > 8
    assert finding_of(first, MARGINS) == "undecided"
    # The scatter of a sample is that of the formula where its standard deviation is.
    inflation = first.standard_error * math.sqrt(6) / half if first.standard_error else 1.0

    def with_blocks(number: int) -> RatioEstimate:
        logs = centre + half * inflation * np.tile(pattern, number // 2) * math.sqrt((number - 1) / number)
        return estimate_paired([float(log) for log in logs], 0.99, estimator="mean")

    assert finding_of(with_blocks(needed + 2 + needed % 2), MARGINS) != "undecided"
    assert finding_of(with_blocks(needed * 3 // 8 * 2), MARGINS) == "undecided"


def test_between_threshold_and_noise_floor_no_number_of_blocks_is_named() -> None:
    between = estimate_paired([0.049, 0.051, 0.05, 0.048, 0.052, 0.05], 0.99)
    assert blocks_to_decide(between, margins_of(0.01, 0.1), 0.99) is None


@pytest.mark.parametrize(
    ("beside", "alone", "is_losing"), [((6, 6), (0, 6), True), ((8, 8), (8, 8), False), ((2, 8), (0, 8), False)]
)
def test_runs_that_only_neighbours_spoil_are_a_disturbance(
    beside: tuple[int, int], alone: tuple[int, int], is_losing: bool
) -> None:
    assert loses_runs(Share(*beside), Share(*alone), confidence_of_claims(2)) == is_losing
