"""Which runs stand against which, and the verdict over them."""

import math
import random
from dataclasses import replace

import pytest
from support.results.builders import edit_manifest, set_positions, share_request_set, write_results

from benchctl.analysis.attribution.decomposition import wall_line
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.words import reasons_of, verdict_sentence
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.errors import NotComparableError, UsageError
from benchctl.interop.foreign_readers import is_foreign
from benchctl.records.stores import MetricNoise

TRUTH = 15.5 / 10


def factors(num_blocks=6, guided=1.0, noise=0.002, drift=0.1, seed="blocks"):
    """Block factors that shake both variants together by ``drift`` and each alone by ``noise``."""
    stream = random.Random(seed)
    blocks = []
    for _ in range(num_blocks):
        block = math.exp(stream.gauss(0, drift))
        blocks.append(
            {
                "baseline": block * math.exp(stream.gauss(0, noise)),
                "guided": block * guided * math.exp(stream.gauss(0, noise)),
            }
        )
    return blocks


def compare(a, b, **options):
    return compare_sides(parse_side(str(a)), parse_side(str(b)), CompareOptions(**options))


def metric(comparison, name, cell=0):
    return next(m for m in comparison.cells[cell].metrics if m.metric.name == name)


@pytest.fixture(name="path")
def _path(tmp_path):
    return write_results(tmp_path / "r", block_factors=factors()).path


def test_a_side_is_a_directory_or_a_variant_of_one(tmp_path):
    assert parse_side("results/x") == Side(parse_side("results/x").path, None)
    assert parse_side("results/x:guided").variant == "guided"
    assert str(parse_side("results/x:guided")) == "results/x:guided"
    with_colon = tmp_path / "2026-01-01T10:00"
    with_colon.mkdir()
    assert parse_side(str(with_colon)).variant is None
    assert parse_side(f"{with_colon}:baseline") == Side(with_colon, "baseline")


@pytest.mark.parametrize("text", [":guided", "results/x:"])
def test_half_a_side_is_refused(text):
    with pytest.raises(UsageError, match="write DIR or DIR:variant"):
        parse_side(text)


def test_guided_against_baseline_is_a_regression_of_the_known_size(path):
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    assert (comparison.verdict, comparison.exit_code) == ("regression", 1)
    step = metric(comparison, "step_ms")
    assert step.estimate.ratio == pytest.approx(TRUTH, rel=0.003)
    assert step.estimate.ci_low < TRUTH < step.estimate.ci_high
    assert step.b / step.a == pytest.approx(step.estimate.ratio, rel=1e-4)
    assert step.estimate.p_value < 1e-9
    assert comparison.pairing == "interleaved"
    assert comparison.num_tests == 3
    assert comparison.cells[0].num_a_first == 6
    assert verdict_sentence(comparison).startswith("regression: guided against baseline: 3 of 3 comparisons worse")
    assert len(reasons_of(comparison)) == 3


def test_blocks_that_drift_together_are_cancelled_by_pairing(path):
    estimate = metric(compare(f"{path}:baseline", f"{path}:guided"), "step_ms").estimate
    assert estimate.half_width < 0.005


def test_swapping_the_sides_is_an_improvement_of_the_inverse_ratio(path):
    forth, back = compare(f"{path}:baseline", f"{path}:guided"), compare(f"{path}:guided", f"{path}:baseline")
    assert (back.verdict, back.exit_code) == ("improvement", 0)
    ratios = [metric(c, "wall_s").estimate.ratio for c in (forth, back)]
    assert ratios[0] * ratios[1] == pytest.approx(1)


def test_throughput_is_better_when_higher(path):
    comparison = compare(f"{path}:guided", f"{path}:baseline", metrics=("output_throughput",))
    assert metric(comparison, "output_throughput").estimate.ratio > 1
    assert comparison.verdict == "improvement"


@pytest.mark.parametrize(
    ("guided", "noise", "verdict", "code"),
    [(1 / TRUTH, 0.0005, "equivalent", 0), (1.002 / TRUTH, 0.05, "inconclusive", 3)],
)
def test_equal_variants_are_equivalent_only_when_the_noise_is_small(tmp_path, guided, noise, verdict, code):
    path = write_results(tmp_path / "r", block_factors=factors(guided=guided, noise=noise)).path
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    assert (comparison.verdict, comparison.exit_code) == (verdict, code)
    assert verdict_sentence(comparison).startswith(verdict)


