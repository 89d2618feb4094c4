"""Results of the LenVM timing scripts as result directories: totals, doubts, damage, and their own columns.

The directories are written by ``lenvm_results.py`` in the schemas of all revisions, so that every total is known.
"""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import cli
from support.results import lenvm_results
from support.results.lenvm_results import (
    Truth,
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
from benchctl.interop.lenvm.import_directory import ImportResult, import_lenvm, request_of
from benchctl.interop.lenvm.summary import RATIO_TAG, REPAIRS
from benchctl.measure.directory import reopen_experiment
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.report.export import write_report

NAME = "Qwen2.5-7B-Instruct_vs_lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"


@pytest.fixture(name="truth")
def _truth(tmp_path: Path) -> Truth:
    return write_directory(tmp_path / NAME)


def imported(truth: Truth, **options: Any) -> ImportResult:
    named = {"model": None, "value_model": None, "argv": ("benchctl", "import"), **options}
    return import_lenvm(truth.path, truth.path.parent / "out", **named)


def runs_of(result: ImportResult) -> dict[str, LoadedRun]:
    return {run.record.variant: run for run in load_results(result.path).runs}


def codes(result: ImportResult) -> list[str]:
    return [warning.code for warning in result.warnings]


def summary_of(result: ImportResult) -> dict[str, dict[str, str]]:
    with (result.path / "lenvm_summary.csv").open(newline="") as file:
        return {row["tag"]: row for row in csv.DictReader(file)}


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_totals_are_those_of_requests_and_not_of_lines(truth: Truth) -> None:
    for run in runs_of(imported(truth)).values():
        metrics = run_metrics(run)
        assert metrics["output_tokens"] == truth.output_tokens
        assert metrics["prompt_tokens"] == truth.prompt_tokens
        assert metrics["num_requests"] == truth.num_questions
        assert metrics["wall_s"] == pytest.approx(truth.makespan_s)
        assert metrics["num_steps"] == truth.num_steps
        assert [len(request.choices) for request in run.requests] == [truth.num_samples] * truth.num_questions
        assert run.record.state == "done"


def test_copied_usage_an_appended_restart_and_a_cut_line_are_mended_and_told_once_each(
    truth: Truth,
) -> None:
    """An earlier server's log lies before this one's, and the last answer has no end."""
    timing = truth.path / "lenvm.timing.jsonl"
    earlier = [*lenvm_results.own_steps(), *sampled_steps([64] * 40, is_guided=True)]
    timing.write_bytes(as_lines(earlier) + timing.read_bytes())
    append(responses_of(truth.path, "lenvm"), as_lines(rows_of(4, num_samples=1, top_k=5))[:70])
    result = imported(truth)
    assert [code for code in codes(result) if code in REPAIRS] == ["usage-duplicated", "log-restarted", "line-cut"]
    guided = runs_of(result)["lenvm"]
    assert run_metrics(guided)["output_tokens"] == truth.output_tokens
    assert run_metrics(guided)["num_steps"] == truth.num_steps
    assert guided.columns.num_seqs.sum() == truth.output_tokens
    assert guided.record.state == "done"
    restarted = next(warning for warning in result.warnings if warning.code == "log-restarted")
    assert restarted.where == "lenvm"
    assert "the last 1 of them yielded the answers and count" in restarted.message


def test_a_server_that_was_restarted_in_mid_run_keeps_the_steps_of_both_lives(truth: Truth) -> None:
    timing = truth.path / "baseline.timing.jsonl"
    sizes = lenvm_results.batch_sizes(truth.num_questions, truth.num_samples)
    lives = [[*lenvm_results.own_steps(), *sampled_steps(part)] for part in (sizes[:10], sizes[10:])]
    timing.write_bytes(b"".join(map(as_lines, lives)))
    baseline = runs_of(result := imported(truth))["baseline"]
    assert run_metrics(baseline)["num_steps"] == truth.num_steps
    assert (len(baseline.columns), len(baseline.warmup_columns)) == (truth.num_steps, 16)
    assert "log-restarted" in codes(result)


def test_a_server_that_wrote_on_behind_half_a_line_loses_that_line_only(truth: Truth) -> None:
    timing = truth.path / "baseline.timing.jsonl"
    timing.write_bytes(b'{"step": 400, "t_sampler_to' + timing.read_bytes())
    result = imported(truth)
    assert [code for code in codes(result) if code in REPAIRS] == ["usage-duplicated", "lines-damaged"]
    assert run_metrics(runs_of(result)["baseline"])["num_steps"] == truth.num_steps


@pytest.mark.parametrize("revision", ["V1", "V3", "V4"])
def test_each_revision_s_log_is_read_by_its_schema(tmp_path: Path, revision: str) -> None:
    result = imported(write_directory(tmp_path / NAME, revision=revision))
    guided = [step for step in records_of(runs_of(result)["lenvm"]) if not step.is_warmup]
    assert all(step.guided_rows == step.num_seqs for step in guided)
    assert {step.fused for step in guided} == {"V1": {None}, "V3": {True}, "V4": {True}}[revision]
    has_candidates = {step.candidates == 3 * step.num_seqs for step in guided}
    assert has_candidates == {revision == "V4"}
    assert guided[1].sections_ns["lvm_forward"] == 36_000_000
    assert guided[0].sections_ns["value_model_load"] == 2_500_000_000
    manifest = load_results(result.path).manifest
    assert manifest.imported is not None
    assert manifest.imported.revisions == {"V1": ("V1", "V3"), "V3": ("V3",), "V4": ("V4",)}[revision]


def test_a_baseline_whose_sampler_has_no_path_for_guidance_scored_nothing(truth: Truth) -> None:
    assert {step.guided_rows for step in records_of(runs_of(imported(truth))["baseline"])} == {0}


def test_without_a_step_log_the_answers_are_still_there(tmp_path: Path) -> None:
    truth = write_directory(tmp_path / NAME, revision=None)
    result = imported(truth)
    assert "steps-unrecorded" in codes(result)
    assert run_metrics(runs_of(result)["lenvm"])["output_tokens"] == truth.output_tokens
    assert load_results(result.path).manifest.imported.revisions == ()


def test_averages_of_a_v2_server_become_windows_and_no_steps(tmp_path: Path) -> None:
    truth = write_directory(tmp_path / NAME, revision=None)
    means = {200: 12.0, 400: 13.0, 600: 12.5}
    lines = [
        f"[2026-01-01 00:00:00] [lvm_timing] calls={calls} skipped=0 gpu_path={calls} fused=3 avg_candidates=4.50 "
        f"apply_total={mean:.3f}ms build_pending=1.310ms/10.2%"
        for calls, mean in means.items()
    ]
    (truth.path / "server.lenvm.log").write_text("\n".join(["fired up", *lines, ""]))
    result = imported(truth)
    assert "averages-cumulative" in codes(result)
    run = runs_of(result)["lenvm"].record
    windows = (result.path / "runs" / run.run_id / "timing_windows.jsonl").read_text().splitlines()
    assert [json.loads(line)["mean_ms"] for line in windows] == pytest.approx([12.0, 14.0, 11.5])
    assert load_results(result.path).manifest.imported.revisions == ("V2",)


def test_what_cannot_be_trusted_is_told_with_the_arms_it_is_about(truth: Truth) -> None:
    warnings = {warning.code: warning for warning in imported(truth).warnings}
    assert list(warnings) == [
        "usage-duplicated", "wall-holds-client", "value-model-load-measured", "greedy-records", "sections-async",
        "steps-are-samplers", "overlap-differs", "sends-reconstructed", "gpu-unattributed",
    ]  # fmt: skip
    assert warnings["value-model-load-measured"].where == "lenvm"
    assert "(2.5 s)" in warnings["value-model-load-measured"].message
    assert "8 of 37 steps are greedy" in warnings["greedy-records"].message
    assert "none is GPU time" in warnings["sections-async"].message


def test_sampling_that_nothing_records_is_told(truth: Truth) -> None:
    for tag in ("baseline", "lenvm"):
        responses_of(truth.path, tag).unlink()
        meta = json.loads((truth.path / f"{tag}.meta.json").read_text())
        (truth.path / f"{tag}.meta.json").write_text(json.dumps(meta | {"cmd": []}))
    warnings = {warning.code: warning for warning in imported(truth).warnings}
    assert warnings["sampling-unrecorded"].message.startswith("temperature, top_p, min_p: recorded in no request")


def test_sampling_is_taken_from_requests_first_and_else_from_the_command_line(truth: Truth) -> None:
    responses_of(truth.path, "baseline").unlink()
    config = {variant: run.record.effective_config for variant, run in runs_of(imported(truth)).items()}
    assert (config["baseline"]["sampling.temperature"], config["baseline"]["sampling.min_p"]) == (1.0, 0.01)
    assert (config["lenvm"]["sampling.top_k"], config["lenvm"]["guidance.value_scale"]) == (5, -10.0)
    assert not any(key.startswith("server.") for of_run in config.values() for key in of_run)


def test_a_failed_line_hides_no_answer_that_came_later(truth: Truth) -> None:
    responses = responses_of(truth.path, "lenvm")
    failed = as_lines([failed_row(2, num_samples=truth.num_samples, top_k=5)])
    responses.write_bytes(failed + responses.read_bytes())
    guided = runs_of(imported(truth))["lenvm"]
    assert run_metrics(guided)["output_tokens"] == truth.output_tokens
    assert [warning.code for warning in guided.record.warnings] == ["answers-resumed"]
    assert guided.record.state == "suspect"


def test_answers_that_took_longer_than_the_clock_says_are_of_another_run(truth: Truth) -> None:
    path = truth.path / "baseline.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wall_clock_s": 1.5}))
    result = imported(truth)
    baseline = runs_of(result)["baseline"].record
    assert baseline.state == load_results(result.path).manifest.state == "suspect"
    assert "the answers took 5.80 s together and the wall clock says 1.50 s" in baseline.warnings[0].message


