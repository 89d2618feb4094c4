"""A client that was the bottleneck says so; one that was not is left in peace."""

import asyncio
import random
import time

import msgspec
import pytest
from support.results.builders import edit_requests, edit_run, write_results
from support.servers.paced_engine import PacedEngine, call, launch, planned, profile, request

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.metrics.arrivals import BEAT_NS, bunching_warnings, earliest_arrivals
from benchctl.analysis.metrics.client import busy_cores
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.interop.vllm_result import vllm_result
from benchctl.load import sockets
from benchctl.load.client import StreamClient
from benchctl.load.schedule import Load
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.server import ServerProcess
from benchctl.profile.arrival import Arrival, arrival_offsets_ns
from benchctl.records.directory import RunDirectory
from benchctl.records.files import encode
from benchctl.records.loaded import LoadedRun, load_results, load_run
from benchctl.records.record import Call, ChoiceRecord, RequestError, RequestRecord, RunRecord
from benchctl.records.schema import ClientSample, ClockOffset
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES
from benchctl.units import NS_PER_MS, NS_PER_S

CLOSED = Arrival(kind="closed-loop", max_concurrency=4)
OPEN = Arrival(kind="constant", request_rate=100.0)
CAPPED = Arrival(kind="constant", request_rate=100.0, max_concurrency=4)
T0_NS = 50 * NS_PER_S


def run_of(requests, samples=(), clock="host", time_scale=1.0):
    """A run that holds these records and nothing else."""
    record = RunRecord(
        schema_version=3,
        index=0,
        run_id="the-run",
        block=0,
        position=0,
        variant="v",
        clock=clock,
        time_scale=time_scale,
        argv=("server",),
    )
    return LoadedRun(record=record, requests=tuple(requests), client=tuple(samples))


def sent(index, due_ms, lag_ms=0.0, *, connect_ms=None, lasts_ms=20.0, chunks_ms=(), late_ms=None, **fields):
    """A request due ``due_ms`` after the start that leaves ``lag_ms`` later, connected ``connect_ms`` after due."""
    due_ns = T0_NS + round(due_ms * NS_PER_MS)
    sent_ns = due_ns + round(lag_ms * NS_PER_MS)
    stamps = tuple(sent_ns + round(ms * NS_PER_MS) for ms in chunks_ms)
    late = None if late_ms is None else tuple(round(ms * NS_PER_MS) for ms in late_ms)
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=due_ns,
        connected_ns=due_ns + round((-90 if connect_ms is None else connect_ms) * NS_PER_MS),
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
                "cpu_ns": round(i * cores * NS_PER_S / 10),
                "num_open": 4,
            }
            | by_number.get(f"_{i}", {})
        )
        for i in range(num)
    )


def errors_of(requests, samples, **options):
    """By how much the time of each chunk may be too late, of all choices in a row; in ms."""
    pairs = zip(requests, earliest_arrivals(requests, samples, **options), strict=True)
    choices = [(choice, early.choices[i]) for record, early in pairs for i, choice in enumerate(record.choices)]
    return [
        (recorded_ns - earliest_ns) / NS_PER_MS
        for choice, early in choices
        for recorded_ns, earliest_ns in zip(choice.chunk_ns, early.chunk_ns, strict=True)
    ]


def codes(warnings):
    return [warning.code for warning in warnings]


def doubts(requests, arrival=CLOSED, samples=(), **run):
    return client_suspect_warnings(run_of(requests, samples, **run), arrival)


def warned(requests, arrival=CLOSED, samples=(), **run):
    return client_warnings(run_of(requests, samples, **run), arrival)


def every_10_ms(num, lag_ms=0.3, **fields):
    return [sent(i, 10 * i, lag_ms(i) if callable(lag_ms) else lag_ms, **fields) for i in range(num)]


