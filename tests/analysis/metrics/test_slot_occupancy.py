"""Slots of a closed loop that stand empty are seen, measured and told; full ones are left in peace."""

from dataclasses import replace
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.closed_loops import T0_NS, closed, closed_loop
from test_client_guard import OPEN, run_of, sent

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


def test_a_planted_delay_is_measured_to_the_nanosecond_and_full_slots_are_not_idle():
    full = occupancy(closed_loop([100.0] * 40, 4), 4)
    assert (full.idle_frac, full.mean_open, set(full.gaps_ns)) == (0.0, 4.0, {0})
    planted = occupancy(closed_loop([95.0] * 40, 4, 5.0), 4)
    assert (planted.idle_ns, planted.slot_time_ns) == (36 * 5 * NS_PER_MS, 4 * 9 * 100 * NS_PER_MS)
    assert planted.idle_frac == pytest.approx(0.05)
    assert median(planted.gaps_ns) == 5 * NS_PER_MS


def test_opening_a_connection_is_idle_time_and_is_told_apart():
    opening, plain = (occupancy(closed_loop([90.0] * 400, 4, 10.0, connecting_ms=ms), 4) for ms in (8.0, 0.0))
    assert opening.idle_frac == pytest.approx(0.1)
    assert set(opening.connecting_ns) == {8 * NS_PER_MS}
    assert len(opening.connecting_ns) == 396
    assert set(plain.connecting_ns) == {0}


ERROR = RequestError(kind="connect-refused", message="nobody there")


@pytest.mark.parametrize(
    ("records", "num_slots", "frac"),
    [
        pytest.param(
            closed_loop([90.0] * 40, 4, 10.0, read_late_ms=9.5), 4, 0.1, id="ends by the kernel, not by the reads"
        ),
        pytest.param(closed_loop([100.0] * 4 + [5000.0, 10.0], 4), 4, 0.0, id="the tail of a load"),
        pytest.param(closed_loop([100.0] * 8 + [2000.0], 8, 50.0), 8, 50 / 850, id="a tail behind a delay"),
        pytest.param(
            [
                msgspec.structs.replace(r, sent_ns=None, error=ERROR) if r.index % 5 == 0 else r
                for r in closed_loop([100.0] * 20, 4)
            ], 4, 0.0, id="failed requests hold their slots",
        ),
        pytest.param(
            [
                msgspec.structs.replace(r, scheduled_ns=r.scheduled_ns - 90 * NS_PER_MS) if r.index < 4 else r
                for r in closed_loop([100.0] * 40, 4)
            ], 4, 90 / 990, id="a load that began late",
        ),
    ],
)  # fmt: skip
def test_idle_time_is_what_no_request_fills_while_some_wait(records, num_slots, frac):
    assert idle_frac(records, num_slots) == pytest.approx(frac)


def test_slots_that_no_request_was_meant_for_are_idle_while_others_still_have_some():
    """One of two processes has sent all of its own: half of the slots stand empty for the second half."""
    both = occupancy([*closed_loop([50.0] * 20, 2), *closed_loop([100.0] * 20, 2)], 4)
    assert both.slot_time_ns == pytest.approx(4 * 900 * NS_PER_MS, rel=0.05)
    assert both.idle_frac == pytest.approx(2 * 400 / (4 * 900), rel=0.05)


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
    assert idle_frac(closed_loop([100.0] * 4, 4), 4) is None
    assert occupancy([], 4) is None


@given(load=LOADS, shift_ns=st.integers(-(10**12), 10**12), late_ms=st.integers(0, 100), more_ms=st.integers(1, 50))
def test_idle_time_is_a_part_of_slot_time_whatever_the_clock_s_zero_and_however_late_the_reads(
    load, shift_ns, late_ms, more_ms
):
    num_slots, lasts_ms, gaps_ms = load
    records = closed_loop(lasts_ms, num_slots, gaps_ms.__getitem__)
    slots = occupancy(records, num_slots)
    end_ns = max(record.sent_ns for record in records)
    busy_ns = sum(min(record.done_ns, end_ns) - record.sent_ns for record in records)
    assert slots.idle_ns == sum(slots.gaps_ns) == slots.slot_time_ns - busy_ns
    assert 0 <= slots.idle_frac <= 1
    shifted = closed_loop(lasts_ms, num_slots, gaps_ms.__getitem__, t0_ns=T0_NS + shift_ns)
    assert occupancy(shifted, num_slots) == slots
    late = closed_loop(lasts_ms, num_slots, gaps_ms.__getitem__, read_late_ms=late_ms)
    assert occupancy(late, num_slots).idle_ns == slots.idle_ns
    # Equal lengths, so that the same slots are filled by the same requests.
    less, more = (
        idle_frac(closed_loop(lasts_ms[:1] * len(lasts_ms), num_slots, gaps_ms[0] + ms), num_slots)
        for ms in (0, more_ms)
    )
    assert less < more


