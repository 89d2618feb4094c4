"""Ranges and sizes of a profile: each number has both bounds, and what is too large or too deep is refused."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from benchctl.errors import ProfileError, RecordError
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.errors import option_keys, profile_keys
from benchctl.profile.load import load_profile, parse_profile, profile_from_plain, stored_profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import ResultDirectory
from benchctl.untrusted import (
    EXTENDED_FILES,
    PROFILE_BYTES,
    PROFILE_DEPTH,
    PROFILE_NODES,
    STORED_PROFILE_BYTES,
    STORED_PROFILE_NODES,
)

KEYS = {f"{kind}: {key.path}": key.field for kind in ENGINES for key in option_keys(kind)} | {
    key.path: key.field for key in profile_keys()
}


FREE = {"sweep", "cells"}
"""Keys whose numbers are settings, checked where they are set."""


def unbounded(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    """The numbers of a declaration that lack a lower or an upper bound."""
    if annotation in (int, float):
        names = {name for each in flat(metadata) for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
        if not (names & {"ge", "gt"} and names & {"le", "lt"}):
            yield f"{annotation.__name__} with {sorted(names)}"
    own = getattr(annotation, "__metadata__", ())
    for argument in get_args(annotation)[: 1 if own else None]:
        yield from unbounded(argument, (*metadata, *own))


def flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for each in metadata:
        yield from flat(tuple(each.metadata)) if isinstance(each, FieldInfo) else (each,)


def test_each_number_of_a_profile_has_a_lower_and_an_upper_bound():
    found = {path: [*unbounded(field.annotation, tuple(field.metadata))] for path, field in KEYS.items()}
    assert {path: problems for path, problems in found.items() if problems and path not in FREE} == {}


def refusal(*overrides: str) -> str:
    with pytest.raises(ProfileError) as error:
        load_profile("ci-smoke", overrides=overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.arrival.max_concurrency=65537", "is 65537; it must be at most 65536"),
        ("workload.num_prompts=0", "is 0; it must be at least 1"),
        ("timeouts.ready_s=1e7", "is 10000000.0; it must be at most 1000000"),
        ("sampling.temperature=101", "is 101; it must be at most 100"),
        ("seed=9223372036854775808", "is 9223372036854775808; it must be at most 9223372036854775807"),
        ("request.extra_body.a=9223372036854775808", "is 9223372036854775808; a whole number has 64 bits at most"),
        ("workload.max_tokens=1e400", "'1e400' is not a number that can be stored; write another"),
        (f"blocks={'9' * 5000}", f"{repr('9' * 60)[:57]}... is not a number that can be stored; write another"),
        ('model="a\\nb"', r"is 'a\nb', which has control characters; remove them"),
        ('model="\\x1b[31mred"', r"is '\x1b[31mred', which has control characters; remove them"),
        ('model="a\\0b"', r"is 'a\x00b', which has control characters; remove them"),
        (f"model={'x' * 300}", "longer than a name (255 bytes) or a path can be; shorten it"),
        (f"description={'x' * 70_000}", "has 70,000 characters, more than 65,536; shorten it"),
        ("variants={%s: {}}" % ("x" * 129), "has more than 128 characters; shorten it"),
        ('request.headers={"a\\nb": c}', r"'a\nb' has control characters or more than 256 of any"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_its_key_and_its_bound(override: str, message: str):
    found = refusal(override)
    assert message in found
    assert found.startswith(f"--set: {override.partition('=')[0]}")


def test_plain_values_of_a_program_are_bounded_as_those_of_a_file_are():
    plain = {"name": "p", "engine": {"kind": "sim"}, "variants": {"baseline": {}}, "seed": 10**5000}
    with pytest.raises(ProfileError, match=r"seed: is a whole number of more than 60 digits; .* 64 bits at most"):
        profile_from_plain(plain, "program")
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ProfileError, match="is nested more than 32 deep; write it flatter"):
        profile_from_plain(plain | {"seed": 1, "description": deep}, "program")


def test_many_errors_are_cut(tmp_path):
    lines = "\n".join(f"key{i}: 1" for i in range(200))
    (tmp_path / "many.yaml").write_text(f"extends: ci-smoke\n{lines}\n")
    with pytest.raises(ProfileError, match="200 errors in the profile") as error:
        load_profile(str(tmp_path / "many.yaml"))
    assert str(error.value).endswith("and 150 more")
    assert len(str(error.value).splitlines()) == 52


TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["workload.dataset=synthetic", "workload.num_prompts=1000", "workload.input_len=1000000"],
            "asks for 1,000,000,000 prompt tokens, which no memory holds, more than 500,000,000",
        ),
        (
            [f"sweep.{factor}={TEN}" for factor in ("top_k", "max_num_seqs", "request.extra_body.a")]
            + [f"variants.v{i}.description=x" for i in range(3)],
            "makes 4,001 arms of the variants, more than 1,000",
        ),
        (
            ["variants.v0={server: {value_model: m}, guidance: {}, controls: true}"]
            + [f"sweep.request.extra_body.{name}={TEN}" for name in "abcdefghijkl"],
            "has 1,000,000,000,000 cells, more than 1,000",
        ),
        (
            ["blocks=10000", *(f"variants.v{i}.description=x" for i in range(10))],
            "which makes 120,000 runs, more than 100,000",
        ),
    ],
    ids=["prompts", "arms", "cells", "runs"],
)
def test_what_no_memory_holds_is_counted_before_it_is_formed(overrides, message):
    assert message in refusal(*overrides)


def test_a_run_directory_has_a_name_of_bounded_length():
    profile = load_profile("ci-smoke", overrides=[f"sweep.request.extra_body.{'x' * 100}=['{'y' * 250}']"])
    names = {run.run_id for run in plan_runs(profile).runs}
    assert (len(names), max(map(len, names))) == (4, 200)


HEAD = """\
name: p
engine: {kind: sim}
workload: {dataset: gsm8k, arrival: {kind: burst}}
variants: {baseline: {}}
"""


@pytest.fixture(name="directory")
def _directory(tmp_path, monkeypatch):
    (tmp_path / "profiles" / "engines").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "profiles"


def refusal_of(name):
    with pytest.raises(ProfileError) as error:
        load_profile(name)
    return str(error.value)


def test_a_profile_of_a_hundred_megabytes_is_refused_unread(directory):
    with (directory / "big.yaml").open("w") as file:
        file.truncate(100_000_000)
    assert refusal_of("big") == (
        "profiles/big.yaml: has 100.0 MB, more than 1 MB; no profile needs so much; keep prompts and schemas in "
        "files of their own"
    )


def test_each_file_that_is_extended_each_preset_and_each_option_has_the_same_bound(directory):
    (directory / "base.yaml").write_text(HEAD + "#" * PROFILE_BYTES)
    (directory / "top.yaml").write_text("extends: base\n")
    assert refusal_of("top").startswith("profiles/base.yaml: has 1.0 MB, more than 1 MB")
    (directory / "engines" / "mine.yaml").write_text("kind: sim\n" + "#" * PROFILE_BYTES)
    (directory / "preset.yaml").write_text(HEAD.replace("{kind: sim}", "mine"))
    assert refusal_of("preset").startswith("profiles/engines/mine.yaml: has 1.0 MB, more than 1 MB")
    with pytest.raises(ProfileError, match=r"^--set: .{,300}has 1\.0 MB, more than 1 MB.{,90}$"):
        load_profile("ci-smoke", overrides=[f"description={'x' * (PROFILE_BYTES + 1)}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"sweep: {{top_k: [{', '.join(['1'] * (PROFILE_NODES + 1))}]}}",
            "5: not readable as YAML: more than 20,000 keys",
        ),
        (
            f"a: {'[' * 5000}{']' * 5000}",
            f"5: not readable as YAML: nested more than {PROFILE_DEPTH} deep; write it",
        ),
        (
            f"a: {'{a: ' * 5000}1{'}' * 5000}",
            f"5: not readable as YAML: nested more than {PROFILE_DEPTH} deep; write",
        ),
        ("l0: &l0 [ha]\nl1: [*l0, *l0]", "6: not readable as YAML: aliases (*name) are not"),
    ],
    ids=["many", "lists", "mappings", "aliases"],
)
def test_keys_depth_and_aliases_are_bounded_while_they_are_read(directory, text, message):
    (directory / "p.yaml").write_text(f"{HEAD}{text}\n")
    assert refusal_of("p").startswith(f"profiles/p.yaml:{message}")


def test_files_in_a_row_are_bounded(directory):
    (directory / "p0.yaml").write_text(HEAD)
    for i in range(1, EXTENDED_FILES + 2):
        (directory / f"p{i}.yaml").write_text(f"extends: p{i - 1}\n")
    assert load_profile(f"p{EXTENDED_FILES - 1}").engine.kind == "sim"
    assert refusal_of(f"p{EXTENDED_FILES + 1}") == (
        "profiles/p1.yaml:1: extends: is the 17th file in a row, and 16 may extend one another; join some"
    )


def test_a_stored_profile_has_wider_bounds_and_is_a_damaged_file_beyond_them(tmp_path):
    assert parse_profile(HEAD + "#" * PROFILE_BYTES, "profile.yaml").name == "p"
    with (tmp_path / "profile.yaml").open("w") as file:
        file.truncate(STORED_PROFILE_BYTES + 400_000)
    with pytest.raises(RecordError, match=r"has 8\.\d MB, and no such file is larger than 8 MB; restore"):
        ResultDirectory(tmp_path).profile_yaml()
    many = ", ".join(["1"] * STORED_PROFILE_NODES)
    with pytest.raises(RecordError, match="more than 60,000 keys and values; benchctl stores none of that size"):
        stored_profile(f"{HEAD}sweep: {{top_k: [{many}]}}\n", "profile.yaml")
