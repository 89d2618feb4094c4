"""The identity of an experiment: what changes it, and what does not."""

import json
from pathlib import Path

import pytest
from support.results.builders import PROFILE_YAML

from benchctl.profile.choices import Section
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.errors import option_keys, profile_keys
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
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


def test_new_fields_with_defaults_leave_the_identity_as_it_was():
    assert profile_sha256(later(PROFILE_YAML)) == profile_sha256(parse_profile(PROFILE_YAML, "p.yaml"))


def test_new_fields_that_are_set_change_the_identity():
    changed = [
        later(PROFILE_YAML, new_number=4),
        later(PROFILE_YAML, new_section={"depth": 5}),
        later(PROFILE_YAML, new_option={}),
    ]
    assert len({profile_sha256(profile) for profile in (later(PROFILE_YAML), *changed)}) == 4


def test_a_default_that_is_written_out_does_not_change_the_identity():
    written_out = (
        PROFILE_YAML + "blocks: 8\nsampling: {top_p: 1.0}\nbaseline: baseline\ntimeouts: {ready_s: 600.0}\n"
    )
    assert profile_sha256(parse_profile(written_out, "p")) == profile_sha256(parse_profile(PROFILE_YAML, "p"))


def test_other_words_for_the_same_experiment_do_not_change_the_identity():
    text = PROFILE_YAML + "description: other words\n"
    described = text.replace("baseline: {}", "baseline: {description: the stock server}")
    assert described.count("description") == 2
    assert profile_sha256(parse_profile(described, "p")) == profile_sha256(parse_profile(PROFILE_YAML, "p"))


def test_a_variant_with_guidance_at_its_defaults_is_another_than_one_without():
    text = PROFILE_YAML.replace("guidance: {mode: centered_exp, value_scale: 0.0}", "guidance: {}")
    without = PROFILE_YAML.replace("    guidance: {mode: centered_exp, value_scale: 0.0}\n", "")
    assert profile_sha256(parse_profile(text, "p")) == profile_sha256(parse_profile(PROFILE_YAML, "p"))
    assert profile_sha256(parse_profile(text, "p")) != profile_sha256(parse_profile(without, "p"))


def test_a_profile_read_back_from_its_dump_has_its_identity():
    for name in ("topk-sweep", "controls", "natural", "aa"):
        profile = load_profile(name)
        assert profile_sha256(parse_profile(dump_profile(profile), "profile.yaml")) == profile_sha256(profile)


def test_no_default_has_changed():
    record = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    defaults = {key.path: _default(key.field) for key in profile_keys()}
    options = {
        key.path.replace("engine.options", kind): _default(key.field)
        for kind in ENGINES
        for key in option_keys(kind)
    }
    assert defaults.keys() == record["profile"].keys(), f"enter new keys with their defaults into {DEFAULTS.name}"
    current = defaults | options
    changed = {
        path for path, default in (record["profile"] | record["options"]).items() if current[path] != default
    }
    assert changed == set(), "experiments of before would no longer resume; enter the new default on purpose"


def _default(field):
    if field.is_required():
        return "required"
    return "its defaults" if isinstance(field.default, Section) else json.loads(json.dumps(field.default))


@pytest.mark.parametrize("assignment", ["blocks=7", "workload.num_warmups=0", "engine.options.block_size=8"])
def test_every_changed_value_gives_another_identity(assignment):
    assert profile_sha256(load_profile("topk-sweep", overrides=[assignment])) != profile_sha256(
        load_profile("topk-sweep")
    )
