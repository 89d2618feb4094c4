"""One run from begin to verdict: what it leaves on disk when all is well, and when it is not."""

import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from support.nvml import FakeNvml
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.steps import records_of

from benchctl.analysis.metrics.run import run_metrics
from benchctl.engines.engine import raw_step_log
from benchctl.errors import EngineUnavailableError, PortTakenError, RunError
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.run import RunContext, measure_run, noise_seed
from benchctl.measure.server.process import is_alive
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.schema import ResultWarning
from benchctl.units import NS_PER_MS


def measure(tmp_path, requests, *flags, engine=None, progress=None, **changes):
    """Measure ``requests`` on a paced server; the record and everything on disk."""
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    context = RunContext(
        profile=profile(**changes),
        requests=tuple(requests),
        engine=engine or PacedEngine(truth=tmp_path / "truth.jsonl", flags=flags),
        on_progress=progress.append if progress is not None else lambda _: None,
    )
    record = measure_run(context, planned(), directory)
    loaded = load_run(directory)
    assert loaded.record == record
    return loaded


def nothing_is_left(loaded):
    port = loaded.record.argv[loaded.record.argv.index("--port") + 1]
    return not any(is_alive(p) and port in p.cmdline() for p in psutil.process_iter() if _readable(p))


def _readable(process):
    try:
        return bool(process.cmdline())
    except psutil.Error:
        return False


OF_THE_PACE = {"client-bunching", "times-bounded", "underfilled-batch"}
"""Warnings about a server with long pauses between steps, and about a busy machine."""


def told(record):
    """Messages of a run's warnings by their codes, but for those of the pace."""
    return {warning.code: warning.message for warning in record.warnings if warning.code not in OF_THE_PACE}


def test_a_run_leaves_its_whole_story_on_disk(tmp_path):
    progress = []
    loaded = measure(
        tmp_path,
        [request(i, max_tokens=5, n=2, gap_ms=10) for i in range(6)],
        workload={"num_warmups": 2},
        sampling={"top_k": 7},
        progress=progress,
    )
    run, times = loaded.record, loaded.record.times
    assert (run.state, run.attempt, run.failure, told(run)) == ("done", 1, None, {})
    assert (run.num_sent, run.num_completed, run.num_failed) == (6, 6, 0)
    assert progress == [1, 2, 3, 4, 5, 6]
    assert times.launch_ns < times.ready_ns < times.warmup_start_ns < times.first_send_ns < times.last_token_ns
    assert times.last_token_ns < times.stop_ns
    assert (run.clock, run.time_scale, run.engine_version) == ("host", 1.0, "1.2")
    config = run.effective_config
    assert (config["server.colour"], config["sampling.top_k"], config["model"]) == ("blue", 7, "qwen2.5-7b")
    assert not any(key.startswith("guidance.") for key in config)
    assert run.env["PACED_COLOUR"] == "blue"
    assert run.env["PACED_API_KEY"] == "[redacted: PACED_API_KEY]"
    assert [record.is_warmup for record in loaded.requests] == [True] * 2 + [False] * 6
    assert {record.request_id for record in loaded.requests[:2]} == {"warmup-0", "warmup-1"}
    assert len(records_of(loaded)) == 8 * 5
    assert loaded.host
    assert loaded.host[-1].server_processes == 1
    assert nothing_is_left(loaded)


