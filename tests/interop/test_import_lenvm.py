"""Results of the LenVM timing scripts as result directories: totals, doubts, damage, and their own columns.

The directories are written by ``lenvm_results.py`` in the schemas of all revisions, so that every total is known.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.cli import printed
from support.results import lenvm_results
from support.results.lenvm_results import (
    as_lines,
    failed_row,
    responses_of,
    rows_of,
    sampled_steps,
    write_directory,
)
from support.steps import records_of

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics.run import run_metrics
from benchctl.errors import InvalidDataError, UsageError
from benchctl.interop.lenvm.directory import makespan_s, read_gpu_samples, read_responses, sends_s
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.interop.lenvm.summary import RATIO_TAG, REPAIRS
from benchctl.measure.directory import reopen_experiment
from benchctl.records.loaded import load_results
from benchctl.report.export import write_report

NAME = "Qwen2.5-7B-Instruct_vs_lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"


@pytest.fixture(name="truth")
def _truth(tmp_path):
    return write_directory(tmp_path / NAME)


def imported(truth):
    named = {"model": None, "value_model": None, "argv": ("benchctl", "import")}
    return import_lenvm(truth.path, truth.path.parent / "out", **named)


def guided_run(result):
    return runs_of(result)["lenvm"]


def change_meta(truth, tag, **changes):
    path = truth.path / f"{tag}.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def runs_of(result):
    return {run.record.variant: run for run in load_results(result.path).runs}


def codes(result):
    return [warning.code for warning in result.warnings]


def summary_of(result):
    with (result.path / "lenvm_summary.csv").open(newline="") as file:
        return {row["tag"]: row for row in csv.DictReader(file)}


def test_totals_are_those_of_requests_and_not_of_lines(truth):
    for run in runs_of(imported(truth)).values():
        metrics = run_metrics(run)
        names = ("output_tokens", "prompt_tokens", "num_requests", "num_steps")
        true = (truth.output_tokens, truth.prompt_tokens, truth.num_questions, truth.num_steps)
        assert tuple(metrics[name] for name in names) == true
        assert metrics["wall_s"] == pytest.approx(truth.makespan_s)
        assert [len(request.choices) for request in run.requests] == [truth.num_samples] * truth.num_questions
        assert run.record.state == "done"


def test_copied_usage_an_appended_restart_and_a_cut_line_are_mended_and_told_once_each(truth):
    """An earlier server's log lies before this one's, and the last answer has no end."""
    timing, responses = truth.path / "lenvm.timing.jsonl", responses_of(truth.path, "lenvm")
    earlier = [*lenvm_results.own_steps(), *sampled_steps([64] * 40, is_guided=True)]
    timing.write_bytes(as_lines(earlier) + timing.read_bytes())
    responses.write_bytes(responses.read_bytes() + as_lines(rows_of(4, num_samples=1, top_k=5))[:70])
    result = imported(truth)
    assert [code for code in codes(result) if code in REPAIRS] == ["usage-duplicated", "log-restarted", "line-cut"]
    guided = guided_run(result)
    metrics = run_metrics(guided)
    assert (metrics["output_tokens"], metrics["num_steps"]) == (truth.output_tokens, truth.num_steps)
    assert guided.columns.num_seqs.sum() == truth.output_tokens
    assert guided.record.state == "done"
    (restarted,) = (warning.message for warning in result.warnings if warning.code == "log-restarted")
    assert "the last 1 of them yielded the answers and count" in restarted


@pytest.mark.parametrize(
    ("revision", "fused", "revisions"),
    [("V1", {None}, ("V1", "V3")), ("V3", {True}, ("V3",)), ("V4", {True}, ("V4",))],
)
def test_each_revision_s_log_is_read_by_its_schema(tmp_path, revision, fused, revisions):
    result = imported(write_directory(tmp_path / NAME, revision=revision))
    guided = [step for step in records_of(guided_run(result)) if not step.is_warmup]
    assert all(step.guided_rows == step.num_seqs for step in guided)
    assert {step.fused for step in guided} == fused
    assert {step.candidates == 3 * step.num_seqs for step in guided} == {revision == "V4"}
    assert (guided[0].sections_ns["value_model_load"], guided[1].sections_ns["lvm_forward"]) == (
        25 * 10**8,
        36 * 10**6,
    )
    assert load_results(result.path).manifest.imported.revisions == revisions
    # A baseline whose sampler has no path for guidance scored nothing.
    assert {step.guided_rows for step in records_of(runs_of(result)["baseline"])} == {0}


def test_averages_of_a_v2_server_become_windows_and_no_steps(tmp_path):
    truth = write_directory(tmp_path / NAME, revision=None)
    lines = [
        f"[2026-01-01 00:00:00] [lvm_timing] calls={calls} skipped=0 gpu_path={calls} fused=3 avg_candidates=4.50 "
        f"apply_total={mean:.3f}ms build_pending=1.310ms/10.2%"
        for calls, mean in ((200, 12.0), (400, 13.0), (600, 12.5))
    ]
    (truth.path / "server.lenvm.log").write_text("\n".join(["fired up", *lines, ""]))
    result = imported(truth)
    assert {"averages-cumulative", "steps-unrecorded"} <= set(codes(result))
    guided = guided_run(result)
    assert run_metrics(guided)["output_tokens"] == truth.output_tokens
    windows = (result.path / "runs" / guided.record.run_id / "timing_windows.jsonl").read_text().splitlines()
    assert [json.loads(line)["mean_ms"] for line in windows] == pytest.approx([12.0, 14.0, 11.5])
    assert load_results(result.path).manifest.imported.revisions == ("V2",)


def test_what_cannot_be_trusted_is_told_with_the_arms_it_is_about(truth):
    warnings = {warning.code: str(warning) for warning in imported(truth).warnings}
    assert list(warnings) == [
        "usage-duplicated", "wall-holds-client", "value-model-load-measured", "greedy-records", "sections-async",
        "steps-are-samplers", "overlap-differs", "sends-reconstructed", "gpu-unattributed",
    ]  # fmt: skip
    assert "(2.5 s)" in warnings["value-model-load-measured"]
    assert "8 of 37 steps are greedy" in warnings["greedy-records"]


def test_sampling_that_nothing_records_is_told_and_is_else_taken_from_requests_or_the_command_line(truth):
    responses_of(truth.path, "baseline").unlink()
    baseline, guided = (run.record.effective_config for run in runs_of(imported(truth)).values())
    assert baseline.items() >= {"sampling.temperature": 1.0, "sampling.min_p": 0.01}.items()
    assert guided.items() >= {"sampling.top_k": 5, "guidance.value_scale": -10.0}.items()
    shutil.rmtree(truth.path.parent / "out")
    responses_of(truth.path, "lenvm").unlink()
    for tag in ("baseline", "lenvm"):
        change_meta(truth, tag, cmd=[])
    warnings = {warning.code: warning for warning in imported(truth).warnings}
    assert warnings["sampling-unrecorded"].message.startswith("temperature, top_p, min_p: recorded in no request")


@pytest.mark.parametrize(
    ("question", "is_answered", "code"), [(2, True, "answers-resumed"), (1, False, "questions-unanswered")]
)
def test_a_failed_line_hides_no_answer_and_a_failed_question_stays_in_the_denominator(
    truth, question, is_answered, code
):
    responses = responses_of(truth.path, "lenvm")
    failed = as_lines([failed_row(question, num_samples=truth.num_samples, top_k=5)])
    lines = responses.read_bytes().splitlines(keepends=True)
    others = [line for line in lines if is_answered or b'"idx": %d,' % question not in line]
    responses.write_bytes(failed + b"".join(others))
    result = imported(truth)
    guided = guided_run(result)
    metrics = run_metrics(guided)
    assert (metrics["num_requests"], metrics["num_failed"]) == (truth.num_questions, 0 if is_answered else 1)
    assert (metrics["output_tokens"] == truth.output_tokens) is is_answered
    assert code in {*codes(result), *(warning.code for warning in guided.record.warnings)}
    assert guided.record.state == "suspect"


def test_answers_that_took_longer_than_the_clock_says_are_of_another_run(truth):
    change_meta(truth, "baseline", wall_clock_s=1.5)
    result = imported(truth)
    baseline = runs_of(result)["baseline"].record
    assert baseline.state == load_results(result.path).manifest.state == "suspect"
    assert "the answers took 5.80 s together and the wall clock says 1.50 s" in baseline.warnings[0].message


def test_a_greedy_run_keeps_its_steps(truth):
    """The project's own analysis drops every greedy step and leaves nothing of such a run."""
    sizes = lenvm_results.batch_sizes(truth.num_questions, truth.num_samples)
    greedy = [record | {"is_greedy": True} for record in sampled_steps(sizes)]
    (truth.path / "lenvm.timing.jsonl").write_bytes(as_lines([*lenvm_results.own_steps(), *greedy]))
    responses = responses_of(truth.path, "lenvm")
    responses.write_bytes(responses.read_bytes().replace(b'"top_k": 5', b'"top_k": 1'))
    result = imported(truth)
    metrics = run_metrics(guided_run(result))
    assert (metrics["num_steps"], metrics["greedy_step_frac"]) == (truth.num_steps, 1.0)
    assert not summary_of(result)["lenvm"].get("n_steps")


