"""The plan: cells, the ladder of controls, settings of each run, and orders that are balanced."""

import pickle
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from benchctl.errors import ProfileError
from benchctl.profile.controls import ladder_of
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import (
    Imbalance,
    allowed_difference,
    arms,
    balanced_numbers,
    balanced_orders,
    cycle_length,
    imbalance_of,
    plan_runs,
    variant_settings,
)
from benchctl.records.record import PlannedRun


def profile_of(num_variants, *, blocks=8, seed=0):
    plain = {
        "name": "p",
        "seed": seed,
        "blocks": blocks,
        "engine": {"kind": "sim"},
        "workload": {"dataset": "generated", "arrival": {"kind": "burst"}},
        "variants": {"baseline": {}, **{f"v{i}": {} for i in range(1, num_variants)}},
    }
    return Profile.model_validate(plain)


def orders_of(profile):
    runs = plan_runs(profile).runs
    return [[run.variant for run in runs if run.block == block] for block in range(profile.blocks)]


def test_cells_are_the_product_of_the_factors_and_the_baseline_and_unswept_variants_have_none():
    overrides = ["sweep={top_k: [2, 1], value_model: [a, b]}", "variants.control={swept: false}"]
    cells = [{"top_k": k, "value_model": model} for k in (2, 1) for model in "ab"]
    swept = arms(load_profile("topk-sweep", overrides=overrides))
    assert swept == (("baseline", {}), *(("guided", cell) for cell in cells), ("control", {}))
    assert arms(profile_of(3)) == (("baseline", {}), ("v1", {}), ("v2", {}))


def test_a_run_is_named_by_its_index_block_variant_and_cell():
    runs = plan_runs(load_profile("ci-smoke")).runs
    assert [(run.index, run.block, run.position) for run in runs] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    names = {f"{block}-{arm}" for block in ("b0", "b1") for arm in ("baseline", "guided-top_k5")}
    assert {run.run_id[4:] for run in runs} == names
    assert [run.run_id[:4] for run in runs] == ["000-", "001-", "002-", "003-"]


def test_two_arms_alternate_and_the_seed_decides_which_begins():
    firsts = set()
    for seed in range(20):
        orders = orders_of(profile_of(2, blocks=6, seed=seed))
        assert sorted(orders[:2]) == [["baseline", "v1"], ["v1", "baseline"]]
        assert orders[:2] * 3 == orders
        firsts.add(orders[0][0])
    assert firsts == {"baseline", "v1"}
    assert orders_of(profile_of(1, blocks=3)) == [["baseline"]] * 3


def test_the_order_is_fixed_for_all_time():
    """A plan that changed between versions would let two results of one profile differ in order."""
    assert orders_of(profile_of(4, blocks=4, seed=1)) == [
        ["baseline", "v2", "v3", "v1"],
        ["v1", "v3", "v2", "baseline"],
        ["v3", "baseline", "v1", "v2"],
        ["v2", "v1", "baseline", "v3"],
    ]


def test_settings_are_the_profiles_then_the_variants_then_the_cells():
    sweep = (
        "{top_k: [2], value_model: [m], value_scale: [-1.0], max_num_seqs: [3], "
        "model: [qwen2.5-14b], server.tokens_per_chunk: [4]}"
    )
    overrides = [
        "engine.options={time_scale: 7, block_size: 8, max_num_seqs: 64}",
        "variants.guided.server.block_size=32",
        "variants.guided.sampling={top_p: 0.9}",
        f"sweep={sweep}",
    ]
    profile = load_profile("topk-sweep", overrides=overrides)
    baseline, guided = (variant_settings(profile, *arm) for arm in arms(profile))
    assert (guided.variant, guided.model) == ("guided", "qwen2.5-14b")
    assert (guided.server.time_scale, guided.server.block_size, guided.server.max_num_seqs) == (7.0, 32, 3)
    assert (guided.server.value_model, guided.server.tokens_per_chunk) == ("m", 4)
    assert (guided.sampling.top_k, guided.sampling.top_p, guided.sampling.min_p) == (2, 0.9, 0.01)
    assert (guided.guidance.mode, guided.guidance.value_scale) == ("centered_exp", -1.0)
    assert (baseline.model, baseline.server.value_model, baseline.guidance) == ("qwen2.5-7b", None, None)
    assert (baseline.server.max_num_seqs, baseline.sampling.top_k, baseline.sampling.min_p) == (64, -1, 0.01)


