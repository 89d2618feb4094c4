"""``benchctl steptime guided``: the floor of guidance by batch and top_k, as a table and as JSON."""

import json
import platform
from pathlib import Path

import pytest
from support.cli import benchctl
from support.peaks import gpu_peaks

from benchctl.costs.roofline import LAYER_OPERATIONS, STEP_OPERATIONS
from benchctl.records.peaks import PEAKS

OPERATIONS = 28 * LAYER_OPERATIONS + STEP_OPERATIONS
"""Of a guided step with the 28 layers of the 1.5B value model."""


def rows_of(*options: str) -> list[dict[str, float]]:
    done = benchctl("steptime", "guided", *options, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, float]] = json.loads(done.stdout)["rows"]
    return rows


def test_the_goal_of_guidance_lies_just_above_its_floor_on_an_h200() -> None:
    """7B guided by 1.5B, 64 rows of 300 tokens, 5 candidates; the goal is 1.35."""
    (again,) = rows_of("--batch", "64", "--top-k", "5", "--scoring", "recompute")
    (reused,) = rows_of("--batch", "64", "--top-k", "5")
    assert (again["value_tokens"], reused["value_tokens"]) == (384, 320)
    assert again["ratio"] == pytest.approx(1.33, abs=0.005)
    assert reused["ratio"] == pytest.approx(1.28, abs=0.005)


def test_the_table_has_a_line_for_each_batch_and_top_k_and_says_what_it_is() -> None:
    done = benchctl("steptime", "guided", "--batch", "8,64", "--top-k", "5,2")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[2:6]] == [["8", "2"], ["8", "5"], ["64", "2"], ["64", "5"]]
    assert "h200-sxm, context 300, scoring reuse" in done.stdout
    assert "a floor and no prediction" in done.stdout
    assert f"without graphs the host launches {OPERATIONS} operations, which --launch-us prices" in done.stdout


def test_launches_count_where_they_are_priced() -> None:
    options = ("--batch", "1", "--top-k", "5")
    (replayed,), (eager,) = rows_of(*options), rows_of(*options, "--launch-us", "5")
    assert replayed["launches_s"] == 0
    assert eager["step_s"] == pytest.approx(eager["base_s"] + OPERATIONS * 5e-6)
    assert "--launch-us prices" not in benchctl("steptime", "guided", *options, "--launch-us", "5").stdout


def test_launches_and_peaks_as_measured_are_those_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    options = ("--batch", "1", "--top-k", "5", "--launch-us", "measured")
    refused = benchctl("steptime", "guided", *options)
    assert refused.returncode == 2
    assert "'benchctl micro roofline' measures them" in refused.stderr
    PEAKS.add(gpu_peaks(host=platform.node(), read=3.1e12))
    (row,) = rows_of(*options, "--hardware", "measured")
    assert row["base_s"] == pytest.approx(14.16e9 / 3.1e12, rel=0.001)
    assert row["step_s"] == pytest.approx(row["base_s"] + OPERATIONS * 5e-6), "5 us were measured"


def test_stated_peaks_and_a_value_model_of_eight_bits_are_understood() -> None:
    slow = rows_of(
        "--hardware", "own:100:1000", "--value-model", "Qwen2.5-1.5B-FP8", "--batch", "1", "--top-k", "5"
    )
    assert slow[0]["base_s"] == pytest.approx(14.16e9 / 1000e9, rel=0.001)
    assert slow[0]["parts"]["weights"] == pytest.approx(0.0927, abs=0.001)  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--hardware", "gpu9"), "any other with its peaks, as name:TFLOP/s:GB/s"),
        (("--batch", "0"), "each must be from 1 to 65536"),
        (("--top-k", "x"), "expected numbers separated by commas, such as 1,2,4"),
        (("--value-model", "qwen2.5-2b"), "did you mean"),
        (("--launch-us", "nan"), "each must be finite"),
        (("--launch-us", "-1"), "give microseconds from 0 to 1000000, or measured"),
    ],
    ids=["hardware", "batch", "top_k", "model", "no number", "below 0"],
)
def test_what_cannot_be_is_refused_with_a_remedy(options: tuple[str, ...], remedy: str) -> None:
    done = benchctl("steptime", "guided", *options)
    assert done.returncode == 2
    assert remedy in done.stderr
