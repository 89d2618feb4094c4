"""What must not be compared, what is left out, and what is doubted."""

import msgspec
import pytest
from support.results.builders import (
    edit_manifest,
    edit_requests,
    edit_run,
    edit_steps,
    write_request_set,
    write_results,
)

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.errors import NotComparableError, RecordError, SchemaVersionError
from benchctl.records.files import encode
from benchctl.records.record import RequestError, RunFailure
from benchctl.records.schema import GitState, GpuInfo, ResultWarning
from benchctl.records.writers import sole_writer
from benchctl.report.documents import refusal_document

SEVEN = ({"baseline": 1.0, "guided": 1.0},) * 7
BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"
TIMEOUT = RequestError(kind="timeout", message="no answer in 600 s")


def compare(a, b, **options):
    return compare_sides(parse_side(str(a)), parse_side(str(b)), CompareOptions(**options))


def within(results, **options):
    return compare(f"{results.path}:baseline", f"{results.path}:guided", **options)


def messages(comparison, code):
    return [warning.message for warning in comparison.warnings if warning.code == code]


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "a", block_factors=SEVEN)


@pytest.fixture(name="other")
def _other(tmp_path):
    results = write_results(tmp_path / "b", block_factors=SEVEN)
    edit_manifest(results, created_at="2026-02-01T00:00:00Z")
    return results


@pytest.fixture(name="asked_else")
def _asked_else(tmp_path):
    return write_results(tmp_path / "b", block_factors=SEVEN, asks="How much is")


def fail(results, run_id, state="suspect"):
    """One of four requests timed out."""
    edit_requests(results, run_id, lambda r: msgspec.structs.replace(r, error=TIMEOUT) if r.index == 0 else r)
    edit_run(results, run_id, num_completed=3, num_failed=1, state=state)


def test_every_difference_between_two_experiments_is_named_with_both_values(results, asked_else):
    edit_manifest(asked_else, seed=8, stop="natural", engine="vllm")
    with pytest.raises(NotComparableError) as caught:
        compare(results.path, asked_else.path)
    sets = [one.manifest().request_set_sha256 for one in (results, asked_else)]
    assert caught.value.differences == (
        f'request_set_sha256: "{sets[0]}" against "{sets[1]}"',
        "seed: 7 against 8",
        'stop: "forced" against "natural"',
        'engine: "sim" against "vllm"',
    )
    assert all(difference in str(caught.value) for difference in caught.value.differences)
    assert "--allow-difference" not in str(caught.value), "nothing allows another request set"


def test_the_same_prompts_that_two_tokenizers_counted_are_the_same_request_set(results, other):
    counted = [
        msgspec.structs.replace(request, prompt_tokens=request.prompt_tokens + 3, prompt_tokens_from="server")
        for request in results.prepared_requests()
    ]
    write_request_set(other, b"".join(encode(request) + b"\n" for request in counted))
    assert results.manifest().request_set_sha256 != other.manifest().request_set_sha256
    allowed = compare(results.path, other.path).allowed
    assert "request_set_sha256" not in {difference.key for difference in allowed}
    write_request_set(other, b"".join(encode(request) + b"\n" for request in counted[1:]))
    with pytest.raises(NotComparableError, match="request_set_sha256"):
        compare(results.path, other.path)


def test_a_refusal_names_ten_differences_and_how_many_more_there_are(results, other):
    settings = {f"server.flag_{i:02d}": i for i in range(25)}
    for run in other.runs():
        edit_run(other, run.path.name, effective_config=run.read().effective_config | settings)
    with pytest.raises(NotComparableError, match="and 15 more, which --json names") as caught:
        compare(results.path, other.path)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  server.flag_")]
    assert lines == [f"  server.flag_{i:02d}: absent against {i}" for i in range(10)]
    assert len(refusal_document(caught.value)["reasons"]) == len(caught.value.differences) == 25


def test_a_difference_in_the_work_itself_can_never_be_allowed(results, asked_else):
    edit_manifest(asked_else, stop="natural")
    for key in ("request_set_sha256", "stop"):
        with pytest.raises(NotComparableError, match=f"Never allowed: .*{key}") as caught:
            compare(results.path, asked_else.path, allow=(key, "*"))
        assert any(difference.startswith(key) for difference in caught.value.differences)


def test_compare_refuses_runs_with_different_models(results, other):
    for run in other.runs():
        config = run.read().effective_config | {"model": "qwen2.5-3b"}
        edit_run(other, run.path.name, effective_config=config)
    with pytest.raises(NotComparableError) as caught:
        compare(results.path, other.path)
    assert caught.value.differences == ('model: "qwen2.5-7b" against "qwen2.5-3b"',)
    allowed = compare(results.path, other.path, allow=("model",))
    assert [difference.key for difference in allowed.allowed] == ["model"]


