"""Values of a profile: both bounds of each number, what is too large or too deep, and no value with a traceback."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from generate import option_keys
from pydantic.fields import FieldInfo
from support.cli import in_process
from support.hostile_values import PROFILES, VALUES, keys_of, profile_text

from benchctl.cli.conduct import prepare_experiment
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.errors import ProfileError, RecordError
from benchctl.measure.run import noise_seed
from benchctl.measure.warmup import warmup_bursts
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.errors import profile_keys
from benchctl.profile.load import load_profile, parse_profile, profile_from_plain, stored_profile
from benchctl.profile.planning import plan_runs, variant_settings
from benchctl.records.directory import ResultDirectory, run_directory_name
from benchctl.sim.__main__ import parser, read_config
from benchctl.sim.virtual import VirtualServer
from benchctl.untrusted import (
    EXTENDED_FILES,
    PROFILE_BYTES,
    PROFILE_DEPTH,
    PROFILE_NODES,
    STORED_PROFILE_BYTES,
    STORED_PROFILE_NODES,
)
from benchctl.workload.prepare import needs_lengths

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


def test_plain_values_of_a_program_are_bounded_as_those_of_a_file_are():
    plain = {"name": "p", "engine": {"kind": "sim"}, "variants": {"baseline": {}}, "seed": 10**5000}
    with pytest.raises(ProfileError, match=r"seed: is a whole number of more than 60 digits; .* 64 bits at most"):
        profile_from_plain(plain, "program")
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ProfileError, match="is nested more than 32 deep; write it flatter"):
        profile_from_plain(plain | {"seed": 1, "description": deep}, "program")


def test_a_run_directory_has_a_name_of_bounded_length():
    profile = load_profile("ci-smoke", overrides=[f"sweep.request.extra_body.{'x' * 100}=['{'y' * 250}']"])
    names = {run.run_id for run in plan_runs(profile).runs}
    assert (len(names), max(map(len, names))) == (4, 200)


SMALLEST = """\
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


def refusal_of_file(name):
    with pytest.raises(ProfileError) as error:
        load_profile(name)
    return str(error.value)


def test_a_profile_of_a_hundred_megabytes_is_refused_unread(directory):
    with (directory / "big.yaml").open("w") as file:
        file.truncate(100_000_000)
    assert refusal_of_file("big") == (
        "profiles/big.yaml: has 100.0 MB, more than 1 MB; no profile needs so much; keep prompts and schemas in "
        "files of their own"
    )


def test_each_file_that_is_extended_each_preset_and_each_option_has_the_same_bound(directory):
    (directory / "base.yaml").write_text(SMALLEST + "#" * PROFILE_BYTES)
    (directory / "top.yaml").write_text("extends: base\n")
    assert refusal_of_file("top").startswith("profiles/base.yaml: has 1.0 MB, more than 1 MB")
    (directory / "engines" / "mine.yaml").write_text("kind: sim\n" + "#" * PROFILE_BYTES)
    (directory / "preset.yaml").write_text(SMALLEST.replace("{kind: sim}", "mine"))
    assert refusal_of_file("preset").startswith("profiles/engines/mine.yaml: has 1.0 MB, more than 1 MB")
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
    (directory / "p.yaml").write_text(f"{SMALLEST}{text}\n")
    assert refusal_of_file("p").startswith(f"profiles/p.yaml:{message}")


def test_many_errors_are_cut(directory):
    (directory / "many.yaml").write_text("extends: ci-smoke\n" + "".join(f"key{i}: 1\n" for i in range(200)))
    heading, *errors, last = refusal_of_file("many").splitlines()
    assert (heading, len(errors), last) == ("200 errors in the profile", 50, "and 150 more")


def test_files_in_a_row_are_bounded(directory):
    (directory / "p0.yaml").write_text(SMALLEST)
    for i in range(1, EXTENDED_FILES + 2):
        (directory / f"p{i}.yaml").write_text(f"extends: p{i - 1}\n")
    assert load_profile(f"p{EXTENDED_FILES - 1}").engine.kind == "sim"
    assert refusal_of_file(f"p{EXTENDED_FILES + 1}") == (
        "profiles/p1.yaml:1: extends: is the 17th file in a row, and 16 may extend one another; join some"
    )


