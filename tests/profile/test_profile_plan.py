"""The plan: cells, balanced blocks, and the settings of each run."""

import pickle
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile, parse_profile, profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import allowed_difference, arms, plan_runs, variant_settings


def profile_of(num_variants: int, *, blocks: int = 8, seed: int = 0) -> Profile:
    return Profile.model_validate(
        {
            "name": "p",
            "seed": seed,
            "blocks": blocks,
            "engine": {"kind": "sim"},
            "workload": {"dataset": "generated", "arrival": {"kind": "burst"}},
            "variants": {"baseline": {}, **{f"v{i}": {} for i in range(1, num_variants)}},
        }
    )


def orders_of(profile: Profile) -> list[list[str]]:
    orders: list[list[str]] = [[] for _ in range(profile.blocks)]
    for run in plan_runs(profile).runs:
        assert run.position == len(orders[run.block])
        orders[run.block].append(run.variant)
    return orders


def test_cells_are_the_product_of_the_factors_in_written_order():
    profile = load_profile("topk-sweep", overrides=["sweep={top_k: [2, 1], value_model: [a, b]}"])
    assert tuple(cell for name, cell in arms(profile) if name == "guided") == (
        {"top_k": 2, "value_model": "a"},
        {"top_k": 2, "value_model": "b"},
        {"top_k": 1, "value_model": "a"},
        {"top_k": 1, "value_model": "b"},
    )


def test_without_a_sweep_there_is_one_empty_cell():
    assert arms(profile_of(3)) == (("baseline", {}), ("v1", {}), ("v2", {}))


def test_the_baseline_and_unswept_variants_have_no_cells():
    profile = load_profile(
        "topk-sweep", overrides=["sweep.top_k=[2, 3]", "variants.control={swept: false}", "variants.again={}"]
    )
    assert arms(profile) == (
        ("baseline", {}),
        ("guided", {"top_k": 2}),
        ("guided", {"top_k": 3}),
        ("control", {}),
        ("again", {"top_k": 2}),
        ("again", {"top_k": 3}),
    )


def test_a_run_is_named_by_its_index_block_variant_and_cell():
    plan = plan_runs(load_profile("ci-smoke"))
    assert plan.runs[0].run_id.startswith("000-b0-")
    assert [run.index for run in plan.runs] == [0, 1, 2, 3]
    assert {run.run_id[4:] for run in plan.runs} == {
        "b0-baseline",
        "b0-guided-top_k5",
        "b1-baseline",
        "b1-guided-top_k5",
    }


@pytest.mark.parametrize("seed", range(6))
def test_two_arms_alternate(seed):
    orders = orders_of(profile_of(2, blocks=6, seed=seed))
    assert sorted(orders[:2]) == [["baseline", "v1"], ["v1", "baseline"]]
    assert orders[:2] * 3 == orders


def test_the_seed_decides_which_of_two_arms_begins():
    assert {orders_of(profile_of(2, seed=seed))[0][0] for seed in range(20)} == {"baseline", "v1"}


def test_a_lone_baseline_runs_once_in_each_block():
    assert orders_of(profile_of(1, blocks=3)) == [["baseline"]] * 3


@given(num_arms=st.integers(1, 9), blocks=st.integers(1, 20), seed=st.integers(0, 1000))
def test_every_block_is_complete_and_every_arm_takes_every_position_equally_often(num_arms, blocks, seed):
    profile = profile_of(num_arms, blocks=blocks, seed=seed)
    orders = orders_of(profile)
    for order in orders:
        assert sorted(order) == sorted(profile.variants)
    for position in range(num_arms):
        counts = Counter(order[position] for order in orders)
        most, least = max(counts.values()), min(counts.get(variant, 0) for variant in profile.variants)
        assert most - least <= 1


@given(num_arms=st.integers(2, 9), seed=st.integers(0, 1000))
def test_every_arm_follows_every_other_equally_often_over_a_complete_cycle(num_arms, seed):
    blocks, times = (num_arms, 1) if num_arms % 2 == 0 else (2 * num_arms, 2)
    followers = Counter(
        pair for order in orders_of(profile_of(num_arms, blocks=blocks, seed=seed)) for pair in pairwise(order)
    )
    assert len(followers) == num_arms * (num_arms - 1)
    assert set(followers.values()) == {times}


@given(num_arms=st.integers(2, 7), seed=st.integers(0, 1000))
def test_the_same_seed_gives_the_same_plan_and_more_blocks_only_extend_whole_cycles(num_arms, seed):
    assert plan_runs(profile_of(num_arms, seed=seed)) == plan_runs(profile_of(num_arms, seed=seed))
    cycle = 2 * num_arms
    longer = plan_runs(profile_of(num_arms, blocks=cycle + 3, seed=seed)).runs
    assert longer[: cycle * num_arms] == plan_runs(profile_of(num_arms, blocks=cycle, seed=seed)).runs


def test_different_seeds_give_different_plans():
    plans = {tuple(run.run_id for run in plan_runs(profile_of(6, seed=seed)).runs) for seed in range(50)}
    assert len(plans) == 50


def test_the_order_is_fixed_for_all_time():
    """A plan that changed between versions would let two results of one profile differ in order."""
    assert orders_of(profile_of(4, blocks=4, seed=1)) == [
        ["baseline", "v2", "v3", "v1"],
        ["v1", "v3", "v2", "baseline"],
        ["v3", "baseline", "v1", "v2"],
        ["v2", "v1", "baseline", "v3"],
    ]


