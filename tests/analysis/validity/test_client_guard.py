"""A client that was the bottleneck says so; one that was not is left in peace."""

import random
import time

import pytest
from support.results.builders import (
    BASELINE,
    change_requests,
    write_results,
)
from support.servers.paced_engine import PacedEngine, planned, profile, request

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics.arrivals import BEAT_NS, errors_ns
from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.interop.vllm_result import vllm_result
from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.arrival import Arrival, arrival_offsets_ns
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import LoadedRun, load_run
from benchctl.records.record import ChoiceRecord, RequestRecord, RunRecord
from benchctl.records.schema import ClientSample, ClockOffset, NodeInfo
from benchctl.units import NS_PER_MS, NS_PER_S

CLOSED = Arrival(kind="closed-loop", max_concurrency=4)
OPEN = Arrival(kind="constant", request_rate=100.0)
CAPPED = Arrival(kind="constant", request_rate=100.0, max_concurrency=4)
LIMITED = Arrival(kind="constant", request_rate=100.0, launch_rate_limit=50.0)
BURST = Arrival(kind="burst")
POISSON = Arrival(kind="poisson", request_rate=200.0)
WAVES = Arrival(kind="closed-loop", max_concurrency=32)
T0_NS = 50 * NS_PER_S


def run_of(requests, samples=(), clock="host", time_scale=1.0):
    """A run that holds these records and nothing else."""
    times = {"clock": clock, "time_scale": time_scale}
    record = RunRecord(
        schema_version=3,
        index=0,
        run_id="the-run",
        block=0,
        position=0,
        variant="v",
        argv=("server",),
        node=NodeInfo(name="n", hostname="n", cores="0-2"),
        **times,
    )
    return LoadedRun(record=record, requests=tuple(requests), client=tuple(samples))


def sent(index, due_ms, lag_ms=0.0, *, connect_ms=-90.0, lasts_ms=20.0, chunks_ms=(), late_ms=None, **fields):
    """A request due ``due_ms`` after the start that leaves ``lag_ms`` later, connected ``connect_ms`` after due."""
    due_ns = T0_NS + round(due_ms * NS_PER_MS)
    sent_ns = due_ns + round(lag_ms * NS_PER_MS)
    stamps = tuple(sent_ns + round(ms * NS_PER_MS) for ms in chunks_ms)
    late = None if late_ms is None else tuple(round(ms * NS_PER_MS) for ms in late_ms)
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=due_ns,
        connected_ns=due_ns + round(connect_ms * NS_PER_MS),
        sent_ns=sent_ns,
        done_ns=sent_ns + round(lasts_ms * NS_PER_MS),
        stamps="loop" if late is None else "kernel",
        choices=(ChoiceRecord(index=0, chunk_ns=stamps, chunk_late_ns=late),) if stamps else (),
        **fields,
    )


def samples_of(num=20, lag_ms=0.1, cores=0.1, worker=0, **by_number):
    """A sample every 100 ms; ``by_number`` holds other fields of single samples, such as ``_3={"offset": …}``."""
    return tuple(
        ClientSample(
            **{
                "t_ns": T0_NS + i * NS_PER_S // 10,
                "worker": worker,
                "loop_lag_ns": round(lag_ms * NS_PER_MS),
                "cpu_ns": NS_PER_S + round(i * cores * NS_PER_S / 10),
                "num_open": 4,
            }
            | by_number.get(f"_{i}", {})
        )
        for i in range(num)
    )


def codes(warnings):
    return [warning.code for warning in warnings]


def every_10_ms(num, lag_ms=0.3, **fields):
    return [sent(i, 10 * i, lag_ms(i) if callable(lag_ms) else lag_ms, **fields) for i in range(num)]


def wave_of_400(more_ms=0, lasts_ms=3000):
    """Requests due at once; after the time for writing, those behind the first hundred are later by ``more_ms``."""
    return [sent(i, 0, 0.08 * i + (more_ms if i > 100 else 0), lasts_ms=lasts_ms) for i in range(400)]


def streams(chunks_ms, late_ms=None):
    """Forty answers with chunks at these times, each of them read so late where the kernel stamped them."""
    late = None if late_ms is None else (late_ms,) * len(chunks_ms)
    return [sent(i, 50 * i, chunks_ms=chunks_ms, late_ms=late) for i in range(40)]


