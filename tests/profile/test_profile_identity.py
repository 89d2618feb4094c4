"""The identity of an experiment: what changes it, and what does not."""

import json
from pathlib import Path

import pytest
from support.results.builders import PROFILE_YAML

from benchctl.profile.choices import Section
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.errors import option_keys, profile_keys
from benchctl.profile.load import load_profile, parse_profile, profile_sha256
from benchctl.profile.model import Profile, Workload

DEFAULTS = Path(__file__).with_name("defaults.json")


class NewSection(Section):
    depth: int = 4


class LaterWorkload(Workload):
    """The workload as a later version might have it."""

    new_word: str = "as before"


class LaterProfile(Profile):
    """A profile as a later version might have it."""

    new_number: int = 3
    new_section: NewSection = NewSection()
    new_option: NewSection | None = None
    workload: LaterWorkload


def later(text: str, **changes: object) -> LaterProfile:
    """The profile as the later version reads the same text."""
    document = parse_profile(text, "p.yaml").model_dump(mode="json") | changes
    return LaterProfile.model_validate(document, strict=False)


SHA256 = profile_sha256(parse_profile(PROFILE_YAML, "p.yaml"))


def test_new_fields_with_defaults_leave_the_identity_as_it_was_and_set_ones_change_it():
    assert profile_sha256(later(PROFILE_YAML)) == SHA256
    for changes in ({"new_number": 4}, {"new_section": {"depth": 5}}, {"new_option": {}}):
        assert profile_sha256(later(PROFILE_YAML, **changes)) != SHA256


GUIDANCE = "guidance: {mode: centered_exp, value_scale: 0.0}"
SAME = {
    "written out": PROFILE_YAML
    + "blocks: 8\nsampling: {top_p: 1.0}\nbaseline: baseline\ntimeouts: {ready_s: 600.0}\n",
    "described": PROFILE_YAML.replace("baseline: {}", "baseline: {description: the stock server}")
    + "description: x\n",
    "defaults of guidance": PROFILE_YAML.replace(GUIDANCE, "guidance: {}"),
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_other_words_for_the_same_experiment_do_not_change_the_identity(text):
    assert text != PROFILE_YAML
    assert profile_sha256(parse_profile(text, "p")) == SHA256


def test_a_variant_without_guidance_and_other_orders_have_identities_of_their_own():
    assert profile_sha256(parse_profile(PROFILE_YAML.replace(f"    {GUIDANCE}\n", ""), "p")) != SHA256
    one = PROFILE_YAML.replace("{value_model: qwen2.5-1.5b}", "{value_model: qwen2.5-1.5b, block_size: 8}")
    two = PROFILE_YAML.replace("{value_model: qwen2.5-1.5b}", "{block_size: 8, value_model: qwen2.5-1.5b}")
    first = parse_profile(one, "x")
    assert profile_sha256(first) == profile_sha256(parse_profile(two, "x"))
    swapped = first.model_copy(update={"variants": dict(reversed(first.variants.items()))})
    assert profile_sha256(first) != profile_sha256(swapped)


def test_no_default_has_changed():
    record = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    current = {key.path: _default(key.field) for key in profile_keys()}
    assert current.keys() == record["profile"].keys(), f"enter new keys with their defaults into {DEFAULTS.name}"
    for kind in ENGINES:
        current |= {key.path.replace("engine.options", kind): _default(key.field) for key in option_keys(kind)}
    before = record["profile"] | record["options"]
    changed = {path for path, default in before.items() if current[path] != default}
    assert changed == set(), "experiments of before would no longer resume; enter the new default on purpose"


def _default(field):
    if field.is_required():
        return "required"
    return "its defaults" if isinstance(field.default, Section) else json.loads(json.dumps(field.default))


def test_every_changed_value_gives_another_identity():
    changes = ["blocks=7", "workload.num_warmups=0", "engine.options.block_size=8", "seed=2", "engine=sim-exact"]
    changes += ["sweep.top_k=[5, 4, 3, 2, 1]", "variants.guided.guidance.value_scale=-1.0"]
    profiles = [load_profile("topk-sweep", overrides=[change]) for change in changes]
    identities = {profile_sha256(profile) for profile in (load_profile("topk-sweep"), *profiles)}
    assert len(identities) == len(changes) + 1
    assert {len(identity) for identity in identities} == {64}
