"""Where the time went, on result directories of known content; the step as a tree of sections that add up."""

import itertools
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import builders
from support.results.builders import (
    T0_NS,
    edit_manifest,
    edit_requests,
    edit_run,
    edit_steps,
    run_ids,
    set_positions,
    share_request_set,
    write_results,
)
from support.results.comparing import compare, metric_of
from support.results.decomposition_laws import assert_exact

from benchctl.analysis.attribution import breakdown
from benchctl.analysis.attribution.breakdown import mean_breakdown
from benchctl.analysis.attribution.decomposition import sentence, wall_line
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.records.columns import columns_from
from benchctl.records.schema import SECTION_PARENT, StepRecord

TRUTH = 15.5 / 10
STEADY = ({"baseline": 1.0, "guided": 1.0},) * 6
SHAKEN = tuple({"baseline": 1 + 0.02 * (i % 3), "guided": 1.01 + 0.015 * (i % 4)} for i in range(6))
EXAMPLE = Path(__file__).parents[2] / "fixtures" / "example-without-digests"


def decomposed(a, b, estimator="mean"):
    """The comparison of two sides, and its decomposition, which is exact."""
    comparison = compare(a, b, estimator=estimator)
    parts = comparison.cells[0].decomposition
    assert_exact(parts)
    return comparison, parts


def within(results, **options):
    return decomposed(f"{results.path}:baseline", f"{results.path}:guided", **options)[1]


def ratios(parts):
    return {factor.name: factor.estimate.ratio for factor in parts.wall.parts}


def section_of(parts, name):
    return next(section for section in parts.sections.parts if section.name == name)


def change_all(results, variant, change):
    for run_id in run_ids(results, variant):
        edit_steps(results, run_id, change)


def natural(path, **options):
    """A directory whose answers end by themselves, ``options`` as in ``write_results``."""
    results = write_results(path, **options)
    edit_manifest(results, stop="natural")
    return results


