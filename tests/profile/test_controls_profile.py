"""The ladder of controls in a profile: which steps there are, what each changes, and how often each runs."""

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.load import dump_profile, load_profile, parse_profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.settings import ladder_of

GUIDED = "variants.guided.controls=true"
TILTED = (GUIDED, "variants.guided.guidance.value_scale=-2.0")


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
    profile = load_profile("topk-sweep", overrides=[*TILTED, "sweep.top_k=[2, 5]"])
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("variants.guided-idle={}", GUIDED), r"controls of 'guided' would make a variant of this name"),
        (("variants.baseline.controls=true",), r"the baseline has no steps to itself"),
        (("variants.guided.controls=3",), r"variants\.guided\.controls: expected true or false"),
        (("variants.guided.swept=[top_p]",), r"names 'top_p', which sweep does not have; it has top_k"),
        (
            ("variants.guided.control={of: x, rung: middle}",),
            r"rung: is 'middle'; allowed are flags, idle, neutral",
        ),
    ],
)
def test_what_cannot_be_a_ladder_is_refused(overrides, message):
    with pytest.raises(ProfileError, match=message):
        load_profile("topk-sweep", overrides=overrides)


def test_an_error_of_a_variant_is_reported_once_and_not_for_each_of_its_steps():
    with pytest.raises(ProfileError) as caught:
        load_profile("controls", overrides=["variants.guided.server.max_num_seqs=0"])
    assert len(str(caught.value).splitlines()) == 1
