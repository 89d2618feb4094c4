"""Sizes of a profile: what is too large or too deep is refused in milliseconds, by file, size and remedy."""

import time
from pathlib import Path

import pytest

from benchctl.errors import ProfileError, RecordError
from benchctl.profile.load import load_profile, parse_profile, stored_profile
from benchctl.records.directory import ResultDirectory
from benchctl.untrusted import (
    EXTENDED_FILES,
    PROFILE_BYTES,
    PROFILE_DEPTH,
    PROFILE_NODES,
    STORED_PROFILE_BYTES,
    STORED_PROFILE_NODES,
)

HEAD = """\
name: p
engine: {kind: sim}
workload: {dataset: gsm8k, arrival: {kind: burst}}
variants: {baseline: {}}
"""


@pytest.fixture(name="directory")
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profiles" / "engines").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "profiles"


def refusal(name: str) -> str:
    with pytest.raises(ProfileError) as error:
        load_profile(name)
    return str(error.value)


def test_a_profile_of_a_hundred_megabytes_is_refused_unread(directory: Path):
    with (directory / "big.yaml").open("w") as file:
        file.write(HEAD)
        file.truncate(100_000_000)
    start = time.monotonic()
    assert refusal("big") == (
        "profiles/big.yaml: has 100.0 MB, more than 1 MB; no profile needs so much; keep prompts and schemas in "
        "files of their own"
    )
    assert time.monotonic() - start < 1


def test_each_file_that_is_extended_and_each_preset_has_the_same_bound(directory: Path):
    (directory / "base.yaml").write_text(HEAD + "#" * PROFILE_BYTES)
    (directory / "top.yaml").write_text("extends: base\n")
    assert refusal("top").startswith("profiles/base.yaml: has 1.0 MB, more than 1 MB")
    (directory / "engines" / "mine.yaml").write_text("kind: sim\n" + "#" * PROFILE_BYTES)
    (directory / "preset.yaml").write_text(HEAD.replace("{kind: sim}", "mine"))
    assert refusal("preset").startswith("profiles/engines/mine.yaml: has 1.0 MB, more than 1 MB")


def test_a_value_of_the_command_line_has_the_same_bound():
    with pytest.raises(ProfileError, match=r"--set: .*has 1\.0 MB, more than 1 MB") as error:
        load_profile("ci-smoke", overrides=[f"description={'x' * (PROFILE_BYTES + 1)}"])
    assert len(str(error.value)) < 400


def test_keys_and_values_are_counted_while_they_are_read(directory: Path):
    many = ", ".join("1" for _ in range(PROFILE_NODES + 1))
    (directory / "many.yaml").write_text(f"{HEAD}sweep: {{top_k: [{many}]}}\n")
    assert refusal("many").startswith(
        "profiles/many.yaml:5: not readable as YAML: more than 20,000 keys and values; no profile needs so much"
    )


@pytest.mark.parametrize("nested", [f"{'[' * 5000}{']' * 5000}", f"{'{a: ' * 5000}1{'}' * 5000}"])
def test_depth_is_bounded_far_before_the_stack_is(directory: Path, nested: str):
    (directory / "deep.yaml").write_text(f"{HEAD}description: {nested}\n")
    assert refusal("deep") == (
        f"profiles/deep.yaml:5: not readable as YAML: nested more than {PROFILE_DEPTH} deep; write it flatter"
    )


def test_aliases_that_multiply_are_refused_at_the_first(directory: Path):
    laughs = "\n".join(f"l{i + 1}: &l{i + 1} [{', '.join([f'*l{i}'] * 10)}]" for i in range(9))
    (directory / "laughs.yaml").write_text(f"{HEAD}l0: &l0 [ha]\n{laughs}\n")
    assert refusal("laughs").startswith("profiles/laughs.yaml:6: not readable as YAML: aliases (*name) are not")


def test_files_in_a_row_are_bounded(directory: Path):
    (directory / "p0.yaml").write_text(HEAD)
    for i in range(1, EXTENDED_FILES + 2):
        (directory / f"p{i}.yaml").write_text(f"extends: p{i - 1}\n")
    assert load_profile(f"p{EXTENDED_FILES - 1}").engine.kind == "sim"
    assert refusal(f"p{EXTENDED_FILES + 1}") == (
        "profiles/p1.yaml:1: extends: is the 17th file in a row, and 16 may extend one another; join some"
    )


def test_a_stored_profile_has_wider_bounds_and_is_a_damaged_file_beyond_them(tmp_path: Path):
    path = tmp_path / "profile.yaml"
    stored = HEAD + "#" * PROFILE_BYTES
    assert parse_profile(stored, "profile.yaml").name == "p"
    path.write_text(HEAD + "#" * STORED_PROFILE_BYTES)
    with pytest.raises(RecordError, match=r"has 8\.4 MB, and no such file is larger than 8 MB; restore"):
        ResultDirectory(tmp_path).profile_yaml()
    many = ", ".join("1" for _ in range(STORED_PROFILE_NODES))
    with pytest.raises(RecordError, match="more than 60,000 keys and values; benchctl stores none of that size"):
        stored_profile(f"{HEAD}sweep: {{top_k: [{many}]}}\n", "profile.yaml")