@pytest.mark.parametrize(
    ("variant", "cell", "message"),
    [
        ("guidde", {}, "profile topk-sweep: no variant is called 'guidde'; did you mean 'guided'?"),
        ("zzz", {}, "profile topk-sweep: no variant is called 'zzz'; variants are baseline, guided"),
        ("guided", {"top_q": 1}, "profile topk-sweep: top_q: no factor or setting has this name"),
        ("guided", {"top_k": "x"}, "profile topk-sweep: sampling.top_k: expected a whole number, found 'x'"),
    ],
)
def test_settings_of_what_the_profile_does_not_have_are_refused(variant, cell, message):
    with pytest.raises(ProfileError) as error:
        variant_settings(load_profile("topk-sweep"), variant, cell)
    assert str(error.value).startswith(message)


def test_a_pattern_allows_what_lies_below_it():
    names = ("guidance.value_scale", "server.value_model", "server.value_model_path", "guidance", "Model")
    patterns = ["guidance.*", "server.value_model", "model"]
    assert [allowed_difference(name, patterns) for name in names] == [True, True, False, False, False]


def passes(**changes):
    plain = {
        "name": "passes",
        "engine": {"kind": "micro"},
        "workload": {"dataset": "none", "arrival": {"kind": "burst"}},
        "variants": {"eager": {}, "graph": {"server": {"mode": "graph"}}},
        "baseline": "eager",
        "sweep_baseline": True,
        "sweep": {"phase": ["decode", "prefill"], "batch_size": [1, 2]},
    }
    return profile_from_plain({**plain, **changes}, "p")


def test_a_swept_baseline_runs_in_every_cell_of_every_block_and_else_once_a_block():
    assert [variant for variant, _ in arms(passes())] == ["eager"] * 4 + ["graph"] * 4
    assert [variant for variant, _ in arms(passes(sweep_baseline=False))] == ["eager"] + ["graph"] * 4


def test_listed_cells_are_run_and_no_other_combination_each_once_where_a_variant_is_swept_in_part():
    cells = [{"phase": "decode", "batch_size": 1}, {"phase": "decode", "batch_size": 2}]
    assert [cell for _, cell in arms(passes(cells=cells))] == cells * 2
    profile = passes(cells=cells, variants=passes_variants(["phase"], True))
    assert arms(profile) == (("eager", {"phase": "decode"}), *(("graph", cell) for cell in cells))


def passes_variants(eager, graph):
    return {"eager": {"swept": eager}, "graph": {"server": {"mode": "graph"}, "swept": graph}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": [{"phase": "decode"}]}, "a cell has a value of every factor of sweep: phase, batch_size"),
        (
            {"cells": [{"phase": "decode", "batch_size": 3}]},
            "lists batch_size: 3, which sweep.batch_size does not have",
        ),
        (
            {
                "sweep": {"phase": ["decode"], "batch_size": [1, "two"]},
                "cells": [{"phase": "decode", "batch_size": 1}],
            },
            r"sweep\.batch_size\[1\]: expected a whole number, found 'two'",
        ),
        (
            {"variants": passes_variants(["phase"], ["phase"])},
            r"sweep\.batch_size: applies to no variant; name it in the swept of one",
        ),
    ],
    ids=["no value", "other value", "wrong type", "no variant"],
)
def test_cells_and_factors_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ProfileError, match=message):
        passes(**changes)


def test_a_profile_can_be_handed_to_another_process_and_keeps_no_settings_of_what_it_was():
    profile = load_profile("topk-sweep")
    assert pickle.loads(pickle.dumps(profile)) == profile
    engine = profile.engine.model_copy(update={"options": profile.engine.options | {"max_num_seqs": 3}})
    changed = profile.model_copy(update={"engine": engine})
    assert variant_settings(changed, "baseline", {}).server.max_num_seqs == 3
    assert variant_settings(profile, "baseline", {}).server.max_num_seqs != 3


GUIDED = "variants.guided.controls=true"


