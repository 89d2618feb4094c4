"""Ladders of controls, whose prices add up; the declared rule for ending early: its looks and what they cost.

The metrics that decide, where servers do not record all of them.
"""

import math
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.cli import printed
from support.results.builders import (
    edit_manifest,
    edit_run,
    run_ids,
    write_results,
)
from support.results.comparing import compare, compare_arms, messages

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.estimate import logarithmic_mean
from benchctl.analysis.compare.answer import reasons_of, verdict_sentence
from benchctl.analysis.compare.words import unrecorded_lines
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import num_looks_of, take_look, widest_interval
from benchctl.analysis.experiment.pairing import deciding_in_plan
from benchctl.analysis.planning import power_lines
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.engines.engine import engine_for
from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile
from benchctl.profile.planning import look_blocks, stopping_rule
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.report.comparison_tables import footnotes_of
from benchctl.report.documents import document_of, summary_document
from benchctl.report.experiment_tables import headline, ladder_table, runs_table
from benchctl.report.export import list_directories

OVERRIDES = (
    "sweep.value_model=[qwen2.5-0.5b, qwen2.5-1.5b]",
    "workload.num_prompts=2",
    "workload.samples_per_prompt=2",
    "workload.output_len=8",
)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    """Three blocks of the profile ``controls`` over two value models, in virtual time."""
    path = tmp_path_factory.mktemp("ladder") / "r"
    words = [word for override in OVERRIDES for word in ("--set", override)]
    printed("simulate", "--profile", "controls", "--blocks", 3, "--jobs", 1, *words, "-o", path)
    return path


def test_prices_add_up_to_the_whole_in_every_cell_which_is_what_compare_says_of_its_two_ends(path):
    ladders = analyze_directory(path).ladders
    cells = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms", "wall_s")).cells
    assert [ladder.label for ladder in ladders] == [f"guided {cell.label}" for cell in cells]
    for ladder, cell in zip(ladders, cells, strict=True):
        assert (ladder.num_blocks, len(cell.deciding)) == (3, 2)
        for metric in cell.deciding:
            name, half = metric.metric.name, metric.estimate.half_width * logarithmic_mean(metric.a, metric.b)
            whole, parts = ladder.whole.differences[name], [price.differences[name].mean for price in ladder.prices]
            assert math.isclose(math.fsum(parts), whole.mean, rel_tol=1e-9)
            assert (whole.mean, whole.half_width) == pytest.approx((metric.b - metric.a, half), rel=1e-12)


def test_each_step_is_named_by_what_it_changes_and_stands_in_its_own_cell_table_and_summary(path):
    analysis = analyze_directory(path)
    prices = analysis.ladders[1].prices
    assert [(price.what, price.upper) for price in prices] == [
        ("flags", "guided-flags"),
        ("idle code", "guided-idle value_model=qwen2.5-1.5b"),
        ("sampling + value-model compute", "guided-neutral value_model=qwen2.5-1.5b"),
        ("changed tokens", "guided value_model=qwen2.5-1.5b"),
    ]
    flags, idle, compute, changed = (price.differences["step_ms"].mean for price in prices)
    assert compute > 5 * max(map(abs, (flags, idle, changed)))
    names = [row["what"] for row in ladder_table(analysis).rows]
    assert names == [*(price.what for price in prices), "all of it"] * 2
    labels = [ladder["label"] for ladder in summary_document(analysis)["ladders"]]
    assert labels == [ladder.label for ladder in analysis.ladders]


def test_a_block_with_an_unusable_step_takes_no_part(path, tmp_path):
    results = ResultDirectory(shutil.copytree(path, tmp_path / "r"))
    flags = next(run.path.name for run in results.runs() if run.path.name.endswith("b1-guided-flags"))
    edit_run(results, flags, state="suspect")
    ladders = analyze_directory(results.path).ladders
    assert [ladder.num_blocks for ladder in ladders] == [2, 2]
    assert ladders[0].whole.differences["wall_s"].half_width is None


RULE = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6, 8, 10, 12))
SCATTER = (0.01, -0.012, 0.004, -0.007, 0.013, -0.008, 0.002, 0.006)


