"""A server under load that dies, hangs or ends its answers early: the run fails, in time, and says with what."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest
from support.servers.paced_engine import planned, profile, request
from support.servers.stubborn_engine import CORE, StubbornEngine, processes_of
from support.waiting import wait_until

from benchctl.load.tally import Activity
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.health import silence_ns
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.units import NS_PER_MS


def measure(tmp_path, *flags, requests=None, meanwhile=None, **changes):
    """Measure long streams on a stubborn server while ``meanwhile`` gets its processes; the run as on disk."""
    directory = RunDirectory(tmp_path / "run")
    asked = requests or [request(i, max_tokens=400, gap_ms=20) for i in range(4)]
    engine = StubbornEngine(truth=tmp_path / "truth.jsonl", flags=flags)
    context = RunContext(profile=profile(**changes), requests=tuple(asked), engine=engine)
    if meanwhile is not None:
        threading.Thread(target=_when_tokens_flow, args=(tmp_path, meanwhile), daemon=True).start()
    measure_run(context, planned(), directory)
    return load_run(directory)


def _when_tokens_flow(tmp_path, meanwhile):
    raw = tmp_path / "run" / "steps.raw.jsonl"
    wait_until("a token", lambda: raw.exists() and raw.stat().st_size)
    time.sleep(0.3)
    meanwhile(*family(tmp_path))


def family(tmp_path):
    """The first process of the server that writes into ``tmp_path``, and its engine process where it has one."""
    (leader,) = [process for process in processes_of(str(tmp_path)) if process.parent().ppid() == os.getpid()]
    return leader, next((child for child in leader.children() if CORE in child.cmdline()), None)


@pytest.mark.parametrize(("habit", "number"), [("leave", signal.SIGTERM), ("stay", signal.SIGKILL)])
def test_an_engine_process_that_is_ended_under_load_fails_the_run_although_the_front_end_says_zero(
    tmp_path, habit, number
):
    killed = []

    def kill_core(_leader, core):
        core.send_signal(number)
        killed.append(time.monotonic_ns())

    run = measure(tmp_path, "--core", habit, meanwhile=kill_core).record
    assert (run.state, run.failure.cause) == ("failed", "server-died")
    assert f"({CORE}) of the server has gone" in run.failure.message
    assert ("and the server ended with exit code 0 in mid-run" in run.failure.message) == (habit == "leave")
    assert "engine core died" in run.failure.log_tail
    assert run.times.stop_ns - killed[0] < 5000 * NS_PER_MS


def test_a_front_end_that_is_asked_to_end_fails_the_run_that_had_more_to_send(tmp_path):
    asked = [request(i, max_tokens=60, gap_ms=20) for i in range(6)]
    for flags, message in (((), "in mid-run"), (("--drain",), "the server ended with exit code 0 in mid-run")):
        path = tmp_path / str(len(flags))
        path.mkdir()
        run = measure(path, *flags, requests=asked, meanwhile=lambda leader, _: leader.terminate()).record
        assert (run.state, message in run.failure.message) == ("failed", True)


def test_an_engine_process_that_has_gone_between_load_and_stop_fails_the_run(tmp_path):
    class Killing(StubbornEngine):
        async def after_load_warnings(self, client):
            family(tmp_path)[1].kill()
            await asyncio.sleep(0.2)
            return ()

    directory = RunDirectory(tmp_path / "run")
    engine = Killing(truth=tmp_path / "truth.jsonl", flags=("--core", "stay"))
    asked = tuple(request(i, max_tokens=60, gap_ms=20) for i in range(2))
    measure_run(RunContext(profile=profile(), requests=asked, engine=engine), planned(), directory)
    run = directory.read()
    assert run.state == "failed"
    assert f"({CORE}) of the server has gone in mid-run" in run.failure.message


@pytest.mark.parametrize("phase", ["first generation", "warm-up", "load"])
def test_a_server_that_hangs_fails_the_run_in_each_phase_and_says_what_is_known(tmp_path, phase):
    stalling = [request(0, max_tokens=4, mode="stall")]
    if phase == "load":
        stalling.append(request(1, max_tokens=4, mode="stall"))
    engine = StubbornEngine(truth=tmp_path / "t", needs_first_generation=phase == "first generation", flags=())
    if phase != "load":
        engine = ReWorded(truth=tmp_path / "t", needs_first_generation=phase == "first generation")
    directory = RunDirectory(tmp_path / "run")
    settings = profile(timeouts={"stall_s": 0.6}, workload={"num_warmups": 0 if phase == "load" else 1})
    context = RunContext(profile=settings, requests=tuple(stalling), engine=engine)
    run = measure_run(context, planned(), directory)
    assert (run.state, run.failure.cause) == ("failed", "hung")
    assert "the server hangs: nothing has arrived for" in run.failure.message
    count = "2 requests are" if phase == "load" else "1 request is"
    assert f"{count} open, the oldest for" in run.failure.message
    assert "paced server listening" in run.failure.log_tail
    kept = load_run(directory).requests
    assert {record.error.kind for record in kept} == {"cancelled"}


class ReWorded(StubbornEngine):
    """Warm-up requests have words before their prompt, which the paced server would not read."""

    def request_call(self, asked, settings):
        call = super().request_call(asked, settings)
        return replace(call, body=call.body.replace(b"(warm-up 0) ", b""))


def test_a_server_that_is_stopped_by_a_signal_hangs_and_is_ended_all_the_same(tmp_path):
    run = measure(
        tmp_path,
        meanwhile=lambda leader, _: leader.suspend(),
        timeouts={"stall_s": 0.6, "stop_s": 0.3},
    ).record
    assert run.failure.cause == "hung"
    assert "is stopped)" in run.failure.message
    assert processes_of(str(tmp_path)) == []
    assert "server-survivor" not in {warning.code for warning in run.warnings}


def test_a_server_without_a_file_for_another_connection_does_not_count_as_hanging(tmp_path):
    def use_up_files(leader, _):
        number = leader.num_fds()
        leader.rlimit(psutil.RLIMIT_NOFILE, (number, number))
        leader.suspend()

    run = measure(tmp_path, meanwhile=use_up_files, timeouts={"stall_s": 0.6, "stop_s": 0.3}).record
    assert run.failure.cause == "too-many-open-files"
    assert "of the server has all" in run.failure.message
    assert "raise the limit (ulimit -n), or lower max_concurrency" in run.failure.message


def test_silence_counts_from_the_last_byte_or_from_the_oldest_open_request():
    assert silence_ns(Activity(num_open=0, last_arrival_ns=5), 100) == 0
    assert silence_ns(Activity(num_open=1, oldest_sent_ns=40), 100) == 60
    assert silence_ns(Activity(num_open=2, oldest_sent_ns=30, last_arrival_ns=70), 100) == 30
    nobody_waited_before = Activity(num_open=1, oldest_sent_ns=90, last_arrival_ns=20)
    assert silence_ns(nobody_waited_before, 100) == 10