@pytest.mark.parametrize(
    ("theirs", "differences"),
    [
        ("client on 15, server on 0-14", ()),
        (
            "client on 14-15, server on 0-13",
            ('server.client_cores: "1 of its own for the client" against "2 of its own for the client"',),
        ),
        (None, ('server.client_cores: "1 of its own for the client" against absent',)),
    ],
)
def test_cores_of_the_client_on_two_machines_are_compared_by_their_number(results, other, theirs, differences):
    host = msgspec.structs.replace(other.manifest().host, hostname="elsewhere")
    edit_manifest(other, host=host)
    for side, cores in ((results, "client on 7, server on 0-6"), (other, theirs)):
        for run in side.runs():
            config = run.read().effective_config | ({} if cores is None else {"server.client_cores": cores})
            edit_run(side, run.path.name, effective_config=config)
    if not differences:
        assert compare(results.path, other.path).verdict == "equivalent"
        return
    with pytest.raises(NotComparableError) as caught:
        compare(results.path, other.path)
    assert caught.value.differences == differences


def test_an_undeclared_setting_of_the_guided_server_is_refused_and_can_be_declared(results):
    for block in range(7):
        run_id = f"{2 * block + 1:03d}-b{block}-guided-top_k5"
        config = results.run(run_id).read().effective_config | {"server.overlap_schedule": False}
        edit_run(results, run_id, effective_config=config)
    with pytest.raises(NotComparableError) as caught:
        within(results)
    assert caught.value.differences == ("server.overlap_schedule: absent against false",)
    assert within(results, allow=("server.*",)).verdict == "regression"


def test_declared_differences_are_listed_with_both_values(results):
    assert [str(difference) for difference in within(results).allowed] == [
        "sampling.top_k: -1 against 5",
        'server.value_model: absent against "qwen2.5-1.5b"',
    ]


def test_a_difference_in_one_cell_names_the_cell(tmp_path):
    results = write_results(tmp_path / "r", cells=({"top_k": 2}, {"top_k": 5}))
    cells_of = {difference.b: difference.cells for difference in within(results).allowed}
    assert cells_of == {"2": ("top_k=2",), "5": ("top_k=5",), '"qwen2.5-1.5b"': ()}


def test_a_setting_that_changes_between_blocks_of_one_side_is_a_difference(results):
    config = results.run(BASELINE).read().effective_config | {"server.max_num_seqs": 8}
    edit_run(results, BASELINE, effective_config=config)
    with pytest.raises(NotComparableError, match=r"server\.max_num_seqs: 8 or absent against absent"):
        within(results)


def test_only_what_both_profiles_allow_is_allowed_between_two_directories(results, other):
    for run in other.runs():
        edit_run(other, run.path.name, effective_config=run.read().effective_config | {"server.max_num_seqs": 8})
    allow(results, "server.max_num_seqs")
    with pytest.raises(NotComparableError) as caught:
        compare(f"{results.path}:baseline", f"{other.path}:guided")
    assert caught.value.differences == ("server.max_num_seqs: absent against 8",)
    allow(other, "server.max_num_seqs")
    allowed = {difference.key for difference in compare(f"{results.path}:baseline", f"{other.path}:guided").allowed}
    assert allowed == {"sampling.top_k", "server.value_model", "server.max_num_seqs"}


def allow(results, pattern):
    profile = results.path / "profile.yaml"
    profile.write_text(profile.read_text().replace("guidance.*]", f"guidance.*, {pattern}]"))


def test_different_profile_names_are_fine(results, other):
    edit_manifest(other, profile="renamed")
    assert compare(results.path, other.path).verdict == "equivalent"


def test_machines_that_differ_are_a_doubt_and_no_refusal(results, other):
    host = msgspec.structs.replace(other.manifest().host, hostname="elsewhere", cpu_model="Xeon")
    gpus = (GpuInfo(index=0, name="H200", driver="580"),)
    edit_manifest(other, host=host, gpus=gpus, git=GitState(sha="a" * 40, is_dirty=True), benchctl_version="0.2.0")
    warnings = messages(compare(results.path, other.path), "machines-differ")
    assert [message.split(" differs")[0] for message in warnings] == [
        "host",
        "GPUs",
        "benchctl version",
        "git commit",
    ]
    assert "none against H200 driver 580" in warnings[1]
    assert warnings[3].endswith("unknown against aaaaaaaaaaaa with changes")


def test_priorities_of_the_client_that_differ_are_a_doubt_where_both_are_known(results, other):
    edit_run(results, GUIDED, client_priority="fifo")
    assert messages(compare(results.path, other.path), "machines-differ") == []
    edit_run(other, GUIDED, client_priority="normal (fifo: not permitted; nice: not permitted)")
    warnings = messages(compare(results.path, other.path), "machines-differ")
    assert warnings == ["priority of the load client differs: fifo against normal"]


