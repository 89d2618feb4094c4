"""The ladder of controls in a profile: which steps there are, what each changes, and how often each runs."""

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.settings import ladder_of

GUIDED = "variants.guided.controls=true"
TILTED = (GUIDED, "variants.guided.guidance.value_scale=-2.0")


def settings_of(profile, variant, **cell):
    return variant_settings(profile, variant, cell)


def test_the_profile_controls_measures_every_step_to_a_guided_server():
    profile = load_profile("controls")
    assert ladder_of(profile, "guided") == ("baseline", "guided-flags", "guided-idle", "guided-neutral", "guided")
    assert list(profile.variants) == list(ladder_of(profile, "guided"))
    baseline, flags, idle, neutral, guided = (settings_of(profile, name) for name in profile.variants)
    assert (flags.server.value_model, flags.server.overlap_schedule) == (None, False)
    assert (flags.sampling, flags.guidance) == (baseline.sampling, None)
    assert (idle.server, idle.sampling, idle.guidance) == (guided.server, baseline.sampling, None)
    assert (neutral.server, neutral.sampling) == (guided.server, guided.sampling)
    assert neutral.guidance == guided.guidance.model_copy(update={"value_scale": 0.0})
    assert guided.guidance.value_scale == -1.0


def test_the_stored_profile_shows_the_steps_and_stays_the_same_when_it_is_read_again():
    profile = load_profile("controls")
    text = dump_profile(profile)
    assert "guided-idle:" in text
    again = parse_profile(text, "profile.yaml")
    assert again == profile
    assert profile_sha256(again) == profile_sha256(profile)


def test_steps_that_no_factor_reaches_run_once_in_a_block():
    profile = load_profile("topk-sweep", overrides=[*TILTED, "sweep.top_k=[2, 5]"])
    assert arms(profile) == (
        ("baseline", {}),
        ("guided-flags", {}),
        ("guided-idle", {}),
        ("guided-neutral", {"top_k": 2}),
        ("guided-neutral", {"top_k": 5}),
        ("guided", {"top_k": 2}),
        ("guided", {"top_k": 5}),
    )


def test_each_step_runs_in_the_cells_of_the_factors_that_reach_it():
    sweep = "sweep={value_model: [qwen2.5-0.5b, qwen2.5-1.5b], max_num_seqs: [8, 16], value_scale: [-1.0, -2.0]}"
    profile = load_profile("controls", overrides=[sweep])
    swept = {name: variant.swept for name, variant in profile.variants.items()}
    assert swept["guided-flags"] == ("max_num_seqs",)
    assert swept["guided-idle"] == swept["guided-neutral"] == ("value_model", "max_num_seqs")
    assert swept["guided"] is True
    counts = [sum(name == arm for arm, _ in arms(profile)) for name in profile.variants]
    assert counts == [1, 2, 4, 4, 8]
    assert parse_profile(dump_profile(profile), "profile.yaml") == profile


def test_a_step_that_equals_its_neighbour_is_left_out():
    neutral = load_profile("topk-sweep", overrides=[GUIDED])
    assert ladder_of(neutral, "guided") == ("baseline", "guided-flags", "guided-idle", "guided")
    flagless = load_profile("topk-sweep", overrides=[GUIDED, "variants.guided.server.overlap_schedule=true"])
    assert ladder_of(flagless, "guided") == ("baseline", "guided-idle", "guided")
    same = load_profile("aa", overrides=["variants.again.controls=true"])
    assert ladder_of(same, "again") == ("baseline", "again")


def test_an_engine_that_cannot_guide_has_the_flags_between_stock_and_variant():
    profile = load_profile("controls", engine="vllm", overrides=["variants.sampled.server.enforce_eager=true"])
    assert ladder_of(profile, "sampled") == ("baseline", "sampled-flags", "sampled")
    flags = settings_of(profile, "sampled-flags")
    assert (flags.server.enforce_eager, flags.sampling.top_k) == (True, -1)


def test_the_flags_step_keeps_what_the_baseline_says_of_its_own():
    overrides = ["variants.baseline={server: {max_num_seqs: 64}, sampling: {min_p: 0.2}}"]
    profile = load_profile("controls", overrides=overrides)
    assert settings_of(profile, "guided-flags").server.max_num_seqs == 64
    assert settings_of(profile, "guided-idle").sampling.min_p == 0.2


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
