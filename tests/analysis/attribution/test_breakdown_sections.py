"""The step as a tree of sections: parts add up, remainders are named, clocks are not mistaken for the device's."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import builders

from benchctl.analysis.attribution.breakdown import Breakdown, mean_breakdown
from benchctl.analysis.attribution.breakdown import break_down as break_down_columns
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.records.columns import columns_from
from benchctl.records.schema import SECTION_PARENT, Clock, StepRecord


def step(dur_ns: int, sections_ns: dict[str, int], *, clock: Clock = "host", is_warmup: bool = False) -> StepRecord:
    return StepRecord(
        step=1,
        start_ns=0,
        dur_ns=dur_ns,
        clock=clock,
        phase="decode",
        is_warmup=is_warmup,
        num_seqs=4,
        sections_ns=sections_ns,
    )


def break_down(steps: Iterable[StepRecord]) -> Breakdown | None:
    return break_down_columns(columns_from(steps))


def test_sections_per_step_add_up_to_the_step_and_remainders_are_named():
    breakdown = break_down(
        [
            step(100, {"model_forward": 60, "sampler_total": 30, "pre_lvm": 5, "lvm_apply_outer": 20}),
            step(80, {"model_forward": 60, "sampler_total": 10, "sample": 10}),
        ]
    )
    assert breakdown is not None
    assert breakdown.tree[0].mean_ns == 90
    assert breakdown.leaf_means_ns == {
        "model_forward": 60.0,
        "pre_lvm": 2.5,
        "lvm_apply_outer": 10.0,
        "sample": 5.0,
        "sampler_total (unnamed)": 2.5,
        "step (unnamed)": 10.0,
    }
    assert sum(breakdown.leaf_means_ns.values()) == breakdown.tree[0].mean_ns


def test_the_mean_over_records_that_have_a_section_stands_beside_the_mean_over_all_steps():
    breakdown = break_down([step(10, {"sampler_total": 8, "lvm_forward": 6}), step(4, {"sampler_total": 2})])
    assert breakdown is not None
    (forward,) = [section for section in breakdown.tree if section.name == "lvm_forward"]
    assert (forward.mean_ns, forward.record_mean_ns, forward.step_frac) == (3.0, 6.0, 0.5)


def test_a_parent_that_the_log_leaves_out_is_the_sum_of_its_children():
    breakdown = break_down([step(10, {"lvm_build_pending": 3, "lvm_forward": 4})])
    assert breakdown is not None
    assert (breakdown.total_ns["lvm_apply_outer"], breakdown.total_ns["sampler_total"]) == (7, 7)
    assert [(section.depth, section.name) for section in breakdown.tree] == [
        (0, "step"),
        (1, "sampler_total"),
        (2, "lvm_apply_outer"),
        (3, "lvm_build_pending"),
        (3, "lvm_forward"),
        (3, "lvm_apply_outer (unnamed)"),
        (2, "sampler_total (unnamed)"),
        (1, "step (unnamed)"),
    ]


def test_warm_up_steps_do_not_count():
    breakdown = break_down([step(1_000, {"value_model_load": 900}, is_warmup=True), step(10, {"model_forward": 9})])
    assert breakdown is not None
    assert breakdown.tree[0].mean_ns == 10
    assert "value_model_load" not in breakdown.total_ns


def test_there_is_no_breakdown_without_measured_steps():
    assert break_down([]) is None
    assert break_down([step(10, {}, is_warmup=True)]) is None


def test_a_step_without_sections_is_a_breakdown_of_one_leaf():
    breakdown = break_down([step(10, {})])
    assert breakdown is not None
    assert breakdown.leaf_means_ns == {"step": 10.0}


def test_a_section_with_unknown_parent_stands_outside_the_tree():
    breakdown = break_down([step(10, {"model_forward": 8, "logprob": 1})])
    assert breakdown is not None
    assert breakdown.unplaced == ["logprob"]
    assert sum(breakdown.leaf_means_ns.values()) == 10


@pytest.mark.parametrize(
    ("clock", "words"),
    [("host", "no section is GPU time"), ("device", "device time"), ("virtual", "virtual time of the simulator")],
)
def test_the_clock_says_what_the_times_are(clock, words):
    breakdown = break_down([step(10, {"model_forward": 8}, clock=clock)])
    assert breakdown is not None
    assert words in breakdown.clock_note


def test_the_mean_over_runs_gives_each_the_same_weight(tmp_path):
    builders.write_results(
        tmp_path, block_factors=({"baseline": 1.0, "guided": 1.0}, {"baseline": 3.0, "guided": 1.0})
    )
    experiment = load_experiment(tmp_path)
    runs = [run for run in experiment.results.runs if run.record.variant == "baseline"]
    breakdown = mean_breakdown([experiment.run_time(run) for run in runs])
    assert breakdown is not None
    assert breakdown.tree[0].mean_ns == 2 * builders.STEP_NS


sections = st.dictionaries(st.sampled_from([*SECTION_PARENT, "unheard_of"]), st.integers(0, 10**9))


def test_a_section_that_is_called_like_the_step_does_not_pass_for_it():
    breakdown = break_down([step(10, {"step": 4, "model_forward": 9})])
    assert breakdown is not None
    assert breakdown.tree[0].mean_ns == 10


@given(st.lists(st.builds(step, st.integers(1, 10**9), sections), min_size=1, max_size=8))
def test_every_parent_is_the_sum_of_its_children(steps):
    breakdown = break_down(steps)
    assert breakdown is not None
    whole, *below = breakdown.tree
    for parent in (section for section in breakdown.tree if not section.is_leaf):
        after = breakdown.tree[breakdown.tree.index(parent) + 1 :]
        inside = itertools.takewhile(lambda section, depth=parent.depth: section.depth > depth, after)
        *named, unnamed = [section for section in inside if section.depth == parent.depth + 1]
        assert unnamed.name == f"{parent.name} (unnamed)"
        total_ns = unnamed.mean_ns + sum(section.mean_ns for section in named)
        assert total_ns == pytest.approx(parent.mean_ns, rel=1e-9, abs=1e-3)
    assert sum(breakdown.leaf_means_ns.values()) == pytest.approx(whole.mean_ns, rel=1e-9, abs=1e-3)
    assert whole.mean_ns == sum(each.dur_ns for each in steps) / len(steps)
    assert bool(below) != whole.is_leaf
