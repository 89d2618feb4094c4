"""Several loads on one server: each is recorded and judged by itself, and one that is lost costs only itself."""

import json
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest
from support.cli import document, only_result, printed, started
from support.results.several import simulated, write_profile
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.waiting import wait_until

from benchctl.measure.run import Listener, RunContext, measure_run
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.loaded import load_run
from benchctl.records.schema import HostSample
from benchctl.records.writers import settled

TOKENS = 6
"""Of each of the four requests of a load."""


def measure(tmp_path, *flags, num_loads=3, engine=PacedEngine, progress=None, **changes):
    """Measure four requests on a paced server, so many times; everything on disk."""
    directory = RunDirectory(tmp_path / "run")
    context = RunContext(
        profile=profile(**changes),
        requests=RequestSets.single(request(i, max_tokens=TOKENS, gap_ms=5) for i in range(4)),
        engine=engine(truth=tmp_path / "truth.jsonl", flags=flags),
        listener=Listener() if progress is None else Listener(on_request_end=progress.append),
        num_loads=num_loads,
    )
    measure_run(context, planned(), directory)
    return load_run(directory)


@dataclass(frozen=True)
class FailingInLoad(PacedEngine):
    """The server refuses requests of the second load: the first of them, or all."""

    calls: list[str] = field(default_factory=list)
    num_refused: int = 4

    def request_call(self, request, settings):
        self.calls.append(request.request_id)
        is_refused = 4 <= len(self.calls) - 1 < 4 + self.num_refused
        prompt = json.dumps({"mode": "refuse"}) if is_refused else request.prompt
        return super().request_call(msgspec.structs.replace(request, prompt=prompt), settings)


class FailingOnce(FailingInLoad):
    def __init__(self, **how):
        super().__init__(**how, num_refused=1)


def left_out(run):
    return [warning.message for warning in run.warnings if warning.code == "load-left-out"]


def test_each_of_several_loads_is_recorded_whole_and_readable_alone(tmp_path):
    progress = []
    run = measure(tmp_path, progress=progress, workload={"num_warmups": 2})
    record = run.record
    assert (record.state, [load.state for load in record.loads]) == ("done", ["done"] * 3)
    assert (record.num_sent, record.num_completed, [load.num_sent for load in record.loads]) == (12, 12, [4] * 3)
    assert progress == list(range(1, 13)), "progress goes over all loads"
    for number, load in enumerate(run.loads, start=1):
        own, of_load = run.record.loads[number - 1], [each for each in load.requests if not each.is_warmup]
        assert (load.load, load.record.state, load.record.loads) == (number, "done", ())
        assert sorted(each.request_id for each in of_load) == ["r0", "r1", "r2", "r3"]
        assert sum(each.is_warmup for each in load.requests) == (2 if number == 1 else 0)
        assert load.columns.total("output_tokens") == 4 * TOKENS
        assert len(load.warmup_columns) == (0 if number > 1 else len(run.warmup_columns))
        times = load.record.times
        assert times.first_send_ns == own.first_send_ns == min(each.sent_ns for each in of_load)
        assert times.last_token_ns == max(each.choices[0].chunk_ns[-1] for each in of_load)
        assert (times.warmup_start_ns is not None) is (number == 1), "only the first comes after a warm-up"
        suffix = "" if number == 1 else f"-{number}"
        assert list(read_jsonl(tmp_path / "run" / f"host{suffix}.jsonl", HostSample))
    ends = [(load.record.times.first_send_ns, load.record.times.last_token_ns) for load in run.loads]
    assert ends[0][1] < ends[1][0] < ends[1][1] < ends[2][0]
    assert (record.times.first_send_ns, record.times.last_token_ns) == (ends[0][0], ends[2][1])
    assert len(run.requests) == 2 + 12
    assert run.columns.total("output_tokens") == 3 * 4 * TOKENS
    assert {"requests-2.jsonl", "steps-3.jsonl", "client-2.jsonl"} <= record.files.keys()


def test_one_load_has_the_files_and_the_record_that_it_always_had(tmp_path):
    run = measure(tmp_path, num_loads=1)
    assert "loads" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run.loads, run.several) == ((run,), ())
    assert not list((tmp_path / "run").glob("*-2.jsonl"))


@pytest.mark.parametrize(
    ("engine", "state", "says"),
    [(FailingInLoad, "failed", "4 of 4 requests failed"), (FailingOnce, "suspect", "1 of 4 requests failed")],
)
def test_a_load_that_fails_is_left_out_by_itself_and_named(tmp_path, engine, state, says):
    run = measure(tmp_path, engine=engine)
    assert (run.record.state, [load.state for load in run.record.loads]) == ("done", ["done", state, "done"])
    (message,) = left_out(run)
    assert message.startswith("load 2 of 3 is left out: ")
    assert says in message
    assert [load.load for load in run.loads] == [1, 3]
    assert (run.record.num_sent, run.record.num_failed) == (12, 4 if state == "failed" else 1)
    assert len(run.requests) == 8
    assert (tmp_path / "run" / "requests-2.jsonl").exists(), "its records stay"


