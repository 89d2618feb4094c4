"""Runs that count, and for what: gates of the machine, suspect runs, times of a client that was in doubt."""

import re
from pathlib import Path

import pytest
from support.results.builders import (
    BASELINE,
    GUIDED,
    T0_NS,
    change_requests,
    edit_requests,
    edit_run,
    run_ids,
    write_results,
)
from support.results.comparing import compare_arms, messages

import benchctl.measure
from benchctl.analysis.compare.metric import Rules, compare_metric, judge_together
from benchctl.analysis.compare.words import reasons_of
from benchctl.analysis.statistics.estimate import unpaired_ratio
from benchctl.analysis.validity.usable import clock_warnings, violated_gates
from benchctl.records.loaded import load_run
from benchctl.records.record import RequestError, RunFailure
from benchctl.records.schema import FOREIGN_GPU_PROCESS, GpuSample, ResultWarning
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES

ALL = ("throttling", "foreign-gpu-process", "failed-requests")
OTHER = ResultWarning(code=FOREIGN_GPU_PROCESS, message="process 7 (python) computed on GPU 0 before the start")
IN_BURSTS = ResultWarning(code="client-bunching", message="tokens came in bursts")
GONE = RequestError(kind="reset", message="the connection broke")
SLOWED = "gate throttling: a GPU slowed itself down during the load (hw-thermal)"


@pytest.fixture(name="results")
def _results(tmp_path):
    blocks = tuple({"baseline": 1.0, "guided": factor} for factor in (1.0, 1.001, 0.999, 1.002, 1.0, 0.998, 1.001))
    return write_results(tmp_path / "r", block_factors=blocks)


def declare(results, gates):
    results.write_profile(f"{results.profile_yaml()}gates: [{', '.join(gates)}]\n")


def sampled(results, run_id, *reasons, t_ns=T0_NS + 1_000_000):
    with results.run(run_id).append("gpu") as writer:
        writer.write(GpuSample(t_ns=t_ns, index=0, source="nvml", throttle_reasons=reasons or None))


def fail(results, run_id):
    change_requests(results, run_id, 0, error=GONE)
    edit_run(results, run_id, num_completed=3, num_failed=1, state="suspect")


def excluded(comparison):
    return messages(comparison, "excluded-block")


def seen(results, gates=ALL):
    """Gates that the first run violates, and the warnings about its clocks."""
    run = load_run(results.run(BASELINE))
    return list(violated_gates(run, gates)), [warning.code for warning in clock_warnings(run)]


@pytest.mark.parametrize("reason", ["hw-slowdown", "hw-thermal", "hw-power-brake", "sw-thermal"])
def test_a_device_that_slows_itself_violates_the_gate_of_throttling_and_only_where_it_is_declared(results, reason):
    sampled(results, BASELINE, "hw-thermal", t_ns=T0_NS - 1)
    sampled(results, BASELINE)
    sampled(results, BASELINE, "gpu-idle", "application-clocks", "sync-boost", "display-clocks")
    assert seen(results) == ([], [])
    sampled(results, BASELINE, "sw-power-cap")
    assert seen(results) == ([], ["gpu-power-capped"]), "the power limit is how devices run"
    sampled(results, BASELINE, reason, "sw-power-cap")
    edit_run(results, BASELINE, warnings=(OTHER,))
    slowed, foreign = SLOWED.replace("hw-thermal", reason), f"gate foreign-gpu-process: {OTHER.message}"
    assert seen(results) == ([slowed, foreign], ["gpu-throttled", "gpu-power-capped"])
    assert seen(results, ("foreign-gpu-process",))[0] == [foreign]
    assert seen(results, ())[0] == []


def test_a_run_that_violates_a_gate_leaves_with_its_pair_and_is_named(results):
    sampled(results, GUIDED, "hw-thermal")
    edit_run(results, "002-b1-baseline", warnings=(OTHER,))
    comparison = compare_arms(results)
    assert excluded(comparison) == [
        f"block 1 is left out: 002-b1-baseline: gate foreign-gpu-process: {OTHER.message}",
        f"block 0 is left out: {GUIDED}: {SLOWED}",
    ]
    assert {cell.num_blocks for cell in comparison.cells} == {5}
    late = ResultWarning(code="sends-delayed", message="requests left late")
    edit_run(results, "002-b1-baseline", state="suspect", warnings=(late, OTHER))
    assert "gate foreign-gpu-process" in excluded(compare_arms(results, allow_suspect=True))[0], "before its client"
    edit_run(results, "002-b1-baseline", state="done", warnings=(OTHER,))
    declare(results, [])
    comparison = compare_arms(results)
    assert excluded(comparison) == []
    assert {cell.num_blocks for cell in comparison.cells} == {7}


