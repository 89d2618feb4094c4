"""Charts of page and pictures: specifications whose numbers are those of the analysis, or a reason for none."""

import base64
import gzip
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import t as student
from support.results.builders import (
    T0_NS,
    change_requests,
    change_steps,
    edit_manifest,
    edit_run,
    rewrite_lines,
    write_results,
)

from benchctl.analysis.analyzed import analyze_directory, level_of_blocks, percentile_levels, run_latencies
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.metrics.latency import percentiles
from benchctl.analysis.statistics.estimate import level_interval
from benchctl.records.columns import StepColumns
from benchctl.records.record import RequestError
from benchctl.records.schema import GpuInfo, GpuSample, HostSample
from benchctl.records.stores import MetricNoise
from benchctl.report.charts.figure import SERIES, chart_bytes, picture_bytes, rounded
from benchctl.report.charts.ratios import sweep_name
from benchctl.report.charts.requests import MAX_POINTS, quantiles, thinned
from benchctl.report.charts.steps import (
    MAX_STRETCHES,
    UNNAMED,
    batch_size_rows,
    bins_of,
    course_of,
    section_parts,
    stacked_bars,
)
from benchctl.report.page.page import draw_charts, packed
from benchctl.report.page.parts import percentile_values
from benchctl.report.page.plots import draw_forest, forest_plot
from benchctl.units import minus

EXAMPLE = Path(__file__).parents[2] / "results" / "example"
SWEEP = tuple({"top_k": k} for k in (1, 2, 5))
SPREAD = ({"baseline": 1.0, "guided": 1.0}, {"baseline": 1.1, "guided": 1.2}, {"baseline": 0.9, "guided": 1.0})


def charts_of(path, *comparisons):
    return {chart.id: chart for chart in draw_charts(analyze_directory(path), comparisons)}


def against_baseline(path, **options):
    return compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions(**options))


def rows_of(chart, **having):
    rows = chart.spec["datasets"]["rows"]
    return [row for row in rows if all(row[name] == value for name, value in having.items())]


def values_of(chart, name, **having):
    return [row[name] for row in rows_of(chart, **having)]


def titles_of(chart):
    return [panel["encoding"]["y"]["title"] for panel in chart.spec["vconcat"]]


def x_axis_of(chart):
    return chart.spec["vconcat"][-1]["encoding"]["x"]


def layers_of(chart, mark):
    layers = [layer for panel in chart.spec["vconcat"] for layer in panel["layer"]]
    return [layer for layer in layers if layer["mark"]["type"] == mark]


