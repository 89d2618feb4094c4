"""Ladders of controls, whose prices add up; the declared rule for ending early: its looks and what they cost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import benchctl
from support.results.builders import edit_manifest, edit_run, write_results
from support.results.comparing import compare, compare_arms, messages

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.estimate import logarithmic_mean
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import describe_difference, num_looks_of, take_look, widest_interval
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.stopping_rule import look_blocks, stopping_rule
from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import StoppingRecord
from benchctl.report.documents import summary_document
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
    """Two blocks of the profile ``controls`` over two value models, in virtual time."""
    path = tmp_path_factory.mktemp("ladder") / "r"
    words = [word for override in OVERRIDES for word in ("--set", override)]
    simulated = benchctl("simulate", "--profile", "controls", "--blocks", 2, "--jobs", 1, *words, "-o", path)
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    return path


def test_prices_add_up_to_the_whole_in_every_cell_which_is_what_compare_says_of_its_two_ends(path):
    ladders = analyze_directory(path).ladders
    assert [ladder.label for ladder in ladders] == [
        "guided value_model=qwen2.5-0.5b",
        "guided value_model=qwen2.5-1.5b",
    ]
    compared = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms", "wall_s"))
    for ladder in ladders:
        assert ladder.num_blocks == 2
        (cell,) = [cell for cell in compared.cells if ladder.label.endswith(cell.label)]
        for metric in cell.deciding:
            quantity, whole = metric.metric.name, ladder.whole.differences[metric.metric.name]
            parts = [price.differences[quantity].mean for price in ladder.prices]
            assert math.isclose(math.fsum(parts), whole.mean, rel_tol=1e-9)
            assert whole.mean == pytest.approx(metric.b - metric.a, rel=1e-12)
            half = metric.estimate.half_width * logarithmic_mean(metric.a, metric.b)
            assert whole.half_width == pytest.approx(half, rel=1e-12)
    assert {metric.metric.name for metric in cell.deciding} == {"step_ms", "wall_s"}


def test_each_step_is_named_by_what_it_changes_and_stands_in_its_own_cell_table_and_summary(path):
    analysis = analyze_directory(path)
    prices = analysis.ladders[1].prices
    assert [(price.what, price.upper) for price in prices] == [
        ("flags", "guided-flags"),
        ("idle code", "guided-idle value_model=qwen2.5-1.5b"),
        ("sampling + value-model compute", "guided-neutral value_model=qwen2.5-1.5b"),
        ("changed tokens", "guided value_model=qwen2.5-1.5b"),
    ]
    compute = prices[2].differences["step_ms"].mean
    assert compute > 5 * max(abs(p.differences["step_ms"].mean) for p in prices if p is not prices[2])
    names = [row["what"] for row in ladder_table(analysis).rows]
    assert names == [*(price.what for price in prices), "all of it"] * 2
    stored = summary_document(analysis)["ladders"]
    assert [ladder["label"] for ladder in stored] == [ladder.label for ladder in analysis.ladders]
    settings = variant_settings(load_profile("aa"), "again", {})
    assert describe_difference(settings, settings) == "nothing"
    assert describe_difference(None, settings) == "unknown"


def test_a_block_with_an_unusable_step_takes_no_part(path):
    results = ResultDirectory(path)
    flags = next(run.path.name for run in results.runs() if run.path.name.endswith("b1-guided-flags"))
    edit_run(results, flags, state="suspect")
    ladders = analyze_directory(path).ladders
    edit_run(results, flags, state="done")
    assert [ladder.num_blocks for ladder in ladders] == [1, 1]
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
    assert looks[-1] == most
    assert looks[0] >= 6
    assert 1 <= len(looks) <= num_looks


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
        rule = StoppingRecord(precision_frac=factor * worst, confidence=0.9875, look_blocks=(6, 8, 10, 12))
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
        look = look_at(results, 6)
        (width,) = look.half_widths
        assert (width.num_blocks, width.half_width_frac, look.is_precise) == (5, None, False)
        assert look_at(results, 8).half_widths[0].num_blocks == 7
    still = measured(tmp_path / "still", scatter=(0.0,) * 6)
    assert look_at(still, 6, "step_ms", "gpu_energy_j").is_precise
    assert not look_at(still, 6, "gpu_energy_j").is_precise
    assert not look_at(still, 6, left_out={"guided top_k=5"}).is_precise


def test_blocks_that_the_rule_made_unnecessary_are_no_gaps_and_one_before_the_end_is(tmp_path):
    """Twelve planned blocks, of which the rule made six unnecessary."""
    results = measured(tmp_path, scatter=(*SCATTER, 0.0, 0.001, 0.002, 0.003))
    rule = {"precision_frac": 0.5, "confidence": 0.9875, "look_blocks": (6, 8, 10, 12)}
    look = look_at(results, 6, rule=StoppingRecord(**rule))
    assert look.is_precise
    for planned in results.plan().runs:
        if planned.block >= 6:
            for file in sorted(results.run(planned.run_id).path.iterdir()):
                file.unlink()
    edit_manifest(results, stopping=StoppingRecord(**rule, looks=(look,)))
    comparison = compare_arms(results)
    codes = {warning.code for warning in comparison.warnings}
    assert not codes & {"excluded-block", "experiment-unfinished", "unmatched"}
    assert comparison.cells[0].num_blocks == 6
    (entry,) = list_directories(tmp_path)
    assert (entry["num_done"], entry["num_planned"]) == (12, 12)
    analysis = analyze_directory(tmp_path)
    assert analysis.runs_not_begun == ()
    confidences = {estimate.confidence for row in analysis.sweep for estimate in row.estimates.values()}
    assert list(confidences) == [pytest.approx(0.9875)]
    assert "12 of 12 runs done" in headline(analysis)
    assert "6 of at most 12 blocks" in headline(analysis)
    assert len(runs_table(analysis).rows) == 12
    lost = results.plan().runs[3]
    (results.run(lost.run_id).path / "run.json").unlink()
    assert messages(compare_arms(results), "excluded-block")
    assert analyze_directory(tmp_path).runs_not_begun == (lost,)


def test_a_comparison_pays_for_every_look_that_could_have_been_taken(tmp_path):
    results, other = measured(tmp_path / "a"), measured(tmp_path / "b")
    fixed = compare_arms(results, metrics=("step_ms",))
    edit_manifest(results, stopping=RULE)
    declared = compare_arms(results, metrics=("step_ms",))
    assert (fixed.num_looks, declared.num_looks) == (1, 4)
    assert declared.rules.confidence == pytest.approx(0.9875)
    (before,), (after,) = fixed.cells[0].deciding, declared.cells[0].deciding
    assert after.estimate.log_interval == pytest.approx(before.estimate.interval_at(0.9875))
    assert after.judged_confidence == pytest.approx(0.9875)
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
