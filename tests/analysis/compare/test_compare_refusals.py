"""What must not be compared, what is left out, and what is doubted; runs that count, and for what.

Gates of the machine, suspect runs, and times of a client that was in doubt.
"""

from itertools import zip_longest

import msgspec
import pytest
from support.results.builders import (
    BASELINE,
    GUIDED,
    T0_NS,
    change_requests,
    change_steps,
    edit_manifest,
    edit_requests,
    edit_run,
    run_ids,
    write_request_set,
    write_results,
)
from support.results.comparing import compare, compare_arms, messages

from benchctl.analysis.compare.answer import reasons_of
from benchctl.analysis.validity.usable import clock_warnings, violated_gates
from benchctl.errors import NotComparableError, RecordError, SchemaVersionError
from benchctl.records.files import encode
from benchctl.records.loaded import load_run
from benchctl.records.record import RequestError, RunFailure
from benchctl.records.schema import FOREIGN_GPU_PROCESS, GitState, GpuInfo, GpuSample, ResultWarning
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES
from benchctl.records.writers import sole_writer
from benchctl.report.documents import refusal_document

SEVEN = tuple({"baseline": 1.0, "guided": f} for f in (1.0, 1.001, 0.999, 1.002, 1.0, 0.998, 1.001))
GONE = RequestError(kind="reset", message="the connection broke")


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "a", block_factors=SEVEN)


@pytest.fixture(name="other")
def _other(tmp_path):
    results = write_results(tmp_path / "b", block_factors=SEVEN)
    edit_manifest(results, created_at="2026-02-01T00:00:00Z")
    return results


def report(results, *of_runs, **config):
    """Add to what servers report: those of the named runs, or of all."""
    for run_id in of_runs or [run.run_id for run in results.plan().runs]:
        edit_run(results, run_id, effective_config=results.run(run_id).read().effective_config | config)


def refused(compare_sides, *sides, **options):
    """The refusal of a comparison; it names all differences, up to ten."""
    with pytest.raises(NotComparableError) as caught:
        compare_sides(*sides, **options)
    assert all(difference in str(caught.value) for difference in caught.value.differences[:10])
    return caught.value


def test_differences_in_the_work_itself_are_named_with_both_values_and_never_allowed(results, tmp_path):
    other = write_results(tmp_path / "b", block_factors=SEVEN, asks="How much is")
    edit_manifest(other, seed=8, stop="natural", engine="vllm")
    sets = [one.manifest().request_set_sha256 for one in (results, other)]
    refusal = refused(compare, results.path, other.path)
    assert refusal.differences == (
        f'request_set_sha256: "{sets[0]}" against "{sets[1]}"',
        "seed: 7 against 8",
        'stop: "forced" against "natural"',
        'engine: "sim" against "vllm"',
    )
    assert "--allow-difference" not in str(refusal), "nothing allows another request set"
    refusal = refused(compare, results.path, other.path, allow=("request_set_sha256", "stop", "*"))
    keys = {difference.partition(":")[0] for difference in refusal.differences}
    assert keys >= {"request_set_sha256", "stop"}
    assert "in everything else: request_set_sha256 and stop may never differ, because" in str(refusal)
    assert "allowed_differences" not in str(refusal)


def test_the_same_prompts_that_two_tokenizers_counted_are_the_same_request_set(results, other):
    counted = [
        encode(
            msgspec.structs.replace(request, prompt_tokens=request.prompt_tokens + 3, prompt_tokens_from="server")
        )
        for request in results.prepared_requests()
    ]
    write_request_set(other, b"\n".join(counted) + b"\n")
    edit_manifest(other, profile="renamed")
    comparison = compare(results.path, other.path)
    assert comparison.verdict == "equivalent"
    assert "request_set_sha256" not in {difference.key for difference in comparison.allowed}
    write_request_set(other, b"\n".join(counted[1:]) + b"\n")
    assert "request_set_sha256" in str(refused(compare, results.path, other.path))