def test_a_stored_profile_has_wider_bounds_and_is_a_damaged_file_beyond_them(tmp_path):
    assert parse_profile(SMALLEST + "#" * PROFILE_BYTES, "profile.yaml").name == "p"
    with (tmp_path / "profile.yaml").open("w") as file:
        file.truncate(STORED_PROFILE_BYTES + 400_000)
    with pytest.raises(RecordError, match=r"has 8\.\d MB, and no such file is larger than 8 MB; restore"):
        ResultDirectory(tmp_path).profile_yaml()
    many = ", ".join(["1"] * STORED_PROFILE_NODES)
    with pytest.raises(RecordError, match="more than 60,000 keys and values; benchctl stores none of that size"):
        stored_profile(f"{SMALLEST}sweep: {{top_k: [{many}]}}\n", "profile.yaml")


SIMULATED: Final = ("sim", "guided", "speculation")
LONG: Final = re.compile(
    r"=(1000000000|1e26|'?x{9})|time_scale|start_delay_s|num_prompts|samples_per_prompt|max_tokens"
)
"""Assignments whose runs are honestly long."""
CASES: Final = [(name, f"{key}={value}") for name in PROFILES for key in keys_of(name) for value in VALUES]
"""Names of profiles, and assignments."""
OF_SIMULATOR: Final = [case for case in CASES if case[0] in SIMULATED and not LONG.search(case[1])]


@pytest.fixture(name="directory_of_profiles")
def _directory_of_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No name of a tokenizer or a model is looked up in the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOPE", raising=False)
    for name in PROFILES:
        Path(f"{name}.yaml").write_text(profile_text(name))


def check_plan(name: str, assignment: str) -> int:
    """The exit code of a plan with one assignment."""
    code, *texts = in_process("run", f"{name}.yaml", "--set", assignment, "--dry-run")
    text = "".join(texts)
    problem = f"{name} --set {assignment[:80]}: exit {code}: {text[:300]}"
    assert code in {0, 2}, problem
    if code:
        lines = text.splitlines()
        assert len(lines) <= 60, problem
        assert max(map(len, lines)) <= 1500, problem
        assert all(character.isprintable() or character == "\n" for character in text), problem
        key, _, value = assignment.partition("=")
        assert any(part in text for part in (*key.split("."), value)), problem
    return code


def check_start(name: str, assignment: str) -> None:
    """Do one run of each arm in virtual time, and read the command line of its server."""
    profile = load_profile(f"{name}.yaml", overrides=[assignment], is_to_send=True)
    if needs_lengths(profile):
        return
    requests, engine = prepare_experiment(profile).requests, engine_for("sim")
    for planned in {(run.variant, str(run.cell)): run for run in plan_runs(profile).runs}.values():
        settings = variant_settings(profile, planned.variant, planned.cell)
        site = LaunchSite(port=1, directory=Path.cwd(), noise_seed=noise_seed(profile, planned))
        read_config(parser().parse_args(engine.argv(settings, site)[3:]).config)
        server = VirtualServer(settings, on_step=lambda _: None)
        for burst in warmup_bursts(requests, profile, settings):
            list(server.send(burst))
        records = list(server.send(requests, profile.workload.arrival))
        assert any(record.error is None for record in records), (name, assignment, records[0].error)
        assert len(run_directory_name(planned.index, planned.block, planned.variant, planned.cell)) <= 255


@pytest.mark.parametrize(
    "cases",
    [
        [*random.Random(1).sample(CASES, 50), *random.Random(2).sample(OF_SIMULATOR, 40)],
        *(
            pytest.param([case for case in CASES if case[0] == name], marks=[pytest.mark.nightly, pytest.mark.slow])
            for name in PROFILES
        ),
    ],
    ids=["a sample", *PROFILES],
)
@pytest.mark.usefixtures("directory_of_profiles")
def test_values_for_all_keys_end_a_plan_with_code_0_or_2_and_can_be_run_on_the_simulator(cases):
    codes = {case: check_plan(*case) for case in cases}
    assert set(codes.values()) == {0, 2}
    for case in set(OF_SIMULATOR) & codes.keys():
        if codes[case] == 0:
            check_start(*case)