@pytest.fixture(name="swept", scope="module")
def _swept(tmp_path_factory):
    """Three cells whose every second step has half as many sequences, with GPU and host samples in each run: over
    its 0.15 s of load and a second beyond it on both sides.
    """
    results = write_results(tmp_path_factory.mktemp("swept") / "r", cells=SWEEP, block_factors=SPREAD)
    times_ns = [T0_NS - 10**9, *range(T0_NS, T0_NS + 10**8, 5 * 10**6), T0_NS + 10**9]
    gpu = GpuSample(t_ns=0, index=0, source="nvml", power_w=100.0, sm_clock_hz=1_980_000_000, utilization_frac=0.5)
    for run in results.runs():
        with run.append("gpu") as on_gpu, run.append("host") as on_host:
            for t_ns in times_ns:
                for device in range(2):
                    on_gpu.write(msgspec.structs.replace(gpu, t_ns=t_ns, index=device))
                on_host.write(HostSample(t_ns=t_ns, server_cpu_cores=1.5, client_cpu_cores=0.25))
        rewrite_lines(run.step_log, lambda step: step | {"num_seqs": step["num_seqs"] // (1 + step["step"] % 2)})
    return results.path


@pytest.fixture(name="analysis", scope="module")
def _analysis(swept):
    return analyze_directory(swept)


@pytest.fixture(name="charts", scope="module")
def _charts(analysis):
    return {chart.id: chart for chart in draw_charts(analysis)}


def fields_of(panel, layer):
    """The fields of the rows that a layer shows, of its own channels and those of its panel."""
    channels = {**panel["encoding"], **layer["encoding"]}
    if "data" in layer and "color" not in layer["encoding"]:
        channels.pop("color", None)
    return {channel["field"] for channel in channels.values() if isinstance(channel, dict) and "field" in channel}


def test_every_chart_of_a_whole_directory_is_drawn_by_fields_of_its_rows_with_axes_that_say_what_they_show(charts):
    assert {chart.id: chart.skipped for chart in charts.values() if chart.skipped} == {}
    for chart_id in (
        *("block-values", "sweep", "sections", "step-time", "step-time-by-batch-size", "request-timeline"),
        *("gpu", "host-cpu"),
    ):
        chart = charts[chart_id]
        assert json.loads(json.dumps(chart.spec, allow_nan=False)) == chart.spec
        drawn = chart_bytes(chart, ".svg").decode()
        assert drawn.startswith("<svg")
        assert drawn.count("<path") > 10
        assert chart.title in drawn
        assert x_axis_of(chart)["title"]
        assert chart_id == "sections" or all(titles_of(chart))  # its labels are names of arms
        for panel in chart.spec["vconcat"]:
            for layer in panel["layer"]:
                if "values" not in layer.get("data", {}):
                    rows = chart.spec["datasets"][layer.get("data", chart.spec["data"])["name"]]
                    assert fields_of(panel, layer) <= set().union(*rows), layer


def test_no_chart_sets_the_theme_of_the_page_and_an_arm_has_one_colour_in_all(charts):
    assert not any({"background", "width", "title"} & set(chart.spec) for chart in charts.values())
    colours = set()
    for chart_id in ("block-values", "step-time", "step-time-by-batch-size", "host-cpu", "latencies"):
        for panel in charts[chart_id].spec["vconcat"]:
            scale = panel["encoding"]["color"]["scale"]
            colours |= set(zip(scale["domain"], scale["range"], strict=True))
    assert len(colours) == len({arm for arm, _ in colours}) == 4
    assert ("baseline", SERIES[0]) in colours


def test_a_forest_has_every_deciding_metric_of_every_cell_and_a_scale_that_holds_their_ratios(swept):
    comparison = against_baseline(swept)
    deciding = [(cell.label, metric) for cell in comparison.cells for metric in cell.deciding]
    chart = draw_forest(comparison)
    rows = [row for row in chart.spec["datasets"]["rows"] if "words" in row]
    expected = {(label, minus(change_text(metric)), metric.verdict) for label, metric in deciding}
    assert {(row["label"], row["words"], row["verdict"]) for row in rows} == expected
    assert len(rows) == len(deciding)
    low, high = chart.spec["vconcat"][0]["encoding"]["x"]["scale"]["domain"]
    assert all(low < row["ratio"] < high for row in rows)
    assert forest_plot(comparison, ".svg").startswith(b"<svg")


def test_the_sections_of_a_bar_add_up_to_its_mean_step(analysis):
    for cell in analysis.cells:
        parts = section_parts(cell.breakdown())
        assert sum(parts.values()) == pytest.approx(cell.breakdown().tree[0].mean_ns / 1e6)
        assert list(parts)[-1] == UNNAMED


def test_the_steps_of_all_batch_sizes_add_up_to_those_of_the_arm(analysis, charts):
    for cell in analysis.cells:
        course = sum(row["steps"] for row in rows_of(charts["step-time"], arm=cell.label, block="0"))
        assert course == cell.runs[0].number("num_steps")
        rows = rows_of(charts["step-time-by-batch-size"], arm=cell.label)
        times_ns = [run.run.columns.dur_ns[run.run.columns.in_phase("decode")] for run in cell.runs]
        assert sum(row["steps"] for row in rows) == sum(map(len, times_ns))
        total = sum(times.sum() / 1e6 for times in times_ns)
        assert math.fsum(row["mean"] * row["steps"] for row in rows) == pytest.approx(total, rel=1e-5)


def test_the_raw_value_of_every_run_stands_in_its_block(analysis, charts):
    for name in ("step_ms", "tpot_ms", "wall_s"):
        for cell in analysis.cells:
            rows = rows_of(charts["block-values"], arm=cell.label, metric=name)
            assert {row["run"]: (row["block"], row["value"]) for row in rows} == {
                run.record.run_id: (run.record.block, pytest.approx(run.number(name), rel=1e-5))
                for run in cell.runs
            }


def test_a_block_that_stands_out_is_open_and_one_that_is_left_out_is_crossed(tmp_path):
    factors = [{"baseline": 1.0, "guided": 1.0 + 0.002 * b} for b in range(9)]
    factors[4]["guided"] = 3.0
    results = write_results(tmp_path / "r", block_factors=factors)
    edit_run(results, results.plan().runs[-1].run_id, state="suspect")
    chart = charts_of(results.path, against_baseline(results.path))["block-values"]
    rows = {row["block"]: row for row in rows_of(chart, arm="guided top_k=5", metric="step_ms")}
    special = {block: row["kind"] for block, row in rows.items() if row["kind"] != "counted"}
    assert special == {4: "outlier", 8: "left out"}
    assert "left out: suspect" in rows[8]["note"]
    joints, points = (layers_of(chart, mark)[0] for mark in ("line", "point"))
    assert joints["transform"] == [{"filter": "datum.kind !== 'left out'"}]
    assert points["encoding"]["shape"]["scale"]["domain"] == ["counted", "outlier", "left out"]


def test_the_sweep_shows_the_ratio_interval_and_blocks_of_every_cell(analysis, charts):
    rows = rows_of(charts["sweep"], line="guided", quantity="wall", kind="estimate")
    estimates = [row.estimates["wall"] for row in analysis.sweep]
    assert [row["x"] for row in rows] == [1.0, 2.0, 5.0]
    for name, values in (("ratio", "ratio"), ("low", "ci_low"), ("high", "ci_high"), ("blocks", "num_blocks")):
        assert [row[name] for row in rows] == pytest.approx([getattr(e, values) for e in estimates], rel=1e-5)
    assert len(rows_of(charts["sweep"], line="guided", quantity="wall", kind="block")) == 9


def bands_of(chart):
    """Ends of the grey bands around 1."""
    encodings = [layer["encoding"] for layer in layers_of(chart, "rect")]
    return [(encoding["y"]["datum"], encoding["y2"]["datum"]) for encoding in encodings]


def test_the_grey_band_is_the_noise_floor_where_one_is_known(swept, charts):
    floor = MetricNoise(log_sd=0.01, num_blocks=8, floor_frac=0.05)
    known = charts_of(swept, against_baseline(swept, noise={"wall_s": floor, "step_ms": floor}))["sweep"]
    assert bands_of(known) == [pytest.approx((1 / 1.05, 1.05))] * 2
    assert "A/A" in known.caption
    logs = [math.log(factor["baseline"]) for factor in SPREAD]
    assert math.log(bands_of(charts["sweep"])[0][1]) == pytest.approx(np.std(logs, ddof=1), rel=1e-6)


def test_several_factors_give_a_line_for_each_value_of_the_others_and_words_stand_side_by_side(tmp_path):
    models = ("small", "large")
    cells = [{"top_k": k, "value_model": m} for k in (2, 5, 40) for m in models]
    chart = charts_of(write_results(tmp_path / "lines", cells=cells).path)["sweep"]
    for model in models:
        line = f"guided value_model={model}"
        assert values_of(chart, "x", line=line, quantity="wall", kind="estimate") == [2.0, 5.0, 40.0]
    assert x_axis_of(chart)["scale"]["type"] == "log"
    cells = [{"value_model": m} for m in models]
    chart = charts_of(write_results(tmp_path / "words", cells=cells).path)["sweep"]
    assert (x_axis_of(chart)["type"], sorted(x_axis_of(chart)["sort"])) == ("nominal", ["large", "small"])
    assert not layers_of(chart, "line")


@pytest.mark.parametrize(
    "values",
    [(20, 28, 38, 52, 72), (2, 28, 72, 1500, 200_000), (0.125, 0.25, 0.5)],
    ids=("near", "wide", "fractions"),
)
def test_the_axis_of_a_sweep_is_labelled_with_its_values_as_they_are(tmp_path, values):
    results = write_results(tmp_path / "r", cells=[{"threshold": value} for value in values], num_requests=2)
    drawn = chart_bytes(charts_of(results.path)["sweep"], ".svg").decode()
    labels = re.findall(r">([^<]+)</text>", drawn)
    assert {f"{value:,}" for value in values} <= set(labels)


def test_gpu_and_host_are_shown_between_first_send_and_last_output_only(charts):
    for chart_id in ("gpu", "host-cpu"):
        times = values_of(charts[chart_id], "time")
        assert 0 <= min(times) <= max(times) < 0.2
    assert set(values_of(charts["gpu"], "device", arm="baseline")) == {"GPU 0", "GPU 1"}
    assert titles_of(charts["gpu"]) == ["power, W", "SM clock, MHz", "utilisation, %"]  # what was reported
    assert set(values_of(charts["host-cpu"], "value", quantity="server CPU, cores")) == {1.5}


def test_a_request_that_failed_is_crossed_in_the_timeline_and_in_no_distribution(tmp_path):
    results = write_results(tmp_path, num_requests=6)
    error = RequestError(kind="reset", message="connection reset")
    run_id = results.plan().runs[0].run_id
    change_requests(results, run_id, 2, error=error, choices=(), done_ns=None)
    chart = charts_of(results.path)["request-timeline"]
    rows = rows_of(chart, block="0", is_first=True)
    assert [(row["row"], row["id"], row["error"]) for row in rows if row["error"]] == [(3, "r00002", "reset")]
    assert [row["row"] for row in rows if row["first"] is not None] == [1, 2, 4, 5, 6]
    assert layers_of(chart, "point")[0]["transform"] == [{"filter": "isValid(datum.error)"}]
    change_requests(results, run_id, 3, done_ns=None)
    assert len(run_latencies(analyze_directory(results.path).runs[0])["e2el"]) == 4


def test_of_many_requests_two_hundred_are_shown_and_the_caption_says_so(tmp_path):
    results = write_results(tmp_path / "r", num_requests=450, output_tokens=2, n=1)
    chart = charts_of(results.path)["request-timeline"]
    rows = values_of(chart, "row", block="0", is_first=True)
    assert (len(rows), len(set(rows)), rows[0], rows[-1]) == (200, 200, 1, 450)
    assert "200 of up to 450" in chart.caption


def test_a_directory_says_of_each_chart_what_is_missing(tmp_path):
    of_example = charts_of(EXAMPLE)["step-time-by-batch-size"].skipped
    assert of_example == "every decode step has 4 sequences: see step_ms"
    results = write_results(tmp_path / "r")
    runs = [planned.run_id for planned in results.plan().runs]
    for run_id in runs:
        change_steps(results, run_id, phase="prefill")
    reason = charts_of(results.path)["step-time-by-batch-size"].skipped
    assert reason == "no finished run has steps that only decode"
    for run_id in runs:
        results.run(run_id).step_log.unlink()
    reasons = {chart.id: chart.skipped for chart in charts_of(results.path).values()}
    for chart_id in ("step-time", "sections", "step-time-by-batch-size"):
        assert reasons[chart_id] == "no finished run has a step log"
    assert reasons["gpu"] == "the measuring machine showed no GPU"
    assert ("two samples" in reasons["host-cpu"], "sweep" in reasons) == (True, False)
    assert reasons["block-values"] is reasons["request-timeline"] is None
    edit_manifest(results, gpus=(GpuInfo(index=0, name="H200"),))
    for run_id in runs[1:]:
        edit_run(results, run_id, state="failed")
    assert charts_of(results.path)["gpu"].skipped == "no GPU sample was taken during the load"


def test_a_picture_is_the_same_each_time_and_of_the_kind_that_is_asked_for(charts):
    chart = charts["sweep"]
    for suffix, beginning in ((".png", b"\x89PNG\r\n"), (".svg", b"<svg"), (".pdf", b"%PDF")):
        assert picture_bytes(chart.spec, "title", suffix=suffix).startswith(beginning)
    assert chart_bytes(chart) == chart_bytes(chart)
    assert [rounded(value, 3) for value in (1.23456789, math.nan, math.inf, None)] == [1.23, None, None, None]


def test_a_picture_shows_markup_and_controls_as_text_and_has_a_name_that_is_one_part_of_a_path():
    hostile = ["<b>$\\frac$", "datum.x", "\x1b[31m\x07\u202e", "\ud800", "x" * 10_000]
    spec = stacked_bars([(label, {label: 1.0}) for label in hostile], "<i>x")
    svg = picture_bytes(spec, "<title>\x1b", suffix=".svg").decode()
    assert "&lt;b&gt;$\\frac$" in svg
    assert "\\x1b[31m\\x07\\u202e" in svg
    assert not any(text in svg for text in ("<b>", "x" * 400))
    assert sweep_name([{"a/../../b.c": number, "d": number} for number in (1, 2)]) == "a_______b_c_d_sweep.png"


def course(dur_ns, gap_ns=0):
    """The stretches of steps of these durations, each a gap after the one before."""
    dur_ns = np.asarray(dur_ns, dtype=np.int64)
    start_ns = np.cumsum(dur_ns + gap_ns) - dur_ns - gap_ns
    ones = np.ones_like(dur_ns)
    columns = {"start_ns": start_ns, "dur_ns": dur_ns, "num_seqs": ones, "phase": ones, "clock": 0 * ones}
    return list(course_of(StepColumns(columns)))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400), st.integers(0, 10**8))
