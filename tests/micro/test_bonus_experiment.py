"""Bonus tokens as an experiment: what is measured, what the directory says, and what the command prints."""

import json
from pathlib import Path

import pytest
from support.bonus_directory import BOTH, LAUNCHES_US, LISTENER, ROW_US, launch_bound, measured
from support.cli import benchctl
from support.fake_passes import FakeWorkers

from benchctl.analysis.bonus import backfill_point, bonus_design, measured_bonus
from benchctl.errors import UsageError
from benchctl.measure.directory import Origin
from benchctl.micro.experiment import measure_forward
from benchctl.micro.points import forward_profile


@pytest.fixture(name="both_modes", scope="module")
def _both_modes(tmp_path_factory):
    """Batches of 5 and 10, eager and as graphs."""
    return measured(tmp_path_factory.mktemp("bonus"))


def row_of(comparison):
    return comparison.decode_mode, comparison.prefill_mode, comparison.batch_size, comparison.bonus_tokens


def test_the_directory_of_both_ways_gives_back_the_design_and_the_planted_costs(both_modes):
    bonus = measured_bonus(both_modes)
    (verdict,) = bonus.verdicts
    design = bonus_design((5, 10), verdict.context_tokens, BOTH)
    assert list(map(row_of, verdict.comparisons)) == list(map(row_of, design))
    assert len(verdict.comparisons) == 4 * (4 + 5)
    for row in verdict.comparisons:
        assert (row.num_blocks, row.cheaper) == (6, "expansion")
        assert row.expansion_ns.value == pytest.approx(1000 * ROW_US * row.bonus_tokens, abs=10_000)
        truth_us = LAUNCHES_US["prefill"][row.prefill_mode] + ROW_US * row.bonus_tokens
        assert row.prefill_ns.value == pytest.approx(1000 * truth_us, rel=0.01)
    assert bonus.is_decided
    assert bonus.where.startswith("llama-68m, float16, on ")


def test_passes_that_failed_take_their_rows_with_them_and_leave_the_others(tmp_path):
    def too_fast(point, mode):
        return 0.001 if point == backfill_point(10, 256) else launch_bound(point, mode)

    path = measured(tmp_path, workers=FakeWorkers(too_fast, device_name="NVIDIA A100-SXM4-80GB"))
    bonus = measured_bonus(path)
    (verdict,) = bonus.verdicts
    assert {(row.batch_size, row.cheaper) for row in verdict.comparisons} == {(5, "expansion")}
    assert not bonus.is_decided
    (sentence,) = bonus.missing
    assert sentence.startswith("20 of 36 comparisons behind 256 tokens in the cache are missing, at batch 10: ")
    done = benchctl("micro", "bonus", path)
    assert (done.returncode, sentence in done.stdout) == (3, True)


def test_a_directory_of_requests_or_of_other_passes_is_refused_with_what_lacks(tmp_path):
    with pytest.raises(UsageError, match=r"holds requests to engine 'sim'.*micro bonus"):
        measured_bonus(Path("results/example"))
    how = {
        "model": "llama-68m",
        "device": "cpu",
        "dtype": "float32",
        "modes": ("eager",),
        "blocks": 1,
        "replays": 4,
    }
    profile, origin = forward_profile([backfill_point(3, 64)], **how), Origin(output_root=tmp_path, argv=())
    outcome = measure_forward(profile, origin, LISTENER, FakeWorkers(launch_bound).start)
    with pytest.raises(UsageError, match="no batch size B with decodes at B and 2B"):
        measured_bonus(outcome.path)


def test_the_command_judges_a_directory_again(both_modes):
    done = benchctl("micro", "bonus", both_modes)
    assert done.returncode == 0, done.stderr
    assert "decode with graphs, prefill without graphs: batch expansion is cheaper from batch 5 on" in done.stdout
    document = json.loads(benchctl("micro", "bonus", both_modes, "--json").stdout)
    row = document["verdicts"][0]["comparisons"][0]
    difference = row["difference_ns"]
    assert row["cheaper"] == "expansion"
    assert difference["low"] < difference["centre"] < difference["high"] < 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch-size", "0", "--batch-size '0': each must be from 1 up"),
        ("--context", "x", "--context 'x': expected numbers separated by commas"),
        ("--mode", "graph", "graph"),
    ],
)
def test_an_option_that_makes_no_design_is_refused_before_anything_starts(tmp_path, option, value, message):
    done = benchctl("micro", "bonus", option, value, "--device", "cpu", "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
