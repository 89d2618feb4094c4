"""Loads whose first requests are warm-up: closed loops that begin as they go on, open loops without their start."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.cli import printed, refusal

from benchctl.analysis.metrics.latency import measured
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.validity.checks import in_step_frac, reconcile, steps_of_load
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.loaded import load_results
from benchctl.workload.opening import running_requests
from benchctl.workload.prepare import prepare_requests
from benchmarks.verdict.begin_truth import LAWS, percentiles_of

PROFILE = """\
name: begun
blocks: 1
engine: {kind: sim, options: {time_scale: 4, num_speculative_tokens: 2, acceptance: 0.6, draft_cost: 0.1}}
model: qwen2.5-7b
workload:
  dataset: synthetic
  num_prompts: 40
  input_len: {mean: 100, cv: 0.6, max: 500}
  output_len: {mean: 30, cv: 0.6, max: 100}
  arrival: {kind: closed-loop, max_concurrency: 6}
load: {begin: running}
variants: {baseline: {}}
"""
OPEN = ("workload.arrival={kind: poisson, request_rate: 30}", "load.begin=drained", "load.discard=0.25")


def run_of(path: Path, *overrides: str, command: tuple[str, ...] = ("run",)):
    """The only run of an experiment, its profile and the checks of each of its loads by name."""
    path.mkdir(exist_ok=True)
    profile = path / "begun.yaml"
    profile.write_text(PROFILE)
    options = [word for override in overrides for word in ("--set", override)]
    printed(*command, "--profile", profile, "-o", path / "results", "--quiet", *options, cwd=path)
    results = load_results(path / "results")
    read = parse_profile(results.profile_yaml, "results")
    (run,) = results.runs
    settings = variant_settings(read, "baseline", {})
    loads = [reconcile(load, read, settings, results.requests, read.stop) for load in run.loads]
    return run, read, [{check.name: check for check in checks} for checks in loads]


@pytest.mark.parametrize(
    ("overrides", "num_loads"),
    [((), 1), (OPEN, 1), (("loads_per_server=2",), 2)],
    ids=["running", "discard", "two loads"],
)
def test_a_load_with_an_opening_adds_up_and_has_the_steps_of_its_simulation(tmp_path, overrides, num_loads):
    run, profile, checks_of_loads = run_of(tmp_path / "server", *overrides)
    simulated, *_ = run_of(tmp_path / "virtual", *overrides, command=("simulate",))
    num_measured, num_opening = (30, 10) if overrides is OPEN else (40, 12)
    assert len(run.loads) == len(simulated.loads) == num_loads
    for load, virtual, checks in zip(run.loads, simulated.loads, checks_of_loads, strict=True):
        assert not [check for check in checks.values() if check.ok is False and check.is_fatal]
        names = ("requests", "step-tokens", "counters", "prefix-cache", "draft-counters")
        assert {checks[name].ok for name in names} == {True}
        assert (load.record.num_sent, len(measured(load.requests))) == (num_measured, num_measured)
        is_first = load is run.loads[0]
        assert sum(request.is_warmup for request in load.requests) == num_opening + is_first
        steps, virtual_steps = steps_of_load(load), steps_of_load(virtual)
        assert len(load.columns) < len(steps)
        for name in ("start_ns", "dur_ns", "num_seqs", "output_tokens", "accepted_tokens"):
            assert np.array_equal(steps.arrays[name], virtual_steps.arrays[name]), name
        metrics = run_metrics(load, profile.workload.arrival)
        assert metrics["num_requests"] == num_measured
        if overrides is not OPEN:
            assert metrics["slot_idle_frac"] < 0.3  # with the slots of the opening as empty ones it would be more
            assert run_metrics(virtual, profile.workload.arrival)["slot_idle_frac"] == 0


def test_the_time_of_requests_in_steps_counts_those_of_the_opening_on_both_sides(tmp_path):
    run, *_ = run_of(tmp_path, command=("simulate",))
    assert in_step_frac(run) is None  # virtual, where it is not asked
    assert run.record.times.opening_ns < run.record.times.first_send_ns


def test_an_opening_has_two_requests_for_each_slot_which_end_one_after_another_and_share_no_prompt():
    requests = prepare_requests(parse_profile(PROFILE, "test")).requests
    opening = running_requests(requests, 6)
    prompts = [request.prompt.split()[0] for request in (*opening, *requests)]
    assert len(opening) == 12
    assert len(set(prompts[:12])) == 12
    assert not set(prompts[:12]) & set(prompts[12:])
    rests = [request.max_tokens for request in opening[:6]]
    assert len(set(rests)) >= 5
    assert max(rests) <= max(request.max_tokens for request in requests)
    assert {request.n for request in opening} == {1}


@pytest.mark.parametrize(
    ("arrival", "load", "says"),
    [
        ("{kind: poisson, request_rate: 5}", "{begin: running}", "set load.discard instead"),
        ("{kind: burst}", "{begin: running}", "set it to drained"),
        ("{kind: closed-loop, max_concurrency: 4}", "{discard: 0.1}", "set load.begin: running instead"),
        ("{kind: burst}", "{discard: 0.1}", "remove it"),
        ("{kind: poisson, request_rate: 5}", "{discard: 0.95}", "0.9"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(tmp_path, arrival, load, says):
    (tmp_path / "begun.yaml").write_text(PROFILE)
    sets = ("--set", f"workload.arrival={arrival}", "--set", f"load={load}")
    message = refusal("run", "--profile", tmp_path / "begun.yaml", "--dry-run", *sets, cwd=tmp_path)
    assert says in " ".join(message.split())


def test_a_dry_run_counts_the_time_of_the_opening(tmp_path):
    (tmp_path / "begun.yaml").write_text(PROFILE)
    seconds = {}
    for begin in ("drained", "running"):
        options = ("--profile", tmp_path / "begun.yaml", "--dry-run", "--set", f"load.begin={begin}")
        (row,) = re.findall(r"^000-b0-baseline .* ([\d.]+)$", printed("run", *options, cwd=tmp_path), re.MULTILINE)
        seconds[begin] = float(row)
    assert seconds["running"] > seconds["drained"]


def test_the_tail_of_first_tokens_is_that_of_a_load_that_goes_on_and_a_drained_start_is_several_times_it():
    law = LAWS[0]
    truth, drained, running = percentiles_of(law, num_requests=1500, num_loads=6, num_true=40_000)
    assert abs(running / truth - 1) < 0.06
    assert drained > 2 * truth


def test_defaults_leave_a_profile_as_it_was():
    profile: Profile = parse_profile(PROFILE.replace("load: {begin: running}\n", ""), "test")
    assert (profile.load.begin, profile.load.discard) == ("drained", 0.0)