def on_a_raster(raster_ms, rate=200.0, count=2000):
    """A Poisson load of which each request leaves at the end of a raster: never later than by ``raster_ms``."""
    due_ms = [
        offset_ns / NS_PER_MS for offset_ns in arrival_offsets_ns(poisson(rate), count, random.Random("1:arrival"))
    ]
    return [sent(i, due, (-due % raster_ms) if raster_ms else 0.0) for i, due in enumerate(due_ms)]


def poisson(rate):
    return Arrival(kind="poisson", request_rate=rate)


@pytest.mark.parametrize(("raster_ms", "told"), [(0.0, []), (0.02, []), (1.8, ["sends-unlike-poisson"])])
def test_poisson_arrivals_that_leave_in_bunches_are_marked_though_none_is_late(raster_ms, told):
    requests = on_a_raster(raster_ms)
    assert doubts(requests, poisson(200.0)) == ()
    assert codes(warned(requests, poisson(200.0))) == told


def test_only_poisson_arrivals_on_a_real_clock_are_held_against_their_law():
    requests = on_a_raster(1.8)
    assert codes(warned(requests, OPEN)) == []
    assert codes(warned(requests, poisson(200.0), clock="virtual")) == []


def test_an_open_loop_that_leaves_on_time_is_left_in_peace():
    requests = every_10_ms(200)
    assert doubts(requests, OPEN, samples_of()) == ()
    assert warned(requests, OPEN, samples_of()) == ()


def test_requests_of_an_open_loop_that_leave_late_again_and_again_are_a_doubt():
    (doubt,) = doubts(every_10_ms(200, lambda i: 9.0 if i % 20 == 0 else 0.3), OPEN)
    assert doubt.code == "sends-delayed"
    assert doubt.message.startswith("10 of 200 requests left more than 2 ms late (p99 9 ms): the load was not")


def test_connections_that_were_not_open_in_time_are_named():
    late = every_10_ms(150, 30.0, connect_ms=29.0)
    (doubt,) = doubts(late, OPEN)
    assert doubt.code == "sends-delayed"
    assert "(150 connections were not open by then)" in doubt.message


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(every_10_ms(200, lambda i: 9.0 if i in {3, 90} else 0.3), id="two hiccups"),
        pytest.param(every_10_ms(90, 9.0), id="a load of less than a second"),
        pytest.param(every_10_ms(2000, lambda i: 9.0 if i % 200 == 0 else 0.3), id="five in a thousand"),
    ],
)
def test_hiccups_are_no_habit(requests):
    assert doubts(requests, OPEN) == ()


def test_a_wave_may_take_the_time_that_writing_takes():
    burst = Arrival(kind="burst")
    writing = [sent(i, 0, 0.08 * i, lasts_ms=3000) for i in range(400)]
    assert doubts(writing, burst) == ()
    hiccup = [sent(i, 0, 0.08 * i + (20 if i > 100 else 0), lasts_ms=3000) for i in range(400)]
    assert doubts(hiccup, burst) == ()
    stuck = [sent(i, 0, 0.08 * i + (80 if i > 100 else 0), lasts_ms=3000) for i in range(400)]
    assert codes(doubts(stuck, burst)) == ["sends-delayed"]
    assert doubts([sent(i, 0, 0.08 * i + (80 if i > 100 else 0), lasts_ms=30_000) for i in range(400)], burst) == ()


def test_a_closed_loop_is_late_from_when_its_connection_is_open():
    far_away = every_10_ms(200, 30.0, connect_ms=29.8)
    assert doubts(far_away, CLOSED) == ()
    slow = every_10_ms(200, 30.0, connect_ms=20.0)
    assert codes(doubts(slow, CLOSED)) == ["sends-delayed"]


