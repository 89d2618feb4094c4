"""Curves over the load wherever they are shown: one set of numbers, and pictures that hold what they say."""

import csv
import html
import json
import re

import pytest
from support.cli import printed
from support.results.builders import write_results
from support.results.curves import KNEES, SIZES, write_curves

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.charts.figure import SERIES, chart_bytes
from benchctl.report.curve_tables import curve_rows
from benchctl.report.export import write_report
from benchctl.report.page.page import draw_charts
from benchctl.units import short_number

IDS = ("throughput-latency", "speed-throughput")


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "r"
    write_curves(path, blocks=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchctl.report.export.why_not_drawn", lambda: "a test does without")
        write_report(path)
    return path


@pytest.fixture(name="curves", scope="module")
def _curves(path):
    return analyze_directory(path).curves


@pytest.fixture(name="charts", scope="module")
def _charts(path):
    return {chart.id: chart for chart in draw_charts(analyze_directory(path)) if chart.id in IDS}


def rows_of(chart, kind):
    return [row for row in chart.spec["datasets"]["rows"] if row["kind"] == kind]


def test_table_csv_json_and_page_have_the_centres_and_intervals_of_the_curves(path, curves):
    shown, page = printed("show", str(path), "--all"), html.unescape((path / "report.html").read_text())
    rows = list(csv.DictReader((path / "curves.csv").read_text().splitlines()))
    points = [
        point for each in json.loads((path / "summary.json").read_text())["curves"] for point in each["points"]
    ]
    assert len(rows) == len(points) == len(KNEES) * len(SIZES)
    for row, point in zip(rows, points, strict=True):
        curve = next(each for each in curves if each.label == row["arm"])
        for name, level in {**curve.levels[float(row["size"])], "knee": curve.knee}.items():
            for key, end in (("value", ""), ("low", "_ci_low"), ("high", "_ci_high")):
                assert float(row[f"{name}{end}"]) == point[f"{name}{end}"] == getattr(level, key)
            text = f"{short_number(level.value)} [{short_number(level.low)}, {short_number(level.high)}]"
            assert text in shown
            assert text in page


def test_run_show_and_page_tell_the_knee_of_each_arm(path):
    shown, page = printed("show", str(path), "--all"), html.unescape((path / "report.html").read_text())
    for label, knee in (("baseline", r"1[56]\.\d \[1\d\.\d, 1\d\.\d\]"), ("wide", r"1[12]\.\d \[.*\]")):
        line = re.search(rf"\* ({label}: {knee} open requests, \d{{3}} output tokens/s)\n", shown)
        assert line
        assert line[1] in page


def test_a_missing_knee_names_what_to_add(tmp_path):
    write_curves(tmp_path / "r", sizes=(1, 2, 4))
    said = printed("show", str(tmp_path / "r"), "--all")
    reason = "beyond 4, the largest load, in 3 of 3 blocks; add such loads to sweep.max_concurrency"
    assert f"* wide: no knee, {reason}" in re.sub(r"\n\s+", " ", said)
    rows = [row for curve in analyze_directory(tmp_path / "r").curves for row in curve_rows(curve)]
    assert {(row["knee"], row["no_knee"]) for row in rows} == {(None, reason)}


def test_both_arms_are_lines_in_the_order_of_their_load_with_a_band(charts, curves):
    for chart, x, y in zip(charts.values(), ("throughput", "speed"), ("tpot", "throughput"), strict=True):
        assert chart_bytes(chart, ".svg").startswith(b"<svg")
        points = [row for row in rows_of(chart, "point") if row["panel"] == y]
        for curve in curves:
            drawn = [row for row in points if row["arm"] == curve.label]
            assert [row["size"] for row in drawn] == list(SIZES)
            for row, level in zip(drawn, curve.levels.values(), strict=True):
                assert (row["x"], row["y"]) == pytest.approx((level[x].value, level[y].value), rel=1e-5)
                assert (row["low"], row["x_high"]) == pytest.approx((level[y].low, level[x].high), rel=1e-5)
        for panel in chart.spec["vconcat"]:
            colours = panel["encoding"]["color"]["scale"]
            assert dict(zip(colours["domain"], colours["range"], strict=True)) == dict(
                zip(KNEES, SERIES, strict=False)
            )
            marks = [layer["mark"]["type"] for layer in panel["layer"]]
            assert marks.count("area") == 1
            for layer in panel["layer"]:
                if layer["mark"]["type"] == "line":
                    assert layer["encoding"]["order"] == {"field": "size", "type": "quantitative"}


def test_a_knee_is_on_its_curve_with_the_piece_of_its_interval(charts, curves):
    for chart in charts.values():
        for curve in curves:
            knees = [row for row in rows_of(chart, "knee") if row["arm"] == curve.label]
            assert [row["size"] for row in knees] == pytest.approx([curve.knee.value] * len(knees), rel=1e-5)
            assert len(knees) == len(chart.spec["vconcat"])
            piece = [row["size"] for row in rows_of(chart, "piece") if row["arm"] == curve.label]
            assert (min(piece), max(piece)) == pytest.approx((curve.knee.low, curve.knee.high), rel=1e-5)
        assert "the knee with its interval." in chart.caption


def test_a_curve_that_turns_back_has_no_area(tmp_path):
    write_curves(tmp_path / "r", sizes=(1, 2, 4), factor=lambda _variant, _block, size: 4.0 if size == 4 else 1.0)
    chart, *_ = draw_charts(analyze_directory(tmp_path / "r"))
    assert not any(layer["mark"]["type"] == "area" for layer in chart.spec["vconcat"][0]["layer"])


def test_each_workload_of_an_arm_is_a_line_of_its_own(tmp_path):
    write_curves(tmp_path / "r", sizes=(4, 8, 16), other=({"input_len": 16}, {"input_len": 32}))
    for chart in draw_charts(analyze_directory(tmp_path / "r"))[:2]:
        lines = {row["arm"] for row in rows_of(chart, "point")}
        assert lines == {f"{label} input_len={length}" for label in KNEES for length in (16, 32)}


@pytest.mark.usefixtures("without_pictures")
def test_a_directory_without_a_swept_load_has_neither_picture_nor_table_nor_file_of_curves(tmp_path):
    write_results(tmp_path / "r", cells=({"top_k": 1}, {"top_k": 5}))
    files = write_report(tmp_path / "r")
    assert not {chart.id for chart in files.charts} & set(IDS)
    assert not (tmp_path / "r" / "curves.csv").exists()
    assert "curves" not in json.loads((tmp_path / "r" / "summary.json").read_text())
    assert 'class="load"' not in (tmp_path / "r" / "report.html").read_text()
    assert "Over the load" not in printed("show", str(tmp_path / "r"), "--all")