def test_slower_steps_are_the_whole_difference_and_the_sections_say_which(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    parts = within(results)
    assert ratios(parts) == pytest.approx({"steps": 1, "time per step": TRUTH, "remainder": 1})
    assert parts.wall.whole.b_s - parts.wall.whole.a_s == pytest.approx(8 * 5.5e-3)
    added = {section.name: section.added_s for section in parts.sections.parts if section.added_s}
    assert added == pytest.approx({"lvm_build_pending": 1e-3, "lvm_forward": 4e-3, "lvm_apply_guidance": 0.5e-3})
    assert parts.sections.origin.startswith("host time, so a section may include waiting")
    assert sentence(parts).startswith(
        "time per step carries 100 % of the +55%: 73 % of it lvm_forward; the roofline floor of its FLOPs and bytes"
    )
    change_all(results, "guided", lambda step: msgspec.structs.replace(step, dur_ns=step.dur_ns + 2_000_000))
    unnamed = section_of(within(results), "step (unnamed)")
    assert (unnamed.a_s, unnamed.b_s) == pytest.approx((0, 2e-3)), "time that no section names stays visible"


def test_a_section_that_only_one_side_divides_is_divided_on_both(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)

    def whole_sampler(step):
        kept = {name: step.sections_ns[name] for name in ("model_forward", "sampler_total")}
        return msgspec.structs.replace(step, sections_ns=kept)

    change_all(results, "baseline", whole_sampler)
    parts = within(results)
    names = [section.name for section in parts.sections.parts]
    assert len(names) == len({*names} - {"sampler_total"})
    assert section_of(parts, "sampler_total (unnamed)").a_s == pytest.approx(0.2e-3)


@pytest.mark.parametrize(
    ("factors", "step_ratio", "told"),
    [
        (SHAKEN, 1, ["output tokens carries 100 % of the -25%"]),
        (({"baseline": 4 / 3},) * 6, 4 / 3, ["time per step +33%", "output tokens -25%"]),
    ],
    ids=["alone", "with slower steps"],
)
def test_fewer_tokens_at_the_same_pace_are_told_from_faster_steps(tmp_path, factors, step_ratio, told):
    blocks = SHAKEN if step_ratio == 1 else STEADY
    cells = ({"top_k": 5},) if "guided" in factors[0] else ()
    long = natural(tmp_path / "long", block_factors=blocks, output_tokens=8)
    short = natural(tmp_path / "short", block_factors=factors, cells=cells, output_tokens=6)
    share_request_set(short, long)
    _, parts = decomposed(f"{long.path}:baseline", f"{short.path}:baseline")
    assert ratios(parts) == pytest.approx(
        {"output tokens": 6 / 8, "steps per token": 1, "time per step": step_ratio, "remainder": 1}
    )
    assert all(words in sentence(parts) for words in told)


def test_steps_that_yield_two_tokens_are_fewer_steps_per_token(tmp_path):
    """Speculation: as many tokens in half of the steps, each of them slower."""
    plain = natural(tmp_path / "plain", block_factors=STEADY, output_tokens=8)
    fast = natural(tmp_path / "fast", block_factors=({"baseline": 1.25, "guided": 1.25},) * 6, output_tokens=4)
    share_request_set(fast, plain)

    def twice(request):
        counts = {"chunk_tokens": (2,) * 4, "output_tokens": 8}
        choices = tuple(msgspec.structs.replace(choice, **counts) for choice in request.choices)
        return msgspec.structs.replace(request, choices=choices, completion_tokens=16)

    for run_id in run_ids(fast, "baseline"):
        edit_requests(fast, run_id, twice)
    change_all(fast, "baseline", lambda step: msgspec.structs.replace(step, output_tokens=2 * step.num_seqs))
    _, parts = decomposed(f"{plain.path}:baseline", f"{fast.path}:baseline")
    assert ratios(parts) == pytest.approx(
        {"output tokens": 1, "steps per token": 0.5, "time per step": 1.25, "remainder": 1}
    )
    assert sentence(parts).startswith("steps per token -50% and time per step +25% make -37%")


def test_time_in_which_no_step_ran_is_the_remainder(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for run_id in run_ids(results):
        times = results.run(run_id).read().times
        edit_run(
            results, run_id, times=msgspec.structs.replace(times, last_token_ns=times.last_token_ns + 40_000_000)
        )
    assert ratios(within(results))["remainder"] == pytest.approx((8 * 15.5 + 40) / (8 * 15.5))


@pytest.mark.parametrize("estimator", ["mean", "robust"])
@pytest.mark.parametrize("positions", [None, (1, 0)])
def test_the_whole_is_what_the_table_says_also_where_the_order_in_the_blocks_is_taken_out(
    tmp_path, positions, estimator
):
    results = write_results(tmp_path / "r", block_factors=SHAKEN)
    if positions is not None:  # in every other block
        odd = [run for run in results.plan().runs if run.block % 2]
        set_positions(results, {run.run_id: positions[run.variant == "guided"] for run in odd})
    comparison, parts = decomposed(f"{results.path}:baseline", f"{results.path}:guided", estimator)
    step = next(factor for factor in parts.wall.parts if factor.name == "time per step")
    names = {"wall_s": parts.wall.whole} | ({"step_ms": step} if estimator == "mean" else {})
    for name, part in names.items():
        theirs = metric_of(comparison, name).estimate
        assert (theirs.method == "robust") == (estimator == "robust")
        assert part.estimate.log_ratio == pytest.approx(theirs.log_ratio, abs=1e-9)
        assert part.estimate.log_interval == pytest.approx(theirs.log_interval, abs=1e-6)
    if estimator == "mean":
        assert (parts.wall.whole.estimate.position_effect is not None) == (positions is not None)


def test_swapping_the_sides_turns_every_part_around_and_a_side_against_itself_has_none(tmp_path):
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    _, forth = decomposed(f"{path}:baseline", f"{path}:guided")
    _, back = decomposed(f"{path}:guided", f"{path}:baseline")
    for name, ratio in ratios(forth).items():
        assert ratio * ratios(back)[name] == pytest.approx(1)
    turned = {section.name: -section.added_s for section in back.sections.parts}
    assert {section.name: section.added_s for section in forth.sections.parts} == pytest.approx(turned)
    _, same = decomposed(f"{path}:baseline", f"{path}:baseline")
    assert all(factor.added_s == 0 for factor in same.wall.parts)
    assert sentence(same) == "no factor can be told from 1 (+0.00% in all)"


def test_sides_without_common_blocks_multiply_and_add_up_too_and_few_of_them_have_no_interval(tmp_path):
    path = write_results(tmp_path / "r", block_factors=SHAKEN).path
    four, two = (write_results(tmp_path / f"{n}", block_factors=SHAKEN[:n]).path for n in (4, 2))
    comparison, parts = decomposed(f"{path}:baseline", f"{four}:guided")
    factors = {factor.name: factor.estimate for factor in parts.wall.parts}
    wall = metric_of(comparison, "wall_s")
    assert not parts.wall.whole.estimate.is_paired
    assert parts.wall.whole.estimate == wall.estimate
    assert factors["steps"] == metric_of(comparison, "num_steps").estimate
    assert factors["time per step"] == metric_of(comparison, "step_ms").estimate
    assert wall.estimate.log_interval is not None
    assert parts.wall.whole.a_s == pytest.approx(wall.a)
    comparison, parts = decomposed(f"{path}:baseline", f"{two}:guided")
    wall = metric_of(comparison, "wall_s")
    assert change_text(wall).endswith(f"% [no interval: {len(SHAKEN)} against 2 runs]")
    assert parts.wall.whole.estimate == wall.estimate
    assert " over too few runs for an interval" in sentence(parts)


def test_scatter_alone_and_one_block_name_no_factor(tmp_path):
    alike = tuple({"baseline": 1 + 0.05 * (i % 2), "guided": (1 + 0.05 * (i % 3)) / TRUTH} for i in range(6))
    parts = within(write_results(tmp_path / "r", block_factors=alike))
    assert sentence(parts).startswith("no factor can be told from 1 (")
    parts = within(write_results(tmp_path / "one", block_factors=STEADY[:1]))
    assert sentence(parts) == "the wall time changes by +55% in one block, which tells no factor from 1"
    assert wall_line(parts) == "wall x1.550 = steps x1.000 * time per step x1.550 * remainder x1.000"


def test_without_a_step_log_the_tokens_are_what_is_left_to_divide_by(tmp_path):
    results = write_results(tmp_path / "r", block_factors=SHAKEN)
    for run in results.runs():
        run.step_log.unlink()
    parts = within(results)
    assert set(ratios(parts)) == {"output tokens", "wall time per token"}
    assert (parts.step, parts.sections, parts.work) == (None, None, "there is no step log")


def test_the_committed_example_is_exact():
    _, parts = decomposed(f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided")
    assert math.isclose(math.prod(ratios(parts).values()), parts.wall.whole.estimate.ratio, rel_tol=1e-9)
    assert sentence(parts).startswith(
        "time per step carries 104 % of the +365%: 59 % of the step's difference lvm_forward"
    )


def test_a_cell_without_any_wall_time_has_the_parts_of_its_steps_alone(tmp_path):
    results = write_results(tmp_path / "r", block_factors=STEADY)
    for run in results.runs():
        nowhere = msgspec.structs.replace(run.read().times, first_send_ns=T0_NS, last_token_ns=T0_NS)
        edit_run(results, run.read().run_id, times=nowhere)
    parts = compare(f"{results.path}:baseline", f"{results.path}:guided").cells[0].decomposition
    assert parts.wall is None
    assert parts.sections is not None
    assert sentence(parts).startswith("the wall time is unknown, because the client's times do not count")


def step(dur_ns, sections_ns, *, clock="host", is_warmup=False):
    return StepRecord(
        step=1, start_ns=0, dur_ns=dur_ns, clock=clock, phase="decode", is_warmup=is_warmup, num_seqs=4,
        sections_ns=sections_ns,
    )  # fmt: skip


def break_down(*steps):
    return breakdown.break_down(columns_from(steps))


def test_sections_per_step_add_up_to_the_step_and_remainders_are_named():
    parts = break_down(
        step(100, {"model_forward": 60, "sampler_total": 30, "pre_lvm": 5, "lvm_apply_outer": 20}),
        step(80, {"model_forward": 60, "sampler_total": 10, "sample": 10}),
    )
    assert parts.tree[0].mean_ns == 90
    assert parts.leaf_means_ns == {
        "model_forward": 60.0,
        "pre_lvm": 2.5,
        "lvm_apply_outer": 10.0,
        "sample": 5.0,
        "sampler_total (unnamed)": 2.5,
        "step (unnamed)": 10.0,
    }
    (outer,) = [section for section in parts.tree if section.name == "lvm_apply_outer"]
    assert (outer.mean_ns, outer.record_mean_ns, outer.step_frac) == (10.0, 20.0, 0.5)


def test_a_parent_that_the_log_leaves_out_is_the_sum_of_its_children():
    parts = break_down(step(10, {"lvm_build_pending": 3, "lvm_forward": 4}))
    assert (parts.total_ns["lvm_apply_outer"], parts.total_ns["sampler_total"]) == (7, 7)
    assert [(section.depth, section.name) for section in parts.tree] == [
        (0, "step"),
        (1, "sampler_total"),
        (2, "lvm_apply_outer"),
        (3, "lvm_build_pending"),
        (3, "lvm_forward"),
        (3, "lvm_apply_outer (unnamed)"),
        (2, "sampler_total (unnamed)"),
        (1, "step (unnamed)"),
    ]


def test_the_warm_up_does_not_count_and_what_has_no_place_in_the_tree_stands_outside():
    warmup = step(1_000, {"value_model_load": 900}, is_warmup=True)
    assert break_down() is None
    assert break_down(warmup) is None
    parts = break_down(warmup, step(10, {"model_forward": 8, "logprob": 1}))
    assert parts.unplaced == ["logprob"]
    assert sum(parts.leaf_means_ns.values()) == parts.tree[0].mean_ns == 10
    assert "value_model_load" not in parts.total_ns
    assert break_down(step(10, {})).leaf_means_ns == {"step": 10.0}
    assert break_down(step(10, {"step": 4, "model_forward": 9})).tree[0].mean_ns == 10, "it is only called so"


@pytest.mark.parametrize(
    ("clock", "words"),
    [("host", "no section is GPU time"), ("device", "device time"), ("virtual", "virtual time of the simulator")],
)
def test_the_clock_says_what_the_times_are(clock, words):
    assert words in break_down(step(10, {"model_forward": 8}, clock=clock)).clock_note


def test_the_mean_over_runs_gives_each_the_same_weight(tmp_path):
    blocks = ({"baseline": 1.0, "guided": 1.0}, {"baseline": 3.0, "guided": 1.0})
    experiment = load_experiment(builders.write_results(tmp_path, block_factors=blocks).path)
    runs = [run for run in experiment.results.runs if run.record.variant == "baseline"]
    assert mean_breakdown([experiment.run_time(run) for run in runs]).tree[0].mean_ns == 2 * builders.STEP_NS


sections = st.dictionaries(st.sampled_from([*SECTION_PARENT, "unheard_of"]), st.integers(0, 10**9))


@given(st.lists(st.builds(step, st.integers(1, 10**9), sections), min_size=1, max_size=8))
def test_every_parent_is_the_sum_of_its_children(steps):
    parts = break_down(*steps)
    whole, *below = parts.tree
    for parent in (section for section in parts.tree if not section.is_leaf):
        after = parts.tree[parts.tree.index(parent) + 1 :]
        inside = itertools.takewhile(lambda section, depth=parent.depth: section.depth > depth, after)
        *named, unnamed = [section for section in inside if section.depth == parent.depth + 1]
        assert unnamed.name == f"{parent.name} (unnamed)"
        total_ns = unnamed.mean_ns + sum(section.mean_ns for section in named)
        assert total_ns == pytest.approx(parent.mean_ns, rel=1e-9, abs=1e-3)
    assert sum(parts.leaf_means_ns.values()) == pytest.approx(whole.mean_ns, rel=1e-9, abs=1e-3)
    assert whole.mean_ns == sum(each.dur_ns for each in steps) / len(steps)
    assert bool(below) != whole.is_leaf
