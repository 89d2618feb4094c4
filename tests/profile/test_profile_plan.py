"""The plan: cells, balanced blocks, and the settings of each run."""

import pickle

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile, profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import allowed_difference, arms, plan_runs, variant_settings


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


def test_cells_are_the_product_of_the_factors_in_written_order():
    profile = load_profile("topk-sweep", overrides=["sweep={top_k: [2, 1], value_model: [a, b]}"])
    cells = [tuple(cell.values()) for name, cell in arms(profile) if name == "guided"]
    assert cells == [(2, "a"), (2, "b"), (1, "a"), (1, "b")]
    assert arms(profile_of(3)) == (("baseline", {}), ("v1", {}), ("v2", {}))


def test_the_baseline_and_unswept_variants_have_no_cells():
    overrides = ["sweep.top_k=[2, 3]", "variants.control={swept: false}", "variants.again={}"]
    two = {"top_k": 2}, {"top_k": 3}
    assert arms(load_profile("topk-sweep", overrides=overrides)) == (
        ("baseline", {}), *(("guided", cell) for cell in two), ("control", {}), *(("again", cell) for cell in two)
    )  # fmt: skip


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


def test_a_pattern_allows_what_lies_below_it():
    assert allowed_difference("guidance.value_scale", ["guidance.*"])
    assert allowed_difference("server.value_model", ["server.value_model"])
    assert not allowed_difference("server.value_model_path", ["server.value_model"])
    assert not allowed_difference("guidance", ["guidance.*"])
    assert not allowed_difference("Model", ["model"])


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
    profile = passes(blocks=2)
    assert [variant for variant, _ in arms(profile)] == ["eager"] * 4 + ["graph"] * 4
    assert len(plan_runs(profile).runs) == 2 * 8
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