def test_a_refusal_names_ten_differences_and_how_many_more_there_are(results, other):
    report(other, **{f"server.flag_{i:02d}": i for i in range(25)})
    refusal = refused(compare, results.path, other.path)
    text = str(refusal)
    assert ("flag_09: absent against 9" in text, "flag_10: absent" in text) == (True, False)
    assert "and 15 more, which --json names" in text
    assert len(refusal_document(refusal)["reasons"]) == len(refusal.differences) == 25


def test_an_undeclared_setting_is_refused_and_can_be_declared(results):
    report(results, *run_ids(results), **{"server.overlap_schedule": False})
    assert refused(compare_arms, results).differences == ("server.overlap_schedule: absent against false",)
    comparison = compare_arms(results, allow=("server.*",))
    assert comparison.verdict == "regression"
    assert [str(difference) for difference in comparison.allowed if difference.is_declared] == [
        "sampling.top_k: -1 against 5",
        'server.value_model: absent against "qwen2.5-1.5b"',
    ]
    report(results, BASELINE, **{"server.max_num_seqs": 8})
    refusal = refused(compare_arms, results, allow=("server.overlap_schedule",))
    of_one_block = "server.max_num_seqs: 8 or absent against absent"
    assert refusal.differences == (of_one_block,), "it changes between blocks of one side"


def test_only_what_both_profiles_allow_is_allowed_between_two_directories(results, other):
    report(other, **{"server.max_num_seqs": 8})
    for side in (results, other):
        assert refused(compare_arms, results, other).differences == ("server.max_num_seqs: absent against 8",)
        side.write_profile(side.profile_yaml().replace("guidance.*]", "guidance.*, server.max_num_seqs]"))
    allowed = {difference.key for difference in compare_arms(results, other).allowed}
    assert allowed == {"sampling.top_k", "server.value_model", "server.max_num_seqs"}


def test_machines_and_priorities_of_the_client_that_differ_are_a_doubt_and_no_refusal(results, other):
    edit_run(results, GUIDED, client_priority="fifo")
    assert messages(compare(results.path, other.path), "machines-differ") == [], "only where both are known"
    edit_run(other, GUIDED, client_priority="normal (fifo: not permitted; nice: not permitted)")
    host = msgspec.structs.replace(other.manifest().host, hostname="elsewhere", cpu_model="Xeon")
    gpus = (GpuInfo(index=0, name="H200", driver="580"),)
    edit_manifest(other, host=host, gpus=gpus, git=GitState(sha="a" * 40, is_dirty=True), benchctl_version="0.2.0")
    host, *others = messages(compare(results.path, other.path), "machines-differ")
    assert host.startswith("host differs: ")
    assert others == [
        "GPUs differs: none against H200 driver 580",
        "benchctl version differs: 0.1.0 against 0.2.0",
        "git commit differs: unknown against aaaaaaaaaaaa with changes",
        "priority of the load client differs: fifo against normal",
    ]


def test_one_failed_request_makes_the_cell_incomplete_unless_that_is_allowed(results):
    change_requests(results, GUIDED, 0, done_ns=None)
    assert "(unanswered)" in compare_arms(results).cells[0].errors[0]
    change_requests(results, GUIDED, 0, error=GONE)
    edit_run(results, GUIDED, num_completed=3, num_failed=1, state="suspect")
    comparison, allowed = compare_arms(results), compare_arms(results, allow_failed=True)
    message = f"1 of 4 requests failed in {GUIDED} (reset)"
    assert (comparison.verdict, comparison.exit_code) == ("invalid", 4)
    assert comparison.cells[0].errors == (f"INCOMPLETE: {message}",)
    assert (allowed.verdict, messages(allowed, "failed-requests")) == ("regression", [message])