def test_failed_requests_make_a_comparison_incomplete_unless_they_are_a_gate(results):
    fail(results, GUIDED)
    sampled(results, GUIDED, "hw-thermal")
    comparison = compare_arms(results)
    assert (comparison.verdict, excluded(comparison)) == ("invalid", []), "no gate of the machine hides them"
    contradiction = ResultWarning(code="check-failed", message="check requests failed")
    edit_run(results, BASELINE, state="suspect", warnings=(contradiction, OTHER))
    declare(results, ALL)
    comparison = compare_arms(results)
    assert excluded(comparison) == [
        f"block 0 is left out: {GUIDED}: {SLOWED}; gate failed-requests: 1 of 4 requests failed"
    ]
    edit_run(results, BASELINE, state="done", warnings=())
    assert compare_arms(results).verdict == "regression"


def doubt(code):
    return ResultWarning(code=code, message=f"{code} it was")


def suspect(results, run_id, *codes):
    edit_run(results, run_id, state="suspect", warnings=(*(doubt(code) for code in codes), IN_BURSTS))


def test_a_suspect_run_counts_if_asked_for_whatever_made_it_suspect(results):
    for code in sorted(SUSPECT_CODES - CLIENT_SUSPECT_CODES - {"check-failed"}):
        suspect(results, GUIDED, code)
        left_out, counted = compare_arms(results), compare_arms(results, allow_suspect=True)
        assert (left_out.cells[0].num_blocks, counted.cells[0].num_blocks) == (6, 7), code
        assert excluded(counted) == messages(left_out, "suspect-counted") == []
        assert messages(counted, code) == [f"{code} it was"]


@pytest.mark.parametrize("code", sorted(CLIENT_SUSPECT_CODES))
def test_where_the_client_is_in_doubt_its_times_do_not_count_and_those_of_the_server_do(results, code):
    suspect(results, GUIDED, code)
    left_out, counted = compare_arms(results), compare_arms(results, allow_suspect=True)
    blocks = [
        {metric.metric.name: metric.estimate.num_blocks for metric in comparison.cells[0].deciding}
        for comparison in (left_out, counted)
    ]
    assert blocks == [{"step_ms": 7, "wall_s": 6, "tpot_ms": 6}, {"step_ms": 7, "wall_s": 7, "tpot_ms": 7}]
    (message,) = messages(left_out, "client-times-excluded")
    assert message.startswith(
        "guided top_k=5: times that the client measured in block 0 do not count, those of the server do"
    )
    assert f"the first: {GUIDED}: {code}: {code} it was" in message
    assert ("lighter load" in message) == (code in {"slots-idle", "sends-delayed", "rate-missed"})
    assert excluded(left_out) == messages(counted, "client-times-excluded") == []


def test_that_times_of_the_client_do_not_count_is_the_first_reason_where_they_decide_nothing(tmp_path):
    shaken = tuple({"baseline": 1.0 + 0.05 * (i % 3), "guided": (1 + 0.07 * (i * i % 4)) / 1.55} for i in range(7))
    results = write_results(tmp_path / "r", block_factors=shaken)
    suspect(results, GUIDED, "arrival-times-unreliable")
    reasons = {metric.metric.name: metric.reason for metric in compare_arms(results).cells[0].deciding}
    across = "the interval reaches across the margin of 1%"
    assert reasons["wall_s"].startswith("the client's times of 1 of 14 runs do not count; ")
    assert f"; {across}" in reasons["wall_s"]
    assert reasons["step_ms"].startswith(across)


def counted_of(results):
    """What is said of the suspect runs of each side that count."""
    (message,) = messages(compare_arms(results, allow_suspect=True), "suspect-counted")
    return message.removeprefix("suspect runs are counted (--allow-suspect): ").partition(";")[0]


def test_suspect_runs_that_count_are_told_with_the_codes_of_their_doubts(results):
    assert compare_arms(results, allow_suspect=True) == compare_arms(results), "where no run is suspect"
    suspect(results, GUIDED, "client-cpu")
    assert counted_of(results) == "1 of 7 runs of guided (client-cpu)"
    for run_id in run_ids(results, "baseline"):
        suspect(results, run_id, "sends-delayed", "arrival-times-unreliable")
    codes = "arrival-times-unreliable, sends-delayed"
    assert counted_of(results) == f"7 of 7 runs of baseline ({codes}) and 1 of 7 runs of guided (client-cpu)"
    for warnings, told in (
        ((), "no reason recorded"),
        ((doubt("throttled"), IN_BURSTS), "client-bunching, throttled"),
    ):
        edit_run(results, GUIDED, state="suspect", warnings=warnings)
        assert f"of guided ({told})" in counted_of(results)