def test_only_what_the_log_tells_is_known_of_steps(truth):
    metrics = run_metrics(guided_run(imported(truth)))
    assert [name for name in metrics if name.endswith("step_ms") and metrics[name] is not None] == []
    assert metrics["ttft_ms"] is metrics["tpot_ms"] is metrics["itl_ms"] is None
    assert metrics["e2el_ms"] == pytest.approx(1000 * 0.2 * sum(20 + 3 * i for i in range(4)) / 4)


def test_gpu_readings_lie_on_the_clock_of_the_run_in_whose_zone_they_are_next_to_its_start(truth):
    gpu = runs_of(imported(truth))["baseline"].gpu
    assert [(sample.t_ns - gpu[0].t_ns, sample.utilization_frac) for sample in gpu] == [
        (0, 0.5), (10**9, 0.51), (2 * 10**9, 0.52)
    ]  # fmt: skip
    header = "timestamp, index, utilization.gpu [%], memory.used [MiB]"
    lines = [header, "2025/10/09 16:23:21.250, 1, [N/A], 7", "2025/"]
    (sample,) = read_gpu_samples(lines, start_epoch_s=1_760_007_200.0, start_ns=5)
    assert (sample.t_ns, sample.index, sample.utilization_frac) == (5 + 1_250_000_000, 1, None)


