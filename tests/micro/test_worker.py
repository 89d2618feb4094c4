"""The worker as a process: it measures, reports failures one by one, and leaves nothing behind."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import stat
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from benchctl.costs.model_shape import ModelShape
from benchctl.errors import EngineUnavailableError, RunError, UsageError
from benchctl.micro.worker import WorkerSettings, started_worker
from benchctl.profile.choices import ForwardPoint

TINY = ModelShape(name="tiny", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128)
DECODE = ForwardPoint(phase="decode", batch_size=3, context_tokens=20)


@pytest.fixture(scope="module")
def settings(torch_python):
    return WorkerSettings(python=str(torch_python), shape=TINY, threads=1)


@pytest.fixture(scope="module")
def worker(settings):
    with started_worker(settings) as worker:
        yield worker


def test_a_worker_describes_itself(worker, torch_python):
    info = worker.info
    assert info.device == "cpu"
    assert info.num_threads == 1
    assert 0 < info.free_bytes <= info.total_bytes
    assert Path(info.python).samefile(torch_python)
    assert info.cpu_capability
    assert info.device_uuid is None


@pytest.mark.parametrize(
    "point",
    [DECODE, ForwardPoint(phase="prefill", batch_size=2, new_tokens=5, context_tokens=3)],
    ids=["decode", "prefill"],
)
def test_every_replay_has_a_start_and_a_duration_on_one_clock(worker, point):
    before_ns = time.monotonic_ns()
    times = worker.measure(point, "eager", warmups=2, replays=25)
    after_ns = time.monotonic_ns()
    assert times.clock == "host"
    assert len(times.start_ns) == len(times.duration_ns) == 25
    assert min(times.duration_ns) > 0
    assert list(times.start_ns) == sorted(times.start_ns)
    assert before_ns < times.start_ns[0]
    assert times.start_ns[-1] + times.duration_ns[-1] < after_ns
    assert sum(times.duration_ns) <= times.wall_ns < after_ns - before_ns
    assert times.num_allocations == 0


def test_a_failure_is_one_message_and_the_worker_goes_on(worker):
    with pytest.raises(UsageError, match="mode graph needs a CUDA device, and this worker runs on cpu"):
        worker.measure(DECODE, "graph", warmups=1, replays=1)
    huge = ForwardPoint(phase="decode", batch_size=1_000_000, context_tokens=1_000_000)
    with pytest.raises(UsageError, match=r"memory ran out \(.*can't allocate memory.*\)") as caught:
        worker.measure(huge, "eager", warmups=1, replays=1)
    assert caught.value.exit_code == 2
    assert "choose a smaller batch size" in str(caught.value)
    with pytest.raises(RunError, match="unexpected keyword argument") as caught:
        worker.ask(point=DECODE, tempo=1)
    assert "Traceback" in caught.value.log_tail
    assert worker.measure(DECODE, "eager", warmups=1, replays=2).duration_ns


def test_paged_and_contiguous_caches_and_each_dtype_are_measured(settings):
    for layout, dtype in (("paged", "bfloat16"), ("contiguous", "float16")):
        with started_worker(msgspec.structs.replace(settings, kv_layout=layout, dtype=dtype)) as worker:
            assert worker.measure(DECODE, "eager", warmups=1, replays=2).duration_ns


def test_a_worker_does_not_start_where_one_of_its_points_cannot_fit(settings):
    huge = ForwardPoint(phase="decode", batch_size=1_000_000, context_tokens=1_000_000)
    with (
        pytest.raises(UsageError, match=r"keys and values up to [\d.]+ GiB, and [\d.]+ GiB are free"),
        started_worker(msgspec.structs.replace(settings, points=(DECODE, huge))),
    ):
        pass


def test_nothing_is_left_of_a_worker_whether_it_ends_well_or_not(settings):
    process = None
    with contextlib.suppress(KeyboardInterrupt), started_worker(settings) as worker:
        process = psutil.Process(worker.pid)
        raise KeyboardInterrupt
    assert not process.is_running()


def test_the_death_of_a_worker_is_an_error_that_says_how_it_ended(settings):
    with started_worker(settings) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="was ended by SIGKILL") as caught:
            worker.measure(DECODE, "eager", warmups=1, replays=1)
        assert caught.value.cause == "worker-died"


def test_a_device_that_this_torch_does_not_see_is_refused(settings):
    with (
        pytest.raises(UsageError, match=r"device cuda:99: torch .* name another with --device") as caught,
        started_worker(msgspec.structs.replace(settings, device="cuda:99")),
    ):
        pass
    assert caught.value.exit_code == 2


def test_a_model_that_does_not_fit_is_refused_before_it_is_allocated(settings):
    vast = dataclasses.replace(TINY, name="vast", hidden=1 << 16, ffn=1 << 20, layers=100)
    with (
        pytest.raises(UsageError, match=r"the weights of 'vast' in float32 need [\d.]+ GiB, .* are free"),
        started_worker(msgspec.structs.replace(settings, shape=vast)),
    ):
        pass


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="benchctl's own interpreter has torch here"
)
def test_an_interpreter_without_torch_is_named_with_the_remedy():
    with (
        pytest.raises(
            EngineUnavailableError, match=r"cannot import torch .*pip install .torch.*--python"
        ) as caught,
        started_worker(WorkerSettings(python=sys.executable, shape=TINY)),
    ):
        pass
    assert sys.executable in str(caught.value)


def program(directory, text):
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_interpreter_that_does_not_exist_is_named(tmp_path):
    with (
        pytest.raises(EngineUnavailableError, match=r"python cannot be started: .* name an interpreter"),
        started_worker(WorkerSettings(python=str(tmp_path / "python"))),
    ):
        pass


def test_a_program_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path):
    python = program(tmp_path, "echo 'libcuda is broken' >&2; exit 3")
    with (
        pytest.raises(RunError, match="ended with exit code 3; the end of its log says more: libcuda is broken"),
        started_worker(WorkerSettings(python=str(python))),
    ):
        pass


def test_a_program_that_is_no_interpreter_is_named_with_what_it_says(tmp_path):
    python = program(tmp_path, "echo hello")
    with (
        pytest.raises(EngineUnavailableError, match=r"answers b'hello', which no worker says; name a Python"),
        started_worker(WorkerSettings(python=str(python))),
    ):
        pass


def test_a_program_that_does_not_answer_is_an_error_and_is_ended(tmp_path):
    python = program(tmp_path, f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    with (
        pytest.raises(RunError, match="has not answered for 1 s") as caught,
        started_worker(WorkerSettings(python=str(python), start_limit_s=1.0)),
    ):
        pass
    assert caught.value.cause == "stuck"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_what_the_environment_adds_to_this_interpreter_does_not_reach_the_worker(
    torch_python, monkeypatch, tmp_path
):
    (tmp_path / "json.py").write_text("raise RuntimeError('of another interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started_worker(WorkerSettings(python=str(torch_python))) as worker:
        assert worker.info.torch_version
