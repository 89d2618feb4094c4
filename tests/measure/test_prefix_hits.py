"""Planned hits in the prefix cache: each load has an empty part of it, primed, and is held against its plan."""

import json
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import pytest
from support.cli import printed
from support.results.several import simulated, write_profile
from support.servers.paced_engine import PacedEngine, planned, profile, request

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.validity.answers import check_planned_hits, planned_hit_frac
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation, run_experiment
from benchctl.measure.run import Listener, RunContext, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run
from benchctl.workload.prepare import prepare_requests

WORKLOAD = {
    "dataset": "synthetic",
    "num_prompts": 12,
    "input_len": [160, 96],
    "output_len": 8,
    "prefix": {"groups": 3, "hit_rate": 0.8},
    "arrival": {"kind": "closed-loop", "max_concurrency": 12},
}
CACHED = {"enable_prefix_caching": True, "noise": "none"}


def experiment(directory, options=(), workload=(), **changes):
    """A simulated experiment in virtual time, the cache of its servers on."""
    engine = {"kind": "sim", "options": CACHED | dict(options)}
    return simulated(directory, engine=engine, workload=WORKLOAD | dict(workload), **changes)


def hit_check(of_experiment, run):
    return {check.name: check for check in of_experiment.checks(run)}["prefix-cache"]


@pytest.mark.parametrize("arrival", [WORKLOAD["arrival"], {"kind": "poisson", "request_rate": 20}])
@pytest.mark.parametrize("loads", [1, 3])
def test_planned_and_measured_hits_agree_and_the_check_holds(tmp_path, loads, arrival):
    done = experiment(tmp_path, loads_per_server=loads, workload={"arrival": arrival})
    plan = planned_hit_frac(done.results.requests)
    assert 0.75 < plan < 0.85
    for run in done.results.runs:
        assert run.record.state == "done"
        assert done.metrics(run)["prefix_hit_frac"] == pytest.approx(plan, abs=1e-9)
        check = hit_check(done, run)
        assert (check.ok, f"planned {plan:.2f}, measured {plan:.2f}" in check.detail) == (True, True)