def test_an_inconclusive_comparison_says_how_many_blocks_are_missing(tmp_path):
    path = write_results(tmp_path / "r", block_factors=factors(guided=1 / TRUTH, noise=0.02, seed="wide")).path
    comparison = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms",))
    assert "more blocks, if ratio and scatter stay as they are" in reasons_of(comparison)[0]


def test_one_block_is_never_a_verdict(tmp_path):
    path = write_results(tmp_path / "r", block_factors=factors(1)).path
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    assert comparison.verdict == "inconclusive"
    assert "screening: 1 block gives no verdict; at least 6 are needed" in reasons_of(comparison)[0]


def test_a_margin_wide_enough_makes_the_change_equivalent(path):
    assert compare(f"{path}:baseline", f"{path}:guided", margin_frac=0.6).verdict == "equivalent"


def test_each_guided_cell_meets_the_baseline_of_its_blocks(tmp_path):
    cells = ({"top_k": 2}, {"top_k": 5})
    path = write_results(tmp_path / "r", block_factors=factors(3), cells=cells).path
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    assert [cell.label for cell in comparison.cells] == ["top_k=2", "top_k=5"]
    assert [cell.a_label for cell in comparison.cells] == ["baseline", "baseline"]
    assert comparison.num_tests == 6


def test_a_regression_in_one_cell_outweighs_the_others(tmp_path):
    path = write_results(
        tmp_path / "r", block_factors=factors(noise=1e-5, drift=0), cells=({"top_k": 2}, {"top_k": 5})
    ).path
    slow = write_results(
        tmp_path / "s", block_factors=factors(guided=1.1, noise=1e-5, drift=0), cells=({"top_k": 5},)
    ).path
    comparison = compare(path, slow)
    assert [(cell.label, cell.verdict) for cell in comparison.cells] == [
        ("baseline", "equivalent"),
        ("guided top_k=5", "regression"),
    ]
    assert comparison.verdict == "regression"
    assert any("guided top_k=2" in w.message for w in comparison.warnings if w.code == "unmatched")


def test_two_directories_of_the_same_plan_are_paired_and_said_not_to_be_interleaved(tmp_path, path):
    other = write_results(tmp_path / "other", block_factors=factors(seed="later"))
    edit_manifest(other, created_at="2026-02-01T00:00:00Z")
    comparison = compare(path, other.path)
    assert comparison.pairing == "same-plan"
    assert {w.code for w in comparison.warnings} >= {"not-interleaved"}
    assert [cell.label for cell in comparison.cells] == ["baseline", "guided top_k=5"]


def test_directories_that_share_no_blocks_are_compared_unpaired(tmp_path, path):
    other = write_results(tmp_path / "other", block_factors=factors(4, seed="other"))
    comparison = compare(f"{path}:baseline", f"{other.path}:guided")
    assert comparison.pairing == "unpaired"
    assert "unpaired" in {w.code for w in comparison.warnings}
    estimate = metric(comparison, "step_ms").estimate
    assert (estimate.is_paired, estimate.num_blocks) == (False, 4)
    assert comparison.cells[0].num_a_first is None


def test_a_variant_named_on_one_side_holds_for_both(tmp_path, path):
    other = write_results(tmp_path / "other", block_factors=factors(seed="later")).path
    comparison = compare(path, f"{other}:guided")
    assert [(cell.a_label, cell.b_label) for cell in comparison.cells] == [("guided top_k=5", "guided top_k=5")]


def test_a_directory_against_itself_is_equivalent_and_says_so(path):
    comparison = compare(path, path)
    assert comparison.verdict == "equivalent"
    assert {"same-runs", "no-scatter"} <= {w.code for w in comparison.warnings}