def test_failed_questions_stay_in_the_denominator(truth: Truth) -> None:
    responses = responses_of(truth.path, "lenvm")
    lines = [line for line in responses.read_bytes().splitlines(keepends=True) if b'"idx": 1,' not in line]
    failed = as_lines([failed_row(1, num_samples=truth.num_samples, top_k=5)])
    responses.write_bytes(b"".join(lines) + failed)
    result = imported(truth)
    assert "questions-unanswered" in codes(result)
    guided = runs_of(result)["lenvm"]
    metrics = run_metrics(guided)
    assert (metrics["num_requests"], metrics["num_failed"]) == (truth.num_questions, 1)
    assert guided.record.state == "suspect"


def test_a_greedy_run_keeps_its_steps(truth: Truth) -> None:
    """The project's own analysis drops every greedy step and leaves nothing of such a run."""
    sizes = lenvm_results.batch_sizes(truth.num_questions, truth.num_samples)
    greedy = [record | {"is_greedy": True} for record in sampled_steps(sizes)]
    (truth.path / "lenvm.timing.jsonl").write_bytes(as_lines([*lenvm_results.own_steps(), *greedy]))
    responses = responses_of(truth.path, "lenvm")
    responses.write_bytes(responses.read_bytes().replace(b'"top_k": 5', b'"top_k": 1'))
    result = imported(truth)
    guided = runs_of(result)["lenvm"]
    assert run_metrics(guided)["num_steps"] == truth.num_steps
    assert run_metrics(guided)["greedy_step_frac"] == 1.0
    assert "n_steps" not in {name for name, value in summary_of(result)["lenvm"].items() if value}