def doubts(records, arrival):
    return {doubt.code: doubt.message for doubt in client_suspect_warnings(run_of(records), arrival)}


def test_slots_that_stand_empty_for_more_than_a_hundredth_make_a_run_suspect():
    message = doubts(closed_loop([97.0] * 400, 4, 3.0), closed(4))["slots-idle"]
    assert message.startswith(
        "slots of the closed loop were empty for 3.00% of their time although requests waited (more than 1%): the "
        "server met 3.88 of 4 requests at once. From the last byte of an answer to the next request: 3 ms "
        "(p50), 3 ms (p99) and 3 ms (max); 0 of 396 had to open a connection"
    )
    assert message.endswith("Free a core for the client, or lower the load")
    message = doubts(closed_loop([97.0] * 400, 4, 3.0, connecting_ms=2.7), closed(4))["slots-idle"]
    assert "396 of 396 had to open a connection, which took 90% of that time" in message
    assert "The server closes connections" in message


CAPPED = Arrival(kind="constant", request_rate=100.0, max_concurrency=4)
LATE = closed_loop([20.0] * 400, 4, 20.0)
OLD = [msgspec.structs.replace(r, slot_free_ns=None, connected_ns=(r.slot_free_ns or T0_NS) + 1) for r in LATE]


def capped(lag_ms):
    """Requests due every 10 ms that have to wait for one of four slots, and leave so long after they have it."""
    return [
        msgspec.structs.replace(record, scheduled_ns=T0_NS + 10 * record.index * NS_PER_MS)
        for record in closed_loop([60.0] * 200, 4, lag_ms)[4:]
    ]


@pytest.mark.parametrize(
    ("records", "arrival", "codes"),
    [
        pytest.param(closed_loop([99.1] * 400, 4, 0.9), closed(4), [], id="empty for less"),
        pytest.param(
            closed_loop([100.0] * 40, 4, lambda i: 60.0 if i in {20, 21, 22, 23} else 0.0), closed(4),
            ["slots-idle"], id="one long delay",
        ),
        pytest.param(closed_loop([90.0] * 40, 5, 10.0), closed(5), [], id="a load of less than a second"),
        pytest.param(closed_loop([90.0] * 50, 5, 20.0), closed(5), ["slots-idle"], id="a longer one"),
        pytest.param(LATE, closed(4), ["slots-idle"], id="known slots"),
        pytest.param(OLD, closed(4), ["sends-delayed"], id="unknown slots"),
        pytest.param(capped(0.5), CAPPED, [], id="waiting for a slot under a cap"),
        pytest.param(capped(9.0), CAPPED, ["sends-delayed"], id="late when the slot is free"),
        pytest.param(
            [sent(i, 10 * i, 6.0, connect_ms=5.9, lasts_ms=1.0) for i in range(200)], CAPPED, ["sends-delayed"],
            id="a cap that was never met, and late connections",
        ),
    ],
)  # fmt: skip
def test_a_load_is_judged_by_its_slots_or_where_these_are_not_known_by_its_sends(records, arrival, codes):
    assert list(doubts(records, arrival)) == codes


def test_a_load_says_how_its_client_did_and_how_its_slots_were_filled():
    records = closed_loop([90.0] * 400, 4, 10.0, connecting_ms=8.0)
    metrics = client_metrics(records, (), closed(4))
    assert [metrics[name] for name in OF_SLOTS] == [pytest.approx(0.9), pytest.approx(0.1), 10, 10, 8]
    figures = load_figures(run_of(records), closed(4), {})

    def totals(**sampled):
        sampled = {"client_cpu_cores": None, "max_loop_lag_ms": None} | sampled
        return dict(totals_table(replace(figures, metrics=figures.metrics | sampled)).texts())

    assert totals()["client"].startswith("not sampled")
    assert totals(max_loop_lag_ms=3.0)["client"] == "its loop at most 3.000 ms late"
    rows = totals(client_cpu_cores=0.1)
    assert (rows["client"], rows["load"]) == ("0.1000 cores", "3.600 of 4.000 requests at once")
    assert rows["slots"] == (
        "empty for 10.00% of their time; filled again after 10.00 ms (p50), 10.00 ms (p99); a connection "
        "took 8.000 ms of it (p99)"
    )
    slower = offered_load([sent(i, 10 * i, i) for i in range(300)], OPEN)
    assert (slower.planned, slower.unit) == (pytest.approx(100), "requests/s")
    assert slower.met == pytest.approx(slower.planned * 10 / 11)
    assert offered_load([sent(i, 0) for i in range(9)], Arrival(kind="burst")) is None
