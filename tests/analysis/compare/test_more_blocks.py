"""Blocks are proposed where a verdict is open, and only there."""

from dataclasses import replace

from support.results.builders import write_results

from benchctl.analysis.compare.compare import CompareOptions, blocks_to_settle, compare_sides
from benchctl.analysis.experiment.pairing import Side

LIKE_BASELINE = 0.635
"""Factor that takes the cost of guidance out of the builder's guided runs."""
SCATTERED = tuple(
    {"baseline": 1 + 0.04 * (-1) ** i, "guided": LIKE_BASELINE * (1.01 + 0.03 * (i % 3))} for i in range(6)
)


def compared(path):
    results = write_results(path, block_factors=SCATTERED)
    options = CompareOptions(metrics=("step_ms", "wall_s"), noise={})
    return compare_sides(Side(results.path, "baseline"), Side(results.path, "guided"), options)


def test_an_open_verdict_asks_for_more_blocks_than_there_are(tmp_path):
    comparison = compared(tmp_path / "r")
    assert comparison.verdict == "inconclusive"
    needed = blocks_to_settle([comparison])
    assert needed is not None
    assert needed > len(SCATTERED)


def test_a_verdict_that_one_metric_gives_asks_for_no_more_blocks(tmp_path):
    comparison = compared(tmp_path / "r")
    (cell,) = comparison.cells
    decided = [replace(m, judged_confidence=0.01) if m.metric.name == "wall_s" else m for m in cell.metrics]
    settled = replace(comparison, cells=(replace(cell, metrics=tuple(decided)),))
    assert settled.verdict == "regression"
    assert any(metric.verdict == "inconclusive" for metric in settled.cells[0].deciding)
    assert blocks_to_settle([settled]) is None