def test_the_files_themselves_lie_beside_the_records_and_such_an_import_cannot_be_gone_on_with(truth):
    result = imported(truth)
    for name, path in {
        "steps.raw.jsonl": truth.path / "lenvm.timing.jsonl",
        "responses.raw.jsonl": responses_of(truth.path, "lenvm"),
        "meta.raw.json": truth.path / "lenvm.meta.json",
        "gpu.raw.csv": truth.path / "lenvm.gpu_samples.csv",
    }.items():
        assert (result.path / "runs" / "001-b0-lenvm" / name).read_bytes() == path.read_bytes()
    imported_from = load_results(result.path).manifest.imported
    assert (imported_from.source, len(imported_from.sha256)) == (str(truth.path), 8)
    with pytest.raises(UsageError, match=r"was imported from .*: there is nothing to resume"):
        reopen_experiment(result.path, None)


def test_a_report_can_be_made_of_it_and_draws_no_step_times(truth):
    result = imported(truth)
    files = write_report(result.path)
    assert not files.damage
    assert "the step log times the sampler alone" in " ".join(files.skipped)
    assert [finding.code for finding in analyze_directory(result.path).findings] == ["lazy-load-measured"]


def test_their_columns_are_reproduced_by_their_definitions(truth):
    rows = summary_of(imported(truth))
    base, guided, ratio = rows["baseline"], rows["lenvm"], rows[RATIO_TAG]
    sizes = sorted(lenvm_results.batch_sizes(truth.num_questions, truth.num_samples))
    wall_s = 6.0 + truth.makespan_s
    expected = {
        "wall_clock_s": wall_s,
        "throughput_output_tokens_per_s": truth.output_tokens / wall_s,
        "n_requests": truth.num_questions * truth.num_samples,
        "total_output_tokens": truth.output_tokens,
        "n_steps": truth.num_steps,
        "n_steps_with_lvm": 0,
        "batch_size_p95": np.percentile(sizes, 95),
    }
    assert {name: float(base[name]) for name in expected} == pytest.approx(expected)
    assert base["t_lvm_forward_ms_mean"] == ""
    of_guidance = {"n_steps_with_lvm": truth.num_steps, "t_lvm_forward_ms_mean": 36.0}
    of_guidance |= {"t_lvm_forward_ms_sum": 36.0 * truth.num_steps, "t_lvm_apply_outer_ms_p50": 53.0}
    assert {name: float(guided[name]) for name in of_guidance} == pytest.approx(of_guidance)
    assert (float(ratio["top_k"]), float(ratio["total_output_tokens"])) == (-5.0, 1.0)
    assert list(base) == sorted(base)