def test_settings_are_the_profiles_then_the_variants_then_the_cells():
    profile = load_profile(
        "topk-sweep",
        overrides=[
            "engine.options={time_scale: 7, block_size: 8, max_num_seqs: 64}",
            "variants.guided.server.block_size=32",
            "variants.guided.sampling={top_p: 0.9}",
            (
                "sweep={top_k: [2], value_model: [m], value_scale: [-1.0], max_num_seqs: [3], "
                "model: [qwen2.5-14b], server.tokens_per_chunk: [4]}"
            ),
        ],
    )
    _, (_, cell) = arms(profile)
    guided = variant_settings(profile, "guided", cell)
    assert (guided.variant, guided.model) == ("guided", "qwen2.5-14b")
    assert (guided.server.time_scale, guided.server.block_size, guided.server.max_num_seqs) == (7.0, 32, 3)
    assert (guided.server.value_model, guided.server.tokens_per_chunk) == ("m", 4)
    assert (guided.sampling.top_k, guided.sampling.top_p, guided.sampling.min_p) == (2, 0.9, 0.01)
    assert guided.guidance is not None
    assert (guided.guidance.mode, guided.guidance.value_scale) == ("centered_exp", -1.0)
    baseline = variant_settings(profile, "baseline", {})
    assert (baseline.model, baseline.server.value_model, baseline.guidance) == ("qwen2.5-7b", None, None)
    assert (baseline.server.max_num_seqs, baseline.sampling.top_k, baseline.sampling.min_p) == (64, -1, 0.01)


def test_settings_of_a_profile_that_was_built_in_code_are_checked_too():
    profile = profile_of(2).model_copy(update={"variants": load_profile("topk-sweep").variants})
    with pytest.raises(ProfileError, match=r"^profile p: guidance: variant 'guided' is guided with"):
        variant_settings(profile, "guided", {})


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


@pytest.mark.parametrize(
    ("path", "patterns", "allowed"),
    [
        ("guidance.value_scale", ["guidance.*"], True),
        ("server.value_model", ["server.value_model"], True),
        ("server.value_model_path", ["server.value_model"], False),
        ("server.lvm.fn", ["server.lvm.*"], True),
        ("guidance", ["guidance.*"], False),
        ("model", [], False),
        ("Model", ["model"], False),
    ],
)
def test_a_pattern_allows_what_lies_below_it(path, patterns, allowed):
    assert allowed_difference(path, patterns) is allowed


def test_a_profile_read_from_a_result_directory_plans_the_same_runs():
    from benchctl.profile.load import dump_profile

    profile = load_profile("topk-sweep")
    assert plan_runs(parse_profile(dump_profile(profile), "profile.yaml")) == plan_runs(profile)


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


def test_a_swept_baseline_runs_in_every_cell_of_every_block():
    profile = passes(blocks=2)
    assert len(arms(profile)) == 2 * 4
    assert [variant for variant, _ in arms(profile)] == ["eager"] * 4 + ["graph"] * 4
    assert len(plan_runs(profile).runs) == 2 * 8


def test_without_sweep_baseline_the_baseline_runs_once_a_block():
    assert arms(passes(sweep_baseline=False))[0] == ("eager", {})
    assert len(arms(passes(sweep_baseline=False))) == 1 + 4


def test_listed_cells_are_run_and_no_other_combination():
    cells = [{"phase": "decode", "batch_size": 1}, {"phase": "prefill", "batch_size": 2}]
    assert [cell for _, cell in arms(passes(cells=cells))] == cells * 2


def test_a_variant_that_is_swept_in_part_runs_each_listed_value_once():
    cells = [{"phase": "decode", "batch_size": size} for size in (1, 2)]
    variants = {"eager": {"swept": ["phase"]}, "graph": {"server": {"mode": "graph"}}}
    profile = passes(cells=cells, variants=variants)
    assert arms(profile) == (("eager", {"phase": "decode"}), *(("graph", cell) for cell in cells))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"phase": "decode"}, "a cell has a value of every factor of sweep: phase, batch_size"),
        ({"phase": "decode", "batch_size": 3}, "lists batch_size: 3, which sweep.batch_size does not have"),
    ],
)
def test_a_listed_cell_that_the_sweep_does_not_have_is_refused(cell, message):
    with pytest.raises(ProfileError, match=message):
        passes(cells=[cell])


def test_a_value_of_a_wrong_type_is_refused_where_no_listed_cell_has_it():
    with pytest.raises(ProfileError, match=r"sweep\.batch_size\[1\]: expected a whole number, found 'two'"):
        passes(sweep={"phase": ["decode"], "batch_size": [1, "two"]}, cells=[{"phase": "decode", "batch_size": 1}])


def test_a_factor_that_no_variant_is_swept_over_is_refused():
    variants = {"eager": {"swept": ["phase"]}, "graph": {"swept": ["phase"]}}
    with pytest.raises(
        ProfileError, match=r"sweep\.batch_size: applies to no variant; name it in the swept of one"
    ):
        passes(variants=variants)


def test_a_profile_can_be_handed_to_another_process_and_keeps_no_settings_of_what_it_was():
    profile = load_profile("topk-sweep")
    assert pickle.loads(pickle.dumps(profile)) == profile
    engine = profile.engine.model_copy(update={"options": profile.engine.options | {"max_num_seqs": 3}})
    changed = profile.model_copy(update={"engine": engine})
    assert variant_settings(changed, "baseline", {}).server.max_num_seqs == 3
    assert variant_settings(profile, "baseline", {}).server.max_num_seqs != 3
