"""Slots of a closed loop that stand empty are seen, measured and told; full ones are left in peace."""

from dataclasses import replace
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.closed_loops import T0_NS, closed, closed_loop
from test_client_guard import OPEN, codes, run_of, sent

from benchctl.analysis.metrics.client import client_metrics, offered_load, slot_occupancy
from benchctl.analysis.metrics.run import load_figures
from benchctl.analysis.validity.client import client_suspect_warnings
from benchctl.profile.arrival import Arrival
from benchctl.records.record import RequestError
from benchctl.report.load_tables import totals_table
from benchctl.units import NS_PER_MS

OF_SLOTS = (
    "offered_load_frac",
    "slot_idle_frac",
    "p50_refill_gap_ms",
    "p99_refill_gap_ms",
    "p99_refill_connect_ms",
)


def occupancy(records, num_slots):
    return slot_occupancy(records, closed(num_slots))


def idle_frac(records, num_slots):
    return occupancy(records, num_slots).idle_frac


LOADS = st.integers(1, 6).flatmap(
    lambda num_slots: st.tuples(
        st.just(num_slots),
        st.lists(st.integers(1, 400), min_size=num_slots + 1, max_size=30),
        st.lists(st.integers(0, 100), min_size=30, max_size=30),
    )
)


def test_full_slots_are_not_idle():
    found = occupancy(closed_loop([100.0] * 40, 4), 4)
    assert (found.idle_frac, found.mean_open, set(found.gaps_ns)) == (0.0, 4.0, {0})


def test_a_planted_delay_is_found_to_the_nanosecond():
    found = occupancy(closed_loop([95.0] * 40, 4, 5.0), 4)
    assert found.idle_ns == 36 * 5 * NS_PER_MS
    assert found.slot_time_ns == 4 * 9 * 100 * NS_PER_MS
    assert found.idle_frac == pytest.approx(0.05)
    assert median(found.gaps_ns) == 5 * NS_PER_MS


def test_the_end_of_an_answer_counts_by_the_kernel_and_not_by_when_it_was_read():
    late = closed_loop([90.0] * 40, 4, 10.0, read_late_ms=9.5)
    assert idle_frac(late, 4) == pytest.approx(0.1)


def test_opening_a_connection_is_idle_time_and_is_told_apart():
    found = occupancy(closed_loop([90.0] * 400, 4, 10.0, connecting_ms=8.0), 4)
    assert found.idle_frac == pytest.approx(0.1)
    assert set(found.connecting_ns) == {8 * NS_PER_MS}
    assert len(found.connecting_ns) == 396
    assert set(occupancy(closed_loop([90.0] * 400, 4, 10.0), 4).connecting_ns) == {0}


def test_the_tail_of_a_load_is_not_idle():
    assert idle_frac(closed_loop([100.0, 100.0, 100.0, 100.0, 5000.0, 10.0], 4), 4) == 0.0
    shared = closed_loop([100.0] * 8 + [2000.0], 8, 50.0)
    assert idle_frac(shared, 8) == pytest.approx(50 / (8 * 100 + 50))


def test_a_failed_request_holds_its_slot_until_it_failed():
    refused = closed_loop([100.0] * 20, 4)
    error = RequestError(kind="connect-refused", message="nobody there")
    refused = [msgspec.structs.replace(r, sent_ns=None, error=error) if r.index % 5 == 0 else r for r in refused]
    assert idle_frac(refused, 4) == 0.0


def test_slots_that_no_request_was_meant_for_are_idle_while_others_still_have_some():
    """One of two processes has sent all of its own: half of the slots stand empty for the second half."""
    quick, slow = closed_loop([50.0] * 20, 2), closed_loop([100.0] * 20, 2)
    found = occupancy([*quick, *slow], 4)
    assert found.slot_time_ns == pytest.approx(4 * 900 * NS_PER_MS, rel=0.05)
    assert found.idle_frac == pytest.approx(2 * 400 / (4 * 900), rel=0.05)


