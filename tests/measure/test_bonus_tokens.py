"""The profile bonus-tokens: its simulated sweep agrees with the law of speculative decoding."""

import numpy as np
import pytest
from scipy import stats
from support.cli import WITHOUT_PICTURES, benchctl, only_result

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.experiment.summary import CellSummary
from benchctl.steptime.speculation_law import DraftCost, speed_up, tokens_per_step

ACCEPTANCE, DRAFT_COST, DRAFTS = 0.8, 0.05, (1, 2, 4, 8)
CELLS = [(num_drafts, bonus) for num_drafts in DRAFTS for bonus in (True, False)]


@pytest.fixture(name="sweep", scope="module")
def _sweep(tmp_path_factory: pytest.TempPathFactory) -> AnalyzedExperiment:
    path = tmp_path_factory.mktemp("bonus-tokens")
    simulated = benchctl(
        *("simulate", "--profile", "bonus-tokens", "--set", "workload.num_prompts=8", "--quiet"),
        *("--set", "workload.output_len=256", "--set", f"sweep.num_speculative_tokens={list(DRAFTS)}"),
        cwd=path,
        **WITHOUT_PICTURES,
    )
    assert simulated.returncode == 0, simulated.stderr
    return analyze_directory(only_result(path))


def cell_of(sweep: AnalyzedExperiment, num_drafts: int, bonus: bool) -> CellSummary:
    (cell,) = (
        cell
        for cell in sweep.cells
        if cell.variant == variant_of(bonus) and cell.cell["num_speculative_tokens"] == num_drafts
    )
    return cell


def variant_of(bonus: bool) -> str:
    return "with-bonus" if bonus else "without-bonus"


def number_of(sweep: AnalyzedExperiment, variant: str, num_drafts: int, name: str) -> float | None:
    (row,) = (
        row for row in sweep.sweep if row.variant == variant and row.cell["num_speculative_tokens"] == num_drafts
    )
    return row.number(name)


def interval(values: list[float]) -> tuple[float, float]:
    """A t interval of the mean that holds for all cells together at 95 %, and is as wide as ends of answers are."""
    half = stats.t.ppf(1 - 0.025 / len(CELLS), len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    half += 0.012 * np.mean(values)  # the last step of an answer is cut: half a step in 256 tokens
    return float(np.mean(values) - half), float(np.mean(values) + half)


def columns(cell: CellSummary, name: str) -> list[float]:
    return [value for run in cell.runs if (value := run.number(name)) is not None]


@pytest.mark.parametrize(("num_drafts", "bonus"), CELLS)
def test_each_cell_agrees_with_the_closed_form_within_its_interval(
    sweep: AnalyzedExperiment, num_drafts: int, bonus: bool
) -> None:
    cell = cell_of(sweep, num_drafts, bonus)
    expected = tokens_per_step([ACCEPTANCE] * num_drafts, bonus=bonus)
    low, high = interval(columns(cell, "tokens_per_step"))
    assert low <= expected <= high
    (baseline,) = (cell for cell in sweep.cells if cell.variant == "baseline")
    plain_ms = np.mean(columns(baseline, "tpot_ms"))
    ratio = number_of(sweep, variant_of(bonus), num_drafts, "step_ms_ratio")
    assert ratio == pytest.approx(
        1 + num_drafts * DRAFT_COST, rel=1e-2
    )  # the first step of an answer has no drafts
    low, high = interval([float(plain_ms / tpot_ms) for tpot_ms in columns(cell, "tpot_ms")])
    assert low <= speed_up(expected, num_drafts, DraftCost(draft=DRAFT_COST), bonus=bonus) <= high


def test_one_draft_without_the_bonus_token_cannot_win(sweep: AnalyzedExperiment) -> None:
    found = [finding for finding in sweep.findings if finding.code.startswith("speculation")]
    assert [(finding.code, finding.sentence.partition(" ")[0]) for finding in found] == [
        ("speculation-cannot-win", "without-bonus")
    ]
    ratio = number_of(sweep, "without-bonus", 1, "wall_ratio")
    assert ratio == pytest.approx(1 + DRAFT_COST, rel=2e-3)


def test_every_run_passes_its_checks_and_its_steps_have_drafts(sweep: AnalyzedExperiment) -> None:
    assert {run.record.state for run in sweep.runs} == {"done"}
    for run in sweep.runs:
        drafted = run.number("draft_tokens") or 0
        assert (drafted > 0) == (run.record.variant != "baseline")