def test_only_what_the_log_tells_is_known_of_steps(truth: Truth) -> None:
    metrics = run_metrics(runs_of(imported(truth))["lenvm"])
    assert [name for name in metrics if name.endswith("step_ms") and metrics[name] is not None] == []
    assert metrics["ttft_ms"] is metrics["tpot_ms"] is metrics["itl_ms"] is None
    assert metrics["e2el_ms"] == pytest.approx(1000 * 0.2 * sum(20 + 3 * i for i in range(4)) / 4)


def test_gpu_readings_lie_on_the_clock_of_the_run(truth: Truth) -> None:
    run = runs_of(imported(truth))["baseline"]
    assert [sample.utilization_frac for sample in run.gpu] == [0.5, 0.51, 0.52]
    assert run.gpu[0].memory_used_bytes == 1000 << 20
    assert [sample.t_ns - run.gpu[0].t_ns for sample in run.gpu] == [0, 1_000_000_000, 2_000_000_000]


def test_local_time_is_brought_into_the_zone_in_which_it_lies_next_to_the_start() -> None:
    lines = [
        "timestamp, index, utilization.gpu [%], memory.used [MiB]",
        "2025/10/09 16:23:21.250, 1, [N/A], 7",
        "2025/",
    ]
    (sample,) = read_gpu_samples(lines, start_epoch_s=1_760_007_200.0, start_ns=5)
    assert (sample.t_ns, sample.index, sample.utilization_frac) == (5 + 1_250_000_000, 1, None)