def measured(path, by=1.0, scatter=SCATTER):
    """Blocks whose guided step times scatter around ``by`` times those of the law."""
    factors = [{"baseline": 1.0, "guided": by * math.exp(noise)} for noise in scatter]
    return write_results(path, block_factors=factors)


def look_at(results, num_blocks, *metrics, rule=RULE, **options):
    return take_look(load_experiment(results.path), rule, num_blocks, metrics or ("step_ms",), **options)


@given(most=st.integers(6, 10_000), num_looks=st.integers(1, 20))
def test_every_plan_of_looks_increases_and_ends_at_the_last_block(most, num_looks):
    looks = look_blocks(most, num_looks)
    assert list(looks) == sorted(set(looks))
    assert (looks[-1], looks[0] >= 6, len(looks) <= num_looks) == (most, True, True)


def test_looks_are_even_from_six_blocks_to_the_most_and_each_has_its_share_of_alpha():
    plans = {(12, 4): (6, 8, 10, 12), (24, 4): (6, 12, 18, 24), (20, 1): (20,), (8, 4): (6, 7, 8), (6, 4): (6,)}
    assert {plan: look_blocks(*plan) for plan in plans} == plans
    rule = stopping_rule(load_profile("topk-sweep", blocks=12, overrides=["stopping.precision=0.01"]))
    assert (rule.look_blocks, rule.confidence, rule.looks) == ((6, 8, 10, 12), pytest.approx(1 - 0.05 / 4), ())
    assert stopping_rule(load_profile("topk-sweep")) is None


@pytest.mark.parametrize(
    ("overrides", "blocks", "words"),
    [
        (["stopping.precision=0.01"], 5, "the first look is after 6 blocks"),
        (["stopping.precision=0.01", "variants.guided=null", "sweep.top_k=null"], 8, "nothing to look at"),
        (["stopping.precision=1.5"], 8, "stopping.precision"),
        (["stopping.looks=3"], 8, "precision"),
    ],
)
def test_a_rule_that_nothing_can_fulfil_is_refused(overrides, blocks, words):
    with pytest.raises(ProfileError, match=words):
        load_profile("topk-sweep", blocks=blocks, overrides=overrides)


def test_a_look_sees_half_the_interval_of_its_share_of_alpha_over_the_blocks_before_it(tmp_path):
    results = measured(tmp_path)
    for num_blocks in (8, 6):
        (width,) = look_at(results, num_blocks).half_widths
        half = estimate_paired(SCATTER[:num_blocks], 1 - 0.0125).half_width
        assert width.half_width_frac == pytest.approx(math.expm1(half), rel=1e-4)
        assert (width.cell, width.metric, width.num_blocks) == ("guided top_k=5", "step_ms", num_blocks)
    worst = widest_interval(look_at(results, 8, "step_ms", "wall_s")).half_width_frac
    for factor, ends in ((1.01, True), (0.99, False)):
        rule = msgspec.structs.replace(RULE, precision_frac=factor * worst)
        assert look_at(results, 8, "step_ms", "wall_s", rule=rule).is_precise is ends


@pytest.mark.parametrize("by", [0.25, 4.0])
def test_only_the_width_ends_an_experiment_and_never_what_it_saw(tmp_path, by):
    plain, other = (
        look_at(measured(tmp_path / f"{factor}", factor), 8, "step_ms", "wall_s") for factor in (1.0, by)
    )
    assert other.is_precise == plain.is_precise
    for left, right in zip(plain.half_widths, other.half_widths, strict=True):
        assert right.half_width_frac == pytest.approx(left.half_width_frac, rel=1e-3)


def test_a_block_with_a_run_that_is_not_done_does_not_count_and_what_no_block_can_tell_is_not_waited_for(tmp_path):
    results = measured(tmp_path / "r")
    for state in ("suspect", "failed"):
        edit_run(results, results.plan().runs[5].run_id, state=state)
        early, late = (look_at(results, num_blocks) for num_blocks in (6, 8))
        assert (early.half_widths[0].num_blocks, early.is_precise, late.half_widths[0].num_blocks) == (5, False, 7)
    still = measured(tmp_path / "still", scatter=(0.0,) * 6)
    assert look_at(still, 6, "step_ms", "gpu_energy_j").is_precise
    assert not look_at(still, 6, "gpu_energy_j").is_precise
    assert not look_at(still, 6, left_out={"guided top_k=5"}).is_precise


