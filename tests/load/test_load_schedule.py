"""The load: what is sent when, in which order, and that everything sent leaves one record."""

import asyncio
import gc
import itertools
import resource
import sys
import time

import pytest
from support.servers.paced_engine import PacedEngine, call, most_at_once, request, running, send

from benchctl.load import schedule
from benchctl.load.client import StreamClient
from benchctl.load.exchange import Exchange
from benchctl.load.process import allow_many_open_files, steady_interpreter
from benchctl.load.schedule import MADE_UP_S, LaunchLimit, Load
from benchctl.load.sockets import Connections, Receiver
from benchctl.profile.arrival import Arrival
from benchctl.records.record import RequestRecord
from benchctl.units import NS_PER_MS


@pytest.fixture(name="how", scope="module")
def _how(tmp_path_factory):
    """A paced server that is up."""
    with running(tmp_path_factory.mktemp("server")) as how:
        yield how


def drive(how, arrival, requests, *, cancel_when=None, on_record=None, on_sample=None, time_scale=1.0):
    """Records in the order of their completion, and the summary."""

    async def go():
        records = []
        async with StreamClient(how.base_url, how.timeouts) as client:
            keep = on_record or records.append
            load = Load(client, Arrival(**arrival), keep, time_scale=time_scale, on_sample=on_sample)
            driving = asyncio.create_task(load.drive([call(one) for one in requests]))
            if cancel_when is not None:
                while not cancel_when(client):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
                driving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await driving
            await asyncio.wait({driving})
            if not driving.cancelled():
                driving.result()
            return records, load.summary

    return asyncio.run(go())


def test_a_closed_loop_keeps_exactly_its_slots_filled_and_sends_in_order(how):
    requests = [request(i, max_tokens=3, gap_ms=4 + 7 * (i % 3)) for i in range(12)]
    records, summary = drive(how, {"kind": "closed-loop", "max_concurrency": 3}, requests)
    assert most_at_once(records) == 3
    by_index = sorted(records, key=lambda record: record.index)
    for earlier, later in itertools.pairwise(by_index):
        # Slots that the client found free at one look may have been freed in another order.
        assert earlier.scheduled_ns <= later.sent_ns
    assert {record.index for record in sorted(records, key=lambda record: record.sent_ns)[:3]} == {0, 1, 2}
    ends = sorted(record.done_ns for record in records)
    for freed, following in zip(ends, sorted(by_index[3:], key=lambda record: record.sent_ns), strict=False):
        assert 0 <= following.sent_ns - freed < 500 * NS_PER_MS
        assert following.sent_ns - following.scheduled_ns < 500 * NS_PER_MS
    assert (summary.num_sent, summary.num_failed) == (12, 0)
    assert summary.first_send_ns == min(record.sent_ns for record in records)
    assert summary.last_token_ns == max(c.chunk_ns[-1] for r in records for c in r.choices)


def test_a_freed_slot_is_filled_from_when_its_last_byte_came_also_while_the_first_requests_leave(how):
    requests = [request(i, max_tokens=1, gap_ms=0) for i in range(60)]
    records, _ = drive(how, {"kind": "closed-loop", "max_concurrency": 12}, requests)
    assert sorted(record.index for record in records) == list(range(60))
    assert sum(record.slot_free_ns is not None for record in records) == 48
    assert most_at_once(records) <= 12
    records, _ = drive(how, {"kind": "closed-loop", "max_concurrency": 1}, requests[:6])
    for before, after in itertools.pairwise(sorted(records, key=lambda record: record.index)):
        assert after.slot_free_ns <= before.done_ns <= after.sent_ns
        assert after.scheduled_ns == after.slot_free_ns


def test_a_burst_sends_everything_at_once_and_a_launch_rate_limit_spaces_the_sends(how):
    records, _ = drive(how, {"kind": "burst"}, [request(i, gap_ms=200, max_tokens=2) for i in range(10)])
    assert most_at_once(records) == 10
    limited = {"kind": "burst", "launch_rate_limit": 50.0}
    records, _ = drive(how, limited, [request(i, max_tokens=1) for i in range(5)])
    sends = sorted(record.sent_ns for record in records)
    assert sends[-1] - sends[0] > 60 * NS_PER_MS  # 80, less for a first send that is late; without a limit no time


