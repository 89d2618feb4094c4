"""Where the time went: on result directories of known content; laws of the parts of a difference, whatever the
numbers are; the part of each factor of a step-time model.
"""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import ttest_ind
from support.results.builders import (
    T0_NS,
    change_requests,
    change_steps,
    edit_manifest,
    edit_run,
    run_ids,
    set_positions,
    share_request_set,
    write_results,
)
from support.results.comparing import assert_exact, compare, compare_arms, metric_of

from benchctl.analysis.attribution.decomposition import sentence
from benchctl.analysis.attribution.estimate import (
    FACTORS,
    MODEL,
    SCATTER,
    ModelledRun,
    PairDesign,
    SourcedModel,
    estimate_levels,
    estimate_terms,
    logarithmic_mean,
    mean_work,
    shapley_s,
    split_by_model,
)
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.statistics.estimate import PooledSlope
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.records.record import RunTimes
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import US_PER_S

TRUTH = 15.5 / 10
STEADY = ({"baseline": 1.0, "guided": 1.0},) * 6
SHAKEN = tuple({"baseline": 1 + 0.02 * (i % 3), "guided": 1.01 + 0.015 * (i % 4)} for i in range(6))


def decomposed(a, b, estimator="mean"):
    """The comparison of two sides, and its decomposition, which is exact."""
    comparison = compare(a, b, estimator=estimator)
    parts = comparison.cells[0].decomposition
    assert_exact(parts)
    return comparison, parts


def within(results):
    return decomposed(f"{results.path}:baseline", f"{results.path}:guided")[1]


def ratios(parts):
    return {factor.name: factor.estimate.ratio for factor in parts.wall.parts}


def natural(path, *, cells=(), **options):
    """A directory whose answers end by themselves, ``options`` as in ``write_results``."""
    results = write_results(path, cells=cells, **options)
    edit_manifest(results, stop="natural")
    return results


def seconds_of(parts, section):
    """What one section takes on each side, per step."""
    return next((each.a_s, each.b_s) for each in parts.sections.parts if each.name == section)