def test_blocks_that_the_rule_made_unnecessary_are_no_gaps_and_one_before_the_end_is(tmp_path):
    """Twelve planned blocks, of which the rule made six unnecessary."""
    results = measured(tmp_path, scatter=(*SCATTER, 0.0, 0.001, 0.002, 0.003))
    rule = msgspec.structs.replace(RULE, precision_frac=0.5)
    for planned in results.plan().runs[12:]:
        shutil.rmtree(results.run(planned.run_id).path)
    edit_manifest(results, stopping=msgspec.structs.replace(rule, looks=(look_at(results, 6, rule=rule),)))
    comparison, analysis = compare_arms(results), analyze_directory(tmp_path)
    codes = {warning.code for warning in comparison.warnings}
    assert not codes & {"excluded-block", "experiment-unfinished", "unmatched"}
    assert (comparison.cells[0].num_blocks, len(runs_table(analysis).rows), analysis.runs_not_begun) == (6, 12, ())
    (entry,) = list_directories(tmp_path)
    assert (entry["num_done"], entry["num_planned"]) == (12, 12)
    confidences = {estimate.confidence for row in analysis.sweep for estimate in row.estimates.values()}
    assert list(confidences) == [pytest.approx(0.9875)]
    for words in ("12 of 12 runs done", "6 of at most 12 blocks"):
        assert words in headline(analysis)
    lost = results.plan().runs[3]
    (results.run(lost.run_id).path / "run.json").unlink()
    assert messages(compare_arms(results), "excluded-block")
    assert analyze_directory(tmp_path).runs_not_begun == (lost,)


def test_a_comparison_pays_for_every_look_that_could_have_been_taken(tmp_path):
    results, other = measured(tmp_path / "a"), measured(tmp_path / "b")
    fixed = compare_arms(results, metrics=("step_ms",))
    edit_manifest(results, stopping=RULE)
    declared = compare_arms(results, metrics=("step_ms",))
    (before,), (after,) = fixed.cells[0].deciding, declared.cells[0].deciding
    assert (fixed.num_looks, declared.num_looks) == (1, 4)
    assert after.estimate.log_interval == pytest.approx(before.estimate.interval_at(0.9875))
    assert declared.rules.confidence == after.judged_confidence == pytest.approx(0.9875)
    edit_manifest(other, stopping=RULE, label="another")
    assert num_looks_of(results.manifest(), other.manifest()) == 16, "each end of one may meet each of the other"
    assert num_looks_of(results.manifest(), results.manifest()) == 4


def test_a_rule_about_widths_alone_makes_intervals_too_narrow_and_its_correction_mends_that():
    """Experiments whose last interval holds the truth, where the width of an interval ended each of them."""
    stream, covered = np.random.default_rng(5), {0.95: 0, 1 - 0.05 / 4: 0}
    for _ in range(400):
        blocks = stream.normal(0.0, 0.01, size=12).tolist()
        for confidence in covered:
            for look in look_blocks(12, 4):
                low, high = estimate_paired(blocks[:look], confidence).log_interval
                if (high - low) / 2 <= 0.006:
                    break
            covered[confidence] += low <= 0.0 <= high
    plain, corrected = (hits / 400 for hits in covered.values())
    assert plain < 0.945
    assert corrected > 0.955


ALL = ["step_ms", "tpot_ms", "wall_s"]


def equal_servers(path):
    """Two arms whose times differ by nothing but scatter."""
    factors = [{"baseline": 1.0, "guided": math.exp(e)} for e in (0.001, -0.001, 0.002, -0.002, 0.001, 0.0)]
    return write_results(path, block_factors=factors, cells=({"top_k": 1},))


def lose_steps(results, *variants, code="steps-unknown", most=99):
    """Leave no step of at most ``most`` runs of each variant, and say why."""
    for variant in variants:
        for run_id in run_ids(results, variant)[:most]:
            (results.run(run_id).path / "steps.jsonl").unlink()
            edit_run(results, run_id, warnings=(ResultWarning(code=code, message="no steps"),))