def test_one_failed_request_makes_the_cell_incomplete(results):
    fail(results, GUIDED)
    comparison = within(results)
    assert (comparison.verdict, comparison.exit_code) == ("invalid", 4)
    assert comparison.cells[0].errors == (f"INCOMPLETE: 1 of 4 requests failed in {GUIDED} (timeout)",)


def test_allow_failed_judges_what_completed_and_says_what_failed(results):
    fail(results, GUIDED)
    comparison = within(results, allow_failed=True)
    assert comparison.verdict == "regression"
    assert messages(comparison, "failed-requests") == [f"1 of 4 requests failed in {GUIDED} (timeout)"]


def test_a_request_that_was_never_answered_is_a_failure(results):
    edit_requests(results, GUIDED, lambda r: msgspec.structs.replace(r, done_ns=None) if r.index == 0 else r)
    assert "(unanswered)" in within(results).cells[0].errors[0]


def test_a_failed_run_takes_its_block_out_of_both_sides(results):
    edit_run(results, GUIDED, state="failed", failure=RunFailure(cause="server-died", message="killed by signal 9"))
    comparison = within(results)
    assert comparison.cells[0].num_blocks == 6
    assert messages(comparison, "excluded-block") == [
        f"block 0 is left out: {GUIDED}: failed (server-died): killed by signal 9"
    ]
    assert len(comparison.cells[0].metrics[0].a_blocks) == 6


def test_runs_that_were_not_measured_are_listed(results):
    (results.run("013-b6-guided-top_k5").path / "run.json").unlink()
    edit_run(results, "003-b1-guided-top_k5", state="running")
    edit_manifest(results, state="running")
    with sole_writer(results.path):
        comparison = within(results)
    assert comparison.verdict == "inconclusive"
    assert [message.rsplit(": ")[-1] for message in messages(comparison, "excluded-block")] == [
        "running",
        "not begun",
    ]
    assert "--resume" in messages(comparison, "experiment-unfinished")[0]


def test_a_suspect_run_is_left_out_with_its_reason(results):
    throttled = ResultWarning(code="throttled", message="the GPU throttled for 3 s")
    edit_run(results, BASELINE, state="suspect", warnings=(throttled,))
    reason = "throttled: the GPU throttled for 3 s"
    assert messages(within(results), "excluded-block") == [
        f"block 0 is left out: {BASELINE}: suspect: {reason} (--allow-suspect counts it)"
    ]


def test_a_comparison_without_a_usable_block_is_invalid(results):
    for block in range(7):
        edit_run(results, f"{2 * block:03d}-b{block}-baseline", state="failed")
    comparison = within(results)
    assert comparison.verdict == "invalid"
    assert comparison.cells[0].errors == ("no block has a usable run on both sides",)


def test_a_cut_off_line_in_a_run_marked_done_is_refused_with_file_and_line(results):
    path = results.run(GUIDED).path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"steps\.jsonl:8: the line is cut off"):
        within(results)


def test_a_newer_schema_is_refused(results):
    path = results.path / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 3', '"schema_version": 4'))
    with pytest.raises(SchemaVersionError, match="schema_version 4 is newer than 3"):
        within(results)


def test_exact_metrics_that_differ_make_the_comparison_invalid(results):
    edit_requests(results, GUIDED, lambda r: msgspec.structs.replace(r, prompt_tokens=21))
    comparison = within(results)
    assert comparison.verdict == "invalid"
    assert comparison.cells[0].errors[0].startswith("prompt_tokens must be equal and is 80 against ")


def test_a_guided_variant_that_was_never_guided_makes_the_comparison_invalid(results):
    edit_steps(results, GUIDED, lambda s: msgspec.structs.replace(s, guided_rows=0))
    comparison = within(results)
    assert comparison.exit_code == 4
    assert comparison.cells[0].errors == (
        f"{GUIDED}: check guided failed: guidance declared; guided rows in 0 of 8 steps",
    )


def test_a_check_that_only_casts_doubt_is_a_warning(results):
    edit_steps(results, GUIDED, lambda s: msgspec.structs.replace(s, is_greedy=True))
    comparison = within(results)
    assert comparison.verdict == "regression"
    assert messages(comparison, "check-greedy-share") == ["sampling declared; 8 of 8 steps are greedy"]


def test_warnings_of_runs_are_gathered_once_with_their_places(results):
    lag = ResultWarning(code="send-lag", message="sends were late", where="load")
    for run_id in (BASELINE, GUIDED):
        edit_run(results, run_id, warnings=(lag,), attempt=2)
    edit_run(results, "002-b1-baseline", effective_config={})
    comparison = within(results, allow=("model", "sampling.top_k"))
    assert messages(comparison, "send-lag") == ["sends were late"]
    repeated = next(w for w in comparison.warnings if w.code == "repeated-run")
    assert repeated.where == f"{BASELINE} and 1 more"
    assert len(messages(comparison, "configuration-unknown")) == 1
