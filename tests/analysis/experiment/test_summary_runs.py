"""Runs as rows, cells as means over blocks, and cells against the baseline of their own block, of known truth.

FLOPs of measured runs: published and observed accounts, and what leads from one to the other.
"""

import csv
import io
import math
import statistics
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st
from support.results.builders import GUIDED, ONE_BLOCK, edit_run, prepared, rewrite_lines, run_ids, write_results
from support.steps import records_of, with_steps

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.flops import count_run_flops
from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.summary import (
    LENVM_SWEEP_COLUMNS,
    SWEEP_COLUMNS,
    RunSummary,
    flops_bridge,
    summarise_cells,
    unexplained_frac,
)
from benchctl.analysis.metrics.table import METRICS, OF_SLO
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.costs.flops import observed_flops, published_flops
from benchctl.costs.run_work import Lengths, RunTotals, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError
from benchctl.report.documents import summary_document
from benchctl.report.table import csv_bytes


def summarise(results):
    experiment = load_experiment(results.path)
    return tuple(RunSummary(run, experiment) for run in experiment.results.runs)


def cells_of(results):
    return summarise_cells(summarise(results), load_experiment(results.path))


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path)


def test_a_row_holds_what_the_run_is_known_to_have_done(results):
    assert len(set(SUMMARY_COLUMNS)) == len(SUMMARY_COLUMNS)
    assert set(METRICS) <= set(SUMMARY_COLUMNS)
    rows = summarise(results)
    expected = {
        "variant": "guided",
        "cell": "top_k=5",
        "wall_s": pytest.approx(8 * 15.5e-3),
        "output_throughput": pytest.approx(64 / (8 * 15.5e-3)),
        "output_tokens": 64,
        "prompt_tokens": 80,
        "num_requests": 4,
        "num_steps": 8,
        "n_steps_with_lvm": 8,
        "mean_batch_size": 8.0,
        "batch_size_p50": 8.0,
        "batch_size_p95": None,
        "e2el_ms": pytest.approx(8 * 15.5),
        "output_tokens_mean": 16.0,
        "t_lvm_forward_ms_mean": pytest.approx(4.0),
        "t_lvm_forward_ms_sum": pytest.approx(32.0),
        "t_lvm_forward_ms_count": 8,
        "t_pre_lvm_ms_mean": None,
        "top_k": 5,
        "value_scale": 0.0,
        "block": 0,
        "state": "done",
        "clock": "host",
        "ready_s": 1.0,
        "client_wall_s": pytest.approx(8 * 15.5e-3),
        "step_ms": pytest.approx(15.5),
        "tokens_per_step": 1.0,
    }
    assert {column: rows[1].values[column] for column in expected} == expected
    columns = tuple(column for column in SUMMARY_COLUMNS if column not in OF_SLO)
    table = list(csv.reader(io.StringIO(csv_bytes(columns, [run.values for run in rows]).decode())))
    assert (len(table), tuple(table[0])) == (1 + 6, columns)
    column = table[0].index("t_lvm_forward_ms_mean")
    assert (table[1][column], float(table[2][column])) == ("", pytest.approx(4.0))


def test_flops_columns_follow_the_published_rule_and_observed_ones_the_step_log(results, tmp_path):
    baseline, guided = (run.values for run in summarise(results)[:2])
    whole, base, value = (guided[f"{name}_pflops_total"] for name in ("theoretical", "base", "lvm"))
    linear = 13_050_576_896 * (4 * 20 + 8 * 8) / 1e15  # prompts once for each question, then every output token
    assert (guided["base_pflops_linear"], whole) == pytest.approx((linear, base + value))
    assert guided["achieved_tflops_per_s"] == pytest.approx(1e3 * whole / guided["wall_s"])
    observed = guided["observed_base_pflops"] + guided["observed_lvm_pflops"]
    assert guided["observed_pflops_total"] == pytest.approx(observed)
    assert baseline["base_pflops_total"] == base
    assert baseline["lvm_pflops_total"] == baseline["observed_lvm_pflops"] == 0 < guided["observed_lvm_pflops"]
    greedy = summarise(write_results(tmp_path / "greedy", cells=[{"top_k": 1}]))[1].values
    assert greedy["lvm_pflops_total"] > 0 == greedy["n_steps_with_lvm"] == greedy["observed_lvm_pflops"]


