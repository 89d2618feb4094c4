"""Capacities of simulated servers: by block, in the verdict, censored, and with sizes that a pilot found."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, strategies as st
from support.results.several import simulated

from benchctl.analysis.analyzed import analyze
from benchctl.analysis.compare.compare import CompareOptions, compare_experiments
from benchctl.analysis.experiment.capacity import ArmCapacity, CapacityPoint, capacities_of, capacity_of
from benchctl.analysis.experiment.experiment import Arm
from benchctl.analysis.experiment.pairing import Side
from benchctl.profile.load import load_profile
from benchctl.profile.objective import Slo
from benchctl.profile.sizes import capacity_sizes
from benchctl.records.record import RequestError
from benchctl.report.curve_tables import capacity_document, capacity_lines

METRIC = "capacity_concurrency"
SLOW, FAST, FASTER = ("small:60:2000", "small:66:2200", "small:120:4000")
SWEEP, FEW = {"max_concurrency": [6, 9, 11, 13, 15, 22]}, {"max_concurrency": [9, 13, 22]}
CAPACITY = {
    "blocks": 6,
    "loads_per_server": 1,
    "per_server": "ladder",
    "engine": {"kind": "sim", "options": {"noise": "none", "cost_model": "roofline", "hardware": SLOW}},
    "slo": {"tpot_ms": 40, "share": 0.9},
    "primary_metrics": [METRIC],
    "load": {"begin": "running"},
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 40,
        "input_len": {"mean": 256, "cv": 0.3},
        "output_len": {"mean": 16, "cv": 0.3},
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "sweep": SWEEP,
    "variants": {"baseline": {}, "fast": {"server": {"hardware": FAST}}},
}


def measured(directory, **changes):
    return simulated(directory, **CAPACITY | changes)


def compared(experiment, b="fast"):
    sides = (experiment, Side(experiment.path, "baseline")), (experiment, Side(experiment.path, b))
    return compare_experiments(*sides, CompareOptions())


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    options = {**CAPACITY["engine"]["options"], "launch_scatter": 0.005}
    return measured(tmp_path_factory.mktemp("capacity"), engine={"kind": "sim", "options": options})


def test_a_server_twice_as_fast_has_the_capacity_of_twice_the_limit(tmp_path):
    """Every time of a closed loop scales with its device, so the two curves are one."""
    sweep, variants = (
        {"max_concurrency": [6, 9, 12, 16, 22, 30]},
        {"baseline": {}, "fast": {"server": {"hardware": FASTER}}},
    )
    once = measured(tmp_path, blocks=1, sweep=sweep, variants=variants)
    profile = once.profile.model_copy(update={"slo": Slo(tpot_ms=80, share=0.9)})
    twice = replace(once, profile_or_none=profile, _derived=defaultdict(dict))
    _, fast = capacities_of(once, METRIC)
    slow, _ = capacities_of(twice, METRIC)
    (fast,), (slow,) = fast.sizes, slow.sizes
    assert fast == pytest.approx(slow, rel=1e-3)


def test_the_capacities_decide_in_place_of_the_loads(experiment):
    comparison = compared(experiment)
    (cell,) = comparison.cells
    assert [metric.metric.name for metric in cell.metrics] == [METRIC]
    assert (comparison.verdict, comparison.exit_code, comparison.num_tests) == ("improvement", 0, 1)
    assert cell.num_blocks == 6


def test_levels_of_the_table_have_the_quotient_that_compare_shows(experiment):
    (cell,), (a, b) = compared(experiment).cells, analyze(experiment).capacities
    assert b.level / a.level == pytest.approx(cell.deciding[0].estimate.ratio)
    assert a.level == pytest.approx(cell.deciding[0].a)
    assert a.interval[0] < a.level < a.interval[1]
    assert 6 < min(a.sizes) < max(a.sizes) < 22
    assert 0 < capacity_document(a)["scatter_frac"] < 0.03


def test_equal_servers_without_noise_have_a_ratio_of_one(tmp_path):
    comparison = compared(measured(tmp_path, sweep=FEW, variants={"baseline": {}, "fast": {}}))
    assert comparison.cells[0].deciding[0].estimate.ratio == 1
    assert comparison.verdict == "equivalent"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([4, 5, 6], "baseline holds at 6, the most that was sent: send more (1 of 1 block)"),
        (
            [20, 30, 40],
            "baseline breaks at 20, the least that was sent: send less, or raise the limits (1 of 1 block)",
        ),
    ],
)
def test_loads_that_do_not_bracket_the_capacity_give_no_verdict(tmp_path, sizes, words):
    experiment = measured(tmp_path, blocks=1, sweep={"max_concurrency": sizes})
    comparison = compared(experiment)
    assert comparison.exit_code == 3
    assert words in comparison.cells[0].deciding[0].reason
    assert words in capacity_lines(analyze(experiment))
    assert all(arm.level is None for arm in analyze(experiment).capacities)


def test_one_censored_block_leaves_the_ratio_undecided(experiment, tmp_path):
    """Its two loads beside the capacity do not count: the others alone would be no fair sample."""
    lost = [
        run
        for run in experiment.results.runs
        if run.record.block == 2 and run.record.cell["max_concurrency"] in {11, 13}
    ]
    runs = tuple(run for run in experiment.results.runs if run not in lost)
    without = replace(experiment, results=replace(experiment.results, runs=runs), _derived=defaultdict(dict))
    metric = compared(without).cells[0].deciding[0]
    assert metric.verdict == "inconclusive"
    assert (
        "baseline has no latency at 11: the load is too short, or does not count (1 of 6 blocks)" in metric.reason
    )
    assert metric.a_blocks.count(None) == 1


def test_a_block_none_of_whose_loads_counts_says_nothing_and_censors_nothing():
    unusable = capacity_of([CapacityPoint(4), CapacityPoint(8)])
    assert (unusable.size, unusable.limit) == (None, None)
    usable = capacity_of([CapacityPoint(4, -0.5), CapacityPoint(8, 0.5)])
    arm = Arm(variant="baseline", cell={}, runs={}, excluded={}, client_excluded={})
    assert not ArmCapacity(arm, (), {0: usable, 1: unusable}).is_censored
    assert ArmCapacity(arm, (), {0: capacity_of([CapacityPoint(4, -0.5), CapacityPoint(8)])}).is_censored


def test_failed_requests_of_a_load_above_the_capacity_only_break_it(experiment):
    """Its latency is unknown, because too many have no answer; the loads below it are as they were."""
    failed = RequestError(kind="timeout", message="planted")
    runs = tuple(
        replace(run, requests=tuple(msgspec.structs.replace(each, error=failed) for each in run.requests))
        if run.record.cell["max_concurrency"] == 22
        else run
        for run in experiment.results.runs
    )
    broken = replace(experiment, results=replace(experiment.results, runs=runs), _derived=defaultdict(dict))
    metric, before = (compared(each).cells[0] for each in (broken, experiment))
    assert not metric.errors
    assert metric.deciding[0].a == pytest.approx(before.deciding[0].a)


@given(st.floats(1, 500), st.floats(1, 1.5), st.booleans())
def test_sizes_around_a_capacity_are_nine_per_cent_apart_beside_it_and_bracket_twice_of_it(
    smallest, apart, is_rate
):
    arrival = {"kind": "poisson", "request_rate": 1} if is_rate else {"kind": "closed-loop", "max_concurrency": 4}
    profile = load_profile("aa")
    workload = profile.workload.model_copy(update={"arrival": profile.workload.arrival.model_validate(arrival)})
    largest = smallest * apart
    sizes = capacity_sizes(profile.model_copy(update={"workload": workload}), [largest, smallest])
    assert list(sizes) == sorted(set(sizes))
    near = {"rel": 0.006} if is_rate else {"abs": 0.5}
    assert sizes[0] == pytest.approx(max(smallest / 2, 0 if is_rate else 1), **near)
    assert sizes[-1] == pytest.approx(largest * (1.4 if is_rate else 2), **near)
    inner = [size for size in sizes if 0.86 * smallest <= size <= 1.17 * largest]
    for before, after in pairwise(inner):
        assert after / before < 1.09 * 1.012 if is_rate else after <= 1.09 * (before + 0.5) + 0.5