def test_an_open_loop_sends_at_the_planned_times_on_the_engines_clock_whatever_the_server_does(how):
    for arrival, time_scale, offsets_ms in (
        ({"kind": "poisson", "request_rate": 100.0}, 1, [0, 5, 40, 41]),
        ({"kind": "trace"}, 10, [0, 10, 400]),
    ):
        requests = [request(i, 2, gap_ms=200, arrival_ns=ms * NS_PER_MS) for i, ms in enumerate(offsets_ms)]
        records, _ = drive(how, arrival, requests, time_scale=float(time_scale))
        records.sort(key=lambda record: record.index)
        due_ns = [record.scheduled_ns - records[0].scheduled_ns for record in records]
        assert due_ns == [ms * NS_PER_MS // time_scale for ms in offsets_ms]
        assert all(record.sent_ns >= record.scheduled_ns for record in records)
        assert most_at_once(records) == len(requests)
    requests = [request(i, max_tokens=1, gap_ms=80, arrival_ns=i) for i in range(2)]
    records, _ = drive(how, {"kind": "constant", "request_rate": 9.0, "max_concurrency": 1}, requests)
    assert most_at_once(records) == 1
    assert records[1].sent_ns - records[1].scheduled_ns > 70 * NS_PER_MS, "a cap shows the wait for a slot as lag"


def test_a_load_that_is_called_off_records_what_was_in_flight_and_sends_no_more(how):
    def have_tokens(client):
        return len(client._open) == 2 and all(len(exchange.reads) > 2 for exchange in client._open)

    requests = [request(i, max_tokens=400, gap_ms=20) for i in range(6)]
    arrival = {"kind": "closed-loop", "max_concurrency": 2}
    records, summary = drive(how, arrival, requests, cancel_when=have_tokens)
    assert sorted(record.index for record in records) == [0, 1]
    assert {record.error.kind for record in records if record.error} == {"cancelled"}
    assert all(record.choices[0].chunk_ns for record in records)
    assert (summary.num_sent, summary.num_failed) == (2, 2)


def test_a_record_that_cannot_be_kept_ends_the_load_and_what_is_in_flight_and_is_told_once(how, caplog):
    kinds = []

    def full(kept):
        if isinstance(kept, RequestRecord):
            kinds.append(kept.error and kept.error.kind)
        raise OSError(28, "No space left on device")

    requests = [request(0, max_tokens=1), request(1, max_tokens=4000, gap_ms=20)]
    for where in ("on_record", "on_sample"):
        with pytest.raises(OSError, match="No space left"):
            drive(how, {"kind": "burst"}, requests, **{where: full})
    assert kinds == [None, "cancelled"]
    gc.collect()
    assert caplog.messages == []


def test_a_client_that_records_slowly_sends_less_instead_of_keeping_all_answers(how, monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_ENDED", 4)
    num_alive = []

    def record_slowly(_record):
        time.sleep(0.002)
        num_alive.append(sum(type(each) is Exchange for each in gc.get_objects()))

    requests = [request(i, max_tokens=1, gap_ms=0) for i in range(150)]
    drive(how, {"kind": "closed-loop", "max_concurrency": 8}, requests, on_record=record_slowly)
    assert (len(num_alive), max(num_alive) < 50) == (150, True)


def test_a_load_lets_go_of_each_request_that_has_ended(how):
    ended, held = set(), []

    def look(record):
        alive = {one.call.request.index for one in gc.get_objects() if type(one) is Exchange}
        held.append(alive & ended)
        ended.add(record.index)

    requests = [request(i, max_tokens=1) for i in range(16)]
    drive(how, {"kind": "closed-loop", "max_concurrency": 4}, requests, on_record=look)
    assert len(ended) == 16
    assert max(map(len, held)) <= 1, "who drives may know the one that it launched last"


@pytest.mark.parametrize(
    "arrival",
    [
        {"kind": "constant", "request_rate": 100.0},
        {"kind": "constant", "request_rate": 100.0, "max_concurrency": 2},
        {"kind": "closed-loop", "max_concurrency": 2},
    ],
    ids=["open loop", "capped", "closed loop"],
)
def test_a_connection_that_is_slow_to_open_holds_up_no_other_request(how, arrival, monkeypatch):
    slow, last = 2, 4
    finish, ended, others = Receiver._finish_connecting, [], []

    def finish_later(receiver, connection):
        waiting = connection.exchange
        if waiting is not None and waiting.call.request.index == slow and not others:
            time.sleep(0.001)  # the file stays ready: do not burn the processor that the server needs
        else:
            finish(receiver, connection)

    def keep(record):
        ended.append(record)
        if record.index == last:
            others.append(record)

    monkeypatch.setattr(Receiver, "_finish_connecting", finish_later)
    # All at once: none can take over the connection of one that has ended.
    requests = [request(i, max_tokens=1, arrival_ns=0) for i in range(last + 1)]
    drive(how, arrival, requests, on_record=keep)
    assert [record.error for record in ended] == [None] * 5
    assert [record.index for record in ended][-1] == slow
    assert ended[-1].sent_ns >= ended[-1].connected_ns > ended[-2].done_ns


@pytest.mark.parametrize(
    ("broken", "method"),
    [(StreamClient, "launch"), (Connections, "put_back"), (Exchange, "record"), (Load, "_prepare_one")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_client_itself_ends_the_load_and_does_not_stall_it(how, broken, method, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(broken, method, fail)
    for arrival in ({"kind": "closed-loop", "max_concurrency": 1}, {"kind": "burst"}):
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            drive(how, arrival, [request(i) for i in range(4)])


def test_times_and_counts_agree_with_what_the_server_did(tmp_path):
    with running(tmp_path) as how:
        requests = [request(i, max_tokens=6, n=2, gap_ms=20) for i in range(3)]
        records, _ = drive(how, {"kind": "closed-loop", "max_concurrency": 1}, requests)
    truths = PacedEngine(truth=tmp_path / "truth.jsonl").truths()
    late_ns: list[list[int]] = [[] for _ in range(6)]  # by position in the stream
    for record in records:
        truth = truths[record.request_id]
        assert record.error is None
        assert (record.prompt_tokens, record.completion_tokens, record.status) == (7, 12, 200)
        assert record.sent_ns <= truth["arrived_ns"]
        assert [c.index for c in record.choices] == [0, 1]
        for choice in record.choices:
            assert choice.chunk_tokens == (1,) * 6
            assert choice.text == "t0 t1 t2 t3 t4 t5 "
            for position, (seen, sent) in enumerate(zip(choice.chunk_ns, truth["sent_ns"], strict=True)):
                late_ns[position].append(seen - sent)
    # A busy machine may delay any arrival, but not one position of every stream by more than half a gap.
    for lateness in late_ns:
        assert 0 <= min(lateness) < 10 * NS_PER_MS


def test_a_large_answer_is_read_in_slices_between_which_others_have_their_turn(how):
    async def go():
        turns = 0
        async with StreamClient(how.base_url, how.timeouts) as client:
            exchange = await send(client, call(request(0, max_tokens=4000, gap_ms=0)), 0)
            reading = asyncio.create_task(exchange.record())
            while not reading.done():
                turns += 1
                await asyncio.sleep(0)
        assert (turns > 3, reading.result().error) == (True, None)

    asyncio.run(go())


def test_what_a_load_lets_go_of_is_freed_without_a_search_for_cycles(how):
    async def left_by(client, mode, num_requests):
        gc.collect()
        calls = (call(request(i, mode=mode)) for i in range(num_requests))
        await Load(client, Arrival(kind="closed-loop", max_concurrency=8), lambda _record: None).drive(calls)
        return gc.collect()

    async def go():
        async with StreamClient(how.base_url, how.timeouts) as client:
            gc.disable()
            gc.collect()
            gc.freeze()  # of what other tests hold nothing is searched
            try:
                for mode in ("good", "truncate", "hang-up", "refuse", "error-event", "noise"):
                    await left_by(client, mode, 8)  # what is made once is no matter
                    assert await left_by(client, mode, 60) < 60, mode
            finally:
                gc.unfreeze()
                gc.enable()

    asyncio.run(go())


def test_as_many_connections_are_allowed_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        allow_many_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_collected_inside_and_all_is_as_before_outside():
    interval_s = sys.getswitchinterval()
    with steady_interpreter():
        assert (gc.isenabled(), sys.getswitchinterval() < interval_s) == (False, True)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    assert sys.getswitchinterval() == pytest.approx(interval_s)


CLOCK_S = 0.0005
"""Between the moment that a launch is counted for and the one that is noted here."""


def launches(rate_per_s, num, *, pauses_s=None):
    """Times of launches that wait for nothing but the limit; the loop is busy for ``pauses_s`` before some."""

    async def go():
        times = []
        with LaunchLimit(rate_per_s) as limit:
            for number in range(num):
                time.sleep((pauses_s or {}).get(number, 0.0))  # noqa: ASYNC251 - the loop is to be late
                await limit.acquire()
                times.append(time.monotonic())
        return times

    return asyncio.run(go())


def most_ahead(times, rate_per_s):
    """The launches by which any window of time has more than its length allows, beside the one that opens it."""
    ahead = highest = 0.0
    for before, after in itertools.pairwise(times):
        ahead = max(0.0, ahead + 1 - (after - before) * rate_per_s)
        highest = max(highest, ahead)
    return highest


def test_no_window_has_more_launches_than_the_limit_and_none_waits_longer_than_it_must():
    for rate_per_s, num in ((10, 4), (50, 10), (200, 40), (1000, 200), (2000, 400)):
        reached = []
        for _ in range(3):  # what a busy machine takes from one of them is no fault of the limit
            times = launches(rate_per_s, num)
            assert most_ahead(times, rate_per_s) <= (MADE_UP_S + CLOCK_S) * rate_per_s
            reached.append((num - 1) / (times[-1] - times[0]) / rate_per_s)
            if reached[-1] > 0.8:
                break
        assert max(reached) > 0.8, f"{reached} of the limit of {rate_per_s}"


def test_a_delay_is_made_up_in_part_and_never_by_a_burst_nor_do_the_first_launches_form_one():
    times = launches(1000, 200, pauses_s={100: 0.05})
    assert times[100] - times[99] > 0.05
    in_next_10_ms = sum(0 <= each - times[100] < 0.01 for each in times)
    assert in_next_10_ms <= 1 + (0.01 + MADE_UP_S + CLOCK_S) * 1000
    times = launches(100, 5)
    assert all(after - before > 0.01 - MADE_UP_S for before, after in itertools.pairwise(times))
    assert times[-1] - times[0] > 0.04 - MADE_UP_S