def test_what_a_profile_does_not_say_leaves_flops_or_settings_unknown_and_says_why(results, tmp_path):
    profile = results.profile_yaml()
    results.write_profile(profile.replace("model: qwen2.5-7b", "model: nonesuch"))
    run = summarise(results)[0]
    assert (run.flops.published, [warning.code for warning in run.warnings]) == (None, ["model-shape-unknown"])
    results.write_profile(profile.replace("model: qwen2.5-7b", "model: unknown"))
    assert (summarise(results)[0].flops, summarise(results)[0].warnings) == (None, ()), (
        "as 'init' writes for a server"
    )
    results.write_profile(profile.replace("  guided:\n", "  renamed:\n"))
    unknown = write_results(tmp_path / "unknown", cells=[{"no_such_factor": 1}])
    assert summarise(results)[1].settings is summarise(unknown)[1].settings is None
    results.write_profile("name: [")
    experiment = load_experiment(results.path)
    assert "settings and FLOPs of the runs are unknown" in experiment.warnings[0].message
    run = RunSummary(experiment.results.runs[1], experiment)
    assert (run.settings, run.values["top_k"], run.values["theoretical_pflops_total"]) == (None, None, None)


NOISY = ({"baseline": 0.8, "guided": 1.0}, {"baseline": 1.0, "guided": 1.1}, {"baseline": 1.5, "guided": 1.2})


def test_cells_are_geometric_means_over_blocks_with_sample_deviation(tmp_path):
    baseline, guided = cells_of(write_results(tmp_path / "r", block_factors=NOISY))
    walls = [0.08 * factor["baseline"] for factor in NOISY]
    spread = baseline.spreads["wall_s"]
    assert (baseline.label, guided.label) == ("baseline", "guided top_k=5")
    assert (spread.n, spread.centre, spread.sd, spread.scatter_frac) == pytest.approx(
        (3, statistics.geometric_mean(walls), statistics.stdev(walls), statistics.stdev(map(math.log, walls)))
    )
    assert baseline.centre("t_lvm_forward_ms_mean") is None
    assert "block" not in baseline.spreads
    assert guided.spreads["num_failed"].scatter_frac is None  # a mean of zero has no relative scatter
    one = cells_of(write_results(tmp_path / "one", block_factors=ONE_BLOCK))[0].spreads["step_ms"]
    assert (one.n, one.sd, one.scatter_frac) == (1, None, None)


def test_runs_that_failed_or_are_damaged_stay_rows_and_leave_the_means(results):
    failed, damaged = run_ids(results, "baseline")[:2]
    edit_run(results, failed, state="failed")
    with results.run(damaged).step_log.open("ab") as file:
        file.write(b'{"step": 9')
    assert [run.is_usable for run in summarise(results)] == [False, True, False, True, True, True]
    baseline = cells_of(results)[0]
    assert (len(baseline.runs), baseline.num_unusable, baseline.spreads["step_ms"].n) == (1, 2, 1)


def test_cells_come_in_the_order_of_baseline_variant_and_factor_value(tmp_path):
    models = ("b-1000", "b-500", "b-1.5", "a")
    cells = [{"top_k": 10}, {"top_k": 2}, *({"value_model": model} for model in models)]
    labels = [cell.label for cell in cells_of(write_results(tmp_path, cells=cells))]
    values = ("top_k=2", "top_k=10", *(f"value_model={model}" for model in reversed(models)))
    assert labels == ["baseline", *(f"guided {value}" for value in values)]


PUBLISHED = (
    "k", "results_dir", "base_wall_s", "lvm_wall_s", "wall_ratio", "base_tok_per_s", "lvm_tok_per_s",
    "tok_per_s_ratio", "base_pflops", "lvm_pflops", "flops_ratio", "base_achieved_tflops_per_s",
    "lvm_achieved_tflops_per_s", "achieved_tflops_ratio", "lvm_apply_ms_mean", "lvm_forward_ms_mean",
    "lvm_build_pending_ms_mean", "lvm_apply_guidance_ms_mean", "utilization_gap",
)  # fmt: skip


def sweep(results):
    return analyze_directory(results.path).sweep