def test_ttft_and_gaps_are_those_of_the_server_within_milliseconds(tmp_path):
    loaded = measure(tmp_path, [request(i, max_tokens=8, gap_ms=15) for i in range(4)])
    truths = PacedEngine(truth=tmp_path / "truth.jsonl").truths()
    differences = []
    for record in loaded.requests:
        truth, (choice,) = truths[record.request_id], record.choices
        differences.append(choice.chunk_ns[0] - record.sent_ns - (truth["sent_ns"][0] - truth["arrived_ns"]))
        gaps = zip(itertools.pairwise(choice.chunk_ns), itertools.pairwise(truth["sent_ns"]), strict=True)
        differences += [(b - a) - (sent_b - sent_a) for (a, b), (sent_a, sent_b) in gaps]
        assert record.completion_tokens == choice.output_tokens == 8
    # A busy machine delays some arrivals; one quarter of them come undelayed all the same.
    sizes = sorted(abs(difference) for difference in differences)
    assert sizes[len(sizes) // 4] < 4 * NS_PER_MS


def test_failed_requests_make_a_run_suspect_and_stay_in_the_data(tmp_path):
    loaded = measure(tmp_path, [request(0), request(1, mode="truncate"), request(2)])
    assert loaded.record.state == "suspect"
    assert (loaded.record.num_sent, loaded.record.num_completed, loaded.record.num_failed) == (3, 2, 1)
    assert list(told(loaded.record)) == ["failed-requests"]
    assert [record.error.kind for record in loaded.requests if record.error] == ["early-close"]


def test_a_failed_warm_up_makes_a_run_suspect(tmp_path):
    class Cold(PacedEngine):
        def request_call(self, asked, settings):
            how = {"mode": "truncate"} if asked.request_id.startswith("warmup") else {}
            return super().request_call(msgspec.structs.replace(asked, prompt=json.dumps(how)), settings)

    engine = Cold(truth=tmp_path / "truth.jsonl")
    loaded = measure(tmp_path, [request(0)], engine=engine, workload={"num_warmups": 1})
    assert loaded.record.state == "suspect"
    assert list(told(loaded.record)) == ["warmup-failed"]
    assert "1 of 1 warm-up requests failed (early-close: " in told(loaded.record)["warmup-failed"]


def test_a_run_of_which_no_request_completes_has_failed_and_says_why(tmp_path):
    loaded = measure(tmp_path, [request(0), request(1)], timeouts={"request_s": 0.0001})
    assert loaded.record.state == "failed"
    assert loaded.record.failure.cause == "no-request-completed"
    assert loaded.record.failure.message.startswith("2 of 2 requests failed (total-timeout: ")
    assert (loaded.record.num_sent, loaded.record.num_failed) == (2, 2)


def test_a_server_that_is_killed_in_mid_run_fails_the_run_and_keeps_its_records(tmp_path):
    loaded = measure(
        tmp_path, [request(i, max_tokens=10, gap_ms=5) for i in range(20)], "--die-after", "33", "--with-worker"
    )
    run = loaded.record
    assert run.state == "failed"
    assert run.failure is not None
    assert run.failure.cause == "server-died"
    assert "was ended by SIGKILL in mid-run" in run.failure.message
    assert run.failure.log_tail.splitlines()[-1] == "fatal: out of luck"
    assert run.num_sent == len(loaded.requests) == run.num_completed + run.num_failed
    assert run.num_completed >= 2
    assert {record.error.kind for record in loaded.requests if record.error} <= {
        "early-close",
        "reset",
        "connect-refused",
        "cancelled",
    }
    assert len(records_of(loaded)) == 33
    assert nothing_is_left(loaded)


def test_a_server_that_does_not_start_fails_the_run_with_cause_and_log(tmp_path):
    loaded = measure(tmp_path, [request(0)], "--die-saying", "bind: address already in use")
    run = loaded.record
    assert (run.state, run.num_sent) == ("failed", 0)
    assert run.failure is not None
    assert run.failure.cause == "port-taken"
    assert "choose another port" in run.failure.message
    assert "address already in use" in run.failure.log_tail


class Misannounced(PacedEngine):
    """An engine whose server refuses what it is told before the load."""

    async def announce(self, client, requests, **how):
        (await client.get("/nowhere", headers={"x-status": "404"})).raise_for_status()


class Unheard(PacedEngine):
    """An engine whose server takes no connection before the load."""

    async def announce(self, client, requests, **how):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await client.get(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.1)


@pytest.mark.parametrize(
    ("engine", "flags", "told"),
    [
        (PacedEngine, ("--broken-info",), "JSONDecodeError"),
        (Misannounced, (), "404"),
        (Unheard, (), "(TimeoutError: the time is up)"),
    ],
)
def test_a_server_that_is_up_but_answers_nonsense_fails_the_run(tmp_path, engine, flags, told):
    loaded = measure(tmp_path, [request(0)], engine=engine(truth=tmp_path / "truth.jsonl", flags=flags))
    assert loaded.record.state == "failed"
    assert loaded.record.failure is not None
    assert loaded.record.failure.cause == "bad-answer"
    assert "does not answer as its engine should" in loaded.record.failure.message
    assert told in loaded.record.failure.message


def test_a_run_leaves_no_event_loop_and_no_certificates_in_memory_for_the_next_one(tmp_path):
    """Half a megabyte and one megabyte a run; nothing else frees them, since cycles are searched for so rarely."""

    def left():
        return Counter(type(each).__name__ for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        measure(tmp_path / "first", [request(0, max_tokens=4)])  # with what is made once
        before = left()
        for name in ("second", "third"):
            measure(tmp_path / name, [request(0, max_tokens=4)])
        grown = left() - before
    finally:
        gc.enable()
    assert not {"Loop", "SSLContext", "AsyncClient", "Client"} & grown.keys()
    assert sum(grown.values()) < 500


def test_a_disk_that_is_full_stops_the_experiment_with_a_remedy(tmp_path):
    def full(_num_ended):
        raise OSError(28, "No space left on device")

    context = RunContext(
        profile=profile(),
        requests=(request(0),),
        engine=PacedEngine(truth=tmp_path / "truth.jsonl"),
        on_progress=full,
    )
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(RunError, match=r"run: .*No space left on device; free space .* --resume"):
        measure_run(context, planned(), directory)
    assert directory.read().failure.cause == "disk-full"


def test_a_mistake_of_ours_is_recorded_and_not_hidden(tmp_path):
    class Mistaken(PacedEngine):
        async def effective_config(self, client, settings, site):
            raise KeyError("version")

    with pytest.raises(KeyError):
        measure(tmp_path, [request(0)], engine=Mistaken(truth=tmp_path / "truth.jsonl"))
    run = RunDirectory(tmp_path / "runs" / "000-b0-baseline").read()
    assert (run.state, run.failure.cause) == ("failed", "internal-error")
    assert run.failure.message == "KeyError: 'version'"


def test_a_fixed_port_that_is_taken_stops_the_experiment_and_the_record_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        baseline = {"server": {"port": holder.getsockname()[1]}}
        with pytest.raises(PortTakenError, match="is taken by process"):
            measure(tmp_path, [request(0)], variants={"baseline": baseline})
    run = RunDirectory(tmp_path / "runs" / "000-b0-baseline").read()
    assert (run.state, run.failure.cause) == ("failed", "PortTakenError")


def test_an_engine_that_is_not_installed_stops_the_experiment(tmp_path):
    class Absent(PacedEngine):
        def check_available(self, settings):
            raise EngineUnavailableError("not here; install it")

    with pytest.raises(EngineUnavailableError):
        measure(tmp_path, [request(0)], engine=Absent(truth=tmp_path / "t"))
    run = RunDirectory(tmp_path / "runs" / "000-b0-baseline").read()
    assert (run.state, run.failure.cause) == ("failed", "EngineUnavailableError")


def test_a_step_log_that_is_torn_is_kept_as_far_as_it_goes(tmp_path):
    class Torn(PacedEngine):
        def read_steps(self, directory):
            raw = raw_step_log(directory)
            raw.write_bytes(raw.read_bytes()[:-20])
            return super().read_steps(directory)

    loaded = measure(tmp_path, [request(0, max_tokens=4)], engine=Torn(truth=tmp_path / "truth.jsonl"))
    assert loaded.record.state == "suspect"
    assert list(told(loaded.record)) == ["steps-damaged", "check-failed"]
    assert told(loaded.record)["check-failed"] == "check step-tokens failed: steps 3, usage 4"
    assert len(records_of(loaded)) == 3


def test_a_run_whose_load_recorded_passes_of_a_value_model_is_suspect(tmp_path):
    class Recording(PacedEngine):
        def read_steps(self, directory):
            for step in super().read_steps(directory):
                yield msgspec.structs.replace(step, value_recordings=1)

    loaded = measure(tmp_path, [request(0)], engine=Recording(truth=tmp_path / "truth.jsonl"))
    assert loaded.record.state == "suspect"
    assert list(told(loaded.record)) == ["value-passes-recorded-late"]


def test_a_run_without_steps_is_suspect(tmp_path):
    class Stepless(PacedEngine):
        def read_steps(self, directory):
            return iter(())

        async def after_load_warnings(self, client):
            return (ResultWarning(code="engine-says", message="something"),)

    loaded = measure(tmp_path, [request(0)], engine=Stepless(truth=tmp_path / "truth.jsonl"))
    assert loaded.record.state == "suspect"
    assert list(told(loaded.record)) == ["steps-missing", "engine-says"]


def test_what_a_server_says_of_a_load_makes_the_run_suspect_where_its_code_does(tmp_path):
    class Behind(PacedEngine):
        async def after_load_warnings(self, client):
            return (ResultWarning(code="sim-far-behind", message="the simulator stood still"),)

    loaded = measure(tmp_path, [request(0)], engine=Behind(truth=tmp_path / "truth.jsonl"))
    assert loaded.record.state == "suspect"
    assert told(loaded.record) == {"sim-far-behind": "the simulator stood still"}


def test_without_a_gpu_a_real_engine_is_measured_and_the_gap_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    loaded = measure(tmp_path, [request(0)], telemetry={"gpu_hz": 10.0})
    assert loaded.record.state == "done"
    assert list(told(loaded.record)) == ["gpu-sampler-missing"]


class LosingOne(FakeNvml):
    """The second device answers five readings of its temperature, and then no question any more."""

    num_readings = 0

    def __getattr__(self, name):
        answer = super().__getattr__(name)

        def failing(handle, *arguments):
            self.num_readings += handle == 1 and name == "nvmlDeviceGetTemperature"
            if handle == 1 and self.num_readings > 5:
                raise self.NVMLError("GPU is lost")
            return answer(handle, *arguments)

        return failing if name.startswith("nvmlDeviceGet") and name != "nvmlDeviceGetCount" else answer


def test_a_gpu_that_is_lost_in_the_middle_ends_neither_the_run_nor_the_samples_of_the_others(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=LosingOne()))
    loaded = measure(tmp_path, [request(0, max_tokens=40, gap_ms=25)], telemetry={"gpu_hz": 50.0})
    assert loaded.record.state == "done"
    assert set(told(loaded.record)) == {"gpu-lost", "gpu-throttled", "gpu-power-capped"}
    assert "GPU 1 has not answered since" in told(loaded.record)["gpu-lost"]
    samples = Counter(sample.index for sample in loaded.gpu)
    assert 1 <= samples[1] <= 5
    assert samples[0] > 10
    assert run_metrics(loaded)["gpu_energy_j"] is None


def test_what_makes_a_run_suspect_stands_before_what_it_merely_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    loaded = measure(tmp_path, [request(0), request(1, mode="error-event")], telemetry={"gpu_hz": 10.0})
    assert loaded.record.state == "suspect"
    codes = list(told(loaded.record))
    assert codes[0] == "failed-requests"
    assert codes[-1] == "gpu-sampler-missing"


def test_a_second_attempt_moves_the_first_aside_whole(tmp_path):
    first = measure(tmp_path, [request(0)], "--die-saying", "no")
    second = measure(tmp_path, [request(0), request(1)])
    third = measure(tmp_path, [request(0)])
    directory = tmp_path / "runs" / "000-b0-baseline"
    assert [run.record.attempt for run in (first, second, third)] == [1, 2, 3]
    assert len(third.requests) == 1
    assert load_run(RunDirectory(directory / "attempt-1")).record == first.record
    assert load_run(RunDirectory(directory / "attempt-2")).requests == second.requests
    (directory / "run.json").write_text("{broken")
    assert measure(tmp_path, [request(0)]).record.attempt == 4
    assert (directory / "attempt-3" / "run.json").read_text() == "{broken"


def test_the_noise_seed_belongs_to_the_run_and_to_nothing_else():
    run, other = planned(0), msgspec.structs.replace(planned(5), block=1)
    assert noise_seed(profile(seed=3), run) == noise_seed(profile(seed=3, blocks=2), planned(9))
    seeds = {noise_seed(profile(seed=3), run), noise_seed(profile(seed=4), run), noise_seed(profile(seed=3), other)}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 32 for seed in seeds)