def test_a_server_that_dies_in_the_third_load_costs_that_load(tmp_path):
    run = measure(tmp_path, "--die-after", str(2 * 4 * TOKENS + 9), num_loads=5)
    assert (run.record.state, run.record.failure) == ("done", None)
    assert [load.state for load in run.record.loads] == ["done", "done", "failed", "planned", "planned"]
    lost, unsent = left_out(run)
    assert lost.startswith("load 3 of 5 is left out: it failed (server-died): ")
    assert unsent == "loads 4, 5 of 5 were not measured"
    assert [load.load for load in run.loads] == [1, 2]


def test_a_server_that_dies_in_the_first_load_fails_the_run(tmp_path):
    run = measure(tmp_path, "--die-after", "9")
    assert (run.record.state, run.record.failure.cause) == ("failed", "server-died")
    assert run.requests, "what came of it can be read"


def test_an_interrupt_in_the_third_load_keeps_the_first_two(tmp_path):
    third = tmp_path / "run" / "requests-3.jsonl"

    def interrupt():
        wait_until("the third load", third.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, num_loads=5)
    run = load_run(RunDirectory(tmp_path / "run"))
    assert (run.record.state, [load.load for load in run.loads]) == ("done", [1, 2])
    assert left_out(run)[0].startswith("load 3 of 5 is left out: it failed (interrupted): ")


def test_a_warning_of_several_loads_is_one_that_names_them(tmp_path):
    run = measure(tmp_path, workload={"num_prompts": 4}, num_loads=2)
    codes = [warning.code for warning in run.record.warnings]
    assert len(codes) == len(set(codes))
    for load in run.record.loads:
        for warning in load.warnings:
            (merged,) = (each for each in run.record.warnings if each.code == warning.code)
            assert merged.message.startswith(("load 1 of 2: ", "load 2 of 2: ", "loads 1, 2 of 2: "))


def test_a_record_of_a_stranger_with_other_numbers_of_loads_is_settled_without_a_mistake(tmp_path):
    record = measure(tmp_path).record
    strange = tuple(
        msgspec.structs.replace(load, number=number, state=state)
        for load, number, state in zip(record.loads, (9, 9, 7), ("done", "planned", "planned"), strict=True)
    )
    ended = settled(msgspec.structs.replace(record, state="running", loads=strange))
    assert (ended.state, [load.state for load in ended.loads]) == ("done", ["done", "failed", "planned"])


SLOW = (
    *("ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet", "--set", "loads_per_server=5"),
    *("--set", "workload.num_prompts=3", "--set", "workload.output_len=20", "--set", "gates=[]"),
    *("--set", "engine.options.time_scale=2"),
)


def test_a_process_that_is_killed_in_the_third_load_of_five_loses_that_load_and_resume_finishes(tmp_path):
    with started("run", *SLOW, cwd=tmp_path) as process:
        wait_until("a third load", lambda: list(tmp_path.glob("results/*/2*/runs/*/requests-3.jsonl")), 120)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        psutil.wait_procs(family, timeout=30)
    path = only_result(tmp_path)
    shown = document("show", path)
    first, *others = shown["runs"]
    assert (first["state"], [load["load"] for load in first["loads"]], others) == ("done", [1, 2], [])
    (lost, unsent) = [each["message"] for each in shown["warnings"] if each["code"] == "load-left-out"]
    assert lost.startswith("load 3 of 5 is left out: it failed (interrupted): the process that measured this run")
    assert unsent == "loads 4, 5 of 5 were not measured"
    printed("run", "--resume", path, "--quiet")
    shown = document("show", path)
    first, second = shown["runs"]
    assert (first["attempt"], second["attempt"]) == (1, 1), "resume goes on at the next run"
    assert [load["load"] for load in first["loads"]] == [1, 2]
    assert [load["load"] for load in second["loads"]] == [1, 2, 3, 4, 5]
    assert shown["manifest"]["state"] == "done"
    assert printed("verify", path)


def test_one_load_of_a_simulation_in_virtual_time_is_what_it_always_was(tmp_path):
    one = simulated(tmp_path / "one", loads_per_server=1)
    three = simulated(tmp_path / "three")
    for alone, several in zip(one.results.runs, three.results.runs, strict=True):
        assert one.metrics(alone) == three.load_metrics(several)[0], "the first load is that of a fresh server"
        a, b = (each.path / "runs" / alone.record.run_id / "steps.jsonl" for each in (one, three))
        assert a.read_bytes() == b.read_bytes()


def test_a_plan_counts_every_load(tmp_path: Path) -> None:
    durations = []
    for number in (1, 3):
        file = write_profile(tmp_path, loads_per_server=number)
        plan = printed("run", file, "--dry-run", cwd=tmp_path)
        row = next(line for line in plan.splitlines() if line.startswith("000-b0"))
        durations.append(float(row.split()[-1]))
        assert ("12 requests each 3 times; estimated duration" in plan) is (number == 3)
    overhead_s = (3 * durations[0] - durations[1]) / 2
    assert overhead_s == pytest.approx(0.6, abs=0.11), "one start and three loads"
