"""A load that is split over several processes: the same load, and an end that is told when one of them fails."""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st
from support.servers.paced_engine import PacedEngine, call, most_at_once, planned, profile, request, running
from support.waiting import wait_until

from benchctl.errors import LoadError
from benchctl.load.client import StreamClient
from benchctl.load.demand import (
    CPU_NS_PER_TOKEN,
    TOKEN_S,
    WORKER_CORES,
    LoadSize,
    expected_tokens_per_s,
    num_workers,
    shares,
    size_of,
)
from benchctl.load.exchange import LoadSummary
from benchctl.load.schedule import Load
from benchctl.load.workers import WorkerLoad, WorkerPlan, load_for
from benchctl.measure.run import Listener, RunContext, measure_run
from benchctl.measure.server.process import is_alive
from benchctl.profile.arrival import Arrival
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import RequestRecord
from benchctl.units import NS_PER_MS, NS_PER_S

LONG = {"max_tokens": 4000, "gap_ms": 20}


@pytest.fixture(name="how", scope="module")
def _how(tmp_path_factory):
    """A paced server that is up."""
    with running(tmp_path_factory.mktemp("server")) as how:
        yield how


def load_on(how, arrival, on_record, count, **more):
    on_sample = more.pop("on_sample", None)
    plan = WorkerPlan(base_url=how.base_url, timeouts=how.timeouts, arrival=Arrival(**arrival), count=count, **more)
    return WorkerLoad(plan, on_record, on_sample)


def drive(how, arrival, requests, count, *, meanwhile=None, **more):
    """Records in the order in which they came, the load, and what it raised; ``meanwhile`` gets the drive.

    No worker is left.
    """

    async def go():
        records = []
        load = load_on(how, arrival, more.pop("on_record", records.append), count, **more)
        driving = asyncio.create_task(load.drive(call(one) for one in requests))
        if meanwhile is not None:
            await meanwhile(driving, load)
        (raised,) = await asyncio.gather(driving, return_exceptions=True)
        return records, load, raised

    ended = asyncio.run(go())
    assert workers_of(os.getpid()) == []
    return ended


def workers_of(parent):
    found = []
    for process in psutil.Process(parent).children():
        with suppress(psutil.Error):
            if "--multiprocessing-fork" in process.cmdline():
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


async def until_open(load, count):
    await asyncio.to_thread(wait_until, "open requests", lambda: load.activity().num_open >= count)