@pytest.mark.parametrize("num_blocks", [2, 5])
def test_fewer_than_six_blocks_are_a_screening_without_a_verdict_however_clear_the_change(tmp_path, num_blocks):
    path = write_results(tmp_path / "r", block_factors=factors(num_blocks, noise=1e-4, drift=0)).path
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    assert metric(comparison, "step_ms").estimate.ci_low > 1.2
    assert (comparison.verdict, comparison.exit_code, comparison.is_screening) == ("inconclusive", 3, True)
    assert f"a screening of {num_blocks} blocks gives no verdict; its largest change is" in verdict_sentence(
        comparison
    )
    estimated = [m for m in comparison.cells[0].metrics if m.estimate is not None]
    assert {m.verdict for m in estimated if m.a_blocks != m.b_blocks} == {"inconclusive"}
    assert {m.verdict for m in estimated if m.a_blocks == m.b_blocks} == {"equal"}


def test_tests_that_say_nearly_the_same_are_judged_nearly_as_one(tmp_path):
    path = write_results(tmp_path / "r", block_factors=factors(guided=1.025 / TRUTH, noise=0.012, seed="w3")).path
    alone = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms",))
    among = compare(
        f"{path}:baseline", f"{path}:guided", metrics=("step_ms", "p50_step_ms", "wall_s", "tpot_ms", "e2el_ms")
    )
    assert alone.verdict == "regression"
    assert among.verdict == "regression"
    tested = metric(among, "step_ms")
    assert tested.estimate.log_interval == metric(alone, "step_ms").estimate.log_interval
    assert metric(alone, "step_ms").judged_confidence == pytest.approx(0.95)
    assert 0.95 <= tested.judged_confidence < 0.97
    strict = replace(tested, judged_confidence=0.999)
    assert strict.verdict == "inconclusive"
    assert "the 95% interval is clear of the margin of 1%, but not that of 99.9%" in strict.reason


def test_a_change_is_called_beyond_the_noise_floor_of_the_machine_and_none_is_called_equivalent_inside_it(path):
    noise = {"step_ms": MetricNoise(log_sd=0.2, num_blocks=8, floor_frac=0.6)}
    comparison = compare(f"{path}:baseline", f"{path}:guided", noise=noise, metrics=("step_ms", "wall_s"))
    assert [(m.metric.name, m.verdict, m.margins.change_frac) for m in comparison.cells[0].deciding] == [
        ("step_ms", "inconclusive", 0.6),
        ("wall_s", "regression", 0.01),
    ]
    assert comparison.noise == noise
    assert compare(f"{path}:baseline", f"{path}:guided", noise=noise, margin_frac=0.7).verdict == "equivalent"


def test_a_block_that_stands_out_counts_and_is_told(tmp_path):
    shaken = factors(8, noise=0.001, drift=0)
    shaken[5]["guided"] *= 1.2
    path = write_results(tmp_path / "r", block_factors=shaken).path
    comparison = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms",))
    step = metric(comparison, "step_ms")
    assert (step.outlier_blocks, step.estimate.num_blocks, step.without_outliers.num_blocks) == ((5,), 8, 7)
    (warning,) = [w for w in comparison.warnings if w.code == "outlier-block"]
    assert warning.message.startswith("block 5 stands out and counts little; without it the change would be +5")
    mean = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms",), estimator="mean")
    (warning,) = [w for w in mean.warnings if w.code == "outlier-block"]
    assert warning.message.startswith("block 5 stands out and counts in full; without it")


def test_the_wall_ratio_splits_exactly_into_steps_and_step_time(path):
    cell = compare(f"{path}:baseline", f"{path}:guided").cells[0]
    wall = cell.decomposition.wall
    steps, step_time, remainder = (factor.estimate.ratio for factor in wall.parts)
    assert wall.whole.estimate.ratio == pytest.approx(steps * step_time * remainder, rel=1e-12)
    assert steps == 1
    assert remainder == pytest.approx(1)
    assert wall_line(cell.decomposition).startswith("wall x1.5")


def test_exact_metrics_are_equal_without_statistics(path):
    comparison = compare(f"{path}:baseline", f"{path}:guided")
    tokens = metric(comparison, "output_tokens")
    assert (tokens.role, tokens.verdict, tokens.estimate) == ("exact", "equal", None)