def test_a_run_that_serves_many_cells_is_counted_once(tmp_path):
    results = write_results(tmp_path / "r", cells=({"top_k": 2}, {"top_k": 5}))
    suspect(results, BASELINE, "arrival-times-unreliable")
    assert counted_of(results) == "1 of 3 runs of baseline (arrival-times-unreliable)"


def test_what_is_wrong_beside_a_doubt_is_not_allowed_with_it(results):
    suspect(results, GUIDED, "arrival-times-unreliable", "failed-requests")
    change_requests(results, GUIDED, 0, error=GONE)
    edit_run(results, GUIDED, num_completed=3, num_failed=1)
    assert compare_arms(results, allow_suspect=True).verdict == "invalid"
    both = compare_arms(results, allow_suspect=True, allow_failed=True)
    assert (both.verdict, both.cells[0].num_blocks) == ("regression", 7)
    edit_requests(results, GUIDED, lambda r: r if r.index else None)
    suspect(results, GUIDED, "check-failed")
    assert compare_arms(results, allow_suspect=True).exit_code == 4
    path = results.run(GUIDED).path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    suspect(results, GUIDED, "arrival-times-unreliable")
    (message,) = excluded(compare_arms(results, allow_suspect=True))
    assert "suspect, and cannot be read completely: " in message
    assert "steps.jsonl:8: the line is cut off" in message
    edit_run(results, GUIDED, state="failed", failure=RunFailure(cause="server-died", message="killed"))
    counted = compare_arms(results, allow_suspect=True)
    assert excluded(counted) == [f"block 0 is left out: {GUIDED}: failed (server-died): killed"]


def test_every_code_with_which_a_measurement_doubts_itself_is_known():
    room = Path(next(iter(benchctl.measure.__path__)))
    text = "".join(file.read_text() for file in room.rglob("*.py"))
    codes = set(re.findall(r'\.suspect\(\s*"([\w-]+)"', text))
    assert {"failed-requests", "warmup-failed"} <= codes <= SUSPECT_CODES
    assert CLIENT_SUSPECT_CODES < SUSPECT_CODES


@pytest.mark.parametrize("run_id", [BASELINE, GUIDED])
def test_bursts_in_one_run_of_either_side_keep_what_the_client_timed_from_deciding_and_nothing_else(
    results, run_id
):
    def outcomes():
        metrics = compare_arms(results).cells[0].metrics
        verdicts = {metric.metric.name: metric.verdict for metric in metrics}
        return verdicts, {metric.metric.name: metric.estimate for metric in metrics}

    (before, estimates) = outcomes()
    assert before["tpot_ms"] == before["step_ms"] == before["wall_s"] == "regression"
    edit_run(results, run_id, warnings=(ResultWarning(code="sim-lag", message="the simulator was late"),))
    assert outcomes()[0] == before, "other warnings take no metric away"
    edit_run(results, run_id, warnings=(IN_BURSTS,))
    after, with_bursts = outcomes()
    changed = {name for name, verdict in before.items() if after[name] != verdict}
    assert {"tpot_ms", "itl_ms", "ttft_ms", "p50_itl_ms"} <= changed
    assert all(name.endswith(("ttft_ms", "itl_ms", "tpot_ms")) for name in changed)
    assert with_bursts == estimates, "the intervals stay"
    named = compare_arms(results, metrics=("tpot_ms", "ttft_ms"))
    assert (named.verdict, named.exit_code) == ("inconclusive", 3)
    assert any("in bursts in 1 of 14 runs" in reason for reason in reasons_of(named))


def test_a_limit_of_the_values_comes_first_in_the_reason_after_the_correction_for_several_tests():
    rules = Rules(margin_frac=0.01, confidence=0.95, is_paired=False, noise={})
    a, b = (1.0, 1.02, 0.98, 1.01, 0.99, 1.0), (1.01, 1.03, 0.99, 1.0, 1.0, 1.02)
    metrics = [
        compare_metric(name, "deciding", (a, b), rules, unpaired_ratio(a, b, 0.95), limits=limits)
        for name, limits in (("tpot_ms", ("2 of 12 runs do not count",)), ("step_ms", ()))
    ]
    ((limited, other),) = judge_together([metrics], 0.95)
    assert limited.judged_confidence > 0.95
    assert limited.reason == f"2 of 12 runs do not count; {other.reason}"
    assert other.reason.startswith("the interval reaches across")