def test_ratios_are_geometric_means_of_the_ratios_within_blocks_and_quotients_of_their_columns(tmp_path):
    assert tuple(LENVM_SWEEP_COLUMNS) == tuple(SWEEP_COLUMNS[: len(PUBLISHED)]) == PUBLISHED
    results = write_results(tmp_path, block_factors=NOISY)
    (row,) = sweep(results)
    ratios = [1.55 * block["guided"] / block["baseline"] for block in NOISY]
    expected = estimate_paired([math.log(ratio) for ratio in ratios])
    wall = row.number("wall_ratio")
    assert (wall, row.number("wall_ratio_ci_low"), row.number("wall_ratio_ci_high")) == pytest.approx(
        (statistics.geometric_mean(ratios), expected.ci_low, expected.ci_high)
    )
    assert (row.number("step_ms_ratio"), row.number("num_steps_ratio")) == (pytest.approx(wall), 1.0)
    assert (row.values["n_blocks"], row.values["k"], row.label) == (3, 5, "guided top_k=5")
    assert row.values["results_dir"] == str(tmp_path)
    for ratio, base, other in (
        ("wall_ratio", "base_wall_s", "lvm_wall_s"),
        ("tok_per_s_ratio", "base_tok_per_s", "lvm_tok_per_s"),
        ("flops_ratio", "base_pflops", "lvm_pflops"),
        ("achieved_tflops_ratio", "base_achieved_tflops_per_s", "lvm_achieved_tflops_per_s"),
        ("utilization_gap", "flops_ratio", "wall_ratio"),
    ):
        assert row.number(ratio) == pytest.approx(row.number(other) / row.number(base))
    assert wall * row.number("achieved_tflops_ratio") == pytest.approx(row.number("flops_ratio"))
    published = summarise(results)[0].values["theoretical_pflops_total"]
    assert row.values["base_pflops"] == published, "equal ones are exact"


def test_a_block_without_a_usable_baseline_takes_no_part(tmp_path):
    results = write_results(tmp_path, block_factors=NOISY)
    first, second, third = run_ids(results, "baseline")
    for lost, blocks, ratio in ((first, (1, 2), math.sqrt(1.1 * 1.2 / 1.5)), (second, (2,), 1.2 / 1.5)):
        edit_run(results, lost, state="failed")
        (row,) = sweep(results)
        assert (row.pair.blocks, row.number("wall_ratio")) == (blocks, pytest.approx(1.55 * ratio))
    assert row.values["wall_ratio_ci_low"] is row.values["wall_ratio_ci_high"] is None
    edit_run(results, third, state="failed")
    assert sweep(results) == ()


def test_what_a_run_does_not_record_stays_unknown(results):
    rewrite_lines(results.run(GUIDED).step_log, lambda step: {k: step[k] for k in step if k != "guided_rows"})
    for run in results.runs():
        (run.path / "requests.jsonl").unlink()
        edit_run(results, run.path.name, times=msgspec.structs.replace(run.read().times, last_token_ns=None))
    assert summarise(results)[1].values["n_steps_with_lvm"] is None
    (row,) = sweep(results)
    unknown = ("wall_ratio", "base_wall_s", "flops_ratio", "utilization_gap", "unexplained_frac")
    assert [row.values[column] for column in unknown] == [None] * 5
    assert (row.number("step_ms_ratio"), row.number("lvm_forward_ms_mean")) == pytest.approx((1.55, 4.0))


def test_rows_are_ordered_by_factor_and_hold_the_sections_where_they_run(tmp_path):
    rows = sweep(write_results(tmp_path, cells=[{"top_k": 5}, {"top_k": 1}, {"top_k": 3}]))
    sections = [(row.values["k"], row.number("lvm_apply_ms_mean")) for row in rows]
    assert sections == [(1, None), (3, pytest.approx(5.5)), (5, pytest.approx(5.5))]
    assert rows[0].number("flops_ratio") > rows[0].number("flops_ratio_observed") == 1.0
    assert rows[0].values["unexplained_frac"] is None  # greedy steps take the baseline's time: no slowdown
    assert rows[1].number("unexplained_frac") is not None


@given(st.floats(1.05, 100), st.floats(0.5, 100))
def test_explained_and_unexplained_logarithms_add_up_to_the_slowdown(wall_ratio, flops_ratio):
    share = unexplained_frac(estimate_paired([math.log(wall_ratio)]), flops_ratio)
    assert math.log(flops_ratio) + share * math.log(wall_ratio) == pytest.approx(math.log(wall_ratio), abs=1e-9)