def test_slower_steps_are_the_whole_difference_and_the_sections_say_which(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    parts = within(results)
    assert ratios(parts) == pytest.approx({"steps": 1, "time per step": TRUTH, "remainder": 1})
    assert parts.wall.whole.b_s - parts.wall.whole.a_s == pytest.approx(8 * 5.5e-3)
    added = {section.name: section.added_s for section in parts.sections.parts if section.added_s}
    assert added == pytest.approx({"lvm_build_pending": 1e-3, "lvm_forward": 4e-3, "lvm_apply_guidance": 0.5e-3})
    assert parts.sections.origin.startswith("host time, so a section may include waiting")
    assert sentence(parts).startswith(
        "wall time +55%: time per step +55%; 73% of the step's difference is lvm_forward; its FLOPs"
    )
    for run_id in run_ids(results):
        change_steps(results, run_id, dur_ns=17_500_000)
    assert seconds_of(within(results), "step (unnamed)") == pytest.approx((0, 2e-3)), "in no section"


def test_a_section_that_only_one_side_divides_is_divided_on_both(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for run_id in run_ids(results, "baseline"):
        change_steps(results, run_id, sections_ns={"model_forward": 9_800_000, "sampler_total": 200_000})
    parts = within(results)
    assert "sampler_total" not in {section.name for section in parts.sections.parts}
    assert seconds_of(parts, "sampler_total (unnamed)")[0] == pytest.approx(0.2e-3)


@pytest.mark.parametrize(
    ("factors", "step_ratio", "told"),
    [
        (SHAKEN, 1, ["wall time -25%: output tokens -25%"]),
        (
            ({"baseline": 4 / 3},) * 6,
            4 / 3,
            ["time per step +33%", "output tokens -25%"],
        ),
    ],
    ids=["alone", "with slower steps"],
)
def test_fewer_tokens_at_the_same_pace_are_told_from_faster_steps(tmp_path, factors, step_ratio, told):
    long = natural(tmp_path / "long", block_factors=SHAKEN if step_ratio == 1 else STEADY, output_tokens=8)
    short = natural(tmp_path / "short", block_factors=factors, output_tokens=6)
    share_request_set(short, long)
    comparison, parts = decomposed(f"{long.path}:baseline", f"{short.path}:baseline")
    tokens = metric_of(comparison, "output_tokens")
    assert (tokens.role, tokens.verdict) == ("exploratory", "changed"), "and no fault"
    assert ratios(parts) == pytest.approx(
        {"output tokens": 6 / 8, "steps per token": 1, "time per step": step_ratio, "remainder": 1}
    )
    text = sentence(parts)
    assert all(words in text for words in told), text


def test_steps_that_yield_two_tokens_are_fewer_steps_per_token(tmp_path):
    """Speculation: as many tokens in half of the steps, each of them slower."""
    plain = natural(tmp_path / "plain", block_factors=STEADY, output_tokens=8)
    fast = natural(tmp_path / "fast", block_factors=({"baseline": 1.25},) * 6, output_tokens=4)
    share_request_set(fast, plain)
    for run_id in run_ids(fast, "baseline"):
        first, *_ = fast.run(run_id).requests()
        counts = {"chunk_tokens": (2,) * 4, "output_tokens": 8}
        choices = tuple(msgspec.structs.replace(choice, **counts) for choice in first.choices)
        change_requests(fast, run_id, choices=choices, completion_tokens=16)
        change_steps(fast, run_id, output_tokens=16)
    _, parts = decomposed(f"{plain.path}:baseline", f"{fast.path}:baseline")
    assert ratios(parts) == pytest.approx(
        {"output tokens": 1, "steps per token": 0.5, "time per step": 1.25, "remainder": 1}
    )
    assert sentence(parts).startswith("wall time -37%: steps per token -50% and time per step +25%")


@pytest.mark.parametrize("estimator", ["mean", "robust"])
@pytest.mark.parametrize("order", [None, (1, 0), (2, 0, 1)])
def test_the_whole_is_what_the_table_says_also_where_the_order_in_the_blocks_is_taken_out(
    tmp_path, order, estimator
):
    cells = ({"top_k": 5}, {"top_k": 2})[: 2 if order == (2, 0, 1) else 1]
    results = write_results(tmp_path / "r", block_factors=SHAKEN, cells=cells)
    if order is not None:  # of the arms in every other block
        odd = [run for run in results.plan().runs if run.block % 2]
        set_positions(results, {run.run_id: order[i % len(order)] for i, run in enumerate(odd)})
    comparison, parts = decomposed(f"{results.path}:baseline", f"{results.path}:guided", estimator)
    wall = parts.wall.whole.estimate
    assert (ratios(parts)["steps"], ratios(parts)["remainder"]) == pytest.approx((1, 1))
    ours = {"wall_s": wall}
    if estimator == "mean":
        ours["step_ms"] = next(part.estimate for part in parts.wall.parts if part.name == "time per step")
        assert (wall.position_effect is not None) == (order is not None)
    for name, estimate in ours.items():
        theirs = metric_of(comparison, name).estimate
        assert (theirs.method == "robust") == (estimator == "robust")
        assert (estimate.log_ratio, *estimate.log_interval) == pytest.approx(
            (theirs.log_ratio, *theirs.log_interval), abs=1e-6
        )


def test_swapping_the_sides_turns_every_part_around_and_a_side_against_itself_has_none(tmp_path):
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    baseline, guided = f"{path}:baseline", f"{path}:guided"
    forth, back, same = (
        decomposed(*sides)[1] for sides in ((baseline, guided), (guided, baseline), (guided, guided))
    )
    assert ratios(forth) == pytest.approx({name: 1 / ratio for name, ratio in ratios(back).items()})
    added = {section.name: section.added_s for section in forth.sections.parts}
    assert added == pytest.approx({section.name: -section.added_s for section in back.sections.parts})
    assert all(factor.added_s == 0 for factor in same.wall.parts)
    assert sentence(same) == "wall time +0.00%: no cause can be told from chance"


def test_sides_without_common_blocks_multiply_and_add_up_too_and_few_of_them_have_no_interval(tmp_path):
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    four, two = (write_results(tmp_path / f"{n}", block_factors=SHAKEN[:n]).path for n in (4, 2))
    comparison, parts = decomposed(f"{path}:baseline", f"{four}:guided")
    ours = {factor.name: factor.estimate for factor in (parts.wall.whole, *parts.wall.parts)}
    wall, steps, step = (metric_of(comparison, name).estimate for name in ("wall_s", "num_steps", "step_ms"))
    assert (ours["wall time"], ours["steps"], ours["time per step"]) == (wall, steps, step)
    assert (wall.is_paired, wall.log_interval is None) == (False, False)
    comparison, parts = decomposed(f"{path}:baseline", f"{two}:guided")
    assert change_text(metric_of(comparison, "wall_s")).endswith(f"% [unknown with {len(SHAKEN)} against 2 runs]")
    assert ": too few runs cannot tell a cause from chance" in sentence(parts)


def test_scatter_alone_and_one_block_name_no_factor(tmp_path):
    alike = tuple({"baseline": 1 + 0.05 * (i % 2), "guided": (1 + 0.05 * (i % 3)) / TRUTH} for i in range(6))
    parts = within(write_results(tmp_path / "r", block_factors=alike))
    assert sentence(parts).endswith(": no cause can be told from chance")
    parts = within(write_results(tmp_path / "one", block_factors=STEADY[:1]))
    assert sentence(parts) == "wall time +55%: 1 block cannot tell a cause from chance"


def test_time_in_which_no_step_ran_is_the_remainder_and_tokens_or_steps_alone_divide_what_they_can(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for run_id in run_ids(results):
        times = results.run(run_id).read().times
        waited = msgspec.structs.replace(times, last_token_ns=times.last_token_ns + 40_000_000)
        edit_run(results, run_id, times=waited)
    assert ratios(within(results))["remainder"] == pytest.approx((8 * 15.5 + 40) / (8 * 15.5))
    timeless = write_results(tmp_path / "timeless", block_factors=STEADY)
    for stepless, run in zip(results.runs(), timeless.runs(), strict=True):
        stepless.step_log.unlink()
        edit_run(timeless, run.path.name, times=RunTimes(first_send_ns=T0_NS, last_token_ns=T0_NS))
    parts = within(results)
    assert set(ratios(parts)) == {"output tokens", "wall time per token"}
    assert (parts.step, parts.sections, parts.work) == (None, None, "there is no step log")
    parts = compare_arms(timeless).cells[0].decomposition
    assert (parts.wall, parts.sections is None) == (None, False)
    assert sentence(parts).startswith("the wall time is unknown, because the client's times do not count")


numbers = st.floats(-1e3, 1e3)
times_s = st.floats(1e-4, 1e3)
runs_of_three = st.tuples(numbers, numbers, numbers)
paired_runs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(st.lists(runs_of_three, min_size=n, max_size=n) for _ in range(2)))
)
unpaired_runs = st.tuples(*(st.lists(runs_of_three, min_size=1, max_size=6) for _ in range(2)))


@given(st.one_of(paired_runs, unpaired_runs), st.lists(st.integers(-3, 3), min_size=9, max_size=9))
def test_parts_that_add_up_in_every_run_add_up_over_the_blocks(sides, places):
    a, b = sides
    is_paired = len(a) == len(b)
    design = PairDesign(is_paired=is_paired, positions=tuple(places[: len(a)]) if is_paired else None)
    rows_a, rows_b = (
        [{"whole": math.fsum(run), **dict(zip("xyz", run, strict=True))} for run in side] for side in (a, b)
    )
    whole, *parts = estimate_levels(rows_a, rows_b, design)
    assert math.fsum(part.added_s for part in parts) == pytest.approx(whole.added_s, abs=1e-9)
    assert math.fsum(part.a_s or 0.0 for part in parts) == pytest.approx(whole.a_s, abs=1e-9)
    assert whole.b_s - whole.a_s == pytest.approx(whole.added_s, abs=1e-9)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_one_side_does_not_have_takes_no_time_there_whatever_the_places_say(is_swapped):
    without, having = [(3.0, 0.0), (3.1, 0.0), (3.3, 0.0)] * 3, [(3.0, 1.0), (3.2, 1.2), (3.1, 1.1)] * 3
    a, b = (having, without) if is_swapped else (without, having)
    positions = (1, -1, 1, 1, -1, -1, 1, -1, 1)
    design = PairDesign(is_paired=True, positions=positions, slope=PooledSlope(0.0, 4.5))
    rows_a, rows_b = ([{"both have": both, "one has": one} for both, one in side] for side in (a, b))
    _, part = estimate_levels(rows_a, rows_b, design)
    assert (part.b_s if is_swapped else part.a_s) == 0
    assert abs(part.added_s) == pytest.approx(1.1, abs=0.05)


def test_all_pairs_give_the_interval_of_welch():
    a, b = [1.0, 1.2, 0.9, 1.1], [2.0, 2.3, 1.8]
    (found,) = estimate_terms(a, b, lambda x, y: [y - x], PairDesign(is_paired=False))
    welch = ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.log_interval == pytest.approx((welch.low, welch.high))


@given(times_s, times_s)
def test_shares_of_the_logarithm_add_up_to_the_difference(a, b):
    mean = logarithmic_mean(a, b)
    assert mean * (math.log(b) - math.log(a)) == pytest.approx(b - a, abs=1e-9 * (a + b))
    assert min(a, b) * (1 - 1e-9) <= mean <= max(a, b) * (1 + 1e-9)


SMALL = Deployment(shape=shape_for("qwen2.5-0.5b"), hardware=hardware_for("h100-sxm"))
LARGE = replace(SMALL, shape=shape_for("qwen2.5-7b"))
COUNTS = st.integers(min_value=0, max_value=64)


def planted_us(work, deployment):
    """Linear in every count, but for the larger of two terms; more for a larger model."""
    linear = 100 + 7 * work.num_decodes + 0.01 * work.decode_context + 0.5 * work.prefill_tokens
    return (linear + np.maximum(3 * work.candidates, 0.2 * work.tokens)) * deployment.shape.layers / 24


PLANTED = SourcedModel(name="planted", predict_us=planted_us, hardware=SMALL.hardware)


def run_of(rows, context, *, prompts=0, prompt_tokens=64, candidates=0, rest_s=0.0, deployment=SMALL):
    """A run of steps with these rows, each of so many context tokens; the last step carries the prompts."""
    rows = np.array(rows, dtype=float)
    is_last = np.arange(len(rows)) == len(rows) - 1
    new = np.where(is_last, prompts * prompt_tokens, 0.0)
    work = StepWork(
        num_prefills=np.where(is_last, prompts, 0.0),
        prefill_tokens=new,
        prefill_positions=new * prompt_tokens / 2,
        num_decodes=rows,
        decode_tokens=rows,
        decode_context=rows * context,
        decode_positions=rows * (context + 0.5),
        num_sampled=rows + np.where(is_last, prompts, 0.0),
        candidates=rows * candidates,
    )
    predicted_s = float(np.mean(planted_us(work, deployment))) / US_PER_S
    return ModelledRun(
        step_s=predicted_s + rest_s,
        predicted_s=predicted_s,
        work=mean_work(work, len(rows)),
        deployment=deployment,
    )


@st.composite
def runs(draw):
    rows = draw(st.lists(COUNTS, min_size=1, max_size=6))
    prompts = draw(st.integers(0, 3))
    if not any(rows) and not prompts:
        prompts = 1
    return run_of(
        rows,
        draw(st.integers(0, 4000)),
        prompts=prompts,
        candidates=draw(st.integers(0, 8)),
        deployment=draw(st.sampled_from([SMALL, LARGE])),
        rest_s=draw(st.floats(-0.01, 0.01)),
    )


def split(a, b, model=PLANTED):
    return split_by_model(model, [a], [b], PairDesign(is_paired=True))


@given(runs(), runs(), st.floats(-0.01, 0.01))
def test_parts_add_up_to_the_difference_and_factors_to_what_the_model_predicts(a, b, added_s):
    parts = split(a, b)
    *factors, rest = parts.parts
    assert sum(part.added_s for part in parts.parts) == pytest.approx(b.step_s - a.step_s, abs=1e-12)
    assert sum(part.added_s for part in factors) == pytest.approx(b.predicted_s - a.predicted_s, abs=1e-12)
    assert (parts.whole.b_s, rest.b_s) == pytest.approx((b.step_s, b.step_s - b.predicted_s), abs=1e-12)
    assert shapley_s(planted_us, a, b) == pytest.approx([-s for s in shapley_s(planted_us, b, a)], abs=1e-12)
    *factors, rest = split(a, replace(a, step_s=a.step_s + added_s)).parts
    assert [part.added_s for part in factors] == pytest.approx([0.0] * len(factors), abs=1e-12)
    assert rest.added_s == pytest.approx(added_s, abs=1e-12), "runs of equal work differ in the rest alone"


def added_us(a, b, model=PLANTED):
    return {part.name: part.added_s * US_PER_S for part in split(a, b, model).parts[:-1]}


def test_one_factor_that_differs_gets_the_whole_difference():
    base = run_of([8, 8, 8, 8], 1000, prompts=1)
    guiding = replace(SMALL, value_shape=shape_for("qwen2.5-0.5b").as_value_model())
    for name, other in (
        ("batch", run_of([16, 16, 16, 16], 1000, prompts=1)),
        ("context", run_of([8, 8, 8, 8], 3000, prompts=1)),
        ("prompts", run_of([8, 8, 8, 8], 1000, prompts=2)),
        ("prompts", run_of([8, 8, 8, 8], 1000)),
        ("candidates", run_of([8, 8, 8, 8], 1000, prompts=1, candidates=5)),
        ("candidates", run_of([8, 8, 8, 8], 1000, prompts=1, candidates=5, deployment=guiding)),
        (MODEL, run_of([8, 8, 8, 8], 1000, prompts=1, deployment=LARGE)),
    ):
        parts = added_us(base, other)
        assert parts.pop(name) == pytest.approx((other.predicted_s - base.predicted_s) * US_PER_S), name
        assert all(abs(part) < 1e-6 for part in parts.values()), (name, parts)


def test_two_factors_that_multiply_share_what_they_add_together():
    parts = added_us(run_of([10], 100), run_of([20], 200))
    alone_batch, alone_context, together = 0.01 * 10 * 100 + 7.2 * 10, 0.01 * 10 * 100, 0.01 * 10 * 100
    assert parts["batch"] == pytest.approx(alone_batch + together / 2)
    assert parts["context"] == pytest.approx(alone_context + together / 2)


def test_steps_that_scatter_about_the_same_mean_differ_by_the_bend_of_the_model():
    model = replace(PLANTED, predict_us=lambda work, _: np.maximum(10 * work.num_decodes, 100.0))
    steady = replace(run_of([10, 10], 100), predicted_s=100 / US_PER_S)
    scattered = replace(run_of([5, 15], 100), predicted_s=125 / US_PER_S)
    parts = added_us(steady, scattered, model)
    assert parts.pop(SCATTER) == pytest.approx(25)
    assert all(abs(part) < 1e-9 for part in parts.values())


def test_blocks_that_scatter_give_every_part_an_interval_that_covers_it():
    a = [run_of([8, 8], 1000 + i) for i in range(6)]
    b = [run_of([12, 12], 1000 - i, rest_s=2e-6 * i) for i in range(6)]
    parts = split_by_model(PLANTED, a, b, PairDesign(is_paired=True))
    by_name = {part.name: part for part in parts.parts[:-1]}
    assert set(by_name) == {*FACTORS, MODEL, SCATTER}
    assert by_name["batch"].ci_low_s < by_name["batch"].added_s < by_name["batch"].ci_high_s
    assert parts.explained_frac == pytest.approx(parts.predicted.added_s / parts.whole.added_s)
