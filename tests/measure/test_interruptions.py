"""What reaches a run from outside: signals, refusals of the operating system, and a wall clock that is set."""

import asyncio
import errno
import fcntl
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest import mock

import pytest
from support.cli import started
from support.results.builders import edit_run, run_ids, write_results
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.servers.stubborn_engine import processes_of
from support.set_clock import SetClock, needs_compiler
from support.steps import records_of
from support.waiting import wait_until

from benchctl.errors import RunError, UsageError, as_usage_error, system_failure
from benchctl.measure.interrupt import OF_SCHEDULERS, await_signal, interruptible, run_interruptible
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.health import limit_in_log, start_refusal
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.files import read_document
from benchctl.records.loaded import load_results, load_run
from benchctl.records.writers import current_manifest, is_held, sole_writer
from benchctl.report.export import list_directories


def signalled(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "written", "flags", "num_sent"),
    [
        (signal.SIGINT, "steps.raw.jsonl", (), 2),
        (signal.SIGTERM, "server.raw.log", ("--start-delay-s", "30"), 0),
    ],
)
def test_an_interrupt_in_mid_run_or_while_the_server_starts_leaves_records_and_no_process(
    tmp_path, number, written, flags, num_sent
):
    directory, file = RunDirectory(tmp_path / "run"), tmp_path / "run" / written

    def interrupt():
        wait_until(written, lambda: file.exists() and file.stat().st_size)
        signalled(number)

    requests = tuple(request(i, max_tokens=400, gap_ms=50) for i in range(4))
    engine = PacedEngine(truth=tmp_path / "truth.jsonl", flags=("--with-worker", *flags))
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        measure_run(
            RunContext(profile=profile(), requests=RequestSets.single(requests), engine=engine),
            planned(),
            directory,
        )
    assert processes_of(str(tmp_path)) == []
    loaded = load_run(directory)
    run = loaded.record
    assert (run.state, run.failure.cause, run.num_sent, run.num_failed) == (
        "failed", "interrupted", num_sent, num_sent
    )  # fmt: skip
    assert [record.error.kind for record in loaded.requests] == ["cancelled"] * num_sent
    assert bool(records_of(loaded)) == bool(num_sent)
    assert run.times.stop_ns is not None


def test_an_interrupt_before_the_verdict_is_recorded_and_one_after_it_leaves_it(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for state, cause in (("failed", "interrupted"), ("done", None)):
            directory = RunDirectory(tmp_path / number.name / state)
            run = MeasuredRun(profile(), planned(), directory)
            with suppress(KeyboardInterrupt), run.begun():
                if state == "done":
                    run.close(state)
                signalled(number)
            record = directory.read()
            assert (record.state, record.failure and record.failure.cause) == (state, cause)


def test_signals_that_follow_the_first_do_not_cut_short_the_cleaning_up():
    cleaned = []

    async def work(number):
        try:
            await until_signalled(number)
        finally:
            for _ in range(3):
                signalled(number)
                await asyncio.sleep(0.01)
            cleaned.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work(number))
        assert cleaned.pop() == number


def test_a_signal_at_the_very_end_is_told_after_the_loop_has_closed_and_what_fails_after_it_fails_by_it():
    async def ends():
        asyncio.get_running_loop().call_soon(signalled, signal.SIGTERM)

    async def fails():
        """A job system signals a server, too: its end is not the news then."""
        try:
            await until_signalled(signal.SIGTERM)
        finally:
            raise RunError("the server died")

    for work in (ends, fails):
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work())


async def until_signalled(number):
    signalled(number)
    await asyncio.sleep(10)


def test_only_the_first_signal_interrupts_the_code_around_a_coroutine_also_where_it_ended_that():
    for ended_by in (signalled, lambda number: run_interruptible(until_signalled(number))):
        with interruptible():
            with pytest.raises(KeyboardInterrupt):
                ended_by(signal.SIGTERM)
            signalled(signal.SIGTERM)


