"""Servers that die, hang or are killed, alone or with benchctl: the run fails and says why, and nothing stays."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from support.cli import in_process, only_result
from support.servers.paced_engine import planned, profile, request, up
from support.servers.stubborn_engine import CORE, StubbornEngine, launch, processes_of
from support.waiting import wait_until

from benchctl.cli import conduct
from benchctl.errors import ServerDiedError
from benchctl.load.exchange import Activity
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.health import silence_ns
from benchctl.measure.server.process import Supervised, descendants, is_alive
from benchctl.measure.server.server import ServerProcess
from benchctl.measure.server.supervise import Launched
from benchctl.records.directory import RequestSets, RunDirectory, open_results
from benchctl.records.loaded import load_run

SHARED = Path("/dev/shm")


def measure(tmp_path, *flags, requests=None, engine=StubbornEngine, meanwhile=None, **changes):
    """Measure long streams on a stubborn server while ``meanwhile`` gets its processes; the run as on disk."""
    directory = RunDirectory(tmp_path / "run")
    asked = requests or [request(i, max_tokens=400, gap_ms=20) for i in range(4)]
    stubborn = engine(truth=tmp_path / "truth.jsonl", flags=flags)
    context = RunContext(profile=profile(**changes), requests=RequestSets.single(asked), engine=stubborn)
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
    run = measure(tmp_path, "--core", habit, meanwhile=lambda _, core: core.send_signal(number)).record
    assert (run.state, run.failure.cause) == ("failed", "server-died")
    assert f"({CORE}) of the server has gone" in run.failure.message
    assert ("and the server ended with exit code 0 in mid-run" in run.failure.message) == (habit == "leave")
    assert "engine core died" in run.failure.log_tail


def test_a_front_end_that_is_asked_to_end_fails_the_run_that_had_more_to_send(tmp_path):
    asked = [request(i, max_tokens=60, gap_ms=20) for i in range(6)]
    for flags, message in (((), "in mid-run"), (("--drain",), "the server ended with exit code 0 in mid-run")):
        path = tmp_path / str(len(flags))
        path.mkdir()
        run = measure(path, *flags, requests=asked, meanwhile=lambda leader, _: leader.terminate()).record
        assert (run.state, message in run.failure.message) == ("failed", True)


class Killing(StubbornEngine):
    """An engine whose server loses its engine process between load and stop."""

    async def after_load_warnings(self, client):
        family(self.truth.parent)[1].kill()
        await asyncio.sleep(0.2)
        return ()


class ReWorded(StubbornEngine):
    """Warm-up requests have words before their prompt, which the paced server would not read."""

    def request_call(self, asked, settings):
        call = super().request_call(asked, settings)
        return msgspec.structs.replace(call, body=call.body.replace(b"(warm-up 0) ", b""))


def test_an_engine_process_that_has_gone_between_load_and_stop_fails_the_run(tmp_path):
    asked = [request(i, max_tokens=60, gap_ms=20) for i in range(2)]
    run = measure(tmp_path, "--core", "stay", requests=asked, engine=Killing).record
    assert (run.state, f"({CORE}) of the server has gone in mid-run" in run.failure.message) == ("failed", True)


@pytest.mark.parametrize("phase", ["first generation", "warm-up", "load"])
def test_a_server_that_hangs_fails_the_run_in_each_phase_and_says_what_is_known(tmp_path, phase):
    num_requests, num_warmups = (2, 0) if phase == "load" else (1, 1)
    loaded = measure(
        tmp_path,
        requests=[request(i, max_tokens=4, mode="stall") for i in range(num_requests)],
        engine=partial(ReWorded, needs_first_generation=phase == "first generation"),
        timeouts={"stall_s": 0.6},
        workload={"num_warmups": num_warmups},
    )
    failure = loaded.record.failure
    assert (loaded.record.state, failure.cause) == ("failed", "hung")
    count = "2 requests are" if phase == "load" else "1 request is"
    for text in ("the server hangs: nothing has arrived for", f"{count} open, the oldest for"):
        assert text in failure.message
    assert "paced server listening" in failure.log_tail
    assert {record.error.kind for record in loaded.requests} == {"cancelled"}


def use_up_files(leader, _core):
    number = leader.num_fds()
    leader.rlimit(psutil.RLIMIT_NOFILE, (number, number))
    leader.suspend()


def test_a_server_that_is_stopped_hangs_and_is_ended_all_the_same_and_one_without_a_file_more_does_not(tmp_path):
    for meanwhile, cause, text in (
        (lambda leader, _: leader.suspend(), "hung", "is stopped)"),
        (use_up_files, "too-many-open-files", "raise the limit (ulimit -n), or lower max_concurrency"),
    ):
        path = tmp_path / cause
        path.mkdir()
        run = measure(path, meanwhile=meanwhile, timeouts={"stall_s": 0.6, "stop_s": 0.3}).record
        assert (run.failure.cause, text in run.failure.message) == (cause, True)
        assert processes_of(str(path)) == []
        assert "server-survivor" not in {warning.code for warning in run.warnings}


def test_silence_counts_from_the_last_byte_or_from_the_oldest_open_request():
    for activity, expected_ns in (
        (Activity(num_open=0, last_arrival_ns=5), 0),
        (Activity(num_open=1, oldest_sent_ns=40), 60),
        (Activity(num_open=2, oldest_sent_ns=30, last_arrival_ns=70), 30),
        (Activity(num_open=1, oldest_sent_ns=90, last_arrival_ns=20), 10),  # nobody waited before
    ):
        assert silence_ns(activity, 100) == expected_ns


class Truncating(StubbornEngine):
    """The second request of a load gets an answer that is cut."""

    def request_call(self, asked, settings):
        how = '{"mode": "truncate"}' if asked.index == 1 and not asked.request_id.startswith("warmup") else "{}"
        return super().request_call(msgspec.structs.replace(asked, prompt=how), settings)


@pytest.fixture(name="run")
def _run(tmp_path, monkeypatch, without_pictures):
    """Runs a small experiment on a stubborn server with these flags; exit code and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conduct, "_REPORT_INTERVAL_S", 0.5)
    small = ("--set", "workload.num_prompts=3", "--set", "workload.output_len=4")

    def run(*flags, variants=("guided",), engine=Truncating, words=("--profile", "ci-smoke", *small)):
        flags_of = dict.fromkeys(variants, flags)
        stubborn = engine(truth=tmp_path / "truth.jsonl", flags_of=flags_of)
        monkeypatch.setattr("benchctl.engines.engine.load_name", lambda _: lambda: stubborn)
        code, _, messages = in_process("run", "--quiet", *words)
        return code, messages

    return run


