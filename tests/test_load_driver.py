"""The load: what is sent when, in which order, and that everything sent leaves one record."""

import asyncio
import gc
import itertools
import subprocess
import sys

import pytest
from paced import PacedEngine, call, launch, request

from benchctl.load.client import StreamClient
from benchctl.load.driver import Load
from benchctl.measure.server import ServerProcess
from benchctl.profile.model import Arrival
from benchctl.units import NS_PER_MS


def drive(tmp_path, arrival, requests, *, cancel_after_s=None, on_record=None, time_scale=1.0):
    """Records in the order of their completion, and the summary."""

    async def go():
        records, how = [], launch(tmp_path)
        with ServerProcess(how) as server:
            async with StreamClient(how.base_url, how.timeouts) as client:
                await server.wait_ready(client.control)
                load = Load(client, Arrival(**arrival), on_record or records.append, time_scale=time_scale)
                driving = asyncio.create_task(load.drive([call(one) for one in requests]))
                if cancel_after_s is not None:
                    await asyncio.sleep(cancel_after_s)
                    driving.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await driving
                else:
                    await driving
                return records, load.summary()

    return asyncio.run(go())


def most_at_once(records):
    edges = sorted([(r.sent_ns, 1) for r in records] + [(r.done_ns, -1) for r in records])
    level = highest = 0
    for _, change in edges:
        level += change
        highest = max(highest, level)
    return highest


def test_a_closed_loop_keeps_exactly_its_slots_filled_and_sends_in_order(tmp_path):
    requests = [request(i, max_tokens=3, gap_ms=4 + 7 * (i % 3)) for i in range(12)]
    records, summary = drive(tmp_path, {"kind": "closed-loop", "max_concurrency": 3}, requests)
    assert most_at_once(records) == 3
    by_send = sorted(records, key=lambda record: record.sent_ns)
    assert [record.index for record in by_send] == list(range(12))
    ends = sorted(record.done_ns for record in records)
    for freed, following in zip(ends, by_send[3:], strict=False):
        assert 0 <= following.sent_ns - freed < 500 * NS_PER_MS
        assert following.sent_ns - following.scheduled_ns < 500 * NS_PER_MS
    assert (summary.num_sent, summary.num_failed) == (12, 0)
    assert summary.first_send_ns == by_send[0].sent_ns
    assert summary.last_token_ns == max(c.chunk_ns[-1] for r in records for c in r.choices)


def test_a_burst_sends_everything_at_once(tmp_path):
    records, _ = drive(tmp_path, {"kind": "burst"}, [request(i, gap_ms=200, max_tokens=2) for i in range(10)])
    assert most_at_once(records) == 10


def test_an_open_loop_sends_at_the_planned_times_whatever_the_server_does(tmp_path):
    offsets_ns = [0, 5 * NS_PER_MS, 40 * NS_PER_MS, 41 * NS_PER_MS]
    requests = [request(i, max_tokens=2, gap_ms=200, arrival_ns=offset) for i, offset in enumerate(offsets_ns)]
    records, _ = drive(tmp_path, {"kind": "poisson", "request_rate": 100.0}, requests)
    records.sort(key=lambda record: record.index)
    assert [record.scheduled_ns - records[0].scheduled_ns for record in records] == offsets_ns
    assert all(record.sent_ns >= record.scheduled_ns for record in records)
    assert most_at_once(records) == 4


def test_the_schedule_is_on_the_engine_s_clock(tmp_path):
    offsets_ns = [0, 10 * NS_PER_MS, 400 * NS_PER_MS]
    requests = [request(i, max_tokens=1, arrival_ns=offset) for i, offset in enumerate(offsets_ns)]
    records, _ = drive(tmp_path, {"kind": "trace"}, requests, time_scale=10.0)
    records.sort(key=lambda record: record.index)
    planned = [record.scheduled_ns - records[0].scheduled_ns for record in records]
    assert planned == [offset // 10 for offset in offsets_ns]


def test_a_capped_open_loop_shows_the_wait_for_a_slot_as_lag(tmp_path):
    requests = [request(i, max_tokens=1, gap_ms=80, arrival_ns=i) for i in range(2)]
    records, _ = drive(tmp_path, {"kind": "constant", "request_rate": 9.0, "max_concurrency": 1}, requests)
    assert most_at_once(records) == 1
    assert records[1].sent_ns - records[1].scheduled_ns > 70 * NS_PER_MS


def test_a_launch_rate_limit_spaces_the_sends(tmp_path):
    requests = [request(i, max_tokens=1) for i in range(5)]
    records, _ = drive(tmp_path, {"kind": "burst", "launch_rate_limit": 50.0}, requests)
    sends = sorted(record.sent_ns for record in records)
    assert all(b - a > 15 * NS_PER_MS for a, b in itertools.pairwise(sends))


def test_a_load_that_is_called_off_records_what_was_in_flight_and_sends_no_more(tmp_path):
    requests = [request(i, max_tokens=40, gap_ms=50) for i in range(6)]
    records, summary = drive(tmp_path, {"kind": "closed-loop", "max_concurrency": 2}, requests, cancel_after_s=0.8)
    assert sorted(record.index for record in records) == [0, 1]
    assert {record.error.kind for record in records if record.error} == {"cancelled"}
    assert all(record.choices[0].chunk_ns for record in records)
    assert (summary.num_sent, summary.num_failed) == (2, 2)
    assert set(PacedEngine(truth=tmp_path / "truth.jsonl").truths()) == {"r0", "r1"}


def test_failed_requests_free_their_slot_and_are_counted(tmp_path):
    requests = [request(i, mode="truncate" if i % 2 else "good") for i in range(6)]
    records, summary = drive(tmp_path, {"kind": "closed-loop", "max_concurrency": 1}, requests)
    assert [record.error is None for record in records] == [True, False] * 3
    assert (summary.num_sent, summary.num_failed) == (6, 3)


def test_a_record_that_cannot_be_kept_ends_the_load_and_is_told_once(tmp_path, caplog):
    def full(_record):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        drive(
            tmp_path, {"kind": "closed-loop", "max_concurrency": 3}, [request(i) for i in range(5)], on_record=full
        )
    gc.collect()
    assert caplog.messages == []


def test_as_many_connections_are_allowed_as_the_system_allows(tmp_path):
    script = (
        "import resource; from benchctl.load.open_files import allow_many_open_files\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 2048)))\n"
        "allow_many_open_files(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 2048))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("arrival", [{"kind": "closed-loop", "max_concurrency": 1}, {"kind": "burst"}], ids=str)
def test_a_fault_of_the_client_itself_ends_the_load_and_does_not_stall_it(tmp_path, arrival, monkeypatch):
    async def broken(_client, _exchange):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(StreamClient, "_send", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        drive(tmp_path, arrival, [request(i) for i in range(4)])
