"""The worker as a process and its interpreter: it measures, reports failures, and leaves nothing behind."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from benchctl.costs.model_shape import ModelShape
from benchctl.errors import EngineUnavailableError, RunError, UsageError
from benchctl.micro import worker as worker_module
from benchctl.micro.worker import WorkerSettings, find_torch_python, started_worker
from benchctl.profile.choices import ForwardPoint


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Adds the interpreter of an engine whose torch has the given version; our own interpreter has none."""
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path))
    own = sys.executable
    asked = worker_module.installed_versions
    monkeypatch.setattr(worker_module, "installed_versions", lambda p, n: {} if str(p) == own else asked(p, n))

    def add(kind, version):
        python = tmp_path / kind / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho '{json.dumps({'versions': {'torch': version} if version else {}})}'\n")
        python.chmod(0o755)
        return python

    return add


def test_our_own_interpreter_comes_first_then_engines_whose_torch_was_built_for_a_gpu(engines, monkeypatch):
    engines("sglang", None)
    with pytest.raises(EngineUnavailableError, match=r"benchctl engines install transformers.*--python"):
        find_torch_python(None)
    of_cpu = engines("a", "2.13.0+cpu")
    assert find_torch_python(None) == of_cpu
    of_gpu = engines("b", "2.13.0+cu130")
    engines("c", "2.13.0")
    assert find_torch_python(None) == of_gpu
    monkeypatch.setattr(worker_module, "installed_versions", lambda python, names: {"torch": "2.13.0"})
    assert find_torch_python(None) == Path(sys.executable)


def test_a_named_interpreter_is_the_one_or_an_error(engines, tmp_path):
    named = engines("mine", "2.9.0")
    assert find_torch_python(named) == named
    with pytest.raises(EngineUnavailableError, match=r"has no torch; run .* -m pip install"):
        find_torch_python(engines("bare", None))
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineUnavailableError, match="cannot be executed; name an interpreter"):
            find_torch_python(path)


TINY = ModelShape(name="tiny", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128)
DECODE = ForwardPoint(phase="decode", batch_size=3, context_tokens=20)
HUGE = ForwardPoint(phase="decode", batch_size=1_000_000, context_tokens=1_000_000)


@pytest.fixture(scope="module")
def settings(torch_python):
    return WorkerSettings(python=str(torch_python), shape=TINY, threads=1)


@pytest.fixture(scope="module")
def worker(settings):
    with started_worker(settings) as worker:
        yield worker


def test_a_worker_describes_itself(worker, torch_python):
    info = worker.info
    assert (info.device, info.num_threads, info.device_uuid) == ("cpu", 1, None)
    assert 0 < info.free_bytes <= info.total_bytes
    assert Path(info.python).samefile(torch_python)


@pytest.mark.parametrize(
    "point",
    [DECODE, ForwardPoint(phase="prefill", batch_size=2, new_tokens=5, context_tokens=3)],
    ids=["decode", "prefill"],
)
def test_every_replay_has_a_start_and_a_duration_on_one_clock(worker, point):
    before_ns = time.monotonic_ns()
    times = worker.measure(point, "eager", warmups=2, replays=25)
    after_ns = time.monotonic_ns()
    assert (times.clock, times.num_allocations) == ("host", 0)
    assert len(times.start_ns) == len(times.duration_ns) == 25
    assert [before_ns, *times.start_ns, after_ns] == sorted([before_ns, *times.start_ns, after_ns])
    assert sum(times.duration_ns) <= times.wall_ns < after_ns - before_ns


def test_a_failure_is_one_message_and_the_worker_goes_on(worker):
    with pytest.raises(UsageError, match="mode graph needs a CUDA device, and this worker runs on cpu"):
        worker.measure(DECODE, "graph", warmups=1, replays=1)
    with pytest.raises(
        UsageError, match=r"memory ran out \(.*can't allocate memory.*\).*choose a smaller batch size"
    ):
        worker.measure(HUGE, "eager", warmups=1, replays=1)
    with pytest.raises(RunError, match="unexpected keyword argument") as caught:
        worker.ask(point=DECODE, tempo=1)
    assert "Traceback" in caught.value.log_tail
    assert worker.measure(DECODE, "eager", warmups=1, replays=2).duration_ns


VAST = dataclasses.replace(TINY, name="vast", hidden=1 << 16, ffn=1 << 20, layers=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": (DECODE, HUGE)}, r"keys and values up to [\d.]+ GiB, and [\d.]+ GiB are free"),
        ({"device": "cuda:99"}, r"device cuda:99: torch .* name another with --device"),
        ({"shape": VAST}, r"the weights of 'vast' in float32 need [\d.]+ GiB, .* are free"),
    ],
    ids=["point", "device", "model"],
)
def test_a_worker_does_not_start_where_something_cannot_fit_or_is_not_there(settings, changes, message):
    with pytest.raises(UsageError, match=message), started_worker(msgspec.structs.replace(settings, **changes)):
        pass


def test_nothing_is_left_of_a_worker_that_is_interrupted(settings):
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


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="benchctl's own interpreter has torch here"
)
def test_an_interpreter_without_torch_is_named_with_the_remedy():
    own = WorkerSettings(python=sys.executable, shape=TINY)
    message = rf"{sys.executable}.*cannot import torch .*pip install .torch.*--python"
    with pytest.raises(EngineUnavailableError, match=message), started_worker(own):
        pass


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (None, EngineUnavailableError, r"python cannot be started: .* name an interpreter"),
        (
            "echo 'libcuda is broken' >&2; exit 3",
            RunError,
            "with exit code 3; the end of its log .*libcuda is broken",
        ),
        ("echo hello", EngineUnavailableError, r"answers b'hello', which no worker says; name a Python"),
        ("echo $$ > pid; exec sleep 600", RunError, "has not answered for 2 s"),
    ],
    ids=["absent", "ends", "no interpreter", "stuck"],
)
def test_a_program_that_is_no_worker_is_named_with_what_it_says_and_is_ended(tmp_path, script, error, message):
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\ncd {tmp_path}; {script}\n")
        python.chmod(0o755)
    started = started_worker(WorkerSettings(python=str(python), start_limit_s=2.0))
    with pytest.raises(error, match=message), started:
        pass
    if (tmp_path / "pid").exists():
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_what_the_environment_adds_to_this_interpreter_does_not_reach_the_worker(
    torch_python, monkeypatch, tmp_path
):
    (tmp_path / "json.py").write_text("raise RuntimeError('of another interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started_worker(WorkerSettings(python=str(torch_python), threads=1)) as worker:
        assert worker.info.torch_version
