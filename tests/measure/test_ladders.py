"""A ladder of loads: one server gets several load points, each recorded, judged and read as a run of its own."""

import json
import os
import signal
import threading
from typing import Any

import msgspec
import psutil
import pytest
from support.cli import document, only_result, printed, started
from support.results.ladders import LADDER
from support.results.several import simulated
from support.servers.paced_engine import PacedEngine, most_at_once, planned, profile, request
from support.waiting import wait_until

from benchctl.cluster.blocks import divide, run_free_blocks
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation
from benchctl.measure.run import Listener, RunContext, loads_of, measure_run, widest
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RequestSets, ResultDirectory, RunDirectory
from benchctl.records.loaded import LoadedRun, load_points_of, load_results
from benchctl.records.record import LoadRecord, PlannedRun
from benchctl.records.schema import Cell
from benchctl.records.writers import settled
from benchctl.workload.prepare import prepare_requests

TOKENS = 6
SLOTS: tuple[Cell, ...] = tuple({"max_concurrency": slots} for slots in (2, 4, 1))
SHARED = RequestSets.single(request(i, max_tokens=TOKENS, gap_ms=5) for i in range(8))
BY_RATE = RequestSets(
    tuple(
        (
            {"request_rate": rate},
            tuple(request(first + i, TOKENS, gap_ms=5, arrival_ns=i * 1_000_000_000 // rate) for i in range(4)),
        )
        for first, rate in ((0, 50), (4, 200))
    )
)


def measure(
    tmp_path: Any, *flags: str, ladder: tuple[Cell, ...] = SLOTS, requests: RequestSets = SHARED, **changes: Any
) -> tuple[LoadedRun, ...]:
    """Measure the points of a ladder on a paced server; everything on disk."""
    directory = RunDirectory(tmp_path / "run")
    engine = PacedEngine(truth=tmp_path / "truth.jsonl", flags=flags)
    context = RunContext(profile=profile(**changes), requests=requests, engine=engine)
    measure_run(context, msgspec.structs.replace(planned(), ladder=ladder), directory)
    return load_points_of(directory)


def sent(point: LoadedRun) -> list[Any]:
    return [each for each in point.requests if not each.is_warmup]


def test_each_point_has_its_slots_and_its_records_and_reads_as_a_run(tmp_path):
    points = measure(tmp_path, workload={"num_warmups": 2})
    assert [point.record.run_id for point in points] == [f"000-b0-baseline~{number}" for number in (1, 2, 3)]
    assert [point.record.cell for point in points] == list(SLOTS)
    assert [most_at_once(sent(point)) for point in points] == [2, 4, 1]
    for number, point in enumerate(points, start=1):
        record, results = point.record, ResultDirectory(tmp_path)
        assert (record.state, record.num_sent, record.loads, point.several) == ("done", 8, (), ())
        assert sorted(each.request_id for each in sent(point)) == sorted(f"r{i}" for i in range(8))
        assert (record.times.warmup_start_ns is not None) is (number == 1), "only the first comes after a warm-up"
        folder = results.run(record.run_id)
        assert (folder.path.name, folder.load) == ("000-b0-baseline", number)
    server = RunDirectory(tmp_path / "run").read()
    assert (server.run_id, server.state, server.num_sent) == ("000-b0-baseline", "done", 24)
    assert [load.cell for load in server.loads] == list(SLOTS)


def test_points_of_several_rates_have_request_sets_of_their_own(tmp_path):
    ladder: tuple[Cell, ...] = ({"request_rate": 200}, {"request_rate": 50})
    arrival = {"kind": "poisson", "request_rate": 1}
    fast, slow = measure(tmp_path, ladder=ladder, requests=BY_RATE, arrival=arrival)
    assert [each.request_id for each in sent(fast)] == ["r4", "r5", "r6", "r7"]
    assert [each.request_id for each in sent(slow)] == ["r0", "r1", "r2", "r3"]
    planned_ns = [request.scheduled_ns - slow.record.times.first_send_ns for request in sent(slow)]
    assert planned_ns[-1] - planned_ns[0] == 60_000_000, "at 50 per second the fourth comes 60 ms after the first"


def test_the_warm_up_reaches_the_largest_batch_of_all_points(tmp_path):
    first, *_ = measure(tmp_path, ladder=SLOTS[::-1], workload={"num_warmups": 1, "warmup_shapes": True})
    assert most_at_once([each for each in first.requests if each.is_warmup]) == 4
    assert most_at_once(sent(first)) == 1


def test_a_server_is_warmed_up_with_the_requests_of_all_sets():
    read = profile(arrival={"kind": "poisson", "request_rate": 1})
    ladder: tuple[Cell, ...] = ({"request_rate": 200}, {"request_rate": 50})
    loads = loads_of(RunContext(profile=read, requests=BY_RATE), msgspec.structs.replace(planned(), ladder=ladder))
    assert [load.profile.workload.arrival.request_rate for load in loads] == [200, 50]
    assert [each.request_id for each in widest(loads)[1]] == ["r4", "r5", "r6", "r7", "r0", "r1", "r2", "r3"]


def test_several_equal_loads_are_warmed_up_for_once():
    context = RunContext(profile=profile(), requests=SHARED, num_loads=3)
    loads = loads_of(context, planned())
    assert len(loads) == 3
    assert widest(loads) == (context.profile, SHARED.of({}))


def test_a_server_that_dies_at_the_third_point_keeps_two_and_is_not_done(tmp_path):
    points = measure(tmp_path, "--die-after", str(2 * 8 * TOKENS + 9), ladder=(*SLOTS, {"max_concurrency": 3}))
    assert [point.record.state for point in points] == ["done", "done", "failed", "planned"]
    assert points[2].record.failure is not None
    assert points[2].record.failure.cause == "server-died"
    assert points[3].record.failure is None, "it was not reached"
    server = RunDirectory(tmp_path / "run").read()
    assert (server.state, server.failure) == ("suspect", None)
    left_out = [warning.message for warning in server.warnings if warning.code == "load-left-out"]
    assert left_out[0].startswith("load 3 of 4 is left out: it failed (server-died): ")
    assert left_out[1] == "load 4 of 4 was not measured"
    assert not any(warning.code == "load-left-out" for point in points for warning in point.warnings)


def test_a_server_that_dies_in_its_first_point_fails_all_of_them(tmp_path):
    points = measure(tmp_path, "--die-after", "9")
    assert [point.record.state for point in points] == ["failed"] * 3
    assert RunDirectory(tmp_path / "run").read().state == "failed"


def test_a_server_that_never_starts_fails_all_points_for_that_reason(tmp_path):
    points = measure(tmp_path, "--die-saying", "no such device")
    assert [point.record.state for point in points] == ["failed"] * 3
    assert len({point.record.failure for point in points}) == 1


def test_an_interrupted_ladder_keeps_whole_points_and_is_measured_again(tmp_path):
    second = tmp_path / "run" / "requests-2.jsonl"

    def interrupt() -> None:
        wait_until("the second point", second.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    points = load_points_of(RunDirectory(tmp_path / "run"))
    assert [point.record.state for point in points] == ["done", "failed", "failed"]
    assert {point.record.failure.cause for point in points[1:] if point.record.failure} == {"interrupted"}
    server = RunDirectory(tmp_path / "run").read()
    assert (server.state, server.has_ended) == ("failed", False)


def test_a_process_that_dies_unawares_costs_the_points_that_are_not_whole(tmp_path):
    measure(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    record = directory.read()
    loads = (record.loads[0], *(LoadRecord(number=load.number, cell=load.cell) for load in record.loads[1:]))
    cut_off = msgspec.structs.replace(record, state="running", loads=loads)
    ended = settled(cut_off)
    assert (ended.state, ended.has_ended) == ("failed", False)
    directory.write(cut_off)
    assert [point.record.state for point in load_points_of(directory)] == ["done", "running", "running"]
    directory.write(ended)
    assert [point.record.state for point in load_points_of(directory)] == ["done", "failed", "failed"]


CURVE = {
    "name": "curve",
    "blocks": 1,
    "per_server": "ladder",
    "gates": [],
    "engine": {"kind": "sim", "options": {"time_scale": 2}},
    "model": "qwen2.5-7b",
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 3,
        "input_len": 32,
        "output_len": 20,
        "arrival": {"max_concurrency": 2},
    },
    "sweep": {"max_concurrency": [1, 2, 3]},
    "variants": {"baseline": {}, "narrow": {"server": {"max_num_seqs": 2}}},
}


def test_a_process_killed_in_the_second_point_keeps_the_first_and_resume_measures_that_server_again(
    tmp_path,
):
    profile_path = tmp_path / "curve.yaml"
    profile_path.write_text(json.dumps(CURVE), encoding="utf-8")
    with started("run", profile_path, "--quiet", cwd=tmp_path) as process:
        wait_until("a second point", lambda: list(tmp_path.glob("results/*/2*/runs/*/requests-2.jsonl")), 120)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        psutil.wait_procs(family, timeout=30)
    path = only_result(tmp_path)
    first, second, third = document("show", path)["runs"]
    assert [run["state"] for run in (first, second, third)] == ["done", "failed", "failed"]
    assert [run["run_id"].partition("~")[2] for run in (first, second, third)] == ["1", "2", "3"]
    printed("run", "--resume", path, "--quiet")
    shown = document("show", path)
    assert [run["state"] for run in shown["runs"]] == ["done"] * 6
    assert [run["attempt"] for run in shown["runs"]] == [2, 2, 2, 1, 1, 1], "all points are of one server again"
    assert shown["manifest"]["state"] == "done"
    server = ResultDirectory(path).runs()[0]
    assert (server.path / "attempt-1" / "run.json").exists(), "what was measured before stays"
    assert printed("verify", path)


BOTH_WAYS = """\
name: both-ways
engine: {kind: sim, options: {time_scale: 100.0, noise: published}}
model: qwen2.5-7b
per_server: ladder
workload:
  dataset: synthetic
  num_prompts: 8
  input_len: 32
  output_len: 12
  arrival: {kind: closed-loop, max_concurrency: 3}
  num_warmups: 2
sweep: {max_concurrency: [1, 3, 8]}
variants: {baseline: {}}
"""


def test_a_ladder_in_virtual_time_has_the_steps_and_tokens_of_the_same_ladder_over_http(tmp_path):
    read = parse_profile(BOTH_WAYS, "test")
    ladder: tuple[Cell, ...] = tuple({"max_concurrency": slots} for slots in (3, 1, 8))
    run = PlannedRun(index=0, run_id="run", block=0, position=0, variant="baseline", ladder=ladder)
    context = RunContext(profile=read, requests=prepare_requests(read).sets)
    for name, do_run in {"http": measure_run, "virtual": simulate_run}.items():
        do_run(context, run, RunDirectory(tmp_path / name))
    for over_http, virtual in zip(
        *(load_points_of(RunDirectory(tmp_path / name)) for name in ("http", "virtual")), strict=True
    ):
        assert over_http.record.cell == virtual.record.cell
        assert over_http.record.state == virtual.record.state == "done", over_http.record
        logs = [tmp_path / name / f"steps{virtual.suffix}.jsonl" for name in ("http", "virtual")]
        assert logs[0].read_bytes() == logs[1].read_bytes()
        tokens = [
            {request.request_id: request.completion_tokens for request in each.requests}
            for each in (over_http, virtual)
        ]
        assert tokens[0] == tokens[1]


def test_a_ladder_whose_blocks_have_directories_of_their_own_reads_as_one(tmp_path):
    whole = simulated(tmp_path / "whole", LADDER, blocks=2, sweep={"output_len": [4, 8]})
    prepared = prepare_requests(whole.profile)
    divided = create_simulation(whole.profile, prepared, Origin(output_root=tmp_path / "divided", argv=()))
    divide(divided)
    run_free_blocks(divided, whole.profile, prepared.sets, Listener(), simulate_run)
    a, b = whole.results, load_results(divided.path)
    assert b.plan == a.plan
    assert [run.record.run_id for run in b.runs] == [run.record.run_id for run in a.runs]
    assert [run.requests for run in b.runs] == [run.requests for run in a.runs]
    assert b.sets == a.sets