def test_the_files_themselves_lie_beside_the_records(truth: Truth) -> None:
    result = imported(truth)
    run = result.path / "runs" / "001-b0-lenvm"
    for name, path in (
        ("steps.raw.jsonl", truth.path / "lenvm.timing.jsonl"),
        ("responses.raw.jsonl", responses_of(truth.path, "lenvm")),
        ("meta.raw.json", truth.path / "lenvm.meta.json"),
        ("gpu.raw.csv", truth.path / "lenvm.gpu_samples.csv"),
    ):
        assert (run / name).read_bytes() == path.read_bytes()
    manifest = load_results(result.path).manifest
    assert manifest.imported.source == str(truth.path)
    assert len(manifest.imported.sha256) == 8
    assert (manifest.host.hostname, manifest.host.num_cores) == ("unknown", None)
    assert manifest.engine == "sglang-lenvm"


def test_a_report_can_be_made_of_it_and_draws_no_step_times(truth: Truth) -> None:
    result = imported(truth)
    files = write_report(result.path)
    assert not files.damage
    assert "the step log times the sampler alone" in " ".join(files.skipped)
    analysis = analyze_directory(result.path)
    assert analysis.sweep[0].values["step_ms_ratio"] is None
    assert [finding.code for finding in analysis.findings] == ["lazy-load-measured"]


def test_an_import_cannot_be_gone_on_with(truth: Truth) -> None:
    with pytest.raises(UsageError, match=r"was imported from .*: there is nothing to resume"):
        reopen_experiment(imported(truth).path, None)


def test_their_columns_are_reproduced_by_their_definitions(truth: Truth) -> None:
    rows = summary_of(imported(truth))
    base, guided, ratio = rows["baseline"], rows["lenvm"], rows[RATIO_TAG]
    wall_s = 6.0 + truth.makespan_s
    assert float(base["wall_clock_s"]) == pytest.approx(wall_s)
    assert float(base["throughput_output_tokens_per_s"]) == pytest.approx(truth.output_tokens / wall_s)
    assert int(base["n_requests"]) == truth.num_questions * truth.num_samples
    assert int(base["total_output_tokens"]) == truth.output_tokens
    assert (int(base["n_steps"]), int(guided["n_steps_with_lvm"])) == (truth.num_steps, truth.num_steps)
    assert (int(base["n_steps_with_lvm"]), base["t_lvm_forward_ms_mean"]) == (0, "")
    assert float(guided["t_lvm_forward_ms_mean"]) == pytest.approx(36.0)
    assert float(guided["t_lvm_forward_ms_sum"]) == pytest.approx(36.0 * truth.num_steps)
    assert float(guided["t_lvm_apply_outer_ms_p50"]) == pytest.approx(53.0)
    sizes = sorted(lenvm_results.batch_sizes(truth.num_questions, truth.num_samples))
    assert float(base["batch_size_p95"]) == pytest.approx(np.percentile(sizes, 95))
    assert float(ratio["top_k"]) == -5.0
    assert float(ratio["total_output_tokens"]) == 1.0
    assert list(base) == sorted(base)