@pytest.mark.parametrize(
    "arrival",
    [
        OPEN,
        Arrival(kind="burst"),
        Arrival(kind="closed-loop", max_concurrency=4, launch_rate_limit=50.0),
        Arrival(kind="constant", request_rate=9.0, max_concurrency=4),
    ],
)
def test_loads_without_slots_to_fill_have_no_occupancy(arrival):
    assert slot_occupancy(closed_loop([100.0] * 40, 4), arrival) is None


def test_of_records_that_do_not_say_when_slots_were_free_nothing_is_held():
    old = [msgspec.structs.replace(record, slot_free_ns=None) for record in closed_loop([100.0] * 40, 4, 50.0)]
    assert occupancy(old, 4) is None
    assert {client_metrics(old, (), closed(4))[name] for name in OF_SLOTS} == {None}
    assert occupancy(closed_loop([100.0] * 4, 4), 4).idle_frac is None
    assert slot_occupancy([], closed(4)) is None


@given(load=LOADS, shift_ns=st.integers(-(10**12), 10**12))
def test_the_clock_s_zero_does_not_matter(load, shift_ns):
    num_slots, lasts_ms, gaps_ms = load
    here = occupancy(closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[i]), num_slots)
    there = occupancy(closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[i], t0_ns=T0_NS + shift_ns), num_slots)
    assert here == there


@given(load=LOADS)
def test_idle_time_is_a_part_of_slot_time_and_the_gaps_until_the_last_send(load):
    num_slots, lasts_ms, gaps_ms = load
    records = closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[i])
    found = occupancy(records, num_slots)
    end_ns = max(record.sent_ns for record in records)
    busy_ns = sum(min(record.done_ns, end_ns) - record.sent_ns for record in records)
    assert found.idle_ns == sum(found.gaps_ns)
    assert found.idle_ns + busy_ns == found.slot_time_ns
    assert 0 <= found.idle_frac <= 1


@given(load=LOADS, more_ms=st.integers(1, 50))
def test_longer_delays_are_never_less_idle(load, more_ms):
    num_slots, lasts_ms, gaps_ms = load
    lasts_ms = [lasts_ms[0]] * len(lasts_ms)  # so that the same slots are filled by the same requests
    less = idle_frac(closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[0]), num_slots)
    more = idle_frac(closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[0] + more_ms), num_slots)
    assert less < more


@given(load=LOADS, late_ms=st.integers(0, 100))
def test_reading_late_does_not_hide_empty_slots(load, late_ms):
    num_slots, lasts_ms, gaps_ms = load
    at_once = closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[i])
    late = closed_loop(lasts_ms, num_slots, lambda i: gaps_ms[i], read_late_ms=late_ms)
    assert occupancy(late, num_slots).idle_ns == occupancy(at_once, num_slots).idle_ns


def doubts(records, num_slots):
    return client_suspect_warnings(run_of(records), closed(num_slots))


def test_slots_that_stand_empty_for_more_than_a_hundredth_make_a_run_suspect():
    (doubt,) = doubts(closed_loop([97.0] * 400, 4, 3.0), 4)
    assert doubt.code == "slots-idle"
    assert doubt.message.startswith(
        "slots of the closed loop were empty for 3.00% of their time although requests waited (more than 1%): the "
        "server met 3.88 of 4 requests at once. From the last byte of an answer to the next request: 3 ms "
        "(p50), 3 ms (p99) and 3 ms (max); 0 of 396 had to open a connection"
    )
    assert doubt.message.endswith("Free a core for the client, or lower the load")
    assert doubts(closed_loop([99.1] * 400, 4, 0.9), 4) == ()


def test_a_server_that_closes_its_connections_is_named():
    (doubt,) = doubts(closed_loop([97.0] * 400, 4, 3.0, connecting_ms=2.7), 4)
    assert "396 of 396 had to open a connection, which took 90% of that time" in doubt.message
    assert "The server closes connections" in doubt.message


def test_one_long_delay_counts_as_much_as_many_short_ones():
    (doubt,) = doubts(closed_loop([100.0] * 40, 4, lambda i: 60.0 if i in {20, 21, 22, 23} else 0.0), 4)
    assert doubt.code == "slots-idle"


def test_a_load_of_less_than_a_second_is_not_judged_by_its_slots():
    assert doubts(closed_loop([90.0] * 40, 5, 10.0), 5) == ()
    assert codes(doubts(closed_loop([90.0] * 50, 5, 20.0), 5)) == ["slots-idle"]