def test_a_failed_or_suspect_run_takes_its_block_out_of_both_sides_with_its_reason(results):
    edit_run(results, GUIDED, state="failed", failure=RunFailure(cause="server-died", message="killed by signal 9"))
    throttled = ResultWarning(code="throttled", message="the GPU throttled for 3 s")
    edit_run(results, "002-b1-baseline", state="suspect", warnings=(throttled,))
    comparison = compare_arms(results)
    of_suspect, of_failed = excluded(comparison)
    assert of_failed == f"block 0 is left out: {GUIDED}: failed (server-died): killed by signal 9"
    assert of_suspect.endswith("suspect: throttled: the GPU throttled for 3 s (--allow-suspect counts it)")
    assert (comparison.cells[0].num_blocks, len(comparison.cells[0].metrics[0].a_blocks)) == (5, 5)
    for run_id in run_ids(results, "baseline"):
        edit_run(results, run_id, state="failed")
    comparison = compare_arms(results)
    error = "no block has a usable run on both sides"
    assert (comparison.verdict, comparison.cells[0].errors) == ("invalid", (error,))


def test_runs_that_were_not_measured_are_listed(results):
    (results.run("013-b6-guided-top_k5").path / "run.json").unlink()
    edit_run(results, "003-b1-guided-top_k5", state="running")
    edit_manifest(results, state="running")
    with sole_writer(results.path):
        comparison = compare_arms(results)
    assert comparison.verdict == "inconclusive"
    assert [message.rsplit(": ")[-1] for message in excluded(comparison)] == ["running", "not begun"]
    assert "--resume" in messages(comparison, "experiment-unfinished")[0]


def test_damaged_files_and_a_newer_schema_are_refused(results):
    log, manifest = results.run(GUIDED).step_log, results.path / "manifest.json"
    log.write_bytes(log.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"steps\.jsonl:8: the line is cut off"):
        compare_arms(results)
    manifest.write_text(manifest.read_text().replace('"schema_version": 3', '"schema_version": 4'))
    with pytest.raises(SchemaVersionError, match="schema_version 4 is newer than 3"):
        compare_arms(results)


def test_exact_metrics_that_differ_and_failed_checks_make_a_comparison_invalid_and_doubts_do_not(results):
    change_steps(results, GUIDED, is_greedy=True)
    doubted = compare_arms(results)
    assert doubted.verdict == "regression"
    assert messages(doubted, "check-greedy-share") == ["sampling declared; 8 of 8 steps are greedy"]
    change_requests(results, GUIDED, prompt_tokens=21)
    change_steps(results, GUIDED, guided_rows=0)
    comparison = compare_arms(results)
    assert (comparison.verdict, comparison.exit_code) == ("invalid", 4)
    check, metric = sorted(comparison.cells[0].errors)
    assert check == f"{GUIDED}: check guided failed: guidance declared; guided rows in 0 of 8 steps"
    assert metric.startswith("prompt_tokens must be equal and is 80 against ")


def test_warnings_of_runs_are_gathered_once_with_their_places(results):
    lag = ResultWarning(code="send-lag", message="sends were late", where="load")
    for run_id in (BASELINE, GUIDED):
        edit_run(results, run_id, warnings=(lag,), attempt=2)
    edit_run(results, "002-b1-baseline", effective_config={})
    warnings = {w.code: w for w in compare_arms(results, allow=("model", "sampling.top_k")).warnings}
    assert (warnings["send-lag"].message, warnings["repeated-run"].where) == (
        "sends were late",
        f"{BASELINE} and 1 more",
    )
    assert "configuration-unknown" in warnings


ALL = ("throttling", "foreign-gpu-process", "failed-requests")
OTHER = ResultWarning(code=FOREIGN_GPU_PROCESS, message="process 7 (python) computed on GPU 0 before the start")
IN_BURSTS = ResultWarning(code="client-bunching", message="tokens came in bursts")
SLOWED = "gate throttling: a GPU slowed itself down during the load (hw-thermal)"