def test_stretches_hold_every_step_once_and_keep_sum_and_order(dur_ns, gap_ns):
    stretches = course(dur_ns, gap_ns)
    assert sum(each["steps"] for each in stretches) == len(dur_ns)
    assert sum(each["steps"] * each["mean"] for each in stretches) == pytest.approx(sum(dur_ns) / 1e6)
    assert len(stretches) <= MAX_STRETCHES
    assert all(a["time"] < b["time"] for a, b in pairwise(stretches))
    for each in stretches:
        assert each["steps"] > 0
        assert min(dur_ns) / 1e6 <= each["low"] <= each["median"] <= each["high"] <= max(dur_ns) / 1e6


def test_a_stall_in_a_long_run_is_seen_in_the_band_of_its_stretch():
    dur_ns = np.full(100_000, 10_000_000)
    dur_ns[60_000:60_100] = 50_000_000  # about a seventh of one stretch
    stretches = course(dur_ns)
    highs = [each["high"] for each in stretches]
    assert [each["median"] for each in stretches] == pytest.approx([10.0] * len(stretches))
    assert (max(highs), np.argmax(highs)) == (pytest.approx(50.0), pytest.approx(0.6 * len(stretches), abs=2))


def test_few_batch_sizes_are_shown_each_and_many_in_powers_of_two():
    assert list(bins_of(np.array([1, 4, 4, 48]))) == ["1", "4", "48"]
    assert list(bins_of(np.arange(1, 41))) == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_every_batch_size_is_in_exactly_one_bin(sizes):
    bins = bins_of(np.array(sizes))
    for size in sizes:
        assert sum(low <= size <= high for low, high in bins.values()) == 1


