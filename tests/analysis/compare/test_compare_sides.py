"""Which runs stand against which, the metrics that decide, and the verdict over them."""

import json
import math
import random
from dataclasses import replace

import msgspec
import pytest
from support.results.builders import (
    edit_manifest,
    edit_run,
    run_ids,
    set_positions,
    share_request_set,
    write_results,
)
from support.results.comparing import compare, compare_arms, messages, metric_of

from benchctl.analysis.attribution.decomposition import wall_line
from benchctl.analysis.compare.compare import blocks_to_settle
from benchctl.analysis.compare.words import reasons_of, unrecorded_lines, verdict_sentence
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.ladder import take_look
from benchctl.analysis.experiment.pairing import Side, deciding_in_plan, parse_side
from benchctl.analysis.planning import power_lines
from benchctl.engines.engine import engine_for
from benchctl.errors import NotComparableError, UsageError
from benchctl.interop.foreign_readers import is_foreign
from benchctl.profile.load import load_profile
from benchctl.records.record import StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.records.stores import MetricNoise
from benchctl.report.comparison_tables import footnotes_of
from benchctl.report.documents import document_of

TRUTH = 15.5 / 10
TWO_CELLS = ({"top_k": 2}, {"top_k": 5})


def factors(num_blocks=6, guided=1.0, noise=0.002, drift=0.1, seed="blocks"):
    """Block factors that shake both variants together by ``drift`` and each alone by ``noise``."""
    stream = random.Random(seed)
    blocks = []
    for _ in range(num_blocks):
        block = math.exp(stream.gauss(0, drift))
        baseline, other = (block * math.exp(stream.gauss(0, noise)) for _ in range(2))
        blocks.append({"baseline": baseline, "guided": other * guided})
    return blocks


def built(path, *numbers, cells=({"top_k": 5},), output_tokens=8, **shaken):
    """Results whose blocks are those of ``factors``."""
    return write_results(path, block_factors=factors(*numbers, **shaken), cells=cells, output_tokens=output_tokens)


@pytest.fixture(name="results", scope="module")
def _results(tmp_path_factory):
    return built(tmp_path_factory.mktemp("sides") / "r")


@pytest.fixture(name="path")
def _path(results):
    return results.path


def test_a_side_is_a_directory_or_a_variant_of_one(tmp_path):
    assert (parse_side("results/x").variant, parse_side("results/x:guided").variant) == (None, "guided")
    assert str(parse_side("results/x:guided")) == "results/x:guided"
    with_colon = tmp_path / "2026-01-01T10:00"
    with_colon.mkdir()
    assert parse_side(str(with_colon)).variant is None
    assert parse_side(f"{with_colon}:baseline") == Side(with_colon, "baseline")
    for text in (":guided", "results/x:"):
        with pytest.raises(UsageError, match="write DIR or DIR:variant"):
            parse_side(text)
    longer_than_a_name = f"{tmp_path}:{'x' * 300}"
    assert not is_foreign(longer_than_a_name)
    assert parse_side(longer_than_a_name) == Side(tmp_path, "x" * 300)


