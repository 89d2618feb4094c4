"""Forest plots, sweeps and stacked bars as they are prepared for picture and page."""

import math
import re
from types import SimpleNamespace

import pytest
from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.report.charts.figure import Subject, picture_bytes, reach
from benchctl.report.charts.ratios import draw_sweep, interval_label, reach_of, swept_factor
from benchctl.report.charts.steps import UNNAMED, section_parts
from benchctl.report.page.plots import draw_forest, forest_plot
from benchctl.units import minus

FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.013 * (i % 4)} for i in range(4)]
CELLS = [{"top_k": 10}, {"top_k": 2}]


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    builders.write_results(path, block_factors=FACTORS, cells=CELLS)
    return path


def test_an_interval_of_two_blocks_does_not_squeeze_the_points():
    low, high = reach([0.0, 0.1, 0.2], [-9.0, 9.0], 0.02)
    assert 0.1 / (high - low) > 0.1
    assert low < 0.0
    assert high < 9.0


def test_a_forest_has_every_deciding_metric_of_every_cell_and_a_scale_that_holds_their_ratios(directory):
    comparison = compare_sides(Side(directory, "baseline"), Side(directory, "guided"), CompareOptions())
    deciding = [(cell.label, metric) for cell in comparison.cells for metric in cell.deciding]
    chart = draw_forest(comparison)
    drawn = chart.spec["datasets"]
    rows = [row for row in drawn["rows"] if "words" in row]
    expected = {(label, minus(change_text(metric)), metric.verdict) for label, metric in deciding}
    assert {(row["label"], row["words"], row["verdict"]) for row in rows} == expected
    assert len(rows) == len(deciding)
    low, high = chart.spec["vconcat"][0]["encoding"]["x"]["scale"]["domain"]
    assert all(low < row["ratio"] < high for row in rows)
    assert len(drawn["bands"]) == sum(len(metric.margins.log_bands) for _, metric in deciding)
    assert forest_plot(comparison, ".svg").startswith(b"<svg")


def test_the_numeric_factor_with_the_most_values_is_the_axis_of_a_sweep(directory):
    assert swept_factor([row for row in analyze_directory(directory).sweep if row.cell]) == "top_k"


def test_a_sweep_says_over_how_many_blocks_its_interval_is_and_where_it_is_cut():
    narrow, wide = estimate_paired([0.0, 0.01]), estimate_paired([0.0, 0.3, 0.1])
    assert interval_label([narrow, narrow]) == "95% interval over 2 blocks"
    assert interval_label([narrow, wide]) == "95% interval over 2 to 3 blocks"
    wide = estimate_paired([0.0, math.log(1.4)])
    ratios = SimpleNamespace(block_ratios={0: 1.0, 1: 1.4})
    low, high, is_cut = reach_of([SimpleNamespace(estimates={"wall": wide}, ratios={"wall": ratios})], "wall")
    assert is_cut
    assert low < 1.0
    assert 1.4 < high < wide.ci_high


@pytest.mark.parametrize("end", [2.0, 1e12])
def test_a_band_that_reaches_far_beyond_the_picture_is_drawn_up_to_its_edge(directory, end):
    spec = draw_sweep(Subject(analyze_directory(directory))).spec
    for row in spec["datasets"]["rows"]:
        if row["high"] is not None:
            row["low"], row["high"] = 1 / end, end
    drawn = picture_bytes(spec, "title", "caption", ".svg").decode()
    bands = re.findall(r'aria-roledescription="area mark"[^>]* d="([^"]+)"', drawn)
    assert bands
    numbers = [float(number) for band in bands for number in re.findall(r"-?[0-9.]+(?:e[0-9]+)?", band)]
    assert all(-1 <= number <= 2000 for number in numbers)


def test_the_sections_of_a_bar_add_up_to_its_mean_step(directory):
    for cell in analyze_directory(directory).cells:
        parts = section_parts(cell.breakdown())
        assert sum(parts.values()) == pytest.approx(cell.breakdown().tree[0].mean_ns / 1e6)
        assert list(parts)[-1] == UNNAMED