def test_one_long_step_pulls_the_mean_of_a_bin_and_not_its_percentiles():
    times_ms = np.array([10.0] * 99 + [5000.0])
    (row,) = batch_size_rows("baseline", np.full(100, 8), times_ms, bins_of(np.array([8])))
    of_bin = {"mean": pytest.approx(59.9), "steps": 100, "low": 10.0, "high": 10.0}
    assert row == {"arm": "baseline", "size": "8", **of_bin}


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1000), max_size=1000))
def test_thinned_samples_stay_within_what_was_read(values):
    points = thinned(list(enumerate(values)))
    assert len(points) == min(len(values), MAX_POINTS)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for _, value in points)
    if len(values) <= MAX_POINTS:
        assert points == [(float(at), value) for at, value in enumerate(values)]


@settings(max_examples=40)
@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=2000), st.sampled_from([50, 90, 95, 99]))
def test_a_percentile_read_from_a_line_is_that_of_the_values(values, percent):
    line = quantiles(np.sort(np.array(values)), MAX_POINTS)
    assert len(line) == min(max(2, len(values)), MAX_POINTS)
    read = np.interp(percent / 100, np.linspace(0, 1, len(line)), line)
    exact = percentiles(values, 10**6, (percent,))[percent]
    rank = percent / 100 * (len(line) - 1)
    low, high = line[math.floor(rank)], line[math.ceil(rank)]
    assert low - 1e-9 <= read <= high + 1e-9
    assert low - 1e-6 * low <= exact <= high + 1e-6 * high