def test_guided_against_baseline_is_a_regression_of_the_known_size(results):
    comparison = compare_arms(results)
    assert (comparison.verdict, comparison.exit_code) == ("regression", 1)
    step = metric_of(comparison, "step_ms")
    assert step.estimate.ratio == pytest.approx(TRUTH, rel=0.003)
    assert step.estimate.ci_low < TRUTH < step.estimate.ci_high
    assert step.estimate.half_width < 0.005, "pairing cancels what blocks have in common"
    assert step.b / step.a == pytest.approx(step.estimate.ratio, rel=1e-4)
    assert step.estimate.p_value < 1e-9
    assert (comparison.pairing, comparison.num_tests, comparison.cells[0].num_a_first) == ("interleaved", 3, 6)
    assert verdict_sentence(comparison).startswith("regression: guided against baseline: 3 of 3 comparisons worse")
    assert len(reasons_of(comparison)) == 3
    assert metric_of(comparison, "preemptions").verdict == "equal", "the same zero on both sides"
    candidates = metric_of(comparison, "candidates_per_token")
    assert (candidates.verdict, candidates.reason) == ("inconclusive", "a value of zero has no ratio")
    tokens = metric_of(comparison, "output_tokens")
    assert (tokens.role, tokens.verdict, tokens.estimate) == ("exact", "equal", None)
    wall = comparison.cells[0].decomposition.wall
    steps, step_time, remainder = (factor.estimate.ratio for factor in wall.parts)
    assert wall.whole.estimate.ratio == pytest.approx(steps * step_time * remainder, rel=1e-12)
    assert (steps, remainder) == (1, pytest.approx(1))
    assert wall_line(comparison.cells[0].decomposition).startswith("wall x1.5")
    assert compare_arms(results, margin_frac=0.6).verdict == "equivalent"


def test_swapping_the_sides_is_an_improvement_of_the_inverse_ratio_and_throughput_is_better_when_higher(path):
    forth, back = compare(f"{path}:baseline", f"{path}:guided"), compare(f"{path}:guided", f"{path}:baseline")
    assert (back.verdict, back.exit_code) == ("improvement", 0)
    ratios = [metric_of(c, "wall_s").estimate.ratio for c in (forth, back)]
    assert ratios[0] * ratios[1] == pytest.approx(1)
    faster = compare(f"{path}:guided", f"{path}:baseline", metrics=("output_throughput",))
    assert metric_of(faster, "output_throughput").estimate.ratio > 1
    assert faster.verdict == "improvement"


@pytest.mark.parametrize(
    ("guided", "noise", "verdict", "code"),
    [(1 / TRUTH, 0.0005, "equivalent", 0), (1.002 / TRUTH, 0.05, "inconclusive", 3)],
)
def test_equal_variants_are_equivalent_only_when_the_noise_is_small(tmp_path, guided, noise, verdict, code):
    comparison = compare_arms(built(tmp_path, guided=guided, noise=noise))
    assert (comparison.verdict, comparison.exit_code) == (verdict, code)
    assert verdict_sentence(comparison).startswith(verdict)


def test_an_inconclusive_comparison_says_how_many_blocks_are_missing(tmp_path):
    results = built(tmp_path, guided=1 / TRUTH, noise=0.02, seed="wide")
    comparison = compare_arms(results, metrics=("step_ms", "wall_s"), noise={})
    assert comparison.verdict == "inconclusive"
    assert "more blocks, if ratio and scatter stay as they are" in reasons_of(comparison)[0]
    assert blocks_to_settle([comparison]) > 6


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_fewer_than_six_blocks_are_a_screening_without_a_verdict_however_clear_the_change(tmp_path, num_blocks):
    comparison = compare_arms(built(tmp_path, num_blocks, noise=1e-4, drift=0))
    assert (comparison.verdict, comparison.exit_code, comparison.is_screening) == ("inconclusive", 3, True)
    if num_blocks == 1:
        assert "screening: 1 block gives no verdict; at least 6 are needed" in reasons_of(comparison)[0]
        return
    assert metric_of(comparison, "step_ms").estimate.ci_low > 1.2
    words = f"a screening of {num_blocks} blocks gives no verdict; its largest change is"
    assert words in verdict_sentence(comparison)
    for metric in comparison.cells[0].metrics:
        if metric.estimate is not None:
            assert metric.verdict == ("equal" if metric.a_blocks == metric.b_blocks else "inconclusive")