def test_their_flops_are_the_published_ones_at_the_published_totals(tmp_path):
    """50 questions of 16 samples with 5200 tokens of prompts and the published totals of output, at k = 5."""
    path = tmp_path / NAME
    path.mkdir()
    for tag, output, wall_s, top_k in (("baseline", 237_675, 19.22, -1), ("lenvm", 237_710, 87.44, 5)):
        meta = {"tag": tag, "dataset": "gsm8k", "max_questions": 50, "n_samples_per_q": 16, "top_k": top_k}
        (path / f"{tag}.meta.json").write_text(json.dumps(meta | {"max_concurrency": 50, "wall_clock_s": wall_s}))
        lengths = [output // 50 + (question < output % 50) for question in range(50)]
        rows = [
            {"idx": question, "choice_idx": i, "usage": {"prompt_tokens": 104, "completion_tokens": length}}
            for question, length in enumerate(lengths)
            for i in range(16)
        ]
        answers = as_lines([row | {"text": "", "elapsed_s": 1.0} for row in rows])
        (path / f"gsm8k.{tag}_q50_n16.responses.jsonl").write_bytes(answers)
    rows = summary_of(import_lenvm(path, tmp_path / "out", model=None, value_model=None, argv=()))
    published = {
        "lenvm": {
            "base_pflops_total": 3.45757, "lvm_pflops_total": 3.818107, "lvm_pflops_candidates": 3.170341,
            "theoretical_pflops_total": 7.275677, "theoretical_gflops_per_output_token": 30.239951,
            "achieved_tflops_per_s": 83.20765,
        },
        "baseline": {
            "theoretical_gflops_per_output_token": 14.237634, "achieved_tflops_per_s": 179.89,
            "throughput_output_tokens_per_s": 12_366,
        },
        RATIO_TAG: {"theoretical_pflops_total": 2.1043, "wall_clock_s": 4.5494},
    }  # fmt: skip
    for tag, columns in published.items():
        assert {name: float(rows[tag][name]) for name in columns} == pytest.approx(columns, rel=5e-5)


def test_models_are_named_by_the_directory_by_the_user_or_assumed_aloud(tmp_path):
    truth = write_directory(tmp_path / "run1")
    assert "models-assumed" in codes(imported(truth))
    named = import_lenvm(truth.path, tmp_path / "named", model="qwen2.5-3b", value_model="qwen2.5-0.5b", argv=())
    assert "models-assumed" not in codes(named)
    assert runs_of(named)["baseline"].record.effective_config["model"] == "qwen2.5-3b"
    with pytest.raises(UsageError, match="unknown model 'qwen9'"):
        import_lenvm(truth.path, tmp_path / "none", model="qwen9", value_model=None, argv=())


def test_what_is_no_such_directory_is_refused_and_leaves_nothing(truth, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has neither baseline\.meta\.json nor baseline\.timing\.jsonl"):
        import_lenvm(tmp_path / "empty", tmp_path / "out", model=None, value_model=None, argv=())
    meta, responses = truth.path / "lenvm.meta.json", responses_of(truth.path, "lenvm")
    for path, content, message in (
        (meta, b'{"tag": "lenvm", "max_ques', r"lenvm\.meta\.json: .*copy it again, or remove it"),
        (
            responses,
            responses.read_bytes().replace(b'"top_k": 5', b'"top_k": -1'),
            "needs a finite top_k, and has -1",
        ),
    ):
        whole = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(InvalidDataError, match=message):
            imported(truth)
        path.write_bytes(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", NAME}
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists; name another directory with -o"):
        imported(truth)


def test_sends_of_a_closed_loop_follow_from_how_long_each_request_took():
    assert sends_s([3.0, 1.0, 2.0, 1.0], 2) == (0.0, 0.0, 1.0, 3.0)
    assert (makespan_s([3.0, 1.0, 2.0, 1.0], 2), makespan_s([], 4)) == (4.0, 0.0)


@settings(max_examples=50)
@given(durations=st.lists(st.floats(0, 1000), max_size=30), concurrency=st.integers(1, 40))
def test_never_more_requests_are_in_flight_than_the_loop_has_workers(durations, concurrency):
    sent = sends_s(durations, concurrency)
    assert list(sent) == sorted(sent)
    spans = list(zip(sent, durations, strict=True))
    assert all(sum(start <= now < start + took for start, took in spans) <= concurrency for now in sent)
    least = max([*durations, sum(durations) / concurrency], default=0.0)
    assert makespan_s(durations, concurrency) >= least * (1 - 1e-12)


LINES = as_lines([row for question in range(3) for row in rows_of(question, num_samples=2, top_k=5)])


@settings(max_examples=50)
@given(length=st.integers(0, len(LINES)))
def test_answers_cut_anywhere_hold_every_whole_line_before_the_cut(length):
    content = LINES[:length]
    questions, rows, damage = read_responses(content.splitlines(keepends=True))
    is_whole_without_end = length > 0 and LINES[length : length + 1] == b"\n"
    assert len(rows) == content.count(b"\n") + is_whole_without_end
    assert damage.is_cut is (not content.endswith(b"\n") and length > 0 and not is_whole_without_end)
    assert damage.num_lines == 0
    assert [answered.first.idx for answered in questions] == list(range(-(-len(rows) // 2)))
    assert all(a.completion_tokens == 2 * lenvm_results.output_of(a.first.idx) for a in questions)


def test_the_command_imports_comparing_the_arms_is_a_screening_and_the_example_script_reads_them(truth):
    benchctl = partial(printed, cwd=truth.path.parent)
    assert benchctl("import", "lenvm", NAME, "-o", "out").startswith("mended or left out:\n")
    assert "a screening of 1 block gives no verdict" in benchctl("compare", "out:baseline", "out:lenvm", code=3)
    script = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "examples" / "read_results.py")]
    told = subprocess.run([*script, "out"], cwd=truth.path.parent, capture_output=True, text=True, check=True)
    assert "lenvm against baseline: inconclusive (exit code 3)" in told.stdout
    assert re.search(r"^lenvm wall_s: x\S+ \[unknown, unknown\], blocks: 1$", told.stdout, re.MULTILINE)