def test_a_schedule_that_is_not_kept_is_a_doubt_beside_its_lateness():
    slower = [sent(i, 10 * i, i) for i in range(300)]
    found = doubts(slower, OPEN)
    assert codes(found) == ["sends-delayed", "rate-missed"]
    assert "sent 90.91 requests/s where 100 were planned" in found[1].message
    assert codes(doubts([sent(i, 10 * i, i / 25) for i in range(300)], OPEN)) == ["sends-delayed"]


def test_a_cap_of_an_open_loop_takes_the_blame_for_who_waited():
    waited = [sent(i, 10 * i, 4 * i if i > 3 else 0.2, connect_ms=4 * i - 0.5, lasts_ms=60) for i in range(200)]
    assert doubts(waited, CAPPED) == ()
    (warning,) = warned(waited, CAPPED)
    assert warning.code == "rate-capped"
    assert warning.message.startswith(
        "196 of 200 requests waited after their time, 406 ms on average and 796 ms at"
    )
    assert "coordinated omission" in warning.message


def test_a_client_that_is_late_after_the_slot_has_come_is_still_to_blame():
    waited = [sent(i, 10 * i, 4 * i + 8, connect_ms=4 * i, lasts_ms=60) for i in range(200)]
    assert codes(doubts(waited, CAPPED)) == ["sends-delayed"]


def test_a_limit_on_launches_holds_back_and_blames_nobody():
    limited = Arrival(kind="constant", request_rate=100.0, launch_rate_limit=50.0)
    held = [sent(i, 10 * i, 10 * i) for i in range(200)]
    assert doubts(held, limited) == ()
    assert codes(warned(held, limited)) == ["rate-capped"]


def test_a_capped_simulation_says_how_long_requests_waited_on_its_own_clock():
    waited = [sent(i, 10 * i, 100.0, connect_ms=99.9, lasts_ms=60) for i in range(200)]
    (warning,) = warned(waited, CAPPED, clock="virtual", time_scale=50.0)
    assert "5e+03 ms on average" in warning.message


def test_late_stamps_of_the_client_s_own_are_a_doubt():
    streams = [sent(i, 50 * i, chunks_ms=range(5, 45, 5)) for i in range(40)]
    assert doubts(streams, samples=samples_of(lag_ms=1.5)) == ()
    (doubt,) = doubts(streams, samples=samples_of(lag_ms=4.0))
    assert doubt.code == "arrival-times-unreliable"
    assert "timestamped 320 of 320 chunks itself" in doubt.message
    assert "(p99 4 ms)" in doubt.message


def test_a_loop_s_lateness_is_held_against_the_pace_of_the_tokens():
    slow_streams = [sent(i, 50 * i, chunks_ms=range(100, 900, 100)) for i in range(40)]
    assert doubts(slow_streams, samples=samples_of(lag_ms=4.0)) == ()


def test_stamps_of_the_kernel_stand_although_the_loop_is_late():
    alone = [sent(i, 50 * i, chunks_ms=range(20, 180, 20), late_ms=(9.0,) * 8) for i in range(40)]
    assert doubts(alone, samples=samples_of(lag_ms=15.0)) == ()


def read_together(late_ms):
    """Two chunks in each read, each stamped with the time of the second; the reads before were in time."""
    stamps = [20, 20, 40, 40, 60, 60, 80, 80]
    return [sent(i, 50 * i, chunks_ms=stamps, late_ms=(late_ms,) * 8) for i in range(40)]


def test_chunks_read_together_late_are_a_doubt():
    (doubt,) = doubts(read_together(3.0), samples=samples_of(lag_ms=12.0))
    assert doubt.code == "arrival-times-unreliable"
    assert doubt.message.startswith("160 of 320 chunks were read together with newer ones")
    assert "(p99 20 ms)" in doubt.message