def test_a_signal_that_is_ignored_stays_ignored():
    async def work():
        signalled(signal.SIGHUP)
        await asyncio.sleep(0.01)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_interruptible(work()) == "done"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with ThreadPoolExecutor() as threads:  # outside the main thread there are no signals
            assert threads.submit(lambda: run_interruptible(work())).result() == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_task_is_ended_by_the_signals_of_schedulers_for_which_a_failure_waits_and_other_code_is_not():
    before = signal.getsignal(signal.SIGUSR2)
    with interruptible(OF_SCHEDULERS):
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(until_signalled(signal.SIGUSR2))
        signalled(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR2) == before
    await_signal()
    with interruptible(OF_SCHEDULERS):
        threading.Timer(0.2, signalled, (signal.SIGUSR1,)).start()
        with pytest.raises(KeyboardInterrupt):
            await_signal()


REFUSALS = [
    (errno.EMFILE, "too-many-open-files", "ulimit -n 65536"),
    (errno.ENFILE, "too-many-open-files", "fs.file-max"),
    (errno.ENOMEM, "out-of-memory", "memory"),
    (errno.EAGAIN, "too-many-processes", "ulimit -u"),
    (errno.ENOSPC, "disk-full", "free space there"),
    (errno.EDQUOT, "disk-quota", "free space within the quota"),
    (errno.EFBIG, "file-too-large", "ulimit -f unlimited"),
    (errno.EROFS, "read-only", "make it writable"),
    (errno.EACCES, "no-permission", "correct the permissions"),
    (errno.EPERM, "no-permission", "correct the permissions"),
    (errno.EIO, "disk-error", "dmesg"),
    (errno.ENAMETOOLONG, "name-too-long", "shorter name"),
]


def ended_by(path, error):
    """The error with which a run ends in which ``error`` is raised, and its record on disk."""
    directory = RunDirectory(path / "runs" / "r")
    run = MeasuredRun(profile(), planned(), directory)
    with pytest.raises(RunError) as caught, run.begun():
        raise error
    return caught.value, directory.read()


def test_each_refusal_has_its_cause_on_record_and_its_remedy(tmp_path):
    for number, cause, remedy in REFUSALS:
        error = OSError(number, os.strerror(number), "file.json")
        raised, record = ended_by(tmp_path / str(number), error)
        assert (raised.exit_code, raised.cause, record.state, record.failure.cause) == (5, cause, "failed", cause)
        assert str(raised).startswith("file.json: ")
        assert remedy in str(raised)
        assert str(raised).endswith(", then continue with --resume; what was measured is kept")
        assert "kept" not in str(as_usage_error(error, "file.json"))


def test_a_refusal_in_the_words_of_python_is_recognised_and_other_errors_are_none(tmp_path):
    for number, (error, cause) in enumerate(
        (
            (MemoryError(), "out-of-memory"),
            (RuntimeError("can't start new thread"), "too-many-processes"),
            (ImportError("x.so: failed to map segment from shared object"), "out-of-memory"),
            (ImportError("x.so: cannot open shared object file: Too many open files"), "too-many-open-files"),
            (OSError("words of a library"), "system-error"),
        )
    ):
        assert ended_by(tmp_path / str(number), error)[1].failure.cause == cause
    for error in (
        KeyError("x"),
        RuntimeError("other"),
        ImportError("No module"),
        BlockingIOError(11, "a full pipe"),
    ):
        assert system_failure(error) is None


def test_a_remedy_for_a_place_that_cannot_be_written_to_is_none_for_full_disks_and_limits_nor_is_a_file_damaged(
    tmp_path, monkeypatch
):
    for number, advice in (
        (errno.ENOSPC, "free space there, or name another directory"),
        (
            errno.EMFILE,
            "raise the limit: ulimit -n 65536, in a container --ulimit nofile=65536, or lower max_concurr",
        ),
        (errno.EROFS, "copy it"),
    ):
        assert f"; {advice}" in str(as_usage_error(OSError(number, os.strerror(number)), "r", remedy="copy it"))
    (tmp_path / "manifest.json").write_text("{}")
    full = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr("benchctl.untrusted.files.os.open", full)
    with pytest.raises(OSError, match="Too many open files"):
        read_document(tmp_path / "manifest.json", within=tmp_path)


