"""One run from begin to verdict: what it leaves on disk when all is well, and when it is not."""

import gc
import socket
from collections import Counter
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from support.nvml import FakeNvml
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.servers.stubborn_engine import processes_of
from support.steps import records_of

from benchctl.analysis.metrics.run import run_metrics
from benchctl.engines.engine import raw_step_log
from benchctl.errors import EngineUnavailableError, PortTakenError
from benchctl.measure.run import Listener, RunContext, measure_run, noise_seed
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.schema import ResultWarning


def measure(tmp_path, requests, *flags, engine=PacedEngine, progress=None, **changes):
    """Measure ``requests`` on a paced server; the record and everything on disk."""
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    context = RunContext(
        profile=profile(**changes),
        requests=RequestSets.single(requests),
        engine=engine(truth=tmp_path / "truth.jsonl", flags=flags),
        listener=Listener() if progress is None else Listener(on_request_end=progress.append),
    )
    record = measure_run(context, planned(), directory)
    loaded = load_run(directory)
    assert loaded.record == record
    return loaded


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
    assert processes_of(str(tmp_path)) == []


class Cold(PacedEngine):
    """The first requests fail, of whose prompts the paced server would not read the words for the warm-up."""

    how = '{"mode": "truncate"}'

    def request_call(self, asked, settings):
        how = self.how if asked.request_id.startswith("warmup") else "{}"
        return super().request_call(msgspec.structs.replace(asked, prompt=how), settings)


class Warm(Cold):
    how = "{}"


def test_failed_requests_make_a_run_suspect_and_stand_before_what_it_merely_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=FakeNvml(count=0)))
    requests = [request(0), request(1, mode="truncate"), request(2)]
    loaded = measure(tmp_path / "load", requests, telemetry={"gpu_hz": 10.0})
    run = loaded.record
    assert (run.state, run.num_sent, run.num_completed, run.num_failed) == ("suspect", 3, 2, 1)
    assert list(told(run)) == ["failed-requests", "gpu-sampler-missing"]
    assert [record.error.kind for record in loaded.requests if record.error] == ["early-close"]
    warmed = measure(tmp_path / "warm-up", [request(0)], engine=Cold, workload={"num_warmups": 1}).record
    assert (warmed.state, list(told(warmed))) == ("suspect", ["warmup-failed"])
    assert "1 of 1 warm-up requests failed (early-close: " in told(warmed)["warmup-failed"]


def test_warm_up_bursts_come_one_after_another_and_stay_out_of_the_load(tmp_path):
    shapes = {"num_warmups": 0, "warmup_shapes": True}
    loaded = measure(tmp_path, [request(i, max_tokens=20) for i in range(3)], engine=Warm, workload=shapes)
    first, second, *others = (record for record in loaded.requests if record.is_warmup)
    assert [first.request_id, second.request_id] == ["warmup-shape-0", "warmup-shape-1"]
    assert first.done_ns <= second.sent_ns
    assert (len(others), loaded.record.state) == (2, "done")


@pytest.mark.parametrize(("token", "is_named"), [(10, True), (2, False)])
def test_a_kernel_that_the_server_compiles_in_the_load_is_named_and_one_of_the_warm_up_is_not(
    tmp_path, token, is_named
):
    requests, warmups = [request(i, max_tokens=5) for i in range(4)], {"num_warmups": 1}
    run = measure(tmp_path, requests, "--compile-after", str(token), workload=warmups).record
    message = told(run).get("shape-met-first")
    assert (run.state, message is not None) == ("done", is_named)
    assert not is_named or "Triton kernel JIT compilation during inference: _topk_kernel;" in message


def test_a_run_of_which_no_request_completes_has_failed_and_says_why(tmp_path):
    run = measure(tmp_path, [request(0), request(1)], timeouts={"request_s": 0.0001}).record
    assert (run.state, run.failure.cause) == ("failed", "no-request-completed")
    assert run.failure.message.startswith("2 of 2 requests failed (total-timeout: ")
    assert (run.num_sent, run.num_failed) == (2, 2)


def test_a_server_that_is_killed_in_mid_run_fails_the_run_and_keeps_its_records(tmp_path):
    loaded = measure(
        tmp_path, [request(i, max_tokens=10, gap_ms=5) for i in range(20)], "--die-after", "33", "--with-worker"
    )
    run = loaded.record
    assert (run.state, run.failure.cause) == ("failed", "server-died")
    assert "was ended by SIGKILL in mid-run" in run.failure.message
    assert run.failure.log_tail.splitlines()[-1] == "fatal: out of luck"
    assert run.num_sent == len(loaded.requests) == run.num_completed + run.num_failed
    assert run.num_completed >= 2
    kinds = {record.error.kind for record in loaded.requests if record.error}
    assert kinds <= {"early-close", "reset", "connect-refused", "cancelled"}
    assert len(records_of(loaded)) == 33
    assert processes_of(str(tmp_path)) == []


class Misannounced(PacedEngine):
    """An engine whose server refuses what it is told before the load."""

    async def announce(self, client, requests, **how):
        (await client.get("/nowhere", headers={"x-status": "404"})).raise_for_status()


class Unheard(PacedEngine):
    """An engine whose server takes no connection before the load."""

    async def announce(self, client, requests, **how):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await client.get(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.1)


def test_a_server_that_is_up_but_answers_nonsense_fails_the_run(tmp_path):
    for engine, flags, says in (
        (PacedEngine, ("--broken-info",), "JSONDecodeError"),
        (Misannounced, (), "404"),
        (Unheard, (), "(TimeoutError: the time is up)"),
    ):
        run = measure(tmp_path / engine.__name__, [request(0)], *flags, engine=engine).record
        assert (run.state, run.failure.cause) == ("failed", "bad-answer")
        assert "does not answer as its engine should" in run.failure.message
        assert says in run.failure.message


