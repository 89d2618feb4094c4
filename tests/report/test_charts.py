"""Charts as they are prepared for picture and page: the same rows, scale, intervals and words in both."""

from itertools import pairwise

import pytest
from support.results import builders

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.summary.analyzed import analyze_directory
from benchctl.report.charts.figure import LogScale, scale_of
from benchctl.report.charts.ratios import (
    SweepPoint,
    interval_label,
    reach_of,
    sweep_lines,
    swept_factor,
    swept_rows,
)
from benchctl.report.charts.steps import UNNAMED, section_bars
from benchctl.report.page.charts.acceptance import forest_of

FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(4)]
CELLS = [{"top_k": 10}, {"top_k": 2}]


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    builders.write_results(path, block_factors=FACTORS, cells=CELLS)
    return path


@pytest.mark.parametrize("ends", [(-0.02, 0.03), (-0.7, 0.1), (-0.01, 1.9), (-3, 3)])
def test_ticks_of_a_scale_are_round_apart_and_hold_no_change(ends):
    scale = LogScale(*ends)
    ticks = scale.ticks()
    assert (0.0, "0") in ticks
    assert 3 <= len(ticks) <= 8
    assert min(scale.at(b) - scale.at(a) for (a, _), (b, _) in pairwise(ticks)) >= 0.13


def test_an_interval_of_two_blocks_does_not_squeeze_the_points():
    scale = scale_of([0.1, 0.2], [-9.0, 9.0], (-0.01, 0.01))
    assert scale.at(0.2) - scale.at(0.1) > 0.1
    assert not scale.holds(9.0)
    assert scale.at(9.0) == 1.0


def test_a_forest_has_every_deciding_metric_of_every_cell_and_a_scale_that_holds_their_ratios(directory):
    comparison = compare_sides(Side(directory, "baseline"), Side(directory, "guided"), CompareOptions())
    forest = forest_of(comparison)
    rows = {(group.metric.name, row.label): row for group in forest.groups for row in group.rows}
    deciding = {(metric.metric.name, cell.label): metric for cell in comparison.cells for metric in cell.deciding}
    assert rows.keys() == deciding.keys()
    assert all(row.change == change_text(deciding[key]) for key, row in rows.items())
    assert all(forest.scale.holds(metric.estimate.log_ratio) for metric in deciding.values())


def test_a_sweep_is_a_line_in_the_order_of_its_factor_with_the_ratio_of_every_block(directory):
    rows = swept_rows(analyze_directory(directory), ["wall"])
    (line,) = sweep_lines(rows, swept_factor(rows))
    assert (line.x, line.is_ordered) == ((2.0, 10.0), True)
    assert [[block for block, _ in point.blocks] for point in line.points("wall")] == [[0, 1, 2, 3]] * 2
    assert line.points("unknown") == ()


def test_a_sweep_says_over_how_many_blocks_its_interval_is_and_where_it_is_cut():
    narrow, wide = estimate_paired([1.0, 1.01]), estimate_paired([1.0, 1.4, 1.2])
    assert interval_label([narrow, narrow]) == "95% interval over 2 blocks"
    assert interval_label([narrow, wide]) == "95% interval over 2 to 3 blocks"
    points = [SweepPoint(x=1.0, estimate=wide, blocks=((0, 1.0), (1, 1.4), (2, 1.2)))]
    reach = reach_of(points)
    assert reach.is_cut
    assert reach.low < 1.0
    assert 1.4 < reach.high < wide.ci_high


def test_the_sections_of_a_bar_add_up_to_its_mean_step(directory):
    cells = analyze_directory(directory).cells
    bars = section_bars(cells)
    sums = [sum(part.values_ms[i] for part in bars.parts) for i in range(len(bars.labels))]
    assert sums == pytest.approx([cell.breakdown().step.mean_ns / 1e6 for cell in cells])
    assert bars.longest_ms == pytest.approx(max(sums))
    assert [part.name for part in bars.parts].count(UNNAMED) <= 1
