"""Latencies on the page: distributions from which percentiles can be read, and percentiles with their intervals."""

import base64
import gzip
import math
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from support.results.builders import edit_requests, edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory, level_of_blocks, percentile_levels, run_latencies
from benchctl.analysis.metrics.latency import percentiles
from benchctl.analysis.statistics.estimate import level_interval
from benchctl.report.charts.requests import MAX_POINTS, quantiles
from benchctl.report.page.page import draw_charts, packed
from benchctl.report.page.parts import percentile_values

FACTORS = [{"baseline": 1 + 0.02 * (i % 3), "guided": 1.2 + 0.03 * (i % 4)} for i in range(6)]


@pytest.fixture(scope="module", name="analysis")
def _analysis(tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    write_results(path, block_factors=FACTORS, num_requests=40)
    return analyze_directory(path)


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=2000), st.sampled_from([50, 90, 95, 99]))
def test_a_percentile_read_from_a_line_is_that_of_the_values(values, percent):
    ordered = np.sort(np.array(values))
    line = quantiles(ordered, MAX_POINTS)
    assert len(line) == min(max(2, len(values)), MAX_POINTS)
    read = np.interp(percent / 100, np.linspace(0, 1, len(line)), line)
    exact = percentiles(values, 10**6, (percent,))[percent]
    rank = percent / 100 * (len(line) - 1)
    low, high = line[math.floor(rank)], line[math.ceil(rank)]
    assert low - 1e-9 <= read <= high + 1e-9
    assert low - 1e-6 * low <= exact <= high + 1e-6 * high


def test_the_lines_of_an_arm_hold_every_request_of_its_blocks(analysis):
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "latencies")
    rows = chart.spec["datasets"]["rows"]
    for cell in analysis.cells:
        for latency in ("ttft", "tpot", "e2el"):
            lines = {}
            for row in rows:
                if (row["latency"], row["arm"]) == (latency, cell.label):
                    lines.setdefault(row["of"], []).append(row["ms"])
            assert list(lines) == [*(f"block {b}" for b in range(6)), ""]
            for line, run in zip(lines.values(), cell.runs, strict=False):
                values = run_latencies(run)[latency]
                assert line[0] == pytest.approx(values.min(), rel=1e-5)
                assert line[-1] == pytest.approx(values.max(), rel=1e-5)
            pooled = np.concatenate([run_latencies(run)[latency] for run in cell.runs])
            assert len(lines[""]) == min(MAX_POINTS, len(pooled))
            assert lines[""][-1] == pytest.approx(pooled.max(), rel=1e-5)


def test_the_latencies_of_a_run_have_the_means_of_its_metrics(analysis):
    for run in analysis.runs:
        for latency, values in run_latencies(run).items():
            assert values.mean() == pytest.approx(run.number(f"{latency}_ms"), rel=1e-9)
            assert (np.diff(values) >= 0).all()


def test_the_interval_of_a_percentile_over_few_blocks_is_that_of_student():
    values = [12.0, 12.5, 11.8, 12.2, 12.9]
    logs = [math.log(value) for value in values]
    level = math.exp(fmean(logs))
    half = student.ppf(0.975, 4) * stdev(logs) / math.sqrt(5)
    interval = level_interval(values, level)
    assert interval == pytest.approx((level * math.exp(-half), level * math.exp(half)))
    assert level_interval([12.0], 12.0) is None
    assert level_interval([0.0], 0.0) is None
    assert level_of_blocks([12.0, None], None, 0.95) is None


def test_blocks_with_a_percentile_of_zero_count_in_the_interval_as_in_the_mean():
    values = [12.65, 0.0, 12.82, 12.52, 12.75, 0.0]
    low, high = level_interval(values, fmean(values))
    half_width = student.ppf(0.975, 5) * stdev(values) / math.sqrt(6)
    assert (low, high) == pytest.approx((fmean(values) - half_width, fmean(values) + half_width))


def test_percentiles_have_the_blocks_as_units_and_are_unknown_where_requests_are_too_few(analysis):
    (baseline, _) = analysis.cells
    _, p90, p95, p99 = percentile_levels(baseline, "e2el", 0.95)
    blocks = [run.number("p90_e2el_ms") for run in baseline.runs]
    assert p90.level_ms == baseline.centre("p90_e2el_ms")
    assert min(blocks) <= p90.level_ms <= max(blocks)
    assert p90.interval_ms[0] < p90.level_ms < p90.interval_ms[1]
    assert p95 is p99 is None  # 40 requests a block, and p95 needs 59
    table = percentile_values(analysis)
    assert [column.heading for column in table.columns] == ["latency", "arm", "p50", "p90", "p95", "p99"]
    assert "p95 59" in table.title
    rows = [row for row in table.texts() if row[0] == "end-to-end latency (E2EL)"]
    assert [row[1] for row in rows] == ["baseline", "guided top_k=5"]
    assert rows[0][4] == "-"


def test_in_virtual_time_the_percentile_of_few_requests_is_shown_with_their_number(tmp_path):
    """Nothing but the requests made it long: it is exact for these 40, and says nothing of others."""
    results = write_results(tmp_path, num_requests=40)
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, clock="virtual")
    analysis = analyze_directory(tmp_path)
    (baseline, _) = analysis.cells
    latencies_ms = run_latencies(baseline.runs[0])["e2el"]
    row = baseline.runs[0].values
    assert row["few_requests"] == "p95 p99"
    assert row["p99_e2el_ms"] == pytest.approx(np.percentile(latencies_ms, 99))
    assert [level.num_requests for level in percentile_levels(baseline, "e2el", 0.95)] == [None, None, 40, 40]
    table = percentile_values(analysis)
    _, _, *numbers = next(row for row in table.texts() if row[0] == "end-to-end latency (E2EL)")
    assert [text.endswith("of 40") for text in numbers] == [False, False, True, True]


def test_requests_that_were_not_answered_are_in_no_distribution(tmp_path):
    results = write_results(tmp_path, num_requests=6)
    before = run_latencies(analyze_directory(tmp_path).runs[0])["e2el"]

    def cut(request):
        return msgspec.structs.replace(request, done_ns=None) if request.index == 2 else request

    edit_requests(results, results.plan().runs[0].run_id, cut)
    after = run_latencies(analyze_directory(tmp_path).runs[0])["e2el"]
    assert len(after) == len(before) - 1


@given(st.text())
def test_what_is_packed_is_the_same_when_unpacked(text):
    assert gzip.decompress(base64.b64decode(packed(text))).decode() == text