def test_a_run_leaves_no_event_loop_and_no_certificates_in_memory_for_the_next_one(tmp_path):
    """Half a megabyte and one megabyte a run; nothing else frees them, since cycles are searched for so rarely."""
    counts = []
    gc.disable()
    try:
        for name in ("first", "second", "third"):  # the first makes what is made once
            measure(tmp_path / name, [request(0, max_tokens=4)])
            counts.append(Counter(type(each).__name__ for each in gc.get_objects()))
    finally:
        gc.enable()
    grown = counts[2] - counts[0]
    assert not {"Loop", "SSLContext", "AsyncClient", "Client"} & grown.keys()
    assert sum(grown.values()) < 500


class Mistaken(PacedEngine):
    async def effective_config(self, client, settings, site):
        raise KeyError("version")


class Absent(PacedEngine):
    def check_available(self, settings):
        raise EngineUnavailableError("not here; install it")


def test_what_stops_the_experiment_is_recorded_as_the_failure_of_its_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        fixed = {"variants": {"baseline": {"server": {"port": holder.getsockname()[1]}}}}
        for engine, changes, error, cause in (
            (Mistaken, {}, KeyError, "internal-error"),
            (Absent, {}, EngineUnavailableError, "EngineUnavailableError"),
            (PacedEngine, fixed, PortTakenError, "PortTakenError"),
        ):
            path = tmp_path / engine.__name__
            with pytest.raises(error):
                measure(path, [request(0)], engine=engine, **changes)
            run = RunDirectory(path / "runs" / "000-b0-baseline").read()
            assert (run.state, run.failure.cause) == ("failed", cause)
            assert error is not KeyError or run.failure.message == "KeyError: 'version'"


class Torn(PacedEngine):
    def read_steps(self, directory):
        raw = raw_step_log(directory)
        raw.write_bytes(raw.read_bytes()[:-20])
        return super().read_steps(directory)


class Stepless(PacedEngine):
    def read_steps(self, directory):
        return iter(())


class Behind(PacedEngine):
    def read_steps(self, directory):
        return (msgspec.structs.replace(step, value_recordings=1) for step in super().read_steps(directory))

    async def after_load_warnings(self, client):
        return (ResultWarning(code="sim-far-behind", message="the simulator stood still"),)


def test_steps_that_are_torn_missing_or_late_and_what_a_server_says_make_a_run_suspect(tmp_path):
    for engine, codes, num_steps in (
        (Torn, {"steps-damaged", "check-failed"}, 3),
        (Stepless, {"steps-missing"}, 0),
        (Behind, {"value-passes-recorded-late", "sim-far-behind"}, 4),
    ):
        loaded = measure(tmp_path / engine.__name__, [request(0, max_tokens=4)], engine=engine)
        messages = told(loaded.record)
        assert (loaded.record.state, set(messages), len(records_of(loaded))) == ("suspect", codes, num_steps)
        assert messages.get("check-failed") in {None, "check step-tokens failed: steps 3, usage 4"}


def test_a_gpu_that_is_lost_in_the_middle_ends_neither_the_run_nor_the_samples_of_the_others(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml()
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=nvml))
    losing = SimpleNamespace(append=lambda _num_ended: nvml.refuses.update({("*", 1): "GPU is lost"}))
    requests = [request(0, max_tokens=4, gap_ms=25), request(1, max_tokens=40, gap_ms=25)]
    loaded = measure(tmp_path, requests, telemetry={"gpu_hz": 50.0}, progress=losing)
    assert loaded.record.state == "done"
    assert set(told(loaded.record)) == {"gpu-lost", "gpu-throttled", "gpu-power-capped"}
    assert "GPU 1 has not answered since" in told(loaded.record)["gpu-lost"]
    samples = Counter(sample.index for sample in loaded.gpu)
    assert 1 <= samples[1] < samples[0] - 10
    assert run_metrics(loaded)["gpu_energy_j"] is None


def test_a_second_attempt_moves_the_first_aside_whole(tmp_path):
    first = measure(tmp_path, [request(0)], "--die-saying", "bind: address already in use")
    failure = first.record.failure
    assert (first.record.state, first.record.num_sent, failure.cause) == ("failed", 0, "port-taken")
    assert "choose another port" in failure.message
    assert "address already in use" in failure.log_tail
    second = measure(tmp_path, [request(0), request(1)])
    directory = tmp_path / "runs" / "000-b0-baseline"
    assert (first.record.attempt, second.record.attempt, len(second.requests)) == (1, 2, 2)
    assert load_run(RunDirectory(directory / "attempt-1")).record == first.record
    (directory / "run.json").write_text("{broken")
    third = measure(tmp_path, [request(0)])
    assert (third.record.attempt, len(third.requests)) == (3, 1)
    assert (directory / "attempt-2" / "run.json").read_text() == "{broken"
    assert len(list(RunDirectory(directory / "attempt-2").requests())) == 2


def test_the_noise_seed_belongs_to_the_run_and_to_nothing_else():
    run, other = planned(0), msgspec.structs.replace(planned(5), block=1)
    assert noise_seed(profile(seed=3), run) == noise_seed(profile(seed=3, blocks=2), planned(9))
    seeds = {noise_seed(profile(seed=3), run), noise_seed(profile(seed=4), run), noise_seed(profile(seed=3), other)}
    assert len(seeds) == 3
    assert all(0 <= seed < 1 << 32 for seed in seeds)