def test_the_published_experiment_leaves_half_of_its_slowdown_unexplained_and_scatter_is_not_divided():
    share = unexplained_frac(estimate_paired([math.log(87.44 / 19.22)]), 2.1043)
    assert share == pytest.approx(0.509, abs=0.001)
    wide = estimate_paired([math.log(0.5), math.log(3.0), math.log(3.0)])
    assert unexplained_frac(wide, 1.1) is unexplained_frac(None, 1.1) is None
    assert unexplained_frac(estimate_paired([math.log(1.01)] * 3), 1.0) is None


BASE, VALUE = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b")

# write_results: 4 requests with 2 choices of 8 tokens and prompts of 20, prefilled sample by sample.
TOTALS = RunTotals(num_questions=4, num_sequences=8, prompt_tokens=80, output_tokens=64)
SEQUENCES = (Lengths(20, 8),) * 8
PREFILLED = StepLogCounts(base_prefill_tokens=160)


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory):
    loaded = load_results(write_results(tmp_path_factory.mktemp("flops")).path)
    return {run.record.variant: run for run in loaded.runs[:2]}


def account(run, **changes):
    value_model = VALUE if run.record.variant == "guided" else None
    options = {"base": BASE, "value_model": value_model, "top_k": 5, "prepared": prepared(4, 8, 2)}
    return count_run_flops(run, **options | changes)


def steps_with(run, **fields):
    return with_steps(run, [msgspec.structs.replace(step, **fields) for step in records_of(run)])


def requests_with(run, *indices, **fields):
    """Replace fields of the requests at ``indices``, or of all."""
    changed = [
        msgspec.structs.replace(request, **fields) if request.index in (indices or range(4)) else request
        for request in run.requests
    ]
    return replace(run, requests=tuple(changed))


def codes(account):
    return [warning.code for warning in account.warnings]


def test_runs_are_accounted_from_usage_and_steps(runs):
    plain = account(runs["baseline"])
    assert plain.published == published_flops(TOTALS, base=BASE)
    assert plain.observed == observed_flops(SEQUENCES, PREFILLED, base=BASE)
    guided = account(runs["guided"])
    assert guided.published == published_flops(TOTALS, base=BASE, value_model=VALUE, top_k=5)
    seen = replace(PREFILLED, value_prefill_tokens=160, value_extend_tokens=7 * 8, candidates=8 * 3 * 8)
    assert guided.observed == observed_flops(SEQUENCES, seen, base=BASE, value_model=VALUE)
    for each in (plain, guided):
        total = sum(correction.flops for correction in each.corrections)
        assert each.published.total + total == each.observed.total
        assert each.warnings == ()


def test_a_greedy_run_and_one_that_was_never_guided_are_charged_by_the_published_rule_only(runs):
    of_value = dict.fromkeys(("guided_rows", "candidates", "value_prefill_tokens", "value_extend_tokens"))
    greedy = account(steps_with(runs["guided"], is_greedy=True, **of_value), top_k=1)
    for each in (greedy, account(runs["baseline"], value_model=VALUE)):
        assert each.published.of("value").total > 0 == each.observed.of("value").total
        assert each.warnings == ()


def test_what_the_log_does_not_count_is_assumed_and_said_and_unknown_candidates_leave_no_account(runs):
    # The same as logged: a prompt and all but the last token of each sequence.
    silent = account(steps_with(runs["guided"], value_prefill_tokens=None, value_extend_tokens=None))
    assert (silent.observed, codes(silent)) == (account(runs["guided"]).observed, ["value-prefixes-assumed"])
    one_prompt = account(steps_with(runs["baseline"], num_prefill_tokens=None))
    assert codes(one_prompt) == ["base-prefill-assumed"]
    assert one_prompt.observed == observed_flops(SEQUENCES, StepLogCounts(base_prefill_tokens=80), base=BASE)
    assert codes(account(steps_with(runs["baseline"], draft_tokens=3))) == ["drafts-not-charged"]
    unknown = account(steps_with(runs["guided"], candidates=None))
    assert (unknown.observed, unknown.corrections, codes(unknown)) == (None, (), ["candidates-unknown"])
    assert unknown.published is not None
    assert account(with_steps(runs["guided"], ())).observed is None