def records_of(cwd, variant):
    results = open_results(only_result(cwd))
    return [run.read() for run in results.begun_runs(results.plan()) if variant in run.path.name]


def test_a_fault_of_the_profile_stops_the_experiment_with_a_sentence_and_the_log(tmp_path, run):
    code, messages = run("--die-saying", "error: unrecognized arguments: --frob")
    assert code == 2, messages
    quoted = "the server's log ends:\n  | paced server starting\n  | error: unrecognized arguments: --frob"
    for text in ("(bad-flag); correct the flag", quoted):
        assert text in messages
    assert "Traceback" not in messages
    refused = [run.failure.cause for run in records_of(tmp_path, "guided") if run.failure is not None]
    assert refused == ["bad-flag"]


def test_a_server_that_fails_otherwise_fails_its_run_shows_its_log_and_the_experiment_goes_on(tmp_path, run):
    code, messages = run("--start-delay-s", "1.2", "--die-saying", "Segmentation fault in kernel 7")
    assert code == 5, messages
    assert re.search(r"the server has been starting for \d+ s: paced server starting\n", messages)
    assert messages.count("  | Segmentation fault in kernel 7") == 1
    assert "; its log ends as that of 00" in messages
    assert [run.failure.cause for run in records_of(tmp_path, "guided")] == ["server-died"] * 2
    assert [run.num_sent for run in records_of(tmp_path, "baseline")] == [3, 3]