@pytest.mark.parametrize(
    ("late_ms", "lag_ms", "is_doubted"),
    [
        pytest.param(0.1, 0.5, False, id="read at once: the server sent them together"),
        pytest.param(3.0, 0.5, False, id="read a little late by a loop that was not held up: so did it"),
        pytest.param(0.1, 40.0, True, id="the newest is fresh, but the loop was held up"),
    ],
)
def test_who_is_to_blame_for_chunks_that_came_together(late_ms, lag_ms, is_doubted):
    assert bool(doubts(read_together(late_ms), samples=samples_of(lag_ms=lag_ms))) is is_doubted


def test_the_error_of_a_stamp_is_bounded_by_the_read_before_and_by_how_long_the_loop_can_have_been_away():
    asked = sent(0, 0, chunks_ms=(20, 30, 30, 30, 90, 90), late_ms=(2, 4, 4, 4, 5, 5))
    assert errors_of([asked], samples_of(lag_ms=12.0)) == [0, 8, 8, 0, 12 + BEAT_NS / NS_PER_MS, 0]
    assert errors_of([asked], ()) == [0, 8, 8, 0, 56, 0]
    assert errors_of([sent(0, 0, chunks_ms=(20, 20))], samples_of()) == [0, 0]


def test_the_first_chunk_of_an_answer_may_have_come_at_any_time_since_it_was_asked_for():
    asked = sent(0, 0, chunks_ms=(60, 60, 60), late_ms=(1.5,) * 3)
    assert errors_of([asked], samples_of(lag_ms=35.0)) == [55, 55, 0]
    assert errors_of([asked], samples_of(lag_ms=80.0)) == [60, 60, 0]


def test_who_cannot_have_been_away_for_several_writes_has_read_one():
    paused = sent(0, 0, chunks_ms=(20, 200, 200), late_ms=(0.1, 3.0, 3.0))
    assert errors_of([paused], samples_of(lag_ms=60.0)) == [0, 0, 0]
    assert errors_of([paused], samples_of(lag_ms=90.0)) == [0, 110, 0]