@pytest.mark.parametrize(
    "arrival", [{"kind": "closed-loop", "max_concurrency": 4}, {"kind": "trace", "max_concurrency": 5}]
)
def test_one_and_two_workers_bring_the_same_results_each_of_every_nth_request_in_order(how, arrival):
    requests = [
        request(i, max_tokens=2 + i % 3, n=1 + i % 2, arrival_ns=i * 10 * NS_PER_MS, gap_ms=5, mode=mode)
        for i, mode in enumerate(["good", "good", "truncate", "good", "refuse"] * 3)
    ]
    told = []
    for count in (1, 2):
        records, load, raised = drive(how, arrival, requests, count)
        assert raised is None
        ended = load.summary
        assert (ended.num_sent, ended.num_failed, len(records)) == (15, 6, 15)
        assert ended.first_send_ns == min(record.sent_ns for record in records)
        assert set() != set(ended.failures) <= {"early-close", "reset", "http-status"}
        assert load.activity().num_open == 0
        assert most_at_once(records) <= arrival["max_concurrency"]
        sends = [record.index for record in sorted(records, key=lambda record: record.sent_ns)]
        for worker in range(count):  # requests that slots take at the same moment may be sent in either order
            turns = [index // count for index in sends if index % count == worker]
            assert sorted(turns) == list(range(len(turns)))
            assert all(abs(turn - expected) < arrival["max_concurrency"] for expected, turn in enumerate(turns))
        records.sort(key=lambda record: record.index)
        told.append([_without_times(record, records[0], arrival) for record in records])
    assert told[0] == told[1]


def _without_times(record, first, arrival):
    """What is not of the moment; of an open loop also when each was due, counted from the first."""
    return (
        record.request_id,
        record.index,
        [(choice.index, choice.text, choice.chunk_tokens, choice.finish_reason) for choice in record.choices],
        (record.prompt_tokens, record.completion_tokens, record.status),
        record.error is None or record.status,
        record.scheduled_ns - first.scheduled_ns if arrival["kind"] == "trace" else None,
    )


def test_workers_start_at_one_moment_when_all_are_ready_and_samples_have_their_numbers(how):
    samples = []
    requests = [request(i, max_tokens=4, gap_ms=150) for i in range(8)]
    records, _, raised = drive(how, {"kind": "burst"}, requests, 2, on_sample=samples.append)
    assert raised is None
    assert most_at_once(records) == 8
    assert max(record.connected_ns for record in records) < min(record.sent_ns for record in records)
    for worker in range(2):
        own = [sample for sample in samples if sample.worker == worker]
        assert own[0].offset is not None
        assert max(sample.num_open for sample in own) == 4
        assert [sample.cpu_ns for sample in own] == sorted(sample.cpu_ns for sample in own)


def test_workers_take_turns_where_launches_are_limited(how):
    requests = [request(i, max_tokens=1) for i in range(8)]
    records, _, _ = drive(how, {"kind": "burst", "launch_rate_limit": 20.0}, requests, 2)
    sends = sorted(record.sent_ns for record in records)
    # One request that is sent late shortens the span behind it: the first that of all, so the median is judged.
    assert sends[-1] - sends[0] > 4.5 * 50 * NS_PER_MS
    spans = [later - sends[i] for i, later in enumerate(sends[2:])]
    assert statistics.median(spans) > 85 * NS_PER_MS, "two per 100 ms"


def test_a_worker_that_raises_ends_the_load_with_its_own_words(how, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        "    import uvloop\n"
        "    def broken(main):\n"
        "        main.close()\n"
        "        raise RuntimeError('the loop is out of order')\n"
        "    uvloop.run = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    records, _, raised = drive(how, {"kind": "burst"}, [request(0), request(1)], 2)
    assert isinstance(raised, LoadError)
    assert "ended with exit code 1 after 0 of its " in str(raised)
    assert str(raised).endswith("RuntimeError: the loop is out of order")
    assert "Traceback" in raised.log_tail
    assert records == []


def test_a_worker_that_falls_silent_counts_as_hung_and_is_ended(how):
    async def stop_first(_driving, load):
        await until_open(load, 2)
        load.max_silent_looks = 20  # not before: workers are silent while they start
        stopped.append(workers_of(os.getpid())[0])
        stopped[0].suspend()

    stopped = []
    requests = [request(i, **LONG) for i in range(2)]
    _, _, raised = drive(how, {"kind": "burst"}, requests, 2, meanwhile=stop_first, cancel_wait_s=0.5)
    assert isinstance(raised, LoadError)
    assert raised.cause == "worker-hung"
    assert f"worker 1 of 2 of the load generator (process {stopped[0].pid}) has reported nothing" in str(raised)


def test_a_load_that_is_called_off_records_what_was_in_flight_in_every_worker(how):
    async def call_off(driving, load):
        await until_open(load, 4)
        driving.cancel()

    async def call_off_early(driving, _load):
        await asyncio.to_thread(wait_until, "workers", lambda: len(workers_of(os.getpid())) == 2)
        driving.cancel()

    requests, arrival = [request(i, **LONG) for i in range(9)], {"kind": "closed-loop", "max_concurrency": 4}
    records, load, raised = drive(how, arrival, requests, 2, meanwhile=call_off)
    assert isinstance(raised, asyncio.CancelledError)
    assert sorted(record.index for record in records) == [0, 1, 2, 3]
    assert {record.error.kind for record in records} == {"cancelled"}
    assert (load.summary.num_sent, load.summary.num_failed) == (4, 4)
    records, _, raised = drive(how, arrival, requests, 2, meanwhile=call_off_early)
    assert isinstance(raised, asyncio.CancelledError)
    assert records == []


def test_records_that_cannot_be_kept_and_calls_that_cannot_be_made_end_the_load_and_the_workers(how, caplog):
    def full(_record):
        raise OSError(28, "No space left on device")

    def calls():
        yield call(request(0))
        raise ValueError("no such dialect")

    _, _, raised = drive(how, {"kind": "burst"}, [request(i) for i in range(6)], 2, on_record=full)
    assert isinstance(raised, OSError)
    with pytest.raises(ValueError, match="no such dialect"):
        asyncio.run(load_on(how, {"kind": "burst"}, lambda _record: None, 2).drive(calls()))
    assert workers_of(os.getpid()) == []
    assert caplog.messages == []


def test_workers_end_with_a_benchctl_that_is_killed(how):
    code = (
        "import asyncio, sys\n"
        "from support.servers.paced_engine import call, request\n"
        "from benchctl.load.workers import WorkerLoad, WorkerPlan\n"
        "from benchctl.profile.sections import Timeouts\n"
        "from benchctl.profile.arrival import Arrival\n"
        "plan = WorkerPlan(base_url=sys.argv[1], timeouts=Timeouts(), arrival=Arrival(kind='burst'), count=2)\n"
        "load = WorkerLoad(plan, print)\n"
        "asyncio.run(load.drive([call(request(i, max_tokens=4000, gap_ms=20)) for i in range(4)]))\n"
    )
    tests = Path(__file__).parents[1]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    with subprocess.Popen([sys.executable, "-c", code, how.base_url], env=paths) as benchctl:
        wait_until("workers", lambda: len(workers_of(benchctl.pid)) == 2)
        workers = workers_of(benchctl.pid)
        wait_until("their connections", lambda: all(worker.net_connections() for worker in workers))
        benchctl.send_signal(signal.SIGKILL)
    wait_until("their end", lambda: not any(is_alive(worker) for worker in workers))


def size(num_requests, *, tokens=128, n=1, last_arrival_ns=0):
    return LoadSize(
        num_requests=num_requests,
        num_outputs=num_requests * n,
        num_tokens=num_requests * n * tokens,
        last_arrival_ns=last_arrival_ns,
    )


@given(
    st.sampled_from(["auto", 1, 2, 7, 64]),
    st.integers(1, 5000) | st.none(),
    st.integers(1, 5000),
    st.integers(1, 128),
    st.sampled_from(
        [
            {"kind": "burst"},
            {"kind": "burst", "launch_rate_limit": 30.0},
            {"kind": "poisson", "request_rate": 50.0},
            {"kind": "trace"},
        ]
    ),
)
def test_every_worker_has_a_slot_and_a_request_and_auto_leaves_a_core(option, slots, num_requests, num_cores, kind):
    arrival = Arrival(max_concurrency=slots, **kind)
    count = num_workers(option, arrival, size(num_requests, last_arrival_ns=NS_PER_S), num_cores)
    assert 1 <= count <= min(num_requests, slots or num_requests)
    assert option != "auto" or count <= max(1, num_cores - 1)
    parts = shares(arrival, count)
    sizes = [part.max_concurrency for part in parts]
    assert sizes == [None] * count if slots is None else sum(sizes) == slots
    assert slots is None or min(sizes) >= max(1, max(sizes) - 1)
    limit = arrival.launch_rate_limit
    assert [part.launch_rate_limit for part in parts] == [limit and pytest.approx(limit / count)] * count


FULL = int(WORKER_CORES * TOKEN_S * NS_PER_S / CPU_NS_PER_TOKEN)
"""Streams that keep one worker as busy as it may be, where the server sets the pace."""


@pytest.mark.parametrize(
    ("option", "slots", "num_requests", "num_cores", "count"),
    [
        ("auto", FULL, 10_000, 16, 1),
        ("auto", FULL + 1, 10_000, 16, 2),
        ("auto", None, 10 * FULL, 16, 10),
        ("auto", None, 10 * FULL, 4, 3),
        ("auto", None, 10 * FULL, 1, 1),
        ("auto", 4 * FULL, 100, 16, 1),
        (4, 2048, 10_000, 2, 4),
        (4, 3, 10_000, 16, 3),
        (4, None, 2, 16, 2),
    ],
)
def test_the_number_of_workers_where_the_server_sets_the_pace(option, slots, num_requests, num_cores, count):
    arrival = Arrival(kind="burst", max_concurrency=slots)
    assert num_workers(option, arrival, size(num_requests), num_cores) == count


@pytest.mark.parametrize(
    ("arrival", "asked", "tokens_per_s"),
    [
        ({"kind": "poisson", "request_rate": 10.0}, {}, 10 * 128),
        ({"kind": "gamma", "request_rate": 10.0, "burstiness": 0.5}, {"n": 4}, 10 * 4 * 128),
        ({"kind": "poisson", "request_rate": 1e6, "max_concurrency": 8}, {}, 8 / TOKEN_S),
        ({"kind": "trace"}, {"last_arrival_ns": 20 * NS_PER_S}, 50 * 128),
        ({"kind": "burst", "launch_rate_limit": 5.0}, {}, 5 * 128),
        ({"kind": "closed-loop", "max_concurrency": 16}, {}, 16 / TOKEN_S),
        ({"kind": "closed-loop", "max_concurrency": 16}, {"n": 3}, 3 * 16 / TOKEN_S),
        ({"kind": "burst"}, {}, 1000 / TOKEN_S),
    ],
)
def test_the_tokens_that_are_expected_of_a_load(arrival, asked, tokens_per_s):
    assert expected_tokens_per_s(Arrival(**arrival), size(1000, **asked)) == pytest.approx(tokens_per_s)


def test_few_tokens_per_second_take_one_worker_and_the_size_of_a_load_is_that_of_its_requests():
    assert num_workers("auto", Arrival(kind="poisson", request_rate=10.0), size(100_000, tokens=200), 64) == 1
    requests = (request(0, max_tokens=5), request(1, max_tokens=7, n=2, arrival_ns=30))
    assert size_of(requests) == LoadSize(num_requests=2, num_outputs=3, num_tokens=19, last_arrival_ns=30)
    assert expected_tokens_per_s(Arrival(kind="burst"), size_of(())) == 0


def test_a_load_begins_with_its_first_send_also_where_a_virtual_clock_begins_at_zero():
    summary = LoadSummary()
    for index, sent_ns in enumerate((0, 1_001_000_000, 500)):
        times = {"scheduled_ns": sent_ns, "sent_ns": sent_ns, "done_ns": sent_ns + 1}
        summary.count(RequestRecord(request_id=f"r{index}", index=index, choices=(), **times))
    assert summary.first_send_ns == 0


def test_one_worker_is_this_process():
    async def made(workers):
        asking = profile(load={"workers": workers})
        async with StreamClient("http://127.0.0.1:9", asking.timeouts) as client:
            return load_for(client, asking, size(20), lambda _record: None)

    assert [type(asyncio.run(made(workers))) for workers in ("auto", 1, 2)] == [Load, Load, WorkerLoad]


def context_of(tmp_path, requests, **more):
    return RunContext(
        profile=profile(load={"workers": 2}, arrival={"kind": "closed-loop", "max_concurrency": 2}),
        requests=RequestSets.single(requests),
        engine=PacedEngine(truth=tmp_path / "truth.jsonl"),
        **more,
    )


def test_a_run_with_two_workers_leaves_the_same_story_on_disk(tmp_path):
    ended = []
    requests = (request(i, max_tokens=3, gap_ms=20) for i in range(9))
    context = context_of(tmp_path, requests, listener=Listener(on_request_end=ended.append))
    record = measure_run(context, planned(), RunDirectory(tmp_path / "run"))
    loaded = load_run(RunDirectory(tmp_path / "run")).requests
    assert (record.state, record.num_sent, record.num_completed, record.num_failed) == ("done", 9, 9, 0)
    assert ended == list(range(1, 10))
    assert sorted((one.index, one.stamps) for one in loaded) == [(i, "kernel") for i in range(9)]
    assert record.times.first_send_ns == min(one.sent_ns for one in loaded)


def test_a_run_whose_worker_is_killed_has_failed_and_says_so_and_the_records_are_kept(tmp_path):
    def kill_second():
        sent = tmp_path / "run" / "requests.jsonl"
        wait_until("two records", lambda: sent.exists() and sent.read_bytes().count(b"\n") == 2)
        victims.extend(workers_of(os.getpid()))
        time.sleep(0.3)  # until the first of the long streams has tokens
        victims[1].kill()

    victims = []
    context = context_of(tmp_path, (request(i, max_tokens=2) if i < 2 else request(i, **LONG) for i in range(8)))
    threading.Thread(target=kill_second, daemon=True).start()
    run = measure_run(context, planned(), RunDirectory(tmp_path / "run"))
    assert (run.state, run.failure.cause) == ("failed", "worker-died")
    name = f"worker 2 of 2 of the load generator (process {victims[1].pid})"
    assert run.failure.message.startswith(f"{name} ended by SIGKILL after 1 of its 4 requests: ")
    assert "memory" in run.failure.message
    records = sorted(load_run(RunDirectory(tmp_path / "run")).requests, key=lambda record: record.index)
    kinds = [(record.index, record.error and record.error.kind) for record in records]
    assert kinds == [(0, None), (1, None), (2, "cancelled")]
    assert records[2].choices[0].chunk_ns, "what the other worker had received"
    assert workers_of(os.getpid()) == []