def compared(results, *metrics, primary=None):
    """The comparison, and the names of the metrics that decide it."""
    if primary is not None:
        results.write_profile(f"{results.profile_yaml()}primary_metrics: {primary}\n")
    comparison = compare_arms(results, metrics=metrics)
    return comparison, [metric.metric.name for metric in comparison.cells[0].deciding]


@pytest.mark.parametrize("variants", [("baseline", "guided"), ("baseline",), ("guided",)])
def test_a_metric_that_a_server_never_records_decides_nothing_and_the_verdict_names_it(tmp_path, variants):
    results = equal_servers(tmp_path / "r")
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, unrecorded_lines(comparison)) == ("equivalent", ALL, ())
    lose_steps(results, *variants)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding, comparison.num_tests) == ("equivalent", ["tpot_ms", "wall_s"], 2)
    line = "step_ms is not recorded by this server; tpot_ms and wall_s decide"
    assert unrecorded_lines(comparison) == (line,)
    assert line in list(footnotes_of(comparison))
    assert list(document_of(comparison)["cells"][0]["unrecorded_metrics"]) == ["step_ms"]
    without, _ = compared(results, primary="[tpot_ms, wall_s]")
    levels = [[m.judged_confidence for m in each.cells[0].deciding] for each in (comparison, without)]
    assert levels[0] == levels[1], "as if the profile did not list it"


@pytest.mark.parametrize(("most", "code"), [(1, "steps-unknown"), (99, "steps-missing")])
def test_a_metric_that_should_be_there_and_is_missing_leaves_no_verdict_of_equivalence(tmp_path, most, code):
    results = equal_servers(tmp_path)
    lose_steps(results, "guided", code=code, most=most)
    comparison, deciding = compared(results)
    assert (comparison.verdict, deciding) == ("inconclusive", ALL)


def test_a_metric_that_is_named_stays_and_where_no_primary_one_is_recorded_that_is_the_reason(tmp_path):
    results = equal_servers(tmp_path)
    lose_steps(results, "baseline", "guided")
    comparison, deciding = compared(results, "step_ms", "wall_s")
    assert (comparison.verdict, deciding) == ("inconclusive", ["step_ms", "wall_s"])
    assert reasons_of(comparison) == ("top_k=1: step_ms ? unknown: needs a step log",)
    comparison, _ = compared(results, primary="[step_ms, p95_step_ms]")
    assert verdict_sentence(comparison) == (
        "inconclusive: guided against baseline (simulated): nothing to judge: step_ms and p95_step_ms are not "
        "recorded by this server, and no other primary metric is left; name one with --metrics, such as wall_s"
    )


@pytest.mark.parametrize(
    ("variants", "lost", "is_precise", "widths"),
    [
        (["guided"], {"most": 1}, False, {"step_ms": False, "tpot_ms": True, "wall_s": True}),
        (["baseline", "guided"], {}, True, {"tpot_ms": True, "wall_s": True}),
        (
            ["baseline", "guided"], {"code": "steps-missing"}, False,
            {"step_ms": False, "tpot_ms": True, "wall_s": True},
        ),
    ],
)  # fmt: skip
def test_a_look_waits_for_the_metrics_that_decide_and_for_no_other(tmp_path, variants, lost, is_precise, widths):
    results = equal_servers(tmp_path)
    lose_steps(results, *variants, **lost)
    look = take_look(load_experiment(results.path), RULE, 6, ALL)
    assert {width.metric: width.half_width_frac is not None for width in look.half_widths} == widths
    assert look.is_precise is is_precise


def test_a_plan_corrects_for_the_metrics_that_will_decide():
    profile = load_profile("aa", engine="attach", overrides=["engine.options.url=http://host:1"], blocks=8)
    has_steps = engine_for("attach").has_steps
    deciding = deciding_in_plan(profile.primary_metrics, profile, has_steps)
    assert set(profile.primary_metrics) - set(deciding) == {"step_ms"}
    power, assumed = power_lines(profile, None, has_steps), power_lines(profile, None)
    for (line, *_), num_tests in ((power, 2), (assumed, 3)):
        assert f"corrected for {num_tests} tests" in line
    assert power[-1] == "step_ms is not recorded by this server; tpot_ms and wall_s decide"