def test_an_experiment_ends_after_a_block_in_which_every_server_died_and_says_why_first(tmp_path, run):
    code, messages = run("--die-saying", "ValueError: no such model", variants=("baseline", "guided"))
    assert code == 5, messages
    results = only_result(tmp_path)
    reason = "server-died: ValueError: no such model"
    assert f"2 runs failed, and 2 runs of other blocks were not tried: {reason}" in messages
    assert len(records_of(tmp_path, "")) == 2
    assert json.loads((results / "summary.json").read_text())["verdict"] == "invalid"
    assert f"every run failed: {reason}" in (results / "report.html").read_text()
    run(words=("--resume", results))
    assert len(records_of(tmp_path, "")) == 4


def test_an_arm_that_runs_out_of_memory_is_not_tried_again_until_a_resume(tmp_path, run):
    assert run("--die-saying", "CUDA out of memory")[0] == 5
    first, second = records_of(tmp_path, "guided")
    assert [(each.state, each.failure.cause) for each in (first, second)] == [
        ("failed", "out-of-memory"), ("failed", "infeasible")
    ]  # fmt: skip
    assert f"not tried, because {first.run_id} ran out of memory" in second.failure.message
    assert second.times.launch_ns is None
    run(words=("--resume", only_result(tmp_path)))
    assert [(each.num_sent, each.attempt) for each in records_of(tmp_path, "guided")] == [(3, 2)] * 2


def test_suspect_runs_are_an_invalid_measurement(tmp_path, run):
    code, messages = run()
    assert code == 4, messages
    assert "runs are suspect (failed-requests in " in messages
    assert re.search(r"000-b0-\w+: suspect in [\d.]+ s; failed-requests\b.*\n", messages)
    assert "): their results are not reliable; see Notes" in messages
    assert {run.state for run in records_of(tmp_path, "baseline")} == {"suspect"}


def reap_orphans():
    """Take leave of what was handed to us, as the process that started the servers before, and has ended."""
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, 0)


def runaway_of(log):
    said = re.search(r"runaway (\d+)\n", log.read_text())  # perhaps within a line of its server
    return psutil.Process(int(said[1])) if said else None


@pytest.mark.parametrize("leader_dies", [False, True])
def test_descendants_and_shared_memory_go_with_a_server_that_ends_or_is_killed_and_those_of_others_stay(
    tmp_path, leader_dies
):
    name, others = f"psm_{os.getpid()}_{tmp_path.name}", SHARED / f"psm_other_{os.getpid()}_{tmp_path.name}"
    how = launch(tmp_path, "--runaway", "--with-worker", "--ignore-term", "--segment", name, stop_s=0.3)
    try:
        with up(how) as server:
            runaway = wait_until("a runaway", lambda: runaway_of(how.raw_log))
            leader, members = psutil.Process(server.pid), server.processes()
            assert len(members) == 3
            assert os.getsid(runaway.pid) != leader.pid
            assert runaway not in leader.children(recursive=True)
            others.write_bytes(b"not a server's")
            assert (SHARED / name).exists()
            if leader_dies:
                leader.kill()
        assert not any(is_alive(member) for member in (*members, runaway))
        assert ((SHARED / name).exists(), others.exists()) == (False, True)
        assert server.warnings == ()
    finally:
        others.unlink(missing_ok=True)
        (SHARED / name).unlink(missing_ok=True)


def test_a_runaway_of_a_server_that_dies_at_once_is_ended_although_nobody_saw_it_leave(tmp_path):
    how = launch(tmp_path, "--runaway", "--die-saying", "farewell")
    with ServerProcess(how) as server:
        runaway = wait_until("a runaway", lambda: runaway_of(how.raw_log))
        asyncio.run(asyncio.wait_for(server.died(), 60))
        assert is_alive(runaway)
    assert not is_alive(runaway)