def test_sends_of_a_closed_loop_are_judged_where_its_slots_are_not_known():
    lates = closed_loop([20.0] * 400, 4, 20.0)
    assert codes(doubts(lates, 4)) == ["slots-idle"]
    old = [msgspec.structs.replace(r, slot_free_ns=None, connected_ns=(r.slot_free_ns or T0_NS) + 1) for r in lates]
    assert codes(doubts(old, 4)) == ["sends-delayed"]


CAPPED = Arrival(kind="constant", request_rate=100.0, max_concurrency=4)


def capped(lag_ms):
    """Requests due every 10 ms that have to wait for one of four slots, and leave so long after they have it."""
    records = closed_loop([60.0] * 200, 4, lag_ms)
    return [
        msgspec.structs.replace(record, scheduled_ns=T0_NS + 10 * record.index * NS_PER_MS)
        for record in records[4:]
    ]


def test_who_waits_for_a_slot_under_a_cap_is_late_from_when_it_is_free():
    assert client_suspect_warnings(run_of(capped(0.5)), CAPPED) == ()
    assert codes(client_suspect_warnings(run_of(capped(9.0)), CAPPED)) == ["sends-delayed"]


def test_under_a_cap_that_was_never_met_a_connection_that_opens_late_is_the_client_s():
    late = [sent(i, 10 * i, 6.0, connect_ms=5.9, lasts_ms=1.0) for i in range(200)]
    assert codes(client_suspect_warnings(run_of(late), CAPPED)) == ["sends-delayed"]


def test_what_the_server_met_of_a_load_is_told_in_its_own_unit():
    slots = offered_load(closed_loop([90.0] * 40, 4, 10.0), closed(4))
    assert (slots.planned, slots.met, slots.unit) == (4, pytest.approx(3.6), "requests at once")
    slower = offered_load([sent(i, 10 * i, i) for i in range(300)], OPEN)
    assert (slower.planned, slower.unit) == (pytest.approx(100), "requests/s")
    assert slower.met == pytest.approx(slower.planned * 10 / 11)
    assert offered_load([sent(i, 0) for i in range(9)], Arrival(kind="burst")) is None


def test_metrics_of_the_slots_are_in_milliseconds():
    found = client_metrics(closed_loop([90.0] * 400, 4, 10.0, connecting_ms=8.0), (), closed(4))
    assert {name: found[name] for name in OF_SLOTS} == {
        "offered_load_frac": pytest.approx(0.9),
        "slot_idle_frac": pytest.approx(0.1),
        "p50_refill_gap_ms": 10,
        "p99_refill_gap_ms": 10,
        "p99_refill_connect_ms": 8,
    }


def rows_of(figures, cores=None, loop_lag_ms=None):
    """The totals of a load as its table prints them."""
    sampled = {"client_cpu_cores": cores, "max_loop_lag_ms": loop_lag_ms}
    return dict(totals_table(replace(figures, metrics={**figures.metrics, **sampled})).texts())


def test_a_load_says_how_its_client_did_and_how_its_slots_were_filled():
    figures = load_figures(run_of(closed_loop([90.0] * 400, 4, 10.0, connecting_ms=8.0)), closed(4), {})
    assert rows_of(figures)["client"].startswith("not sampled")
    assert rows_of(figures, loop_lag_ms=3.0)["client"] == "its loop at most 3.000 ms late"
    rows = rows_of(figures, cores=0.1)
    assert rows["client"] == "0.1000 cores"
    assert rows["load"] == "3.600 of 4.000 requests at once"
    assert rows["slots"] == (
        "empty for 10.00% of their time; filled again after 10.00 ms (p50), 10.00 ms (p99); a connection "
        "took 8.000 ms of it (p99)"
    )


def test_a_load_that_began_late_is_idle_until_its_first_requests_left():
    records = closed_loop([100.0] * 40, 4)
    late = [
        msgspec.structs.replace(r, scheduled_ns=r.scheduled_ns - 90 * NS_PER_MS) if r.index < 4 else r
        for r in records
    ]
    assert idle_frac(late, 4) == pytest.approx(90 / 990)