def test_output_tokens_of_natural_stops_are_a_change_and_not_a_fault(tmp_path):
    short = write_results(tmp_path / "r", block_factors=factors())
    longer = write_results(tmp_path / "longer", block_factors=factors(), output_tokens=10)
    share_request_set(longer, short)
    for results in (short, longer):
        edit_manifest(results, stop="natural")
    comparison = compare(f"{short.path}:baseline", f"{longer.path}:baseline")
    tokens = metric(comparison, "output_tokens")
    assert (tokens.role, tokens.verdict) == ("exploratory", "changed")
    assert comparison.verdict != "invalid"


def test_metrics_that_were_not_recorded_leave_a_deciding_one_unknown_and_the_verdict_open(path):
    comparison = compare(f"{path}:baseline", f"{path}:guided", metrics=("gpu_energy_j",))
    assert metric(comparison, "gpu_energy_j").verdict == "unknown"
    assert comparison.verdict == "inconclusive"
    assert "needs GPU samples" in reasons_of(comparison)[0]
    assert all(m.metric.name != "gpu_power_w" for m in comparison.cells[0].metrics)


def test_a_zero_that_is_the_same_on_both_sides_is_equal(path):
    assert metric(compare(f"{path}:baseline", f"{path}:guided"), "preemptions").verdict == "equal"


def test_a_ratio_to_zero_is_not_invented(path):
    guided = metric(compare(f"{path}:baseline", f"{path}:guided"), "candidates_per_token")
    assert (guided.verdict, guided.reason) == ("inconclusive", "a value of zero has no ratio")


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (("step_sm",), "no metric is called 'step_sm'; did you mean 'step_ms'"),
        (("qqqq",), "metrics are wall_s, "),
        (("mean_batch_size",), "mean_batch_size cannot decide a comparison"),
    ],
)
def test_a_metric_that_cannot_decide_is_refused(path, metrics, message):
    with pytest.raises(UsageError, match=message):
        compare(f"{path}:baseline", f"{path}:guided", metrics=metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin_frac": 1.0}, "threshold is 1"),
        ({"margin_frac": -0.1}, "-0.1"),
        ({"confidence": 1.0}, "confidence is 1"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        CompareOptions(**options)


def test_an_unknown_variant_names_those_there_are(path):
    with pytest.raises(UsageError, match="has no variant 'guide'; it has baseline, guided"):
        compare(f"{path}:baseline", f"{path}:guide")


def test_sweeps_without_a_common_cell_are_not_comparable(tmp_path, path):
    other = write_results(tmp_path / "other", block_factors=factors(), cells=({"top_k": 3},)).path
    with pytest.raises(NotComparableError, match="share no cell: guided top_k=5 against guided top_k=3"):
        compare(f"{path}:guided", f"{other}:guided")


def test_a_run_that_ran_second_in_its_block_is_counted(tmp_path):
    results = write_results(tmp_path / "r", block_factors=factors(2))
    set_positions(results, {"002-b1-baseline": 1, "003-b1-guided-top_k5": 0})
    assert compare(f"{results.path}:baseline", f"{results.path}:guided").cells[0].num_a_first == 1


def test_exact_metrics_alone_decide_nothing(path):
    comparison = compare(f"{path}:baseline", f"{path}:guided", metrics=("num_completed",))
    assert comparison.exit_code == 3
    assert "nothing to judge" in verdict_sentence(comparison)


def test_a_baseline_may_be_judged_against_the_only_guided_cell(tmp_path, path):
    swept = write_results(tmp_path / "s", block_factors=factors(3), cells=({"top_k": 2}, {"top_k": 5})).path
    assert [c.label for c in compare(f"{swept}:guided", f"{swept}:baseline").cells] == ["top_k=2", "top_k=5"]
    assert [c.a_label for c in compare(f"{path}:guided", f"{path}:baseline").cells] == ["guided top_k=5"]


def test_a_side_whose_variant_is_longer_than_a_name_of_a_file_is_that_variant(tmp_path):
    side = f"{tmp_path}:{'x' * 300}"
    assert not is_foreign(side)
    assert parse_side(side) == Side(tmp_path, "x" * 300)