def sampled(results, run_id, *reasons, t_ns=T0_NS + 1_000_000):
    with results.run(run_id).append("gpu") as writer:
        writer.write(GpuSample(t_ns=t_ns, index=0, source="nvml", throttle_reasons=reasons or None))


def excluded(comparison):
    return messages(comparison, "excluded-block")


def seen(results, gates=ALL):
    """Gates that the first run violates, and the warnings about its clocks."""
    run = load_run(results.run(BASELINE))
    return [*violated_gates(run, gates), *(warning.code for warning in clock_warnings(run))]


@pytest.mark.parametrize("reason", ["hw-slowdown", "hw-thermal", "hw-power-brake", "sw-thermal"])
def test_a_device_that_slows_itself_violates_the_gate_of_throttling_and_only_where_it_is_declared(results, reason):
    sampled(results, BASELINE, "hw-thermal", t_ns=T0_NS - 1)
    sampled(results, BASELINE, "gpu-idle", "application-clocks", "sync-boost", "display-clocks")
    assert seen(results) == []
    sampled(results, BASELINE, "sw-power-cap")
    assert seen(results) == ["gpu-power-capped"], "the power limit is how devices run"
    sampled(results, BASELINE, reason, "sw-power-cap")
    edit_run(results, BASELINE, warnings=(OTHER,))
    slowed, foreign = SLOWED.replace("hw-thermal", reason), f"gate foreign-gpu-process: {OTHER.message}"
    told = ["gpu-throttled", "gpu-power-capped"]
    assert [seen(results, gates) for gates in (ALL, ALL[1:], ())] == [
        [slowed, foreign, *told],
        [foreign, *told],
        told,
    ]


def test_a_run_that_violates_a_gate_leaves_with_its_pair_and_is_named(results):
    late = ResultWarning(code="sends-delayed", message="requests left late")
    sampled(results, GUIDED, "hw-thermal")
    edit_run(results, "002-b1-baseline", state="suspect", warnings=(late, OTHER))
    comparison = compare_arms(results, allow_suspect=True)
    assert excluded(comparison) == [
        f"block 1 is left out: 002-b1-baseline: gate foreign-gpu-process: {OTHER.message}",
        f"block 0 is left out: {GUIDED}: {SLOWED}",
    ]
    assert comparison.cells[0].num_blocks == 5
    edit_run(results, "002-b1-baseline", state="done", warnings=(OTHER,))
    assert len(excluded(compare_arms(results))) == 2
    results.write_profile(f"{results.profile_yaml()}gates: []\n")
    comparison = compare_arms(results)
    assert (excluded(comparison), comparison.cells[0].num_blocks) == ([], 7)


def test_failed_requests_make_a_comparison_incomplete_unless_they_are_a_gate(results):
    change_requests(results, GUIDED, 0, error=GONE)
    edit_run(results, GUIDED, num_completed=3, num_failed=1, state="suspect")
    sampled(results, GUIDED, "hw-thermal")
    comparison = compare_arms(results)
    assert (comparison.verdict, excluded(comparison)) == ("invalid", []), "no gate of the machine hides them"
    results.write_profile(f"{results.profile_yaml()}gates: [{', '.join(ALL)}]\n")
    comparison = compare_arms(results)
    gates = f"{SLOWED}; gate failed-requests: 1 of 4 requests failed"
    assert excluded(comparison) == [f"block 0 is left out: {GUIDED}: {gates}"]
    assert comparison.verdict == "regression"


def suspect(results, run_id, *codes):
    doubts = (ResultWarning(code=code, message=f"{code} it was") for code in codes)
    edit_run(results, run_id, state="suspect", warnings=(*doubts, IN_BURSTS))


