"""Long runs in few points: what may be left out of a chart and what must not."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.records.columns import StepColumns
from benchctl.report.charts.figure import rounded
from benchctl.report.charts.requests import MAX_POINTS, thinned
from benchctl.report.charts.steps import MAX_STRETCHES, batch_size_rows, bins_of, course_of
from benchctl.report.page.page import packed


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
    course = list(course_of(columns(dur_ns, gaps_ns=gap_ns)))
    assert sum(each["steps"] for each in course) == len(dur_ns)
    assert sum(each["steps"] * each["mean"] for each in course) == pytest.approx(sum(dur_ns) / 1e6)
    assert len(course) <= MAX_STRETCHES
    assert all(each["steps"] > 0 for each in course)
    assert all(a["time"] < b["time"] for a, b in pairwise(course))
    assert all(each["low"] <= each["median"] <= each["high"] for each in course)
    assert min(each["low"] for each in course) >= min(dur_ns) / 1e6
    assert max(each["high"] for each in course) <= max(dur_ns) / 1e6


def test_a_stall_in_a_long_run_is_seen_in_the_band_of_its_stretch():
    dur_ns = np.full(100_000, 10_000_000)
    dur_ns[60_000:60_100] = 50_000_000  # about a seventh of one stretch
    course = list(course_of(columns(dur_ns)))
    highs = [each["high"] for each in course]
    assert [each["median"] for each in course] == pytest.approx([10.0] * len(course))
    assert max(highs) == pytest.approx(50.0)
    assert np.argmax(highs) == pytest.approx(0.6 * len(course), abs=2)


def test_a_run_without_steps_has_no_course():
    with pytest.raises(ValueError, match="zero-size"):
        list(course_of(columns([])))


def test_few_batch_sizes_are_shown_each_and_many_in_powers_of_two():
    assert list(bins_of(np.array([1, 4, 4, 48]))) == ["1", "4", "48"]
    assert list(bins_of(np.arange(1, 41))) == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200))
def test_every_batch_size_is_in_exactly_one_bin(sizes):
    bins = bins_of(np.array(sizes))
    for size in sizes:
        assert sum(low <= size <= high for low, high in bins.values()) == 1


def test_one_long_step_pulls_the_mean_of_a_bin_and_not_its_percentiles():
    times_ms = np.array([10.0] * 99 + [5000.0])
    (row,) = batch_size_rows("baseline", np.full(100, 8), times_ms, bins_of(np.array([8])))
    assert row == {
        "arm": "baseline",
        "size": "8",
        "mean": pytest.approx(59.9),
        "steps": 100,
        "low": 10.0,
        "high": 10.0,
    }


def test_a_long_log_costs_a_chart_no_more_than_a_short_one():
    rng = np.random.default_rng(1)
    course = course_of(columns(rng.integers(8_000_000, 12_000_000, 100_000), rng.integers(1, 65, 100_000)))
    rows = [{name: rounded(value) for name, value in row.items()} for row in course]
    assert len(packed(json.dumps(rows))) < 10_000
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