def written_together(num, per_write, late_ms=0.1, first=0):
    """Streams of a server that writes ``per_write`` chunks at once, every 20 ms; each read brings one write."""
    stamps = [20 * (i // per_write + 1) for i in range(5 * per_write)]
    return [
        sent(first + i, 50 * (first + i), chunks_ms=stamps, late_ms=(late_ms,) * len(stamps)) for i in range(num)
    ]


def held_up_after(num_quiet, num, lag_ms):
    """Samples of a loop that is in time at first and held up later."""
    return samples_of(num, **{f"_{i}": {"loop_lag_ns": round(lag_ms * NS_PER_MS)} for i in range(num_quiet, num)})


@pytest.mark.parametrize("per_write", [2, 4, 16])
@pytest.mark.parametrize(("late_ms", "lag_ms"), [(0.1, 23.0), (5.0, 23.0), (5.0, 0.5)])
def test_a_server_that_writes_several_chunks_at_once_is_no_late_client(per_write, late_ms, lag_ms):
    in_time, late = written_together(10, per_write), written_together(30, per_write, late_ms, first=10)
    samples = held_up_after(6, 25, lag_ms)
    assert errors_of([*in_time, *late], samples) == [0] * (40 * 5 * per_write)
    assert doubts([*in_time, *late], samples=samples) == ()


def wave(number, per_write=4, num_streams=32, late_ms=0.1):
    """Answers that begin together, of five writes each 80 ms after the other, of which the last are read late."""
    stamps = [80 * (i // per_write + 1) for i in range(5 * per_write)]
    late = [late_ms] * (4 * per_write) + [6.0] * per_write
    return [
        sent(num_streams * number + i, 410 * number, 0.1 * i, chunks_ms=stamps, late_ms=late, lasts_ms=400)
        for i in range(num_streams)
    ]


def test_a_server_that_writes_four_chunks_at_once_is_no_late_client_in_waves_either():
    """All answers end at once, and the client is busy with the next requests: its loop is never in time."""
    streams = [request for number in range(5) for request in wave(number, late_ms=3.0)]
    samples = samples_of(25, lag_ms=8.0)
    assert not any(errors_of(streams, samples))
    assert doubts(streams, Arrival(kind="closed-loop", max_concurrency=32), samples) == ()


def test_a_client_that_reads_four_writes_at_a_time_is_no_server_that_writes_four_at_once():
    streams = [request for number in range(5) for request in wave(number, late_ms=5.0)]
    away = samples_of(25, lag_ms=58.0)
    assert sum(error > 0 for error in errors_of(streams, away)) == 0.75 * len(errors_of(streams, away))
    arrival = Arrival(kind="closed-loop", max_concurrency=32)
    assert codes(doubts(streams, arrival, away)) == ["arrival-times-unreliable"]


def test_of_several_writes_in_a_late_read_only_the_newest_has_its_own_time():
    in_time = written_together(10, 4)
    both = sent(10, 500, chunks_ms=[40] * 8, late_ms=(0.1,) * 8)
    errors = errors_of([*in_time, both], held_up_after(4, 8, 23.0))
    assert errors[-8:] == [40] * 4 + [0] * 4
    assert not any(errors[:-8])


def test_a_server_that_writes_each_chunk_by_itself_does_not_excuse_a_client_that_reads_several():
    in_time, late = written_together(10, 1), written_together(30, 4, late_ms=3.0, first=10)
    (doubt,) = doubts([*in_time, *late], samples=held_up_after(4, 25, 15.0))
    assert doubt.code == "arrival-times-unreliable"
    assert "450 of 650 chunks were read together" in doubt.message


def test_a_long_load_is_judged_by_some_of_its_choices():
    streams = [*written_together(20, 4), *written_together(60, 4, late_ms=5.0, first=20)]
    assert not any(errors_of(streams, held_up_after(11, 41, 23.0), chunks_examined=400))


def test_reads_of_a_loop_that_was_never_in_time_excuse_nothing():
    errors = errors_of(written_together(30, 4, late_ms=1.5), samples_of(25, lag_ms=12.0))
    assert sum(error > 18 for error in errors) == 30 * 15


def test_a_loop_that_never_was_away_for_as_long_as_four_writes_take_read_one():
    assert not any(errors_of(written_together(30, 4, late_ms=1.5), samples_of(25, lag_ms=3.0)))


def test_a_loop_that_is_away_for_long_is_a_warning_where_its_sends_and_stamps_are_good():
    alone = [sent(i, 50 * i, chunks_ms=(20,), late_ms=(0.1,)) for i in range(40)]
    away = samples_of(lag_ms=150.0)
    assert doubts(alone, samples=away) == ()
    (warning,) = warned(alone, samples=away)
    assert warning.code == "event-loop-stalls"
    assert "repeatedly stalled for over 100 ms (p99 150 ms)" in warning.message
    assert "refills of a closed loop and timeout checks may have been late by as much" in warning.message
    assert warned(alone, samples=away, clock="virtual", time_scale=50.0) == ()


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(samples_of(lag_ms=90.0), id="never for that long"),
        pytest.param(samples_of(_7={"loop_lag_ns": 150 * NS_PER_MS}), id="once"),
        pytest.param(samples_of(num=8, lag_ms=150.0), id="a load of less than a second"),
    ],
)
def test_a_loop_that_is_away_for_a_moment_is_not_worth_a_warning(samples):
    alone = [sent(i, 50 * i, chunks_ms=(20,), late_ms=(0.1,)) for i in range(40)]
    assert warned(alone, samples=samples) == ()


def test_a_process_without_a_processor_to_spare_is_a_doubt():
    both = (*samples_of(cores=0.5), *samples_of(cores=0.97, worker=1))
    assert busy_cores(both) == pytest.approx({0: 0.5, 1: 0.97})
    (doubt,) = doubts(every_10_ms(200), OPEN, both)
    assert doubt.code == "client-cpu"
    assert doubt.message.startswith(
        "1 of 2 processes of the load generator used more than 90% of a core (at most 97%)"
    )
    assert doubts(every_10_ms(200), OPEN, samples_of(cores=0.85)) == ()
    assert doubts(every_10_ms(200), OPEN, samples_of(num=9, cores=0.97)) == ()


def test_a_wall_clock_that_was_set_is_told_once_for_all_processes():
    first, moved = (
        ClockOffset(t_ns=NS_PER_S, realtime_less_monotonic_ns=5),
        ClockOffset(t_ns=3 * NS_PER_S, realtime_less_monotonic_ns=5 - 3600 * NS_PER_S),
    )
    steady = samples_of(_0={"offset": first})
    assert warned(every_10_ms(5), samples=steady) == ()
    stepped = [samples_of(worker=w, _0={"offset": first}, _5={"offset": moved}) for w in (0, 1)]
    (warning,) = warned(every_10_ms(5), samples=[sample for own in stepped for sample in own])
    assert warning.code == "wall-clock-set"
    assert "the system clock was set once during the load (by -3,600 s after 2.0 s)" in warning.message


def test_requests_that_went_another_way_are_counted():
    (warning,) = warned([*every_10_ms(3, route="httpx"), *every_10_ms(7)])
    assert warning.code == "other-transport"
    assert "3 of 10 requests used the fallback transport (TLS)" in warning.message


def test_on_a_virtual_clock_the_simulator_s_own_account_decides():
    late = every_10_ms(200, 30.0)
    assert codes(doubts(late, OPEN, samples_of(cores=1.0))) == ["sends-delayed", "client-cpu"]
    assert doubts(late, OPEN, samples_of(cores=1.0), clock="virtual", time_scale=50.0) == ()


def test_old_directories_without_samples_of_the_client_are_read(tmp_path):
    write_results(tmp_path / "r")
    for run in load_results(tmp_path / "r").runs:
        assert run.client == ()
        assert client_suspect_warnings(run, CLOSED) == client_warnings(run, CLOSED) == ()
        assert run_metrics(run)["client_cpu_cores"] is None


def with_client(results, samples):
    for run in results.runs():
        with run.append("client") as writer:
            for sample in samples:
                writer.write(sample)


def test_tables_and_result_files_say_how_the_client_did(tmp_path):
    results = write_results(tmp_path / "r")
    with_client(results, samples_of(lag_ms=0.25, cores=0.4))
    edit_requests(results, "000-b0-baseline", lambda r: msgspec.structs.replace(r, sent_ns=r.sent_ns + 500_000))
    analysis = analyze_directory(results.path)
    result = vllm_result(analysis.runs[0].run, analysis.results.manifest, CLOSED)
    assert result["client"] == {
        "offered_load_frac": None,
        "slot_idle_frac": None,
        "p50_refill_gap_ms": None,
        "p99_refill_gap_ms": None,
        "p99_refill_connect_ms": None,
        "p50_send_lag_ms": 0.5,
        "p99_send_lag_ms": None,
        "max_send_lag_ms": 0.5,
        "kernel_stamp_frac": 0.0,
        "coalesced_chunk_frac": 0.0,
        "p99_read_delay_ms": None,
        "max_loop_lag_ms": 0.25,
        "client_cpu_cores": pytest.approx(0.4),
    }
    assert set(result["client"]) <= set(result["definitions"])


def test_a_damaged_line_of_the_client_names_its_place(tmp_path):
    results = write_results(tmp_path / "r")
    path = results.run("000-b0-baseline").path / "client.jsonl"
    path.write_bytes(encode(samples_of()[0]) + b"\n{broken\n")
    loaded = load_run(results.run("000-b0-baseline"))
    assert (len(loaded.client), loaded.is_damaged) == (1, True)
    assert "client.jsonl:2" in loaded.damage[0]


@pytest.mark.parametrize("code", sorted(CLIENT_SUSPECT_CODES))
def test_compare_leaves_out_what_the_client_measured_of_itself_even_if_failed_requests_are_allowed(tmp_path, code):
    results = write_results(tmp_path / "r")
    late = msgspec.convert(
        {"code": code, "message": "it was the client"}, type=type(doubts(every_10_ms(150, 9.0), OPEN)[0])
    )
    edit_run(results, "000-b0-baseline", state="suspect", warnings=(late,))
    error = RequestError(kind="reset", message="gone")
    edit_requests(
        results, "000-b0-baseline", lambda r: msgspec.structs.replace(r, error=error) if not r.index else r
    )
    sides = (parse_side(f"{results.path}:baseline"), parse_side(f"{results.path}:guided"))
    compared = compare_sides(*sides, CompareOptions(allow_failed=True))
    assert [w.message for w in compared.warnings if w.code == "excluded-block"] == [
        f"block 0 is left out: 000-b0-baseline: suspect: {code}: it was the client (--allow-suspect counts it)"
    ]


async def _block_again_and_again(block_s):
    """Hold the event loop up as a client that has too much to do would."""
    while True:
        time.sleep(block_s)  # noqa: ASYNC251 - this is the point
        await asyncio.sleep(0)


async def _block_now_and_then(block_s):
    """Hold the event loop up for a twentieth of the time, as a busy machine does."""
    while True:
        await asyncio.sleep(20 * block_s)
        time.sleep(block_s)  # noqa: ASYNC251 - this is the point


def driven(tmp_path, requests, block_s, block=_block_again_and_again):
    """What a client records that is held up for ``block_s`` at a time, and what the server knows of its sends."""

    async def go():
        records, samples, how = [], [], launch(tmp_path)
        with ServerProcess(how) as server:
            async with StreamClient(how.base_url, how.timeouts) as client:
                await server.wait_ready(client.control)
                load = Load(client, CLOSED, records.append, on_sample=samples.append)
                blocking = asyncio.create_task(block(block_s)) if block_s else None
                await load.drive([call(one) for one in requests])
                if blocking is not None:
                    blocking.cancel()
        truths = PacedEngine(truth=tmp_path / "truth.jsonl").truths()
        return run_of(records, samples), truths

    return asyncio.run(go())


STREAMS = [request(i, max_tokens=250, gap_ms=8) for i in range(4)]


def errors_ms(run, truths):
    """Arrival as recorded less the server's own send, of the chunks whose stamp is their own, and of the others."""
    own, bounds = [], []
    for record in run.requests:
        stamps = record.choices[0].chunk_ns
        for i, (stamp, sent_ns) in enumerate(zip(stamps, truths[record.request_id]["sent_ns"], strict=True)):
            is_bound = i + 1 < len(stamps) and stamps[i + 1] == stamp
            (bounds if is_bound else own).append((stamp - sent_ns) / NS_PER_MS)
    return own, bounds


def test_a_client_that_is_held_up_has_true_stamps_where_they_are_its_own_and_says_that_others_are_not(tmp_path):
    run, truths = driven(tmp_path, STREAMS, block_s=0.05)
    own, bounds = errors_ms(run, truths)
    assert {record.stamps for record in run.requests} == {"kernel"}
    assert sorted(own)[len(own) // 2] < 2  # milliseconds, of a client that reads every 50 ms
    assert sorted(bounds)[len(bounds) // 2] > 5
    (doubt,) = [doubt for doubt in client_suspect_warnings(run, CLOSED) if doubt.code == "arrival-times-unreliable"]
    assert "chunks were read together with newer ones" in doubt.message


COALESCED = [request(i, max_tokens=400, gap_ms=5, tokens_per_write=4) for i in range(4)]


def test_of_four_tokens_in_a_write_the_last_has_a_true_stamp_however_late_the_client_reads(tmp_path):
    run, truths = driven(tmp_path, COALESCED, block_s=0.023, block=_block_now_and_then)
    own, bounds = errors_ms(run, truths)
    assert len(bounds) >= 3 * len(own)
    assert sorted(own)[len(own) // 2] < 2  # milliseconds
    assert min(own + bounds) > -0.1  # nothing arrives before it is sent, but for the relation of clocks


@pytest.mark.parametrize("held_up", [0, 1])
def test_a_server_that_writes_four_tokens_at_once_is_named_and_its_times_are_not_suspect(held_up):
    writes_ms = [20.0 * write for write in range(100) for _ in range(4)]
    requests = [
        sent(i, 0.0, 0.1, chunks_ms=writes_ms, late_ms=[0.2] * 400, lasts_ms=2000.0, completion_tokens=400)
        for i in range(4)
    ]
    samples = samples_of(20, **{f"_{i}": {"loop_lag_ns": 23 * NS_PER_MS} for i in range(held_up)})
    run = run_of(requests, samples)
    assert codes(client_suspect_warnings(run, CLOSED)) == []
    assert codes(bunching_warnings(run)) == ["server-coalescing"]


def test_a_client_that_is_held_up_is_found_out_whatever_the_server_writes_at_once(tmp_path):
    run, truths = driven(tmp_path, COALESCED, block_s=0.1)
    _, bounds = errors_ms(run, truths)
    assert sorted(bounds)[len(bounds) // 2] > 5
    assert codes(client_suspect_warnings(run, CLOSED)).count("arrival-times-unreliable") == 1


def test_without_the_kernel_s_stamps_the_lateness_of_the_loop_is_that_of_the_times(tmp_path, monkeypatch):
    for module in (sockets, sockets):
        monkeypatch.setattr(module, "stamp_arrivals", lambda _: False)
    run, truths = driven(tmp_path, STREAMS, block_s=0.05)
    assert {record.stamps for record in run.requests} == {"loop"}
    own, bounds = errors_ms(run, truths)
    assert sorted(own + bounds)[len(own + bounds) // 2] > 5
    (doubt,) = [doubt for doubt in client_suspect_warnings(run, CLOSED) if doubt.code == "arrival-times-unreliable"]
    assert "timestamped 1000 of 1000 chunks itself" in doubt.message


def test_a_run_writes_down_how_its_client_did(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    engine = PacedEngine(truth=tmp_path / "truth.jsonl")
    context = RunContext(
        profile=profile(), requests=tuple(request(i, max_tokens=40, gap_ms=10) for i in range(2)), engine=engine
    )
    measure_run(context, planned(), directory)
    loaded = load_run(directory)
    assert len(loaded.client) >= 2
    assert [sample.worker for sample in loaded.client] == [0] * len(loaded.client)
    assert loaded.client[0].offset is not None
    assert all(
        later.cpu_ns >= earlier.cpu_ns for earlier, later in zip(loaded.client, loaded.client[1:], strict=False)
    )
    assert run_metrics(loaded)["kernel_stamp_frac"] == 1.0


def test_a_run_whose_schedule_was_not_kept_is_suspect(tmp_path):
    """Writing each request takes this client 15 ms, and one is due every 8 ms."""
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    slow = SlowToAsk(truth=tmp_path / "truth.jsonl")
    requests = tuple(request(i, max_tokens=2, gap_ms=1, arrival_ns=i * 8 * NS_PER_MS) for i in range(140))
    context = RunContext(
        profile=profile(arrival={"kind": "constant", "request_rate": 125.0}), requests=requests, engine=slow
    )
    record = measure_run(context, planned(), directory)
    assert record.state == "suspect"
    assert "sends-delayed" in codes(record.warnings)


class SlowToAsk(PacedEngine):
    """An engine whose requests take long to write."""

    def request_call(self, request, settings) -> Call:
        time.sleep(0.015)
        return super().request_call(request, settings)
