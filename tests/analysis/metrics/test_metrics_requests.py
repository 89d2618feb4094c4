"""Durations of single requests and the percentiles over them, each computed by hand."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_client_guard import run_of

from benchctl.analysis.metrics.latency import (
    choice_tokens,
    e2el_ns,
    is_completed,
    itls_ns,
    measured,
    percentiles,
    send_lag_ns,
    smallest_sample,
    tpots_ns,
    ttft_ns,
)
from benchctl.analysis.metrics.run import load_window_ns
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

ONE_CHOICE = RequestRecord(
    request_id="r0",
    index=0,
    scheduled_ns=90,
    sent_ns=100,
    done_ns=500,
    choices=(ChoiceRecord(index=0, chunk_ns=(200, 300, 460), output_tokens=5),),
    prompt_tokens=7,
    completion_tokens=14,
)
TWO_CHOICES = RequestRecord(
    request_id="r1",
    index=1,
    scheduled_ns=100,
    sent_ns=100,
    done_ns=900,
    choices=(
        ChoiceRecord(index=0, chunk_ns=(250, 450), output_tokens=5),
        ChoiceRecord(index=1, chunk_ns=(210, 810), chunk_tokens=(1, 3)),
    ),
    completion_tokens=9,
)
NOTHING = RequestRecord(request_id="r2", index=2, scheduled_ns=100)


def durations(request):
    """Time to first token, until the last one, between tokens, and from when it was due to its send."""
    return ttft_ns(request), e2el_ns(request), list(itls_ns(request)), send_lag_ns(request)


def test_latencies_follow_vllms_definitions_and_span_all_choices():
    assert durations(ONE_CHOICE) == (100, 360, [100, 160], 10)
    assert durations(TWO_CHOICES) == (110, 710, [200, 600], 0)
    assert durations(NOTHING) == (None, None, [], None)


def test_tpot_divides_by_the_tokens_of_usage_or_of_each_choice():
    assert tpots_ns(ONE_CHOICE) == (260 / 13,)
    assert tpots_ns(TWO_CHOICES) == (200 / 4, 600 / 3)
    silent = ChoiceRecord(index=0, chunk_ns=(1, 2))
    unknown = msgspec.structs.replace(TWO_CHOICES, choices=(silent, silent))
    assert choice_tokens(unknown, silent) is None, "usage of several choices says nothing of one of them"
    assert tpots_ns(unknown) == ()
    one_token = (ChoiceRecord(index=0, chunk_ns=(5,)),)
    assert tpots_ns(msgspec.structs.replace(ONE_CHOICE, choices=one_token, completion_tokens=1)) == ()


def test_the_load_spans_first_send_to_last_output_of_what_is_measured():
    assert load_window_ns(run_of([ONE_CHOICE, TWO_CHOICES, NOTHING])) == (100, 810)
    assert load_window_ns(run_of([NOTHING])) is None
    failed = msgspec.structs.replace(ONE_CHOICE, error=RequestError(kind="timeout", message="late"))
    assert [is_completed(request) for request in (ONE_CHOICE, NOTHING, failed)] == [True, False, False]
    assert measured([msgspec.structs.replace(NOTHING, is_warmup=True), ONE_CHOICE]) == (ONE_CHOICE,)


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 29), (95, 59), (99, 299)])
def test_a_tail_percentile_needs_as_many_requests_as_bound_it(percent, needed):
    assert smallest_sample(percent) == needed
    assert percentiles([1.0, 2.0], needed - 1, (percent,))[percent] is None or percent == 50
    assert percentiles([1.0, 2.0], needed, (percent,))[percent] == pytest.approx(1 + percent / 100)
    assert percentiles([], 1000, (percent,)) == {percent: None}


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.floats(0.001, 1000))
def test_percentiles_lie_in_order_within_the_values_and_scale_with_them(values, factor):
    found = percentiles(values, 1000)
    ordered = [found[percent] for percent in (50, 90, 95, 99)]
    assert ordered == sorted(ordered)
    assert min(values) <= ordered[0]
    assert ordered[-1] <= max(values)
    scaled = percentiles([value * factor for value in values], 1000)
    assert np.allclose([scaled[p] for p in (50, 90, 95, 99)], np.array(ordered) * factor, rtol=1e-9, atol=1e-9)