def test_each_guided_cell_meets_the_baseline_of_its_blocks(tmp_path, path):
    swept = built(tmp_path, 3, cells=TWO_CELLS)
    comparison = compare_arms(swept)
    assert [(cell.label, cell.a_label) for cell in comparison.cells] == [
        ("top_k=2", "baseline"),
        ("top_k=5", "baseline"),
    ]
    assert comparison.num_tests == 6
    back = compare(f"{swept.path}:guided", f"{swept.path}:baseline")
    assert [cell.label for cell in back.cells] == ["top_k=2", "top_k=5"]
    assert [c.a_label for c in compare(f"{path}:guided", f"{path}:baseline").cells] == ["guided top_k=5"]


def test_a_regression_in_one_cell_outweighs_the_others(tmp_path):
    both = built(tmp_path / "r", noise=1e-5, drift=0, cells=TWO_CELLS)
    slow = built(tmp_path / "s", guided=1.1, noise=1e-5, drift=0)
    comparison = compare(both.path, slow.path)
    assert [(cell.label, cell.verdict) for cell in comparison.cells] == [
        ("baseline", "equivalent"),
        ("guided top_k=5", "regression"),
    ]
    assert comparison.verdict == "regression"
    assert any("guided top_k=2" in message for message in messages(comparison, "unmatched"))


def test_two_directories_are_paired_where_they_have_one_plan_and_not_where_they_share_no_blocks(tmp_path, path):
    later = built(tmp_path / "later", seed="later")
    edit_manifest(later, created_at="2026-02-01T00:00:00Z")
    same_plan = compare(path, later.path)
    assert same_plan.pairing == "same-plan"
    assert messages(same_plan, "not-interleaved")
    assert [cell.label for cell in same_plan.cells] == ["baseline", "guided top_k=5"]
    named = compare(path, f"{later.path}:guided")
    assert [(cell.a_label, cell.b_label) for cell in named.cells] == [("guided top_k=5", "guided top_k=5")]
    other = built(tmp_path / "other", 4, seed="other")
    unpaired = compare(f"{path}:baseline", f"{other.path}:guided")
    assert unpaired.pairing == "unpaired"
    assert messages(unpaired, "unpaired")
    estimate = metric_of(unpaired, "step_ms").estimate
    assert (estimate.is_paired, estimate.num_blocks, unpaired.cells[0].num_a_first) == (False, 4, None)
    itself = compare(path, path)
    assert itself.verdict == "equivalent"
    assert {"same-runs", "no-scatter"} <= {warning.code for warning in itself.warnings}


def test_tests_that_say_nearly_the_same_are_judged_nearly_as_one(tmp_path):
    results = built(tmp_path, guided=1.025 / TRUTH, noise=0.012, seed="w3")
    alone = compare_arms(results, metrics=("step_ms",))
    among = compare_arms(results, metrics=("step_ms", "p50_step_ms", "wall_s", "tpot_ms", "e2el_ms"))
    assert alone.verdict == among.verdict == "regression"
    tested = metric_of(among, "step_ms")
    assert tested.estimate.log_interval == metric_of(alone, "step_ms").estimate.log_interval
    assert metric_of(alone, "step_ms").judged_confidence == pytest.approx(0.95)
    assert 0.95 <= tested.judged_confidence < 0.97
    strict = replace(tested, judged_confidence=0.999)
    assert strict.verdict == "inconclusive"
    assert "the 95% interval is clear of the margin of 1%, but not that of 99.9%" in strict.reason
    (cell,) = among.cells
    others = tuple(replace(m, judged_confidence=0.999) if m.metric.name != "wall_s" else m for m in cell.metrics)
    mixed = replace(among, cells=(replace(cell, metrics=others),))
    assert mixed.verdict == "regression"
    assert any(metric.verdict == "inconclusive" for metric in mixed.cells[0].deciding)
    assert blocks_to_settle([mixed]) is None, "one metric that decides is enough"


STEADY = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))
ALL_THREE = ("step_ms", "tpot_ms", "wall_s")