def test_warm_up_counts_for_nothing_and_failed_requests_are_left_out_and_named(runs):
    run = runs["guided"]
    warm_request = msgspec.structs.replace(run.requests[0], request_id="warm", is_warmup=True)
    warm_step = msgspec.structs.replace(records_of(run)[0], is_warmup=True, candidates=10**9)
    warmed = replace(with_steps(run, (warm_step, *records_of(run))), requests=(warm_request, *run.requests))
    assert account(warmed) == account(run)
    failed = account(requests_with(runs["baseline"], 0, error=RequestError(kind="timeout", message="no answer")))
    assert (failed.published.output_tokens, codes(failed)) == (48, ["failed-requests-in-step-log"])
    assert "1 of 4 requests did not complete" in failed.warnings[0].message


def test_tokens_are_those_of_usage_or_of_choices_or_of_the_workload(runs):
    run, whole = runs["baseline"], account(runs["baseline"])
    uncounted = tuple(
        msgspec.structs.replace(choice, output_tokens=None, chunk_tokens=None) for choice in run.requests[0].choices
    )
    once = account(requests_with(run, choices=uncounted, completion_tokens=15))
    assert (once.published.output_tokens, codes(once)) == (60, ["choice-lengths-assumed"])
    assert once.observed == observed_flops((Lengths(20, 8), Lengths(20, 7)) * 4, PREFILLED, base=BASE)
    assert account(requests_with(run, completion_tokens=None)).observed == whole.observed
    bare = account(requests_with(run, choices=()))
    assert (bare.observed, bare.warnings) == (observed_flops((Lengths(20, 16),) * 4, PREFILLED, base=BASE), ())
    silent = requests_with(run, prompt_tokens=None)
    estimated = account(silent)
    assert (estimated.published, codes(estimated)) == (whole.published, ["prompt-tokens-estimated"])
    for each, code in (
        (account(silent, prepared=()), "tokens-unknown"),
        (account(requests_with(run, completion_tokens=None, choices=())), "tokens-unknown"),
        (account(replace(run, requests=())), "no-completed-requests"),
    ):
        assert (each.published, each.observed, codes(each)) == (None, None, [code])


@pytest.mark.parametrize(
    ("sources", "samples", "num_questions"),
    [
        ("aabb", (0, 1, 0, 1), 2),
        ("abab", (0, 0, 1, 1), 2),
        ("aaaa", (0, 1, 2, 3), 1),
        ("aaaa", (0, 1, 0, 1), 2),
        ("aaaa", (0, 0, 0, 0), 4),
    ],
)
def test_samples_sent_as_requests_share_the_prompt_of_their_question(runs, sources, samples, num_questions):
    requests = tuple(
        msgspec.structs.replace(request, source=source, sample=sample)
        for request, source, sample in zip(prepared(4, 8, 2), sources, samples, strict=True)
    )
    shared = account(runs["baseline"], prepared=requests)
    totals = RunTotals(
        num_questions=num_questions, num_sequences=8, prompt_tokens=20 * num_questions, output_tokens=64
    )
    assert shared.published == published_flops(totals, base=BASE)
    assert shared.observed == account(runs["baseline"]).observed


def test_corrections_lead_from_the_published_to_the_observed_total_of_every_cell(tmp_path):
    results = write_results(tmp_path / "r", cells=[{"top_k": 1}, {"top_k": 5}])
    analysis = analyze_directory(results.path)
    plain, greedy, guided = map(flops_bridge, analysis.cells)
    for bridge in (plain, greedy, guided):
        total = bridge["published_flops"] + sum(step["flops"] for step in bridge["steps"])
        assert total == pytest.approx(bridge["observed_flops"], rel=1e-12)
    peak = analysis.experiment.hardware.peak_flops_per_s
    shares = [plain["observed_flops"] / run.number("wall_s") / peak for run in analysis.cells[0].runs]
    assert plain["utilization_frac"] == pytest.approx(statistics.fmean(shares))
    of_value = [step["flops"] for step in greedy["steps"] if step["code"] in {"candidates", "value-prefill"}]
    assert max(of_value) < 0 < guided["observed_flops"] - greedy["observed_flops"], "the value model never ran"
    for run in results.runs():
        run.step_log.unlink()
    cells = summary_document(analyze_directory(results.path))["cells"]
    assert [cell["flops_bridge"] is None for cell in cells] == [False, True, True]