def test_the_profile_controls_measures_every_step_to_a_guided_server_and_is_stored_with_them():
    profile = load_profile("controls")
    assert ladder_of(profile, "guided") == ("baseline", "guided-flags", "guided-idle", "guided-neutral", "guided")
    assert list(profile.variants) == list(ladder_of(profile, "guided"))
    baseline, flags, idle, neutral, guided = (variant_settings(profile, name, {}) for name in profile.variants)
    assert (flags.server.value_model, flags.server.overlap_schedule) == (None, False)
    assert (flags.sampling, flags.guidance) == (baseline.sampling, None)
    assert (idle.server, idle.sampling, idle.guidance) == (guided.server, baseline.sampling, None)
    assert (neutral.server, neutral.sampling) == (guided.server, guided.sampling)
    assert neutral.guidance == guided.guidance.model_copy(update={"value_scale": 0.0})
    assert guided.guidance.value_scale == -1.0
    assert "guided-idle:" in dump_profile(profile)
    assert parse_profile(dump_profile(profile), "profile.yaml") == profile


def test_steps_that_no_factor_reaches_run_once_in_a_block():
    profile = load_profile(
        "topk-sweep", overrides=[GUIDED, "variants.guided.guidance.value_scale=-2.0", "sweep.top_k=[2, 5]"]
    )
    once = [(name, {}) for name in ("baseline", "guided-flags", "guided-idle")]
    in_cells = [(name, {"top_k": k}) for name in ("guided-neutral", "guided") for k in (2, 5)]
    assert arms(profile) == (*once, *in_cells)


def test_each_step_runs_in_the_cells_of_the_factors_that_reach_it():
    sweep = "sweep={value_model: [qwen2.5-0.5b, qwen2.5-1.5b], max_num_seqs: [8, 16], value_scale: [-1.0, -2.0]}"
    profile = load_profile("controls", overrides=[sweep])
    swept = {name: variant.swept for name, variant in profile.variants.items()}
    assert swept["guided-flags"] == ("max_num_seqs",)
    assert swept["guided-idle"] == swept["guided-neutral"] == ("value_model", "max_num_seqs")
    assert swept["guided"] is True
    assert [sum(name == arm for arm, _ in arms(profile)) for name in profile.variants] == [1, 2, 4, 4, 8]
    assert parse_profile(dump_profile(profile), "profile.yaml") == profile


@pytest.mark.parametrize(
    ("name", "variant", "overrides", "steps"),
    [
        ("topk-sweep", "guided", [GUIDED], ["guided-flags", "guided-idle", "guided"]),
        (
            "topk-sweep",
            "guided",
            [GUIDED, "variants.guided.server.overlap_schedule=true"],
            ["guided-idle", "guided"],
        ),
        ("aa", "again", ["variants.again.controls=true"], ["again"]),
    ],
    ids=["neutral", "no flag", "same"],
)
def test_a_step_that_equals_its_neighbour_is_left_out(name, variant, overrides, steps):
    assert ladder_of(load_profile(name, overrides=overrides), variant) == ("baseline", *steps)


def test_the_flags_step_stands_between_stock_and_variant_and_keeps_what_the_baseline_says_of_its_own():
    unguided = load_profile("controls", engine="vllm", overrides=["variants.sampled.server.enforce_eager=true"])
    assert ladder_of(unguided, "sampled") == ("baseline", "sampled-flags", "sampled")
    flags = variant_settings(unguided, "sampled-flags", {})
    assert (flags.server.enforce_eager, flags.sampling.top_k) == (True, -1)
    overrides = ["variants.baseline={server: {max_num_seqs: 64}, sampling: {min_p: 0.2}}"]
    profile = load_profile("controls", overrides=overrides)
    assert variant_settings(profile, "guided-flags", {}).server.max_num_seqs == 64
    assert variant_settings(profile, "guided-idle", {}).sampling.min_p == 0.2


def balanced(num_arms, num_blocks, seed=0):
    return balanced_orders(num_arms, num_blocks, random.Random(f"{seed}:plan"))


def planned(orders):
    """Arm 0 is ``baseline``, the others are cells of ``guided``."""
    return [
        PlannedRun(
            index=block * len(order) + position,
            run_id=f"{block}-{position}",
            block=block,
            position=position,
            variant="guided" if arm else "baseline",
            cell={"k": arm} if arm else {},
        )
        for block, order in enumerate(orders)
        for position, arm in enumerate(order)
    ]