def read_together(late_ms):
    """Two chunks in each read, each stamped with the time of the second; the reads before were in time."""
    return streams([20, 20, 40, 40, 60, 60, 80, 80], late_ms)


def written_together(num, per_write, late_ms=0.1, first=0):
    """Streams of a server that writes ``per_write`` chunks at once, every 20 ms; each read brings one write."""
    stamps = [20 * (i // per_write + 1) for i in range(5 * per_write)]
    return [sent(i, 50 * i, chunks_ms=stamps, late_ms=(late_ms,) * len(stamps)) for i in range(first, first + num)]


def waves(late_ms, per_write=4, num_streams=32):
    """Five waves of answers of five writes each 80 ms after the other, of which the last are read late."""
    stamps = [80 * (i // per_write + 1) for i in range(5 * per_write)]
    late = [late_ms] * (4 * per_write) + [6.0] * per_write
    return [
        sent(num_streams * wave + i, 410 * wave, 0.1 * i, chunks_ms=stamps, late_ms=late, lasts_ms=400)
        for wave in range(5)
        for i in range(num_streams)
    ]


def held_up_after(num_quiet, num, lag_ms):
    """Samples of a loop that is in time at first and held up later."""
    return samples_of(num, **{f"_{i}": {"loop_lag_ns": round(lag_ms * NS_PER_MS)} for i in range(num_quiet, num)})


ALONE = streams((20,), 0.1)
UNRELIABLE = "arrival-times-unreliable"
SUSPECTS = {
    "an open loop that leaves on time": (every_10_ms(200), OPEN, samples_of(), {}),
    "requests that leave late again and again": (
        every_10_ms(200, lambda i: 9.0 if i % 20 == 0 else 0.3), OPEN, (),
        {"sends-delayed": "10 of 200 requests left more than 2 ms late (p99 9 ms): the load was not"},
    ),
    "four hiccups": (every_10_ms(200, lambda i: 9.0 if i in {3, 50, 90, 150} else 0.3), OPEN, (), {}),
    "a load of less than a second": (every_10_ms(90, 9.0), OPEN, (), {}),
    "five late ones in a thousand": (every_10_ms(2000, lambda i: 9.0 if i % 200 == 0 else 0.3), OPEN, (), {}),
    "connections that were not open in time": (
        every_10_ms(150, 30.0, connect_ms=29.0), OPEN, (),
        {"sends-delayed": "(150 connections were not open by then)"},
    ),
    "a wave that takes the time of writing": (wave_of_400(), BURST, (), {}),
    "a wave with a hiccup": (wave_of_400(20), BURST, (), {}),
    "a wave that is stuck": (wave_of_400(80), BURST, (), {"sends-delayed": ""}),
    "a wave that is stuck for little of a long load": (wave_of_400(80, lasts_ms=30_000), BURST, (), {}),
    "a closed loop whose connections open late": (every_10_ms(200, 30.0, connect_ms=29.8), CLOSED, (), {}),
    "a closed loop that is late with open ones": (
        every_10_ms(200, 30.0, connect_ms=20.0), CLOSED, (), {"sends-delayed": ""},
    ),
    "a schedule that is not kept": (
        every_10_ms(300, lambda i: i), OPEN, (),
        {"sends-delayed": "", "rate-missed": "sent 90.91 requests/s where 100 were planned"},
    ),
    "a schedule that is nearly kept": (every_10_ms(300, lambda i: i / 25), OPEN, (), {"sends-delayed": ""}),
    "a client that is late after its slot has come": (
        [sent(i, 10 * i, 4 * i + 8, connect_ms=4 * i, lasts_ms=60) for i in range(200)], CAPPED, (),
        {"sends-delayed": ""},
    ),
    "its own stamps within the tolerance": (streams(range(5, 45, 5)), CLOSED, samples_of(lag_ms=1.5), {}),
    "its own stamps, late": (
        streams(range(5, 45, 5)), CLOSED, samples_of(lag_ms=4.0),
        {UNRELIABLE: "timestamped 320 of 320 chunks itself, without the kernel, and its event loop was late"},
    ),
    "its own stamps, late by little of the pace of tokens": (
        streams(range(100, 900, 100)), CLOSED, samples_of(lag_ms=4.0), {},
    ),
    "stamps of the kernel of each chunk": (streams(range(20, 180, 20), 9.0), CLOSED, samples_of(lag_ms=15.0), {}),
    "chunks read together late": (
        read_together(3.0), CLOSED, samples_of(lag_ms=12.0), {UNRELIABLE: "160 of 320 chunks were read together"},
    ),
    "a short load of which a stalled loop took two samples": (
        read_together(3.0)[:28], CLOSED,
        samples_of(2, 140.0, _0={"t_ns": T0_NS + 700 * NS_PER_MS}, _1={"t_ns": T0_NS + 1400 * NS_PER_MS}),
        {UNRELIABLE: "112 of 224 chunks were read together"},
    ),
    "chunks read together late in less than a second": (
        read_together(3.0)[:18], CLOSED, samples_of(lag_ms=12.0), {},
    ),
    "read at once: the server sent them together": (read_together(0.1), CLOSED, samples_of(lag_ms=0.5), {}),
    "read a little late by a loop in time": (read_together(3.0), CLOSED, samples_of(lag_ms=0.5), {}),
    "the newest is fresh, but the loop was held up": (
        read_together(0.1), CLOSED, samples_of(lag_ms=40.0), {UNRELIABLE: "(p99 20 ms)"},
    ),
    "a server that writes four at once in waves, to a loop that is never in time": (
        waves(3.0), WAVES, samples_of(25, lag_ms=8.0), {},
    ),
    "a client that reads four writes at a time": (waves(5.0), WAVES, samples_of(25, lag_ms=58.0), {UNRELIABLE: ""}),
    "several chunks in a read of a server that writes each by itself": (
        [*written_together(10, 1), *written_together(30, 4, late_ms=3.0, first=10)], CLOSED,
        held_up_after(4, 25, 15.0), {UNRELIABLE: "450 of 650 chunks were read together"},
    ),
    "a loop that is away for long with good sends and stamps": (ALONE, CLOSED, samples_of(lag_ms=150.0), {}),
    "a process without a processor to spare": (
        every_10_ms(200), OPEN, (*samples_of(cores=0.5), *samples_of(cores=0.97, worker=1)),
        {"client-cpu": "1 of 2 processes of the load generator used more than 90% of a core (at most 97%)"},
    ),
    "a process with some to spare": (every_10_ms(200), OPEN, samples_of(cores=0.85), {}),
    "a busy process of a short load": (every_10_ms(200), OPEN, samples_of(num=9, cores=0.97), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SUSPECTS)
def test_a_run_is_suspect_where_its_client_was_the_bottleneck_and_nowhere_else(case):
    requests, arrival, samples, words = SUSPECTS[case]
    doubts = {doubt.code: doubt.message for doubt in client_suspect_warnings(run_of(requests, samples), arrival)}
    assert list(doubts) == list(words)
    assert all(words[code] in message for code, message in doubts.items())
    simulated = run_of(requests, samples, clock="virtual", time_scale=50.0)
    assert client_suspect_warnings(simulated, arrival) == (), "the simulator has its own account"


def on_a_raster(raster_ms):
    """A Poisson load of which each request leaves at the end of a raster: never later than by ``raster_ms``."""
    offsets_ms = [ns / NS_PER_MS for ns in arrival_offsets_ns(POISSON, 2000, random.Random("1:arrival"))]
    return [sent(i, due, (-due % raster_ms) if raster_ms else 0.0) for i, due in enumerate(offsets_ms)]


FIRST, MOVED = (
    ClockOffset(t_ns=seconds * NS_PER_S, realtime_less_monotonic_ns=5 - by_s * NS_PER_S)
    for seconds, by_s in ((1, 0), (3, 3600))
)
SET = [samples_of(worker=w, _0={"offset": FIRST}, _5={"offset": MOVED}) for w in (0, 1)]
HELD_BACK = [sent(i, 10 * i, 4 * i if i > 3 else 0.2, connect_ms=4 * i - 0.5, lasts_ms=60) for i in range(200)]
NOTES = {
    "an open loop that leaves on time": (every_10_ms(200), OPEN, samples_of(), {}),
    "a Poisson load": (on_a_raster(0), POISSON, (), {}),
    "a Poisson load on a fine raster": (on_a_raster(0.02), POISSON, (), {}),
    "a Poisson load that leaves in bunches": (on_a_raster(1.8), POISSON, (), {"sends-unlike-poisson": "bunches"}),
    "bunches where no law was planned": (on_a_raster(1.8), OPEN, (), {}),
    "requests that waited for a slot": (
        HELD_BACK, CAPPED, (),
        {"rate-capped": "196 of 200 requests waited after their time, 406 ms on average and 796 ms at most"},
    ),
    "requests that a limit on launches holds back": (
        every_10_ms(200, lambda i: 10 * i), LIMITED, (), {"rate-capped": "coordinated omission"},
    ),
    "a loop that is away for long": (
        ALONE, CLOSED, samples_of(lag_ms=150.0),
        {"event-loop-stalls": "repeatedly stalled for over 100 ms (p99 150 ms)"},
    ),
    "a loop that is never away for that long": (ALONE, CLOSED, samples_of(lag_ms=90.0), {}),
    "a loop that is away once": (ALONE, CLOSED, samples_of(_7={"loop_lag_ns": 150 * NS_PER_MS}), {}),
    "a loop that is away in a short load": (ALONE, CLOSED, samples_of(num=8, lag_ms=150.0), {}),
    "as many processes as cores": (ALONE, CLOSED, (*samples_of(), *samples_of(worker=1)), {}),
    "more processes than cores": (
        ALONE, CLOSED, [sample for worker in range(3) for sample in samples_of(worker=worker)],
        {"client-crowded": "4 processes of the load generator shared 3 cores"},
    ),
    "a steady wall clock": (every_10_ms(5), CLOSED, samples_of(_0={"offset": FIRST}), {}),
    "a wall clock that was set": (
        every_10_ms(5), CLOSED, (*SET[0], *SET[1]),
        {"wall-clock-set": "the system clock was set once during the load (by -3,600 s after 2.0 s)"},
    ),
    "requests that went another way": (
        [*every_10_ms(3, route="httpx"), *every_10_ms(7)], CLOSED, (),
        {"other-transport": "3 of 10 requests used the fallback transport (TLS)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTES)
def test_what_leaves_a_run_as_it_is_is_noted(case):
    requests, arrival, samples, words = NOTES[case]
    run = run_of(requests, samples)
    notes = {note.code: note.message for note in client_warnings(run, arrival)}
    assert (list(notes), client_suspect_warnings(run, arrival)) == (list(words), ())
    assert all(words[code] in message for code, message in notes.items())


def test_a_simulation_says_how_long_a_cap_held_requests_on_its_own_clock_and_nothing_of_its_loop():
    waited = [sent(i, 10 * i, 100.0, connect_ms=99.9, lasts_ms=60) for i in range(200)]
    (warning,) = client_warnings(run_of(waited, clock="virtual", time_scale=50.0), CAPPED)
    assert "5e+03 ms on average" in warning.message
    assert client_warnings(run_of(ALONE, samples_of(lag_ms=150.0), clock="virtual"), CLOSED) == ()


def errors_of(requests, samples, **options):
    """By how much the time of each chunk may be too late, of all choices in a row; in ms."""
    return (errors_ns(chunks_of(requests), samples, **options) / NS_PER_MS).tolist()


@pytest.mark.parametrize(
    ("chunks_ms", "late_ms", "lag_ms", "errors"),
    [
        pytest.param(
            (20, 30, 30, 30, 90, 90), (2, 4, 4, 4, 5, 5), 12.0, [0, 8, 8, 0, 12 + BEAT_NS / NS_PER_MS, 0],
            id="bounded by the read before and by how long the loop can have been away",
        ),
        pytest.param((20, 30, 30, 30, 90, 90), (2, 4, 4, 4, 5, 5), None, [0, 8, 8, 0, 56, 0], id="without samples"),
        pytest.param((20, 20), None, 0.1, [0, 0], id="without late times"),
        pytest.param((60,) * 3, (1.5,) * 3, 35.0, [55, 55, 0], id="a first chunk, by how long it was away"),
        pytest.param((60,) * 3, (1.5,) * 3, 80.0, [60, 60, 0], id="a first chunk, since it was asked for"),
        pytest.param((20, 200, 200), (0.1, 3, 3), 60.0, [0, 0, 0], id="never away for as long as two writes take"),
        pytest.param((20, 200, 200), (0.1, 3, 3), 90.0, [0, 110, 0], id="away for as long as two writes take"),
    ],
)  # fmt: skip
def test_the_error_of_a_stamp_has_a_bound(chunks_ms, late_ms, lag_ms, errors):
    samples = () if lag_ms is None else samples_of(lag_ms=lag_ms)
    assert errors_of([sent(0, 0, chunks_ms=chunks_ms, late_ms=late_ms)], samples) == errors


@pytest.mark.parametrize("per_write", [2, 16])
@pytest.mark.parametrize(("late_ms", "lag_ms"), [(0.1, 23.0), (5.0, 23.0), (5.0, 0.5)])
def test_a_server_that_writes_several_chunks_at_once_is_no_late_client(per_write, late_ms, lag_ms):
    requests = [*written_together(10, per_write), *written_together(30, per_write, late_ms, first=10)]
    samples = held_up_after(6, 25, lag_ms)
    assert errors_of(requests, samples) == [0] * (40 * 5 * per_write)
    assert client_suspect_warnings(run_of(requests, samples), CLOSED) == ()


def test_of_several_writes_in_a_late_read_only_the_newest_has_its_own_time():
    both = sent(10, 500, chunks_ms=[40] * 8, late_ms=(0.1,) * 8)
    errors = errors_of([*written_together(10, 4), both], held_up_after(4, 8, 23.0))
    assert errors == [0] * (len(errors) - 8) + [40] * 4 + [0] * 4
    long = [*written_together(20, 4), *written_together(60, 4, late_ms=5.0, first=20)]
    assert not any(errors_of(long, held_up_after(11, 41, 23.0), chunks_examined=400)), "some choices are enough"
    away = errors_of(waves(5.0), samples_of(25, lag_ms=58.0))
    assert sum(error > 0 for error in away) == 0.75 * len(away)


def test_reads_of_a_loop_that_was_never_in_time_excuse_nothing_unless_it_was_not_away_for_four_writes():
    requests = written_together(30, 4, late_ms=1.5)
    assert sum(error > 18 for error in errors_of(requests, samples_of(25, lag_ms=12.0))) == 30 * 15
    assert not any(errors_of(requests, samples_of(25, lag_ms=3.0)))


def test_tables_and_result_files_say_how_the_client_did(tmp_path):
    results = write_results(tmp_path / "r")
    silent = load_run(results.run(BASELINE))
    assert client_suspect_warnings(silent, CLOSED) == client_warnings(silent, CLOSED) == silent.client == ()
    with results.run(BASELINE).append("client") as writer:
        for sample in samples_of(lag_ms=0.25, cores=0.4):
            writer.write(sample)
    change_requests(results, BASELINE, sent_ns=silent.requests[0].sent_ns + 500_000)
    analysis = analyze_directory(results.path)
    run = analysis.runs[0].run
    result = vllm_result(run, run_metrics(run, CLOSED), analysis.results.manifest, CLOSED)
    assert {name: value for name, value in result["client"].items() if value is not None} == {
        "p50_send_lag_ms": 0.5,
        "max_send_lag_ms": 0.5,
        "kernel_stamp_frac": 0.0,
        "coalesced_chunk_frac": 0.0,
        "max_loop_lag_ms": 0.25,
        "client_cpu_cores": pytest.approx(0.4),
    }
    assert set(result["client"]) <= set(result["definitions"])


class SlowToAsk(PacedEngine):
    """An engine whose requests take long to write."""

    def request_call(self, request, settings):
        time.sleep(0.015)
        return super().request_call(request, settings)


def test_a_run_whose_schedule_was_not_kept_is_suspect_and_holds_samples_of_its_client(tmp_path):
    """Writing each request takes this client 15 ms, and one is due every 8 ms."""
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    requests = tuple(request(i, max_tokens=2, gap_ms=1, arrival_ns=i * 8 * NS_PER_MS) for i in range(80))
    slow = profile(arrival={"kind": "constant", "request_rate": 125.0})
    engine = SlowToAsk(truth=tmp_path / "truth.jsonl")
    record = measure_run(
        RunContext(profile=slow, requests=RequestSets.single(requests), engine=engine), planned(), directory
    )
    assert (record.state, "sends-delayed" in codes(record.warnings)) == ("suspect", True)
    samples = load_run(directory).client
    used_ns = [sample.cpu_ns for sample in samples]
    assert ({sample.worker for sample in samples}, len(samples) >= 2) == ({0}, True)
    assert (samples[0].offset is None, used_ns) == (False, sorted(used_ns))