@pytest.mark.parametrize(
    ("floors", "named"),
    [
        ({}, "worse by more than a margin of 1%, foremost"),
        ({"step_ms": 0.002}, "worse by more than a margin of 1%, foremost"),
        (dict.fromkeys(ALL_THREE, 0.19), "worse by more than the noise floor of 19%, foremost"),
        ({"step_ms": 0.19}, "worse by more than a margin of 1% or the noise floor of 19%, foremost"),
        (
            {"step_ms": 0.19, "wall_s": 0.05},
            "worse by more than a margin of 1% or a noise floor of 5% to 19%, foremost",
        ),
        (
            dict.fromkeys(ALL_THREE, 9.0),
            "undecided at a margin of 1% for equivalence and the noise floor of 900% for a change, foremost",
        ),
    ],
)
def test_the_headline_names_the_margin_that_decided(tmp_path, floors, named):
    noise = {name: MetricNoise(log_sd=0.01, num_blocks=6, floor_frac=floor) for name, floor in floors.items()}
    assert named in verdict_sentence(compare_arms(write_results(tmp_path, block_factors=STEADY), noise=noise))


def test_a_change_is_called_beyond_the_noise_floor_of_the_machine_and_none_is_called_equivalent_inside_it(results):
    noise = {"step_ms": MetricNoise(log_sd=0.2, num_blocks=8, floor_frac=0.6)}
    comparison = compare_arms(results, noise=noise, metrics=("step_ms", "wall_s"))
    assert [(m.metric.name, m.verdict, m.margins.change_frac) for m in comparison.cells[0].deciding] == [
        ("step_ms", "inconclusive", 0.6),
        ("wall_s", "regression", 0.01),
    ]
    assert comparison.noise == noise
    assert compare_arms(results, noise=noise, margin_frac=0.7).verdict == "equivalent"


def test_a_block_that_stands_out_counts_and_is_told(tmp_path):
    shaken = factors(8, noise=0.001, drift=0)
    shaken[5]["guided"] *= 1.2
    results = write_results(tmp_path, block_factors=shaken)
    comparison = compare_arms(results, metrics=("step_ms",))
    step = metric_of(comparison, "step_ms")
    assert (step.outlier_blocks, step.estimate.num_blocks, step.without_outliers.num_blocks) == ((5,), 8, 7)
    (message,) = messages(comparison, "outlier-block")
    assert message.startswith("block 5 stands out and counts little; without it the change would be +5")
    (message,) = messages(compare_arms(results, metrics=("step_ms",), estimator="mean"), "outlier-block")
    assert message.startswith("block 5 stands out and counts in full; without it")


def test_output_tokens_of_natural_stops_are_a_change_and_not_a_fault(tmp_path):
    short, longer = built(tmp_path / "short"), built(tmp_path / "longer", output_tokens=10)
    share_request_set(longer, short)
    for results in (short, longer):
        edit_manifest(results, stop="natural")
    comparison = compare(f"{short.path}:baseline", f"{longer.path}:baseline")
    tokens = metric_of(comparison, "output_tokens")
    assert (tokens.role, tokens.verdict) == ("exploratory", "changed")
    assert comparison.verdict != "invalid"


def test_metrics_that_were_not_recorded_or_are_exact_leave_the_verdict_open(results):
    energy = compare_arms(results, metrics=("gpu_energy_j",))
    assert metric_of(energy, "gpu_energy_j").verdict == "unknown"
    assert energy.verdict == "inconclusive"
    assert "needs GPU samples" in reasons_of(energy)[0]
    assert all(m.metric.name != "gpu_power_w" for m in energy.cells[0].metrics)
    exact = compare_arms(results, metrics=("num_completed",))
    assert exact.exit_code == 3
    assert "nothing to judge" in verdict_sentence(exact)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ("step_sm",)}, "no metric is called 'step_sm'; did you mean 'step_ms'"),
        ({"metrics": ("qqqq",)}, "metrics are wall_s, "),
        ({"metrics": ("mean_batch_size",)}, "mean_batch_size cannot decide a comparison"),
        ({"margin_frac": 1.0}, "threshold is 1"),
        ({"margin_frac": -0.1}, "-0.1"),
        ({"confidence": 1.0}, "confidence is 1"),
    ],
)
def test_a_metric_that_cannot_decide_and_options_outside_their_range_are_refused(results, options, words):
    with pytest.raises(UsageError, match=words):
        compare_arms(results, **options)