def test_every_load_over_http_begins_with_an_empty_cache_and_primed_prefixes(tmp_path):
    options = {"engine": {"kind": "sim", "options": CACHED | {"time_scale": 20.0}}}
    path = write_profile(tmp_path, workload=WORKLOAD, blocks=1, **options)
    printed("run", path, "--output", tmp_path / "r", "--no-store-noise", "--quiet", cwd=tmp_path)
    done = load_experiment(tmp_path / "r")
    virtual = experiment(tmp_path / "virtual", blocks=1)
    for run, simulated_run in zip(done.results.runs, virtual.results.runs, strict=True):
        shared = {request.request_id: request.shared_tokens for request in done.results.requests}
        cached = [{r.request_id: r.cached_tokens for r in each.requests if not r.is_warmup} for each in run.loads]
        assert cached == [shared] * 3
        for load, number in zip(run.loads, (1, 2, 3), strict=True):
            primed = [request for request in load.requests if request.request_id.startswith("prime-")]
            assert len(primed) == 6
            assert all(request.is_warmup for request in primed), "no metric has them"
            assert [r.cached_tokens for r in primed[3:]] == [r.prompt_tokens // 16 * 16 for r in primed[3:]]
            files = (directory / "runs" / run.record.run_id for directory in (done.path, virtual.path))
            steps = [RunDirectory(path).of_load(number).path / "steps.jsonl" for path in files]
            assert steps[0].read_bytes() == steps[1].read_bytes(), "the same steps as in virtual time"
        assert simulated_run.record.state == run.record.state == "done"


def test_a_cache_that_is_too_small_fails_its_plan_and_is_measured_where_the_profile_says_so(tmp_path):
    small, many = {"num_kv_blocks": 40}, {"prefix": {"groups": 6, "hit_rate": 0.8}}
    done = experiment(tmp_path / "small", options=small, loads_per_server=1, workload=many)
    run = done.results.runs[0]
    assert run.record.state == "suspect"
    (message,) = (warning.message for warning in run.record.warnings if warning.code == "check-failed")
    assert message.startswith("check prefix-cache failed: planned 0.81, measured 0.")
    assert "its cache may be too small beside the load" in message
    many["allow_prefix_cache_hits"] = True
    allowed = experiment(tmp_path / "allowed", options=small, loads_per_server=1, workload=many)
    assert {run.record.state for run in allowed.results.runs} == {"done"}
    assert "the profile allows it" in hit_check(allowed, allowed.results.runs[0]).detail


def test_larger_blocks_than_planned_are_named(tmp_path):
    done = experiment(tmp_path, options={"block_size": 64}, loads_per_server=1)
    (message,) = (each.message for each in done.results.runs[0].record.warnings if each.code == "check-failed")
    assert "the server finds whole blocks of 64 tokens: set workload.prefix.block: 64" in message


@pytest.mark.parametrize("stated", ["64 tokens", 0, -3, [64]])
def test_a_server_that_states_no_number_for_its_blocks_is_no_mistake_of_ours(tmp_path, stated):
    done = experiment(tmp_path, options={"block_size": 64}, loads_per_server=1, blocks=1)
    for run in done.results.runs:
        record = msgspec.structs.replace(run.record, effective_config={"server.block_size": stated})
        check = check_planned_hits(done.results.requests, (0.81, 0.81), 0.5, record, is_allowed=False)
        assert (check.ok, "its cache may be too small" in check.detail) == (False, True)
    nothing = [msgspec.structs.replace(each, prompt_tokens=0) for each in done.results.requests]
    assert planned_hit_frac(nothing) is None


def test_an_arm_without_a_cache_is_planned_to_find_nothing(tmp_path):
    variants = {"baseline": {"server": {"enable_prefix_caching": False}}, "cached": {}}
    done = experiment(tmp_path, variants=variants, loads_per_server=1)
    details = {run.record.variant: hit_check(done, run).detail for run in done.results.runs}
    plan = planned_hit_frac(done.results.requests)
    assert details == {
        "baseline": "steps left out 0 of the prompt tokens that usage counts",
        "cached": f"planned {plan:.2f}, measured {plan:.2f}",
    }
    assert {run.record.state for run in done.results.runs} == {"done"}
    line = f"prefix hits: planned {plan:.2f}, measured {plan:.2f} (cached)"
    assert line in " ".join(printed("show", done.path).split())


@pytest.mark.parametrize("per_server", ["fresh", "ladder"])
def test_a_sweep_of_hit_rates_plans_and_measures_each_of_them(tmp_path, per_server):
    changes = {"per_server": per_server, "sweep": {"hit_rate": [0.3, 0.6, 0.8]}, "loads_per_server": 1}
    file = write_profile(tmp_path, engine={"kind": "sim", "options": CACHED}, workload=WORKLOAD, **changes)
    parsed = load_profile(str(file))
    prepared = prepare_requests(parsed)
    results = create_simulation(parsed, prepared, Origin(output_root=tmp_path, argv=()))
    run_experiment(results, parsed, prepared.sets, Listener(), simulate_run)
    done = load_experiment(results.path)
    assert len(done.results.runs) == 2 * 2 * 3
    for run in done.results.runs:
        plan = planned_hit_frac(done.results.sets.of(run.record.cell))
        assert abs(plan - run.record.cell["hit_rate"]) < 0.06, "as near as whole blocks are"
        assert done.metrics(run)["prefix_hit_frac"] == pytest.approx(plan, abs=1e-9)
        assert hit_check(done, run).ok is True


def test_loads_that_may_hit_the_cache_find_nothing_of_the_load_before(tmp_path):
    workload = {"prefix": None, "allow_prefix_cache_hits": True}
    done = experiment(tmp_path, workload=workload, loads_per_server=3)
    assert {
        request.cached_tokens for run in done.results.runs for load in run.loads for request in load.requests
    } == {0}


def test_a_dry_run_says_how_many_hits_are_planned(tmp_path):
    path = write_profile(tmp_path, workload=WORKLOAD, engine={"kind": "sim", "options": CACHED})
    plan = " ".join(printed("run", path, "--dry-run", cwd=tmp_path).split())
    assert "prefixes of 80 to 128 tokens in 3 groups: planned prefix hits 0.81" in plan
    plan = " ".join(
        printed("run", path, "--set", "sweep={hit_rate: [0.2, 0.8]}", "--dry-run", cwd=tmp_path).split()
    )
    assert "prefixes of 16 to 128 tokens in 3 groups: planned prefix hits 0.19 to 0.81" in plan


@dataclass(frozen=True)
class PrimedEngine(PacedEngine):
    """Takes the words that stand behind a primed prefix for what they are: no instructions to the server."""

    def salted(self, settings):
        return settings

    def request_call(self, request, settings):
        if request.request_id.startswith("prime-"):
            request = msgspec.structs.replace(request, prompt=json.dumps({"gap_ms": 5}))
        return super().request_call(request, settings)


def test_steps_of_priming_on_the_clock_of_the_host_are_warm_up_of_their_own_load(tmp_path):
    requests = tuple(
        msgspec.structs.replace(request(i, max_tokens=6, gap_ms=5), shared_tokens=4, shared_chars=4)
        for i in range(4)
    )
    workload = {"dataset": "synthetic", "input_len": 7, "prefix": {"groups": 2, "len": 4, "block": 4}}
    directory = RunDirectory(tmp_path / "run")
    measure_run(
        RunContext(
            profile=profile(workload=workload),
            requests=RequestSets.single(requests),
            engine=PrimedEngine(truth=tmp_path / "truth.jsonl"),
            num_loads=3,
        ),
        planned(),
        directory,
    )
    run = load_run(directory)
    for load in run.loads:
        tokens = defaultdict(int)
        for answer in load.requests:
            tokens[answer.is_warmup] += answer.completion_tokens or 0
        measured_steps, warmup_steps = load.columns, load.warmup_columns
        assert measured_steps.total("output_tokens") == tokens[False] == 24
        assert (warmup_steps.total("output_tokens") or 0) >= 4, "two groups, twice"
