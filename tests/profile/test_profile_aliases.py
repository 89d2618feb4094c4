"""Older words of profiles: accepted, with a warning that names the new word and the line."""

import subprocess
import sys
import warnings

import pytest

from benchctl.errors import DeprecatedWordWarning, ProfileError
from benchctl.profile.load import load_profile, parse_profile, profile_from_plain

HEAD = """\
name: p
engine: {kind: sim}
workload:
  dataset: generated
  arrival: {kind: burst}
"""
VARIANTS = "variants: {baseline: {}}\n"


def load(tmp_path, text, *, engine=None, overrides=()):
    """The profile, and its warnings."""
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = load_profile(str(path), engine=engine, overrides=overrides)
    assert all(item.category is DeprecatedWordWarning for item in caught)
    return profile, [str(item.message).removeprefix(f"{tmp_path}/") for item in caught]


@pytest.mark.parametrize(
    ("older", "new", "warning"),
    [
        (
            "  if_missing: generated\n",
            "  on_missing_dataset: generate\n",
            (
                "p.yaml:6: workload.if_missing: generated is deprecated since 0.2.0; "
                "write workload.on_missing_dataset: generate"
            ),
        ),
        (
            "  if_missing: fail\n",
            "  on_missing_dataset: fail\n",
            "p.yaml:6: workload.if_missing: this key is deprecated since 0.2.0; write workload.on_missing_dataset",
        ),
        (
            "  prefix_hits: allowed\n",
            "  allow_prefix_cache_hits: true\n",
            (
                "p.yaml:6: workload.prefix_hits: allowed is deprecated since 0.2.0; "
                "write workload.allow_prefix_cache_hits: true"
            ),
        ),
        (
            "stop: forced-natural\n",
            "stop: replay-natural\n",
            "p.yaml:6: stop: forced-natural is deprecated since 0.2.0; write stop: replay-natural",
        ),
        (
            "primary_metrics: [step_ms, bound_stamp_frac]\n",
            "primary_metrics: [step_ms, coalesced_chunk_frac]\n",
            (
                "p.yaml:6: primary_metrics: bound_stamp_frac is deprecated since 0.2.0; "
                "write primary_metrics: coalesced_chunk_frac"
            ),
        ),
        (
            "  prefix_hits: forbidden\n",
            "  allow_prefix_cache_hits: false\n",
            (
                "p.yaml:6: workload.prefix_hits: forbidden is deprecated since 0.2.0; "
                "write workload.allow_prefix_cache_hits: false"
            ),
        ),
    ],
)
def test_an_older_word_means_the_new_one_and_warns_with_its_line(tmp_path, older, new, warning):
    profile, messages = load(tmp_path, HEAD + older + VARIANTS)
    assert messages == [warning]
    assert load(tmp_path, HEAD + new + VARIANTS) == (profile, [])


def test_the_older_section_for_engines_that_cannot_guide_still_counts(tmp_path):
    text = "extends: topk-sweep\nunguided:\n  seed: 9\n  workload: {if_missing: fail}\n"
    profile, messages = load(tmp_path, text, engine="vllm")
    assert (profile.seed, profile.workload.on_missing_dataset) == (9, "fail")
    assert messages == [
        "p.yaml:2: unguided: this key is deprecated since 0.2.0; write for_unguided_engines",
        (
            "p.yaml:4: unguided.workload.if_missing: this key is deprecated since 0.2.0; "
            "write for_unguided_engines.workload.on_missing_dataset"
        ),
    ]


def test_older_words_in_the_section_of_an_engine_are_replaced_too(tmp_path):
    text = "extends: topk-sweep\nper_engine: {vllm: {workload: {prefix_hits: allowed}}}\n"
    profile, messages = load(tmp_path, text, engine="vllm")
    assert profile.workload.allow_prefix_cache_hits
    assert [message.partition(" is ")[0] for message in messages] == [
        "p.yaml:2: per_engine.vllm.workload.prefix_hits: allowed"
    ]


def test_an_older_word_on_the_command_line_names_the_option(tmp_path):
    profile, messages = load(tmp_path, HEAD + VARIANTS, overrides=["workload.if_missing=fail"])
    assert profile.workload.on_missing_dataset == "fail"
    assert messages == [
        "--set: workload.if_missing: this key is deprecated since 0.2.0; write workload.on_missing_dataset"
    ]


def test_an_older_word_below_a_new_one_is_overridden_by_it(tmp_path):
    (tmp_path / "below.yaml").write_text(HEAD + "  if_missing: fail\n" + VARIANTS, encoding="utf-8")
    text = "extends: ./below.yaml\nworkload: {on_missing_dataset: generate}\n"
    profile, messages = load(tmp_path, text)
    assert profile.workload.on_missing_dataset == "generate"
    assert len(messages) == 1


def test_both_words_for_one_key_are_refused(tmp_path):
    with pytest.raises(ProfileError) as error:
        load(tmp_path, HEAD + "  if_missing: fail\n  on_missing_dataset: fail\n" + VARIANTS)
    assert str(error.value) == (
        f"{tmp_path}/p.yaml:6: workload.if_missing: is the older name of on_missing_dataset, which is set too; "
        "remove it"
    )


def test_a_wrong_value_of_an_older_key_is_reported_under_that_key(tmp_path):
    with pytest.raises(ProfileError, match=r"p\.yaml:6: workload\.prefix_hits: expected true or false, found 'no'"):
        load(tmp_path, HEAD + "  prefix_hits: no\n" + VARIANTS)


def test_a_stored_profile_with_older_words_is_read_without_a_warning():
    profile = parse_profile(HEAD + "  prefix_hits: allowed\n  if_missing: generated\n" + VARIANTS, "profile.yaml")
    assert (profile.workload.allow_prefix_cache_hits, profile.workload.on_missing_dataset) == (True, "generate")
    plain = {"workload": {"dataset": "generated", "arrival": {"kind": "burst"}, "if_missing": "fail"}}
    plain |= {"name": "p", "engine": "sim", "variants": {"baseline": {}}}
    assert profile_from_plain(plain, "test").workload.on_missing_dataset == "fail"


def test_the_command_line_prints_the_warning_in_one_line_and_goes_on(tmp_path):
    (tmp_path / "p.yaml").write_text(HEAD + "  if_missing: fail\n" + VARIANTS, encoding="utf-8")
    command = [sys.executable, "-m", "benchctl", "profiles", "validate", "p.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "ok p.yaml: 8 runs in 8 blocks on sim\n"
    assert ended.stderr == (
        "benchctl: warning: p.yaml:6: workload.if_missing: this key is deprecated since 0.2.0; "
        "write workload.on_missing_dataset\n"
    )