def test_their_flops_are_the_published_ones_at_the_published_totals(tmp_path: Path) -> None:
    """50 questions of 16 samples with 5200 tokens of prompts and the published totals of output, at k = 5."""
    path = tmp_path / NAME
    path.mkdir()
    for tag, output, wall_s, top_k in (("baseline", 237_675, 19.22, -1), ("lenvm", 237_710, 87.44, 5)):
        meta = {"tag": tag, "dataset": "gsm8k", "max_questions": 50, "n_samples_per_q": 16, "top_k": top_k}
        (path / f"{tag}.meta.json").write_text(json.dumps(meta | {"max_concurrency": 50, "wall_clock_s": wall_s}))
        rows = []
        for question in range(50):
            of_question = output // 50 + (question < output % 50)
            usage = {"prompt_tokens": 104, "completion_tokens": of_question}
            rows += [
                {"idx": question, "choice_idx": i, "usage": usage, "text": "", "elapsed_s": 1.0} for i in range(16)
            ]
        (path / f"gsm8k.{tag}_q50_n16.responses.jsonl").write_bytes(as_lines(rows))
    result = import_lenvm(path, tmp_path / "out", model=None, value_model=None, argv=())
    rows = summary_of(result)
    base, guided, ratio = rows["baseline"], rows["lenvm"], rows[RATIO_TAG]
    published = {
        "base_pflops_total": 3.45757, "lvm_pflops_total": 3.818107, "lvm_pflops_candidates": 3.170341,
        "theoretical_pflops_total": 7.275677, "theoretical_gflops_per_output_token": 30.239951,
        "achieved_tflops_per_s": 83.20765,
    }  # fmt: skip
    for column, value in published.items():
        assert float(guided[column]) == pytest.approx(value, rel=2e-5), column
    assert float(base["theoretical_gflops_per_output_token"]) == pytest.approx(14.237634, rel=1e-6)
    assert float(base["achieved_tflops_per_s"]) == pytest.approx(179.89, abs=0.01)
    assert float(base["throughput_output_tokens_per_s"]) == pytest.approx(12_366, abs=0.5)
    assert float(ratio["theoretical_pflops_total"]) == pytest.approx(2.1043, abs=5e-5)
    assert float(ratio["wall_clock_s"]) == pytest.approx(4.55, abs=0.005)


def test_models_are_named_by_the_directory_by_the_user_or_assumed_aloud(tmp_path: Path) -> None:
    truth = write_directory(tmp_path / "run1")
    result = imported(truth)
    assert "models-assumed" in codes(result)
    named = import_lenvm(
        truth.path, tmp_path / "named", model="qwen2.5-3b", value_model="qwen2.5-0.5b", argv=()
    )  # fmt: skip
    assert "models-assumed" not in codes(named)
    assert runs_of(named)["baseline"].record.effective_config["model"] == "qwen2.5-3b"
    with pytest.raises(UsageError, match="unknown model 'qwen9'"):
        import_lenvm(truth.path, tmp_path / "none", model="qwen9", value_model=None, argv=())