@pytest.fixture(scope="module", name="measured")
def _measured(tmp_path_factory):
    """Six blocks of 40 requests."""
    factors = [{"baseline": 1 + 0.02 * (i % 3), "guided": 1.2 + 0.03 * (i % 4)} for i in range(6)]
    path = tmp_path_factory.mktemp("results")
    write_results(path, block_factors=factors, num_requests=40)
    return analyze_directory(path)


def test_the_lines_of_an_arm_hold_every_request_of_its_blocks(measured):
    (chart,) = (chart for chart in draw_charts(measured) if chart.id == "latencies")
    for cell in measured.cells:
        for latency in ("ttft", "tpot", "e2el"):
            of_runs = [run_latencies(run)[latency] for run in cell.runs]
            lines = {f"block {b}": values for b, values in enumerate(of_runs)} | {"": np.concatenate(of_runs)}
            of_arm = rows_of(chart, latency=latency, arm=cell.label)
            assert list(dict.fromkeys(row["of"] for row in of_arm)) == list(lines)
            for name, values in lines.items():
                line = [row["ms"] for row in of_arm if row["of"] == name]
                assert name or len(line) == min(MAX_POINTS, len(values))
                assert [line[0], line[-1]] == pytest.approx([values.min(), values.max()], rel=1e-5)
            means = [values.mean() for values in of_runs]
            assert means == pytest.approx([run.number(f"{latency}_ms") for run in cell.runs], rel=1e-9)