def test_the_log_of_a_server_names_a_limit_and_a_program_that_is_missing_is_to_be_installed():
    assert limit_in_log("OSError: [Errno 24] Too many open files\n").cause == "too-many-open-files"
    assert limit_in_log("MemoryError\nOSError: [Errno 28] No space left on device\n").cause == "disk-full"
    assert limit_in_log("KeyError: 'x'\n") is None
    missing = start_refusal("vllm", FileNotFoundError(2, "No such file or directory", "vllm"))
    lacking = start_refusal("vllm", OSError(24, "Too many open files"))
    assert (missing.cause, lacking.cause) == ("cannot-start", "too-many-open-files")
    assert ["install the engine" in str(error) for error in (missing, lacking)] == [True, False]


def test_results_of_a_process_that_is_gone_are_shown_as_interrupted_and_those_of_a_living_one_as_running(tmp_path):
    results = write_results(tmp_path / "r", state="running")
    edit_run(results, run_ids(results)[-1], state="running")
    assert list_directories(tmp_path)[0]["state"] == "interrupted"
    loaded = load_results(results.path)
    assert (loaded.manifest.state, loaded.runs[-1].record.failure.cause) == ("interrupted", "interrupted")
    with sole_writer(results.path):
        assert is_held(results.path)
        assert list_directories(tmp_path)[0]["state"] == "running"
        assert load_results(results.path).runs[-1].record.state == "running"
    assert (results.manifest().state, current_manifest(results).state) == ("running", "interrupted")


def test_a_reader_that_looks_does_not_keep_a_writer_out_and_another_writer_does(tmp_path):
    """A look holds the lock for a moment, and the writer tries again."""
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, (handle,)).start()
    with sole_writer(tmp_path), pytest.raises(UsageError, match="another benchctl is measuring"):
        sole_writer(tmp_path).__enter__()


@pytest.mark.slow
@needs_compiler
def test_a_wall_clock_that_is_set_in_mid_run_changes_no_duration_and_is_told_with_its_size(tmp_path, monkeypatch):
    clock, out = SetClock(tmp_path), tmp_path / "out"
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    workload = ("workload.num_prompts=12", "workload.output_len=100", "workload.samples_per_prompt=1")
    one_arm = ("engine.options.time_scale=1", "variants.again=null", "workload.arrival.max_concurrency=3")
    changes = [word for each in (*one_arm, *workload) for word in ("--set", each)]
    with started("run", "aa", "--blocks", "1", "-o", "out", *changes, cwd=tmp_path) as process:
        wait_until("a load", lambda: any(path.stat().st_size for path in out.glob("runs/000*/client.jsonl")))
        for shift_s in (3600.0, 0.0):
            time.sleep(0.6)
            clock.set_by(shift_s)
        assert process.wait(120) == 0
    run = load_results(out).runs[0]
    sent = [each for each in run.requests if not each.is_warmup]
    for each in sent:
        (choice,) = each.choices
        times = [each.sent_ns, *choice.chunk_ns, each.done_ns]
        assert times == sorted(times)
        assert times[-1] - times[0] < 20e9, "an hour went into no duration"
        assert each.stamps == "loop" or len(choice.chunk_ns) == 100
    assert {each.stamps for each in sent[-4:]} == {"loop"}, (
        "the kernel's times are not used again in a load in which the clock was set"
    )
    assert run.record.times.stop_ns - run.record.times.launch_ns < 120e9
    assert all(0 <= sample.t_ns - run.host[0].t_ns < 120e9 for sample in run.host)
    (message,) = (warning.message for warning in run.warnings if warning.code == "wall-clock-set")
    assert re.search(r"set 2 times during the load \(by \+3,600 s after .*, by -3,600 s after ", message)
