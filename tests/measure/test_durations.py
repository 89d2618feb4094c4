"""How long an experiment will take: by earlier runs on this machine, and said to be unknown without them."""

import msgspec
import pytest
from support.cli import printed
from support.results.builders import edit_run, write_results
from support.servers.paced_engine import profile, request

from benchctl.analysis.analyzed import analyze_directory
from benchctl.cli.plan import print_plan
from benchctl.measure import on_file as durations
from benchctl.measure.on_file import estimate_durations, load_s, remember_duration
from benchctl.profile.arrival import Arrival
from benchctl.records.directory import RequestSets
from benchctl.records.loaded import load_results
from benchctl.records.record import LoadRecord, RunTimes
from benchctl.records.stores import store_duration, stored_durations
from benchctl.report.texts import time_lines
from benchctl.units import NS_PER_S

CLOSED = Arrival(kind="closed-loop", max_concurrency=2)


REQUESTS = [request(i, max_tokens=100) for i in range(4)]


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_DURATIONS_DIR", str(tmp_path / "durations"))


@pytest.fixture(name="record")
def _record(tmp_path):
    """A run of a real engine that came to its end."""
    record = load_results(write_results(tmp_path / "r").path).runs[0].record
    return msgspec.structs.replace(record, state="done", clock="host", variant="baseline", cell={})


def ran(record, load_seconds, took_s=30.0, experiment=None, requests=REQUESTS, **changes):
    """File a run whose load took so long."""
    times = RunTimes(first_send_ns=NS_PER_S, last_token_ns=NS_PER_S + round(load_seconds * NS_PER_S))
    measured = msgspec.structs.replace(record, times=times, **changes)
    remember_duration(experiment or profile(), RequestSets.single(requests), measured, took_s, gpus=())


def estimated(experiment=None, requests=REQUESTS, gpus=()):
    estimate = estimate_durations(experiment or profile(), RequestSets.single(requests), gpus)
    return None if estimate is None else estimate.run_s["baseline"]


def test_the_same_experiment_takes_as_long_again_and_only_the_load_grows_with_its_tokens(record):
    ran(record, 4.0)
    for requests, expected_s in (
        (REQUESTS, 30.0),
        ([request(i, max_tokens=300) for i in range(4)], 26.0 + 12.0),
        ([request(i, max_tokens=100) for i in range(12)], 26.0 + 12.0),
    ):
        assert estimated(requests=requests) == pytest.approx(expected_s)
    assert estimated(requests=()) is None, "an empty request set has no estimate"


def test_the_middle_of_the_newest_runs_counts_and_not_one_that_was_held_up(record):
    for took_s in (400.0, *(30.0,) * 12, 31.0, 29.0):
        ran(record, 4.0, took_s)
    assert estimated() == pytest.approx(30.0)


def test_time_per_token_is_that_of_batches_of_like_size(record):
    wide = profile(arrival={"kind": "closed-loop", "max_concurrency": 4})
    ran(record, 4.0)
    ran(record, 3.0, experiment=wide)
    assert estimated() == pytest.approx(26.5 + 4.0)
    assert estimated(wide) == pytest.approx(26.5 + 3.0)


def test_runs_of_the_same_settings_speak_before_others_of_the_server_and_of_the_model(record):
    three = profile(
        variants={"baseline": {}, "drawn": {"sampling": {"top_k": 5}}, "small": {"server": {"max_num_seqs": 3}}},
        allowed_differences=("*",),
    )
    ran(record, 4.0, 30.0, three)
    ran(record, 4.0, 50.0, three, variant="drawn")
    estimate = estimate_durations(three, RequestSets.single(REQUESTS), ())
    assert estimate.run_s == pytest.approx({"baseline": 30.0, "drawn": 50.0, "small": 40.0})
    assert estimate.basis == "from 2 earlier runs on this machine"


def test_runs_that_failed_or_were_simulated_and_other_machines_devices_and_models_say_nothing(record, monkeypatch):
    ran(record, 4.0, state="failed")
    ran(record, 4.0, clock="virtual", time_scale=10.0)
    assert estimated() is None
    ran(record, 4.0)
    assert estimated(profile(model="qwen2.5-0.5b")) is None
    assert estimated(gpus=("H100",)) is None
    monkeypatch.setattr(durations.platform, "node", lambda: "elsewhere")
    assert estimated() is None