def test_what_is_no_such_directory_is_refused_and_leaves_nothing(truth: Truth, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has neither baseline\.meta\.json nor baseline\.timing\.jsonl"):
        import_lenvm(tmp_path / "empty", tmp_path / "out", model=None, value_model=None, argv=())
    with pytest.raises(UsageError, match="is not a directory"):
        import_lenvm(tmp_path / "absent", tmp_path / "out", model=None, value_model=None, argv=())
    (truth.path / "lenvm.meta.json").write_text('{"tag": "lenvm", "max_ques')
    with pytest.raises(InvalidDataError, match=r"lenvm\.meta\.json: .*copy it again, or remove it"):
        imported(truth)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", NAME}
    (tmp_path / "out").mkdir()
    (truth.path / "lenvm.meta.json").unlink()
    with pytest.raises(UsageError, match="exists; name another directory with -o"):
        imported(truth)


def test_requests_that_would_have_ended_the_server_are_no_results(truth: Truth) -> None:
    responses = responses_of(truth.path, "lenvm")
    responses.write_bytes(responses.read_bytes().replace(b'"top_k": 5', b'"top_k": -1'))
    with pytest.raises(InvalidDataError, match="which needs a finite top_k, and has -1"):
        imported(truth)
    assert not (truth.path.parent / "out").exists()


def test_sends_of_a_closed_loop_follow_from_how_long_each_request_took() -> None:
    assert sends_s([3.0, 1.0, 2.0, 1.0], 2) == (0.0, 0.0, 1.0, 3.0)
    assert sends_s([3.0, 1.0, 2.0], 3) == (0.0, 0.0, 0.0)
    assert makespan_s([3.0, 1.0, 2.0, 1.0], 2) == 4.0
    assert makespan_s([], 4) == 0.0


@given(durations=st.lists(st.floats(0, 1000), max_size=30), concurrency=st.integers(1, 40))
def test_never_more_requests_are_in_flight_than_the_loop_has_workers(
    durations: list[float], concurrency: int
) -> None:
    sent = sends_s(durations, concurrency)
    assert list(sent) == sorted(sent)
    for now in sent:
        in_flight = sum(start <= now < start + took for start, took in zip(sent, durations, strict=True))
        assert in_flight <= concurrency
    least = max([*durations, sum(durations) / concurrency], default=0.0)
    assert makespan_s(durations, concurrency) >= least * (1 - 1e-12)


LINES = as_lines([row for question in range(3) for row in rows_of(question, num_samples=2, top_k=5)])


@given(length=st.integers(0, len(LINES)))
def test_answers_cut_anywhere_hold_every_whole_line_before_the_cut(length: int) -> None:
    content = LINES[:length]
    questions, rows, damage = read_responses(content.splitlines(keepends=True))
    whole = content.count(b"\n")
    is_whole_without_end = length > 0 and LINES[length : length + 1] == b"\n"
    assert len(rows) == whole + is_whole_without_end
    assert damage.is_cut is (not content.endswith(b"\n") and length > 0 and not is_whole_without_end)
    assert damage.num_lines == 0
    assert [answered.first.idx for answered in questions] == list(range(-(-len(rows) // 2)))
    assert all(a.completion_tokens == 2 * lenvm_results.output_of(a.first.idx) for a in questions)


@pytest.mark.parametrize(
    ("reason", "word", "kind"),
    [
        ({"type": "stop", "matched": 2}, "stop", None),
        ({"type": "abort"}, "abort", "finish-abort"),
        ("content_filter", "content_filter", "finish-content-filter"),
    ],
)
def test_a_finish_reason_of_an_imported_answer_means_what_it_means_in_a_load(
    reason: object, word: str, kind: str | None
) -> None:
    row = rows_of(1, num_samples=1, top_k=5)[0]
    row["choice"]["finish_reason"] = reason
    ((answered,), _, _) = read_responses([as_lines([row])])
    assert answered.choices[0].finish_reason == word
    error = request_of(answered, 0).error
    assert (error and error.kind) == kind


@pytest.mark.slow
def test_the_command_imports_and_comparing_the_arms_is_a_screening(truth: Truth) -> None:
    benchctl = partial(cli.benchctl, cwd=truth.path.parent)
    done = benchctl("import", "lenvm", NAME, "-o", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "mended or left out:"
    assert "usage-duplicated: " in done.stdout.splitlines()[1]
    assert benchctl("show", "out").returncode == 0
    compared = benchctl("compare", "out:baseline", "out:lenvm")
    assert compared.returncode == 3, compared.stderr
    assert "a screening of 1 block gives no verdict" in compared.stdout
    again = benchctl("import", "lenvm", NAME, "-o", "out")
    assert (again.returncode, "exists; name another directory" in again.stderr) == (2, True)