RUN_UNTIL_STOPPED = """
import sys
from pathlib import Path
from support.servers.paced_engine import PacedEngine, planned, profile, request
from benchctl.measure.run import RunContext, measure_run
from benchctl.records.directory import RunDirectory

root = Path(sys.argv[1])
engine = PacedEngine(truth=root / "truth.jsonl", flags=tuple(sys.argv[2:]))
requests = tuple(request(i, max_tokens=400, gap_ms=50) for i in range(4))
context = RunContext(profile=profile(), requests=requests, engine=engine)
try:
    measure_run(context, planned(), RunDirectory(root / "run"))
except KeyboardInterrupt:
    sys.exit(130)
"""


def begun(tmp_path, *flags):
    """A benchctl that measures, as a process of its own, at the moment when tokens flow."""
    here = str(Path(__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {here!r})\n{RUN_UNTIL_STOPPED}"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), "--with-worker", *flags])
    raw, deadline = tmp_path / "run" / "steps.raw.jsonl", time.monotonic() + 60
    while not (raw.exists() and raw.stat().st_size):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    return process, servers_of(process)


def servers_of(process):
    """Processes of the server that a benchctl has started, but for what supervises them."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if not any(part.endswith("/supervise.py") for part in child.cmdline())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_in_mid_run_leaves_records_and_no_process(tmp_path, number):
    process, servers = begun(tmp_path)
    assert len(servers) == 2
    process.send_signal(number)
    assert process.wait(15) == 130
    assert not any(is_alive(server) for server in servers)
    loaded = load_run(RunDirectory(tmp_path / "run"))
    assert loaded.record.state == "failed"
    assert loaded.record.failure is not None
    assert loaded.record.failure.cause == "interrupted"
    assert [record.error.kind for record in loaded.requests if record.error] == ["cancelled", "cancelled"]
    assert loaded.record.num_sent == loaded.record.num_failed == 2
    assert loaded.record.times.stop_ns is not None
    assert records_of(loaded)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupt_before_the_verdict_is_recorded_and_one_after_it_leaves_it(tmp_path, number):
    def interrupted(name, *states):
        directory = RunDirectory(tmp_path / name)
        run = MeasuredRun(profile(), planned(), directory)
        with run.begun():
            for state in states:
                run.close(state)
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        interrupted("before")
    with pytest.raises(KeyboardInterrupt):
        interrupted("after", "done")
    before, after = (RunDirectory(tmp_path / name).read() for name in ("before", "after"))
    assert (before.state, before.failure.cause) == ("failed", "interrupted")
    assert (after.state, after.failure) == ("done", None)


def test_an_interrupt_while_the_server_is_still_starting_ends_it(tmp_path):
    here = str(Path(__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {here!r})\n{RUN_UNTIL_STOPPED}"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), "--start-delay-s", "30"])
    log, deadline = tmp_path / "run" / "server.raw.log", time.monotonic() + 60
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    servers = servers_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 130
    assert servers
    assert not any(is_alive(server) for server in servers)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["failure"]["cause"] == "interrupted"
