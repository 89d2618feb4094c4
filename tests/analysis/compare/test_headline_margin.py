"""The headline of a comparison names the margin that decided, wherever it is printed."""

import pytest
from support.results.builders import write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.pairing import Side
from benchctl.records.stores import MetricNoise

BLOCKS = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))


def floor(fraction: float) -> MetricNoise:
    return MetricNoise(log_sd=0.01, num_blocks=6, floor_frac=fraction)


@pytest.mark.parametrize(
    ("floors", "named"),
    [
        ({}, "worse by more than a margin of 1%, foremost"),
        ({"step_ms": 0.002}, "worse by more than a margin of 1%, foremost"),
        ({"step_ms": 0.19, "tpot_ms": 0.19, "wall_s": 0.19}, "worse by more than the noise floor of 19%, foremost"),
        ({"step_ms": 0.19}, "worse by more than a margin of 1% or the noise floor of 19%, foremost"),
        (
            {"step_ms": 0.19, "wall_s": 0.05},
            "worse by more than a margin of 1% or a noise floor of 5% to 19%, foremost",
        ),
        (
            {"step_ms": 9.0, "tpot_ms": 9.0, "wall_s": 9.0},
            "undecided at a margin of 1% for equivalence and the noise floor of 900% for a change, foremost",
        ),
    ],
)
def test_the_headline_names_the_margin_that_decided(tmp_path, floors, named):
    results = write_results(tmp_path / "r", block_factors=BLOCKS)
    noise = {name: floor(fraction) for name, fraction in floors.items()}
    comparison = compare_sides(
        Side(results.path, "baseline"), Side(results.path, "guided"), CompareOptions(noise=noise)
    )
    assert named in verdict_sentence(comparison)