def least_difference(num_arms, num_blocks):
    """No design has a smaller largest difference of the sums of positions to the baseline, where the counts of
    positions differ by at most one: only the positions taken once more, ``rest`` of each arm, make a difference.
    """
    rest = num_blocks % num_arms
    if rest == 0:
        return 0
    if rest in {1, num_arms - 1}:  # each position is the odd one of one arm
        return num_arms // 2
    if rest * (num_arms - 1) % 2:  # the mean of the sums is no whole number
        return 1
    return 1 if num_arms % 2 and rest in {2, num_arms - 2} else 0  # the middle position has no partner


@pytest.mark.parametrize("num_arms", range(2, 13))
def test_every_design_is_complete_and_nearly_as_balanced_in_positions_as_can_be(num_arms):
    for num_blocks in range(1, 25):
        orders = balanced(num_arms, num_blocks)
        assert [sorted(order) for order in orders] == [list(range(num_arms))] * num_blocks
        figures = imbalance_of(planned(orders), "baseline")
        assert figures.position_spread == (1 if num_blocks % num_arms else 0)
        least = least_difference(num_arms, num_blocks)
        assert least - 1e-9 <= figures.position_difference * num_blocks <= least + 3
        assert figures.predecessor_spread <= 3


@pytest.mark.parametrize("num_arms", range(2, 13))
def test_whole_cycles_are_balanced_in_what_follows_what_as_well(num_arms):
    length = cycle_length(num_arms)
    for num_blocks in (length, 2 * length):
        assert imbalance_of(planned(balanced(num_arms, num_blocks)), "baseline").is_balanced
    followers = Counter(pair for order in balanced(num_arms, length) for pair in pairwise(order))
    assert set(followers.values()) == {length // num_arms}
    assert len(followers) == num_arms * (num_arms - 1)


@settings(max_examples=50)
@given(num_arms=st.sampled_from([2, 4, 6, 8]), num_blocks=st.integers(1, 12), seed=st.integers(0, 1000))
def test_an_experiment_that_ends_after_an_even_number_of_blocks_has_equal_mean_positions(
    num_arms, num_blocks, seed
):
    begun = balanced(num_arms, 24, seed)[: 2 * num_blocks]
    assert imbalance_of(planned(begun), "baseline").position_difference == 0


@settings(max_examples=50)
@given(num_arms=st.integers(2, 12), num_blocks=st.integers(1, 24), seed=st.integers(0, 1000))
def test_more_cycles_only_extend_the_orders_of_a_stream(num_arms, num_blocks, seed):
    orders = balanced(num_arms, num_blocks, seed)
    whole = num_blocks // cycle_length(num_arms) * cycle_length(num_arms)
    assert balanced(num_arms, whole + 30, seed)[:whole] == orders[:whole]


@pytest.mark.parametrize(
    ("num_arms", "num_blocks", "numbers"), [(6, 8, (6, 12)), (6, 3, (0, 6)), (5, 12, (10, 20)), (2, 7, (6, 8))]
)
def test_the_nearest_balanced_numbers_of_blocks_are_multiples_of_a_cycle(num_arms, num_blocks, numbers):
    assert balanced_numbers(num_arms, num_blocks) == numbers


def test_the_imbalance_of_a_plan_is_what_one_counts_by_hand():
    runs = planned([(0, 1, 2), (0, 2, 1), (1, 0, 2)])
    assert imbalance_of(runs, "baseline") == Imbalance(
        position_difference=pytest.approx(4 / 3),  # arm 2 at 2, 1, 2; the baseline at 0, 0, 1
        position_spread=2,  # the baseline twice first and never last
        predecessor_spread=2,  # arm 2 runs after the baseline twice, the baseline never after arm 2
    )


def test_runs_that_do_not_count_leave_an_imbalance_of_what_is_left():
    runs = planned(balanced(6, 6))
    first = {run.cell.get("k", 0): run.position for run in runs if run.block == 0}
    without_block = imbalance_of([run for run in runs if run.block], "baseline")
    farthest = max(abs(position - first[0]) for position in first.values())
    assert without_block.position_difference == pytest.approx(farthest / 5)
    pair = [run for run in runs if run.cell in ({}, {"k": 3}) and (run.block or not run.cell)]
    assert imbalance_of(pair, "baseline").position_difference == pytest.approx(abs(first[3] - first[0]) / 5)
