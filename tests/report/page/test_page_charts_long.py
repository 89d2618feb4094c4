"""Long runs in few points: what may be left out of a chart and what must not."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.records.columns.columns import StepColumns
from benchctl.report.charts.requests import MAX_POINTS, thinned
from benchctl.report.charts.steps import MAX_STRETCHES, batch_size_trace, bins_of, course_of


def columns(dur_ns, num_seqs=None, gaps_ns=0):
    dur_ns = np.asarray(dur_ns, dtype=np.int64)
    return StepColumns(
        {
            "start_ns": np.cumsum(dur_ns + gaps_ns) - dur_ns - gaps_ns,
            "dur_ns": dur_ns,
            "num_seqs": np.ones_like(dur_ns) if num_seqs is None else np.asarray(num_seqs, dtype=np.int64),
            "phase": np.ones_like(dur_ns),
            "clock": np.zeros_like(dur_ns),
        }
    )


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=400), st.integers(0, 10**8))
def test_stretches_hold_every_step_once_and_keep_sum_and_order(dur_ns, gap_ns):
    course = course_of(columns(dur_ns, gaps_ns=gap_ns), 0)
    assert course.count.sum() == len(dur_ns)
    assert (course.count * course.mean_ms).sum() == pytest.approx(sum(dur_ns) / 1e6)
    assert len(course.count) <= MAX_STRETCHES
    assert (course.count > 0).all()
    assert (np.diff(course.time_s) > 0).all()
    assert (course.low_ms <= course.median_ms).all()
    assert (course.median_ms <= course.high_ms).all()
    assert course.low_ms.min() >= min(dur_ns) / 1e6
    assert course.high_ms.max() <= max(dur_ns) / 1e6


def test_a_stall_in_a_long_run_is_seen_in_the_band_of_its_stretch():
    dur_ns = np.full(100_000, 10_000_000)
    dur_ns[60_000:60_100] = 50_000_000  # about a seventh of one stretch
    course = course_of(columns(dur_ns), 0)
    assert course.median_ms == pytest.approx(10.0)
    assert course.high_ms.max() == pytest.approx(50.0)
    assert np.argmax(course.high_ms) == pytest.approx(0.6 * len(course.high_ms), abs=2)


def test_a_run_without_steps_has_no_course():
    with pytest.raises(ValueError, match="no course"):
        course_of(columns([]), 0)


def test_few_batch_sizes_are_shown_each_and_many_in_powers_of_two():
    assert bins_of(np.array([1, 4, 4, 48])).labels == ["1", "4", "48"]
    assert bins_of(np.arange(1, 41)).labels == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_every_batch_size_is_in_exactly_one_bin(sizes):
    bins = bins_of(np.array(sizes))
    for size in sizes:
        assert ((bins.lows <= size) & (size <= bins.highs)).sum() == 1


def test_a_mean_that_one_long_step_pulled_beyond_the_percentiles_has_no_negative_bar():
    arm = SimpleNamespace(label="baseline", color="#0072B2", dash="solid")
    times_ms = np.array([10.0] * 99 + [5000.0])
    trace = batch_size_trace(arm, np.full(100, 8), times_ms, bins_of(np.array([8])))
    assert trace["y"] == [pytest.approx(59.9)]
    assert trace["error_y"]["array"] == [0.0]
    assert trace["error_y"]["arrayminus"] == [pytest.approx(49.9)]
    assert trace["customdata"] == [[100, 10.0, 10.0]]


def test_a_long_log_costs_a_chart_no_more_than_a_short_one():
    rng = np.random.default_rng(1)
    course = course_of(columns(rng.integers(8_000_000, 12_000_000, 100_000), rng.integers(1, 65, 100_000)), 0)
    fields = ("time_s", "count", "mean_ms", "low_ms", "median_ms", "high_ms", "num_seqs")
    assert len(json.dumps([getattr(course, name).tolist() for name in fields])) < 30_000
    assert len(thinned([(i, float(i)) for i in range(50_000)])) == MAX_POINTS


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=1000))
def test_thinned_samples_stay_within_what_was_read(values):
    shown = thinned(list(enumerate(values)))
    assert len(shown) == min(len(values), MAX_POINTS)
    assert min(values) - 1e-9 <= min(v for _, v in shown)
    assert max(v for _, v in shown) <= max(values) + 1e-9
    if len(values) <= MAX_POINTS:
        assert shown == [(float(at), value) for at, value in enumerate(values)]


def test_no_samples_are_thinned_to_none():
    assert thinned([]) == []