def test_the_interval_of_a_percentile_over_few_blocks_is_that_of_student_also_where_a_block_has_zero():
    values = [12.0, 12.5, 11.8, 12.2, 12.9]
    logs = [math.log(value) for value in values]
    half = student.ppf(0.975, 4) * stdev(logs) / math.sqrt(5)
    level = math.exp(fmean(logs))
    assert level_interval(values, level) == pytest.approx((level * math.exp(-half), level * math.exp(half)))
    values = [12.65, 0.0, 12.82, 12.52, 12.75, 0.0]
    half = student.ppf(0.975, 5) * stdev(values) / math.sqrt(6)
    assert level_interval(values, fmean(values)) == pytest.approx((fmean(values) - half, fmean(values) + half))
    assert level_interval([12.0], 12.0) is level_interval([0.0], 0.0) is None
    assert level_of_blocks([12.0, None], None, 0.95) is None


def rows_of_e2el(measured):
    rows = percentile_values(measured).texts()
    return [row[1:] for row in rows if row[0] == "end-to-end latency (E2EL)"]


def test_percentiles_have_the_blocks_as_units_and_are_unknown_where_requests_are_too_few(measured):
    (baseline, _) = measured.cells
    _, p90, p95, p99 = percentile_levels(baseline, "e2el", 0.95)
    blocks = [run.number("p90_e2el_ms") for run in baseline.runs]
    assert p90.level_ms == baseline.centre("p90_e2el_ms")
    assert min(blocks) <= p90.level_ms <= max(blocks)
    assert p90.interval_ms[0] < p90.level_ms < p90.interval_ms[1]
    assert p95 is p99 is None  # 40 requests a block, and p95 needs 59
    assert "p95 59" in percentile_values(measured).title
    labels = [(row[0], len(row)) for row in rows_of_e2el(measured)]
    assert labels == [("baseline", 3), ("guided top_k=5", 3)], "columns without a value are left out"


def test_in_virtual_time_the_percentile_of_few_requests_is_shown_with_their_number(tmp_path):
    """Nothing but the requests made it long: it is exact for these 40, and says nothing of others."""
    results = write_results(tmp_path, num_requests=40)
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, clock="virtual")
    measured = analyze_directory(tmp_path)
    (baseline, _) = measured.cells
    row = baseline.runs[0].values
    assert row["few_requests"] == "p95 p99"
    assert row["p99_e2el_ms"] == pytest.approx(np.percentile(run_latencies(baseline.runs[0])["e2el"], 99))
    assert [level.num_requests for level in percentile_levels(baseline, "e2el", 0.95)] == [None, None, 40, 40]
    assert [text.endswith("of 40") for text in rows_of_e2el(measured)[0][1:]] == [False, False, True, True]


@settings(max_examples=40)
@given(st.text())
def test_what_is_packed_is_the_same_when_unpacked(text):
    assert gzip.decompress(base64.b64decode(packed(text))).decode() == text
