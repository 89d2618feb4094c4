"""The step as a tree of sections: parts add up, remainders are named, clocks are not mistaken for the device's."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import builders

from benchctl.analysis.attribution import breakdown
from benchctl.analysis.attribution.breakdown import mean_breakdown
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.records.columns import columns_from
from benchctl.records.schema import SECTION_PARENT, StepRecord


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
