"""Load factors: arms under each load, the profile of one load point, and what no load can be."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from benchctl.analysis.planning import repeated_baseline
from benchctl.errors import ProfileError
from benchctl.profile.controls import ladder_of
from benchctl.profile.load import load_profile, profile_from_plain, profile_sha256
from benchctl.profile.planning import (
    Imbalance,
    arms,
    cycle_length,
    extend_plan,
    imbalance_of,
    is_repeated_baseline,
    plan_runs,
    servers,
    variant_settings,
)
from benchctl.profile.settings import is_load_factor, load_part, load_points, server_part, under_load
from benchctl.records.record import PlannedRun

SLOTS = [{"max_concurrency": slots} for slots in (1, 8, 64)]


def curve(**changes):
    plain = {
        "name": "curve",
        "engine": {"kind": "sim"},
        "workload": {
            "dataset": "synthetic",
            "input_len": 64,
            "output_len": 16,
            "num_prompts": 400,
            "arrival": {"max_concurrency": 8},
        },
        "variants": {"baseline": {}, "small-batch": {"server": {"max_num_seqs": 16}}},
        "sweep": {"max_concurrency": [1, 8, 64]},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        inner = plain
        for section in sections:
            inner = inner[section]
        inner[key] = value
    return profile_from_plain(plain, "curve.yaml")


def test_a_load_factor_applies_to_the_baseline_to_unswept_variants_and_to_controls():
    profile = curve()
    assert arms(profile) == tuple((name, cell) for name in ("baseline", "small-batch") for cell in SLOTS)
    unswept = curve(variants={"baseline": {}, "again": {"swept": False}, "some": {"swept": ["top_k"]}}, sweep={
        "top_k": [1, 2], "max_concurrency": [1, 8]
    })  # fmt: skip
    cells = {name: [cell for variant, cell in arms(unswept) if variant == name] for name in unswept.variants}
    assert cells["baseline"] == cells["again"] == SLOTS[:2]
    assert cells["some"] == [{"top_k": k, **slots} for k in (1, 2) for slots in SLOTS[:2]]

    guided = load_profile("controls", overrides=["sweep.max_concurrency=[1, 8]", "sweep.top_k=[1, 5]"])
    steps = ladder_of(guided, "guided")
    assert len(steps) > 2
    assert all(
        {"max_concurrency": 1} in [load_part(cell) for name, cell in arms(guided) if name == step] for step in steps
    )


def test_a_cell_is_its_load_part_and_its_server_part_in_the_order_of_the_factors():
    cell = {"top_k": 1, "workload.input_len": 9, "model": "m", "request_rate": 2.5}
    assert load_part(cell) == {"workload.input_len": 9, "request_rate": 2.5}
    assert server_part(cell) == {"top_k": 1, "model": "m"}
    assert [*load_part(cell)] == ["workload.input_len", "request_rate"]
    assert not is_load_factor("length")


def test_the_profile_of_a_load_point_differs_in_its_load_alone():
    profile = curve(sweep={"max_concurrency": [1, 8], "workload.input_len": [10, 20]})
    assert load_points(profile) == tuple(
        {"max_concurrency": slots, "workload.input_len": length} for slots in (1, 8) for length in (10, 20)
    )
    loaded = under_load(profile, {"top_k": 3, "max_concurrency": 1, "workload.input_len": 20})
    assert loaded.workload.arrival.max_concurrency == 1
    assert loaded.workload.input_len == 20
    arrival = profile.workload.arrival.model_copy(update={"max_concurrency": 1})
    workload = profile.workload.model_copy(update={"arrival": arrival, "input_len": 20})
    assert loaded == profile.model_copy(update={"workload": workload, "sweep": {}})
    assert under_load(loaded, {"max_concurrency": 1, "workload.input_len": 20}) == loaded
    assert under_load(profile, {}) is under_load(profile, {"top_k": 3}) is profile
    assert variant_settings(loaded, "small-batch", {"max_concurrency": 1}).server.max_num_seqs == 16


def test_prompts_per_slot_gives_each_load_as_many_prompts_as_its_slots_need():
    profile = curve(workload__prompts_per_slot=20)
    assert [under_load(profile, point).workload.num_prompts for point in SLOTS] == [20, 160, 400]
    assert [under_load(curve(), point).workload.num_prompts for point in SLOTS] == [400, 400, 400]


def test_a_profile_without_load_factors_keeps_its_hash():
    """Of 4b76c37e, where profiles had no load factors."""
    assert (
        profile_sha256(load_profile("ci-smoke"))
        == "60ad368c842250de1d10ac5ca3e5f260f9f0e9ea2b4fc02fd95a143a11675af6"
    )


REFUSED = {
    "unknown key": (
        {"sweep": {"workload.num_prompts": [1]}},
        "sweep.workload.num_prompts: no factor or setting has this name; factors are model",
    ),
    "named twice": (
        {"sweep": {"max_concurrency": [1], "workload.arrival.max_concurrency": [2]}},
        "sweep.workload.arrival.max_concurrency: sets what max_concurrency sets already",
    ),
    "rate of a closed loop": (
        {"sweep": {"request_rate": [1, 2]}},
        "sweep.request_rate: arrival kind closed-loop has no rate; set workload.arrival.kind: poisson",
    ),
    "output length that is not forced": (
        {"sweep": {"output_len": [8]}, "stop": "natural"},
        "sweep.output_len: is read with stop: forced only; set it, or remove the factor",
    ),
    "input length with natural lengths": (
        {"sweep": {"input_len": [8]}, "stop": "replay-natural"},
        "sweep.input_len: natural lengths are those of one set of prompts",
    ),
    "no number": (
        {"sweep": {"max_concurrency": [1, None]}},
        "sweep.max_concurrency[1]: is null, and a load has a number",
    ),
    "out of bounds": (
        {"sweep": {"max_concurrency": [1, 0]}},
        "sweep.max_concurrency[1]: is 0; it must be at least 1",
    ),
    "a word": (
        {"sweep": {"input_len": ["long"]}},
        "sweep.input_len[0]: expected a whole number",
    ),
    "one load": (
        {"per_server": "ladder", "sweep": {}},
        "per_server: is ladder, and sweep has one load; sweep a load factor such as max_concurrency",
    ),
    "loads that a server lacks": (
        {
            "per_server": "ladder",
            "sweep": {"top_k": [2, 3], "max_concurrency": [1, 8]},
            "cells": [{"top_k": 2, "max_concurrency": n} for n in (1, 8)] + [{"top_k": 3, "max_concurrency": 1}],
        },
        "cells: with per_server: ladder every server gets the same loads, and those of small-batch lack some",
    ),
    "several loads of a ladder": (
        {"per_server": "ladder", "loads_per_server": 3},
        "loads_per_server: is 3, and per_server: ladder sends each load once; leave out one of the two",
    ),
    "too many loads": (
        {"per_server": "ladder", "sweep": {"max_concurrency": list(range(1, 61))}},
        "per_server: makes 60 loads on each server, more than 50; sweep fewer values",
    ),
    "prompts per slot without slots": (
        {"workload__prompts_per_slot": 3, "sweep": {"input_len": [8]}},
        "workload.prompts_per_slot: is read where sweep has max_concurrency",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_load_can_be_is_refused_where_it_is_written(changes, message):
    with pytest.raises(ProfileError) as error:
        curve(**changes)
    assert f"curve.yaml: {message}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_of_the_command_line_that_the_sweep_replaces_is_refused(tmp_path):
    path = tmp_path / "curve.yaml"
    path.write_text(
        "engine: sim\n"
        "workload: {dataset: generated, output_len: 4, arrival: {max_concurrency: 8}}\n"
        "variants: {baseline: {}}\n"
        "sweep: {max_concurrency: [1, 2]}\n"
    )
    with pytest.raises(
        ProfileError, match=r"max_concurrency: is 4, and sweep.max_concurrency replaces it in every run"
    ):
        load_profile(str(path), overrides=["workload.arrival.max_concurrency=4"])


def test_an_engine_that_serves_no_requests_has_no_load_factors():
    workload = {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}}
    with pytest.raises(ProfileError, match=r"sweep\.max_concurrency: no factor or setting has this name"):
        curve(engine={"kind": "micro", "options": {"device": "cpu"}}, workload=workload, variants={"baseline": {}})


def ladder(num_points=3, **changes):
    sweep = {"max_concurrency": [2**i for i in range(num_points)]}
    return curve(per_server="ladder", sweep=sweep, **changes)


def order_imbalance(runs: Sequence[PlannedRun]) -> Imbalance:
    """The imbalance of the orders of load points, as if each block had one run for each."""
    blocks = {run.block: run for run in runs}
    return imbalance_of(
        [
            replace(run, position=i, variant="a", cell=point)
            for run in blocks.values()
            for i, point in enumerate(run.ladder)
        ],
        baseline="",
    )


def test_a_ladder_starts_one_server_for_each_arm_in_a_block_and_gives_all_of_a_block_one_order():
    profile = ladder(blocks=6)
    assert servers(profile) == (("baseline", {}), ("small-batch", {}))
    plan = plan_runs(profile)
    assert [(run.block, run.position) for run in plan.runs] == [(block, i) for block in range(6) for i in (0, 1)]
    assert all(run.cell == {} for run in plan.runs)
    orders = {run.block: [point["max_concurrency"] for point in run.ladder] for run in plan.runs}
    assert all(len({str(run.ladder) for run in plan.runs if run.block == block}) == 1 for block in orders)
    assert order_imbalance(plan.runs).is_balanced
    assert sorted(map(sorted, orders.values())) == [[1, 2, 4]] * 6
    assert all([*orders.values()].count(order) == 1 for order in orders.values())
    assert not order_imbalance(plan_runs(ladder(blocks=4)).runs).is_balanced


def test_a_swept_server_gets_its_own_ladder():
    profile = curve(per_server="ladder", sweep={"top_k": [2, 3], "max_concurrency": [1, 8]})
    assert servers(profile) == (("baseline", {}), ("small-batch", {"top_k": 2}), ("small-batch", {"top_k": 3}))
    assert {run.run_id.split("-", 2)[2] for run in plan_runs(profile).runs} == {
        "baseline", "small-batch-top_k2", "small-batch-top_k3"
    }  # fmt: skip


@pytest.mark.parametrize("num_points", [2, 3, 4])
@pytest.mark.parametrize(("num_old", "num_blocks"), [(6, 12), (8, 12), (7, 9)])
def test_an_extension_keeps_old_orders_of_loads_and_balances_the_new_with_them(num_points, num_old, num_blocks):
    profile = ladder(num_points, blocks=num_old)
    plan = plan_runs(profile)
    longer = extend_plan(plan, profile, num_blocks)
    assert longer.runs[: len(plan.runs)] == plan.runs
    assert len(longer.runs) == 2 * num_blocks
    assert all(len(run.ladder) == num_points for run in longer.runs)
    if num_blocks % cycle_length(num_points) == 0 == num_old % cycle_length(num_points):
        assert order_imbalance(longer.runs).is_balanced


def test_servers_that_get_one_load_have_no_ladder():
    assert servers(curve()) == arms(curve())
    assert not any(run.ladder for run in plan_runs(curve()).runs)


def test_the_repeated_baseline_of_a_curve_is_its_baseline_twice_under_every_load():
    again = repeated_baseline(ladder())
    assert is_repeated_baseline(again)
    assert load_points(again) == load_points(ladder())
    assert servers(again) == (("baseline", {}), ("again", {}))
    assert not is_repeated_baseline(ladder())
    assert not is_repeated_baseline(curve(variants={"baseline": {}}))
    cells = [{"max_concurrency": 8, "top_k": k} for k in (1, 2)]
    listed = curve(sweep={"top_k": [1, 2], "max_concurrency": [8]}, cells=cells)
    assert repeated_baseline(listed).cells == ({"max_concurrency": 8},)