SECRET = "opensesame-4711-opensesame"
LATE_LEAVER = "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os.setsid()); "
LATE_LEAVER += f"print(os.getpid(), '{SECRET}', flush=True); time.sleep(300)"
ITS_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LATE_LEAVER!r}])"


def test_who_leaves_the_session_after_it_was_seen_is_ended_with_a_benchctl_that_is_killed_and_the_log_is_redacted(
    tmp_path,
):
    raw, log = tmp_path / "server.raw.log", tmp_path / "server.log"
    argv, sent = (sys.executable, "-c", ITS_PARENT), {"TEAM_KEY": SECRET}
    server = Supervised(Launched(argv=argv, env=dict(os.environ), raw_log=str(raw), log=str(log), sent=sent))
    leaver = psutil.Process(int(wait_until("the leaver", lambda: raw.read_text().split())[0]))
    assert leaver in descendants(server.supervisor_pid)
    leaver.send_signal(signal.SIGUSR1)
    wait_until("a session of its own", lambda: os.getsid(leaver.pid) == leaver.pid)
    psutil.Process(server.pid).kill()
    server._supervisor.stdin.close()  # as the kernel does when we are killed
    wait_until("its end", lambda: not is_alive(leaver))
    assert server._supervisor.wait(10) == 0
    server._supervisor.stdout.close()
    assert (raw.exists(), log.read_text()) == (False, f"{leaver.pid} [redacted: TEAM_KEY]\n")


def test_a_supervisor_that_is_killed_takes_the_server_along_and_the_log_is_written(tmp_path):
    how = launch(tmp_path)
    with up(how) as server:
        leader = psutil.Process(server.pid)
        psutil.Process(server._process.supervisor_pid).kill()
        asyncio.run(asyncio.wait_for(server.died(), 60))
        with pytest.raises(ServerDiedError, match="supervises the server was ended by SIGKILL in mid-run"):
            server.check_alive()
    assert not is_alive(leader)
    assert "paced server listening" in how.log.read_text()
    assert not how.raw_log.exists()


def test_two_servers_in_one_program_do_not_end_each_other(tmp_path):
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    with up(launch(directories[0])) as first:
        with up(launch(directories[1])):
            pass
        first.check_alive()
    assert first.warnings == ()


MEASURE = """
import sys, time
from pathlib import Path
from support.servers.paced_engine import up
from support.servers.stubborn_engine import launch

with up(launch(Path(sys.argv[1]), *sys.argv[2:])) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="reads the table of processes that only Linux has")
def test_a_benchctl_that_is_killed_takes_the_whole_family_of_its_server_along(tmp_path, is_stopped):
    here = str(Path(__file__).parents[2])
    script = f"import sys; sys.path.insert(0, {here!r})\n{MEASURE}"
    name = f"psm_guarded_{os.getpid()}_{tmp_path.name}"
    flags = ["--core", "stay", "--runaway", "--ignore-term", "--segment", name]
    benchctl = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), *flags], stdout=subprocess.PIPE)
    try:
        leader = psutil.Process(int(benchctl.stdout.readline()))
        family = [leader, *leader.children(recursive=True), runaway_of(tmp_path / "server.raw.log")]
        assert len(family) == 3
        assert any(CORE in process.cmdline() for process in family)
        (supervisor,) = psutil.Process(benchctl.pid).children()
        if is_stopped:
            leader.send_signal(signal.SIGSTOP)
        benchctl.kill()
        gone = lambda: not any(is_alive(process) for process in [*family, supervisor])  # noqa: E731
        wait_until("the end of all", gone, 5)
        wait_until("the end of shared memory", lambda: not (SHARED / name).exists(), 5)
    finally:
        benchctl.kill()
        benchctl.communicate()
        reap_orphans()
        (SHARED / name).unlink(missing_ok=True)