def test_each_load_of_a_ladder_is_filed_by_itself_and_a_server_takes_the_sum_of_its_loads(record):
    slots = [{"max_concurrency": number} for number in (1, 2, 4)]
    ladder = profile(
        arrival={"kind": "closed-loop", "max_concurrency": 1},
        per_server="ladder",
        sweep={"max_concurrency": (1, 2, 4)},
    )
    loads = tuple(
        LoadRecord(
            number=i, cell=cell, first_send_ns=i * 100 * NS_PER_S, last_token_ns=(i * 100 + took_s) * NS_PER_S
        )
        for i, (cell, took_s) in enumerate(zip(slots, (8, 6, 4), strict=True), start=1)
    )
    ran(record, 1.0, 40.0, ladder, ladder=tuple(slots), loads=loads)
    assert sorted(each.num_sequences for each in stored_durations("sim")) == [1, 2, 4]
    assert estimated(ladder) == pytest.approx(40.0), "22 s around loads of 8, 6 and 4 s"
    fresh = ladder.model_copy(update={"per_server": "fresh"})
    estimate = estimate_durations(fresh, RequestSets.single(REQUESTS), ())
    assert estimate.run_s["baseline max_concurrency=2"] == pytest.approx(22.0 + 6.0)


def test_requests_take_slots_in_turn_when_they_are_due():
    for arrival, arrivals_s, expected_s in (
        (CLOSED, (0, 0, 0, 0), 2.0),
        (Arrival(kind="burst"), (0, 0, 0, 0), 1.0),
        (Arrival(kind="constant", request_rate=1.0), (0, 1, 2, 3), 4.0),
        (Arrival(kind="constant", request_rate=1.0, max_concurrency=1), (0, 0.1, 0.2, 5), 6.0),
    ):
        due = [request(i, max_tokens=100, arrival_ns=round(t * NS_PER_S)) for i, t in enumerate(arrivals_s)]
        assert load_s(due, arrival, 0.01) == pytest.approx(expected_s)


def test_damaged_lines_are_passed_over_and_the_store_forgets_the_oldest(record, tmp_path):
    ran(record, 4.0)
    file = tmp_path / "durations" / "sim.jsonl"
    (kept,) = stored_durations("sim")
    file.write_bytes(file.read_bytes() + b'{"broken\n')
    assert stored_durations("sim") == (kept,)
    file.write_bytes(file.read_bytes() * 1100)
    store_duration(msgspec.structs.replace(kept, overhead_s=7.0))
    *others, last = stored_durations("sim")
    assert (len(others) < 1099, last.overhead_s) == (True, 7.0)


def test_a_store_that_cannot_be_written_costs_no_run(record, monkeypatch):
    monkeypatch.setenv("BENCHCTL_DURATIONS_DIR", "/dev/null/below")
    ran(record, 4.0)
    assert estimated() is None


def test_a_plan_without_earlier_runs_says_so_and_with_them_names_how_many(record, capsys):
    print_plan(profile(engine={"kind": "vllm"}), RequestSets.single(REQUESTS), None)
    assert "duration unknown: no earlier run of vllm with" in capsys.readouterr().out
    vllm = profile(engine={"kind": "vllm"}, blocks=10)
    ran(record, 4.0, 30.0, vllm)
    print_plan(vllm, RequestSets.single(REQUESTS), None)
    said = capsys.readouterr().out
    assert "estimated duration 303 s (5 min), from 1 earlier run on this machine" in said
    assert said.count(" 30.0\n") == 10
    assert "of each run 26 s are its server's start and end, 4.0 s its load: with workload.num_prompts=7 " in said


def test_results_say_how_much_of_their_time_went_into_starts_where_that_was_most_of_it(tmp_path):
    results = write_results(tmp_path / "r", cells=[{}], block_factors=[{"baseline": 1, "guided": 1}] * 2)
    for start_s, lines in (
        (35, ["148 s: 140 s starting servers, 4 s under load, 4 s the rest", "workload.num_prompts=140 (now 4)"]),
        (1, []),
    ):
        at_s = (0, start_s, start_s + 0.5, start_s + 1.5, start_s + 2)
        names = ("launch_ns", "ready_ns", "first_send_ns", "last_token_ns", "stop_ns")
        times = RunTimes(**{name: round(s * NS_PER_S) for name, s in zip(names, at_s, strict=True)})
        for planned in results.plan().runs:
            edit_run(results, planned.run_id, times=times)
        told = time_lines(analyze_directory(results.path))
        assert [text in line for text, line in zip(lines, told, strict=True)] == [True] * len(lines)
        assert (told[:1] == []) == ("Where the time went" not in printed("show", results.path)), "and show, too"