def test_sides_that_are_not_there_or_share_no_cell_are_refused(tmp_path, path):
    with pytest.raises(UsageError, match="has no variant 'guide'; it has baseline, guided"):
        compare(f"{path}:baseline", f"{path}:guide")
    other = built(tmp_path, cells=({"top_k": 3},)).path
    with pytest.raises(NotComparableError, match="share no cell: guided top_k=5 against guided top_k=3"):
        compare(f"{path}:guided", f"{other}:guided")


def test_a_run_that_ran_second_in_its_block_is_counted(tmp_path):
    results = built(tmp_path, 2)
    set_positions(results, {"002-b1-baseline": 1, "003-b1-guided-top_k5": 0})
    assert compare_arms(results).cells[0].num_a_first == 1


ALL = ["step_ms", "tpot_ms", "wall_s"]
RULE = StoppingRecord(precision_frac=0.02, confidence=0.9875, look_blocks=(6,))


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
    assert verdict_sentence(comparison).startswith("equivalent: guided against baseline: 2 of 2 comparisons inside")
    line = "step_ms is not recorded by this server; tpot_ms and wall_s decide"
    assert unrecorded_lines(comparison) == (line,)
    assert line in list(footnotes_of(comparison))
    assert json.loads(msgspec.json.encode(document_of(comparison)["cells"]))[0]["unrecorded_metrics"] == ["step_ms"]
    without, _ = compared(results, primary="[tpot_ms, wall_s]")
    levels = [[(m.verdict, m.judged_confidence) for m in each.cells[0].deciding] for each in (comparison, without)]
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
        "inconclusive: guided against baseline: nothing to judge: step_ms and p95_step_ms are not recorded by this "
        "server, and no other primary metric is left; name one with --metrics, such as wall_s"
    )


def test_a_look_waits_for_the_metrics_that_decide_and_for_no_other(tmp_path):
    def look(results):
        taken = take_look(load_experiment(results.path), RULE, 6, ALL)
        return taken.is_precise, {width.metric: width.half_width_frac is not None for width in taken.half_widths}

    results = equal_servers(tmp_path / "a")
    lose_steps(results, "guided", most=1)
    assert not look(results)[0], "five blocks know step_ms"
    results = equal_servers(tmp_path / "b")
    lose_steps(results, "baseline", "guided")
    assert look(results) == (True, {"tpot_ms": True, "wall_s": True})
    results = equal_servers(tmp_path / "c")
    lose_steps(results, "baseline", "guided", code="steps-missing")
    assert look(results) == (False, {"step_ms": False, "tpot_ms": True, "wall_s": True})


def test_a_plan_corrects_for_the_metrics_that_will_decide():
    profile = load_profile("aa", engine="attach", overrides=["engine.options.url=http://host:1"], blocks=8)
    has_steps = engine_for("attach").has_steps
    deciding = deciding_in_plan(profile.primary_metrics, profile, has_steps)
    assert set(profile.primary_metrics) - set(deciding) == {"step_ms"}
    power, assumed = power_lines(profile, None, has_steps), power_lines(profile, None)
    changes = [float(lines[0].partition("±")[2].partition("%")[0]) for lines in (power, assumed)]
    assert changes[0] < changes[1]
    assert "2 corrected tests" in power[0]
    assert "3 corrected tests" in assumed[0]
    assert power[-1] == "step_ms is not recorded by this server; tpot_ms and wall_s decide"
