"""Experiments with conversations: what is checked of them, what is compared, and what users read."""

import msgspec
import pytest
from support.cli import printed
from support.results.several import simulated, write_profile

from benchctl.analysis.compare.accuracy import compare_divergence
from benchctl.analysis.metrics.client import sends_of, slot_occupancy
from benchctl.analysis.validity.answers import check_planned_hits, planned_hit_frac, prompt_warnings
from benchctl.analysis.validity.client import _unlike_poisson
from benchctl.analysis.validity.conversations import check_turns, hits_of_turns
from benchctl.profile.arrival import Arrival

CLOSED = {"kind": "closed-loop", "max_concurrency": 4}
WORKLOAD = {
    "dataset": "synthetic",
    "num_prompts": 10,
    "input_len": [60, 90],
    "output_len": 24,
    "turns": {"number": [3, 4], "think_s": 0.2, "think_cv": 1.0},
    "arrival": CLOSED,
}
CACHED = {"enable_prefix_caching": True, "noise": "none"}


def experiment(directory, options=(), workload=(), **changes):
    """A simulated experiment in virtual time, the cache of its servers on."""
    engine = {"kind": "sim", "options": CACHED | dict(options)}
    return simulated(
        directory, **{"loads_per_server": 1} | changes, engine=engine, workload=WORKLOAD | dict(workload)
    )


def checks_of(done, run):
    return {check.name: check for check in done.checks(run)}


@pytest.mark.parametrize("arrival", [CLOSED, {"kind": "poisson", "request_rate": 4}])
@pytest.mark.parametrize("loads", [1, 3])
def test_turns_keep_their_order_and_hits_are_those_that_conversations_can_have(tmp_path, loads, arrival):
    done = experiment(tmp_path, loads_per_server=loads, workload={"arrival": arrival})
    plan = planned_hit_frac(done.results.requests)
    for run in done.results.runs:
        assert run.record.state == "done"
        checks = checks_of(done, run)
        assert (checks["turns"].ok, checks["prefix-cache"].ok) == (True, True)
        assert "25 later turns, 0 of them before" in checks["turns"].detail
        # answers of full length, one token each: what is missing are ends of blocks
        assert plan - 0.12 < done.metrics(run)["prefix_hit_frac"] < plan


def test_a_cache_that_is_too_small_for_open_conversations_is_a_warning(tmp_path):
    done = experiment(tmp_path, {"num_kv_blocks": 30}, blocks=1)
    run = done.results.runs[0]
    check = checks_of(done, run)["prefix-cache"]
    assert (check.ok, check.is_fatal) == (False, False)
    assert "its cache may be too small beside the load" in check.detail
    compared = printed("compare", done.results.path, "--json", code=3, cwd=tmp_path)
    assert "check-prefix-cache" in compared
    assert run.record.state == "done"


def test_a_server_that_does_not_say_how_large_its_blocks_are_may_find_less(tmp_path):
    done = experiment(tmp_path, blocks=1)
    run = done.results.runs[0]
    records = [record for record in run.requests if not record.is_warmup]
    unstated = msgspec.structs.replace(run.record, effective_config={})
    least, most = hits_of_turns(records, run.record)
    assert 0.3 < least < done.metrics(run)["prefix_hit_frac"] <= most < 0.9
    assert hits_of_turns(records, unstated)[0] == 0
    prepared = done.results.requests
    for record, hits, verdict in (
        (run.record, 0.2, False),
        (unstated, 0.2, True),
        (run.record, 0.99, False),
        (unstated, 0.99, False),
        (run.record, None, None),
    ):
        bounds = hits_of_turns(records, record)
        assert check_planned_hits(prepared, bounds, hits, record, is_allowed=False).ok is verdict


def test_the_gaps_of_arrivals_are_those_of_first_turns(tmp_path):
    """Later turns come when their users have thought, and are no part of the Poisson process."""
    arrival = {"kind": "poisson", "request_rate": 5}
    done = experiment(tmp_path, blocks=1, workload={"arrival": arrival, "num_prompts": 60})
    records = [record for record in done.results.runs[0].requests if not record.is_warmup]
    sends = sends_of(records, Arrival(**arrival))
    assert len(sends.requests) > 150
    assert _unlike_poisson(sends, Arrival(**arrival)) is None


def test_without_a_cache_no_hit_is_planned_and_none_may_be(tmp_path):
    done = experiment(tmp_path, {"enable_prefix_caching": False}, blocks=1)
    assert checks_of(done, done.results.runs[0])["prefix-cache"].ok in {True, None}


def test_a_turn_that_was_sent_too_early_makes_a_run_suspect(tmp_path):
    done = experiment(tmp_path, blocks=1)
    (run, *_), prepared = done.results.runs, done.results.requests
    records = [record for record in run.requests if not record.is_warmup]
    (check,) = check_turns(records, prepared, run.record)
    assert check.ok
    turn = next(record for record in records if record.turn == 2)
    early = msgspec.structs.replace(turn, sent_ns=turn.sent_ns - 1)
    others = [record for record in records if record is not turn]
    (check,) = check_turns([*others, early], prepared, run.record)
    assert (check.ok, check.is_fatal) == (False, True)
    assert f"1 of them before the answer before it and its think time: {turn.request_id}" in check.detail


def test_later_turns_are_compared_with_no_plan_and_with_no_other_text(tmp_path):
    """Arms with other texts from the first turn on: what follows is not divergent, and not of another length."""
    done = experiment(
        tmp_path,
        stop="natural",
        blocks=1,
        workload={"output_len": None, "max_tokens": 30},
        variants={"baseline": {}, "other": {"sampling": {"top_k": 1}}},
    )
    a, b = done.results.runs
    assert compare_divergence([a], [b]).b_against_a.num_pairs == 10
    assert prompt_warnings(done.results.requests, a.requests) == ()
    assert slot_occupancy([record for record in a.requests if not record.is_warmup], Arrival(**CLOSED)) is None


def test_users_read_how_many_conversations_there_are_and_what_the_cache_had(tmp_path):
    engine = {"kind": "sim", "options": CACHED}
    path = write_profile(tmp_path, workload=WORKLOAD, blocks=1, engine=engine)
    plan = printed("run", path, "--dry-run", "--output", tmp_path / "r", cwd=tmp_path)
    assert "; conversations of up to 4 turns: planned prefix hits 0." in plan
    done = experiment(tmp_path / "virtual", blocks=1)
    shown = printed("show", done.results.path, cwd=tmp_path)
    assert "prefix hits: planned 0." in shown
    assert "prefix hits: planned 0." in shown


def test_checks_of_other_loads_know_no_turns(tmp_path):
    workload = {key: value for key, value in WORKLOAD.items() if key != "turns"}
    done = simulated(tmp_path, engine={"kind": "sim"}, workload=workload, blocks=1)
    assert "turns" not in checks_of(done, done.results.runs[0])
    assert b'"turn"' not in (done.results.path / "requests.jsonl").read_bytes()
