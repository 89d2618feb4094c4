"""Durations of single requests and the percentiles over them, each computed by hand."""

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


def test_latencies_of_one_choice_follow_vllms_definitions():
    assert ttft_ns(ONE_CHOICE) == 100
    assert e2el_ns(ONE_CHOICE) == 360
    assert list(itls_ns(ONE_CHOICE)) == [100, 160]
    assert send_lag_ns(ONE_CHOICE) == 10


def test_tpot_of_a_single_choice_divides_by_the_tokens_of_usage():
    assert tpots_ns(ONE_CHOICE) == (260 / 13,)


def test_with_several_choices_latency_spans_them_all_and_tpot_is_that_of_each():
    assert ttft_ns(TWO_CHOICES) == 110
    assert e2el_ns(TWO_CHOICES) == 710
    assert tpots_ns(TWO_CHOICES) == (200 / 4, 600 / 3)
    assert list(itls_ns(TWO_CHOICES)) == [200, 600]


def test_usage_of_several_choices_says_nothing_of_one_of_them():
    silent = ChoiceRecord(index=0, chunk_ns=(1, 2))
    request = RequestRecord(request_id="r", index=0, scheduled_ns=0, choices=(silent, silent), completion_tokens=9)
    assert choice_tokens(request, silent) is None
    assert tpots_ns(request) == ()


def test_a_choice_of_one_token_has_no_time_per_output_token():
    request = RequestRecord(
        request_id="r",
        index=0,
        scheduled_ns=0,
        sent_ns=0,
        choices=(ChoiceRecord(index=0, chunk_ns=(5,)),),
        completion_tokens=1,
    )
    assert tpots_ns(request) == ()


def test_a_request_that_was_never_sent_has_no_durations():
    assert ttft_ns(NOTHING) is None
    assert e2el_ns(NOTHING) is None
    assert send_lag_ns(NOTHING) is None
    assert load_window_ns(run_of([NOTHING])) is None


def test_the_load_spans_first_send_to_last_output():
    assert load_window_ns(run_of([ONE_CHOICE, TWO_CHOICES, NOTHING])) == (100, 810)


def test_completed_means_answered_to_the_end_without_an_error():
    failed = RequestRecord(
        request_id="r", index=0, scheduled_ns=0, done_ns=9, error=RequestError(kind="timeout", message="late")
    )
    assert [is_completed(request) for request in (ONE_CHOICE, NOTHING, failed)] == [True, False, False]


def test_warm_up_requests_are_not_measured():
    warmup = RequestRecord(request_id="warmup-0", index=0, scheduled_ns=0, is_warmup=True)
    assert measured([warmup, ONE_CHOICE]) == (ONE_CHOICE,)


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 29), (95, 59), (99, 299)])
def test_a_tail_percentile_needs_as_many_requests_as_bound_it(percent, needed):
    assert smallest_sample(percent) == needed
    assert percentiles([1.0, 2.0], needed - 1, (percent,))[percent] is None or percent == 50
    assert percentiles([1.0, 2.0], needed, (percent,))[percent] == pytest.approx(1 + percent / 100)


def test_percentiles_of_nothing_are_unknown():
    assert percentiles([], 1000, (50, 99)) == {50: None, 99: None}


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.floats(0.001, 1000))
def test_percentiles_lie_in_order_within_the_values_and_scale_with_them(values, factor):
    found = percentiles(values, 1000)
    ordered = [found[percent] for percent in (50, 90, 95, 99)]
    assert ordered == sorted(ordered)
    assert min(values) <= ordered[0]
    assert ordered[-1] <= max(values)
    scaled = percentiles([value * factor for value in values], 1000)
    assert np.allclose([scaled[p] for p in (50, 90, 95, 99)], np.array(ordered) * factor, rtol=1e-9, atol=1e-9)