def test_a_suspect_run_counts_if_asked_for_whatever_made_it_suspect(results):
    codes, guided = sorted(SUSPECT_CODES - CLIENT_SUSPECT_CODES - {"check-failed"}), run_ids(results, "guided")
    while codes:
        some, codes = codes[:6], codes[6:]
        for run_id, code in zip_longest(guided, some):
            suspect(results, run_id, code) if code else edit_run(results, run_id, state="done", warnings=())
        left_out, counted = compare_arms(results), compare_arms(results, allow_suspect=True)
        assert (left_out.cells[0].num_blocks, counted.cells[0].num_blocks) == (7 - len(some), 7), some
        assert excluded(counted) == messages(left_out, "suspect-counted") == []
        assert [messages(counted, code) for code in some] == [[f"{code} it was"] for code in some]


@pytest.mark.parametrize("code", sorted(CLIENT_SUSPECT_CODES))
def test_where_the_client_is_in_doubt_its_times_do_not_count_and_those_of_the_server_do(results, code):
    suspect(results, GUIDED, code)
    left_out, counted = compare_arms(results), compare_arms(results, allow_suspect=True)
    for comparison, num_blocks in ((left_out, 6), (counted, 7)):
        of_metrics = {metric.metric.name: metric.estimate.num_blocks for metric in comparison.cells[0].deciding}
        assert of_metrics == {"step_ms": 7, "wall_s": num_blocks, "tpot_ms": num_blocks}
    (message,) = messages(left_out, "client-times-excluded")
    assert message.startswith(
        "guided top_k=5: times that the client measured in block 0 do not count, those of the server do"
    )
    assert f"the first: {GUIDED}: {code}: {code} it was" in message
    assert ("lighter load" in message) == (code in {"slots-idle", "sends-delayed", "rate-missed"})
    assert excluded(left_out) == messages(counted, "client-times-excluded") == []


def test_suspect_runs_that_count_are_told_with_the_codes_of_their_doubts(results):
    assert compare_arms(results, allow_suspect=True) == compare_arms(results), "where no run is suspect"
    suspect(results, GUIDED, "client-cpu")
    for run_id in run_ids(results, "baseline"):
        suspect(results, run_id, "sends-delayed", "arrival-times-unreliable")
    (message,) = messages(compare_arms(results, allow_suspect=True), "suspect-counted")
    assert message.partition(";")[0] == (
        "suspect runs are counted (--allow-suspect): 7 of 7 runs of baseline (arrival-times-unreliable, "
        "sends-delayed) and 1 of 7 runs of guided (client-cpu)"
    )


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
    results.run(GUIDED).step_log.write_bytes(results.run(GUIDED).step_log.read_bytes()[:-20])
    suspect(results, GUIDED, "arrival-times-unreliable")
    (message,) = excluded(compare_arms(results, allow_suspect=True))
    assert "suspect, and cannot be read completely: " in message


@pytest.mark.parametrize("run_id", [BASELINE, GUIDED])
def test_bursts_in_one_run_of_either_side_keep_what_the_client_timed_from_deciding_and_nothing_else(
    results, run_id
):
    outcomes = []
    for warnings in ((), (ResultWarning(code="sim-lag", message="the simulator was late"),), (IN_BURSTS,)):
        edit_run(results, run_id, warnings=warnings)
        metrics = compare_arms(results).cells[0].metrics
        outcomes.append({metric.metric.name: (metric.verdict, metric.estimate) for metric in metrics})
    before, unchanged, after = outcomes
    changed = {name: before[name][1] for name in before if after[name] != before[name]}
    assert unchanged == before, "other warnings take no metric away"
    assert {"tpot_ms", "itl_ms", "ttft_ms", "p50_itl_ms"} <= set(changed)
    assert all(name.endswith(("ttft_ms", "itl_ms", "tpot_ms")) for name in changed)
    assert all(after[name] == ("inconclusive", estimate) for name, estimate in changed.items())
    named = compare_arms(results, metrics=("tpot_ms", "ttft_ms"))
    assert (named.exit_code, "in bursts in 1 of 14 runs" in " ".join(reasons_of(named))) == (3, True)
