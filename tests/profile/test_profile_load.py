"""Reading profiles: layers, the command line, names and paths, identity."""

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import PROFILE_YAML

from benchctl.errors import ProfileError
from benchctl.profile.files import builtin_profiles, list_profiles
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.model import LengthRange
from benchctl.profile.yaml import dump_document, read_document

SMALL = """\
engine: {kind: sim}
workload:
  dataset: generated
  num_prompts: 4
  arrival: {kind: burst}
variants:
  baseline: {}
  wide:
    server: {max_num_seqs: 2048}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with a place for profiles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles" / "engines").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_profile_without_a_name_has_that_of_its_file(here):
    write(here / "profiles/tiny.yaml", SMALL)
    assert load_profile("tiny").name == "tiny"
    assert load_profile("profiles/tiny.yaml").name == "tiny"


def test_a_name_is_found_in_the_current_directory_before_the_built_in_profiles(here):
    assert load_profile("topk-sweep").workload.dataset == "gsm8k"
    write(here / "profiles/topk-sweep.yaml", SMALL)
    assert load_profile("topk-sweep").workload.dataset == "generated"


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known_profiles(here):
    write(here / "profiles/mine.yaml", SMALL)
    with pytest.raises(ProfileError) as error:
        load_profile("topk-swep")
    message = str(error.value)
    assert message.startswith("no profile is called 'topk-swep'. Did you mean 'topk-sweep'? Known profiles: ")
    assert "mine" in message
    assert "lenvm-50x16" in message


def test_a_path_without_a_file_is_named(here):
    with pytest.raises(ProfileError, match=r"^other/x\.yaml: no such file\. Known profiles: "):
        load_profile("other/x.yaml")


def test_extends_merges_mappings_and_replaces_lists(here):
    write(here / "profiles/below.yaml", SMALL + "description: below\nprimary_metrics: [wall_s, step_ms]\n")
    write(
        here / "profiles/above.yaml",
        """\
        extends: below
        workload: {num_prompts: 9}
        primary_metrics: [tpot_ms]
        variants:
          wide: {server: {block_size: 32}}
          narrow: {server: {max_num_seqs: 8}}
        """,
    )
    profile = load_profile("above")
    assert (profile.workload.dataset, profile.workload.num_prompts) == ("generated", 9)
    assert profile.primary_metrics == ("tpot_ms",)
    assert profile.variants["wide"].server == {"max_num_seqs": 2048, "block_size": 32}
    assert list(profile.variants) == ["baseline", "wide", "narrow"]
    assert (profile.name, profile.description) == ("above", "")


def test_extends_follows_a_chain_of_names_and_paths(here):
    write(here / "deep/one.yaml", SMALL)
    write(here / "deep/two.yml", "extends: one\nseed: 5\n")
    write(here / "top.yaml", "extends: deep/two.yml\nblocks: 3\n")
    profile = load_profile("top.yaml")
    assert (profile.seed, profile.blocks, profile.name) == (5, 3, "top")


def test_a_file_may_extend_the_built_in_profile_of_its_own_name(here):
    write(here / "profiles/topk-sweep.yaml", "extends: topk-sweep\nblocks: 12\n")
    profile = load_profile("topk-sweep")
    assert (profile.blocks, profile.workload.dataset) == (12, "gsm8k")


def test_null_drops_an_inherited_variant_and_an_inherited_factor(here):
    write(here / "profiles/below.yaml", SMALL + "sweep: {server.block_size: [8, 16], max_num_seqs: [4]}\n")
    write(
        here / "profiles/above.yaml",
        "extends: below\nvariants: {wide: null, other: {}}\nsweep: {max_num_seqs: null}\n",
    )
    profile = load_profile("above")
    assert list(profile.variants) == ["baseline", "other"]
    assert profile.sweep == {"server.block_size": (8, 16)}


def test_extends_in_a_circle_is_named_with_every_file_in_it(here):
    write(here / "profiles/a.yaml", "extends: b\n")
    write(here / "profiles/b.yaml", "\nextends: c\n")
    write(here / "profiles/c.yaml", "extends: b\n")
    with pytest.raises(ProfileError) as error:
        load_profile("a")
    assert str(error.value) == (
        "profiles/c.yaml:1: extends: goes round in a circle: "
        "profiles/b.yaml -> profiles/c.yaml -> profiles/b.yaml; remove one"
    )


def test_an_engine_preset_is_read_with_the_profiles_own_options_over_it(here):
    write(here / "profiles/engines/slow.yaml", "kind: sim\noptions: {time_scale: 2, block_size: 8}\n")
    write(
        here / "profiles/p.yaml",
        SMALL.replace("engine: {kind: sim}", "engine: {preset: slow, options: {block_size: 64}}"),
    )
    options = load_profile("p").engine.options
    assert (options["time_scale"], options["block_size"], options["noise"]) == (2.0, 64, "none")


def test_an_extending_profile_adds_engine_options_or_replaces_the_engine(here):
    write(here / "profiles/engines/slow.yaml", "kind: sim\noptions: {time_scale: 2, block_size: 8}\n")
    write(here / "profiles/below.yaml", SMALL.replace("engine: {kind: sim}", "engine: slow"))
    write(here / "profiles/adds.yaml", "extends: below\nengine: {options: {block_size: 32}}\n")
    write(here / "profiles/replaces.yaml", "extends: below\nengine: {kind: sim, options: {block_size: 32}}\n")
    adds, replaces = load_profile("adds").engine.options, load_profile("replaces").engine.options
    assert (adds["time_scale"], adds["block_size"]) == (2.0, 32)
    assert (replaces["time_scale"], replaces["block_size"]) == (1.0, 32)


def test_the_engine_option_takes_a_preset_or_a_kind(here):
    write(here / "profiles/p.yaml", SMALL.replace("{kind: sim}", "{kind: sim, options: {block_size: 8}}"))
    assert load_profile("p", engine="sim-exact").engine.options["time_scale"] == 4.0
    assert load_profile("p", engine="sim-exact").engine.options["block_size"] == 16
    write(here / "profiles/engines/sim.yaml", "kind: sim\noptions: {time_scale: 3}\n")
    assert load_profile("p", engine="sim").engine.options["time_scale"] == 3.0


def test_a_device_in_place_of_a_profile_is_no_regular_file(here):
    with pytest.raises(ProfileError, match=r"^/dev/zero: not a regular file\. Known profiles: "):
        load_profile("/dev/zero")
    write(here / "x.yaml", "extends: /dev/zero\n")
    with pytest.raises(ProfileError, match=r"/dev/zero: not a regular file; a path is relative"):
        load_profile("./x.yaml")


@pytest.mark.parametrize("value", ["7", "0.5x"])
def test_an_assignment_to_a_variant_that_the_sweep_replaces_in_every_run_is_refused(value):
    assignment = f"variants.guided.sampling.top_k={value}"
    with pytest.raises(
        ProfileError, match=r"--set: .*guided\.sampling\.top_k: is .*sweep\.top_k replaces it in every"
    ):
        load_profile("topk-sweep", overrides=[assignment])
    assert load_profile("topk-sweep", overrides=["sweep.top_k=null", "variants.guided.sampling.top_k=7"]).variants


def test_assignments_go_over_everything_in_the_order_given():
    profile = load_profile(
        "topk-sweep",
        engine="sim-exact",
        blocks=3,
        seed=11,
        overrides=[
            "blocks=5",
            "workload.num_prompts=2",
            "workload.output_len={mean: 50, cv: 0.2}",
            "engine.options.time_scale=100",
            "variants.guided.server.value_model=qwen2.5-3b",
            "sweep.top_k=[2]",
            "sweep.server.block_size=[16, 32]",
            "description=a = b",
            "workload.path=",
        ],
    )
    assert (profile.blocks, profile.seed, profile.description) == (5, 11, "a = b")
    assert profile.workload.output_len == LengthRange(mean=50, cv=0.2)
    assert (profile.engine.options["time_scale"], profile.engine.options["noise"]) == (100, "none")
    assert profile.sweep == {"top_k": (2,), "server.block_size": (16, 32)}
    assert profile.workload.path is None


def test_an_assignment_of_an_engine_replaces_the_engine():
    assert load_profile("topk-sweep", overrides=["engine=sim-exact"]).engine.options["noise"] == "none"


def test_a_complete_profile_is_read_back_exactly():
    for entry in list_profiles():
        profile = load_profile(entry.name)
        text = dump_profile(profile)
        assert parse_profile(text, "profile.yaml") == profile
        assert dump_profile(parse_profile(text, "profile.yaml")) == text


def test_the_dump_is_also_plain_yaml_for_other_readers():
    document = yaml.safe_load(dump_profile(load_profile("topk-sweep")))
    assert document["sweep"] == {"top_k": [1, 2, 3, 4, 5]}
    assert document["variants"]["guided"]["guidance"]["gamma"] == 0.997


def test_parse_profile_takes_a_text_that_extends_nothing():
    assert parse_profile(PROFILE_YAML, "here").name == "built"
    with pytest.raises(
        ProfileError, match=r"^here:1: extends: a stored profile is complete and cannot extend another"
    ):
        parse_profile("extends: topk-sweep\n", "here")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, min_size=1, max_size=4))
def test_whatever_is_dumped_is_read_back_with_the_same_types(document):
    errors = []
    tree = read_document(dump_document(document), "x", errors)
    assert errors == []
    assert repr(tree.values) == repr(document)


@pytest.mark.parametrize(
    "text", ["1e3", "yes", "0o17", "1:30", "2026-01-01", "null", "", "~", "01", "a: b", "5\n", ".inf"]
)
def test_text_that_looks_like_something_else_stays_text(text):
    profile = parse_profile(PROFILE_YAML, "x").model_copy(update={"description": text})
    assert parse_profile(dump_profile(profile), "x").description == text


def test_the_identity_of_a_profile_changes_with_what_it_measures():
    profile = load_profile("topk-sweep")
    assert profile_sha256(profile) == profile_sha256(load_profile("topk-sweep"))
    assert len(profile_sha256(profile)) == 64
    others = [
        load_profile("topk-sweep", seed=2),
        load_profile("topk-sweep", engine="sim-exact"),
        load_profile("topk-sweep", overrides=["sweep.top_k=[5, 4, 3, 2, 1]"]),
        load_profile("topk-sweep", overrides=["variants.guided.guidance.value_scale=-1.0"]),
    ]
    assert len({profile_sha256(profile), *(profile_sha256(other) for other in others)}) == 5


def test_the_order_of_options_does_not_change_the_identity_but_that_of_variants_does():
    one = PROFILE_YAML.replace("{value_model: qwen2.5-1.5b}", "{value_model: qwen2.5-1.5b, block_size: 8}")
    two = PROFILE_YAML.replace("{value_model: qwen2.5-1.5b}", "{block_size: 8, value_model: qwen2.5-1.5b}")
    assert profile_sha256(parse_profile(one, "x")) == profile_sha256(parse_profile(two, "x"))
    first = parse_profile(SMALL + "  narrow: {}\nname: x\n", "x")
    swapped = dict(reversed(first.variants.items()))
    assert profile_sha256(first) != profile_sha256(first.model_copy(update={"variants": swapped}))


def test_profiles_are_listed_by_name_with_the_users_own_first(here):
    write(here / "profiles/aa.yaml", SMALL + "description: mine\n")
    write(here / "profiles/broken.yaml", "a: [\n")
    entries = {entry.name: entry for entry in list_profiles()}
    assert list(entries) == sorted(entries)
    assert (entries["aa"].description, entries["aa"].path) == ("mine", Path("profiles/aa.yaml"))
    assert entries["broken"].description == "not readable; 'benchctl profiles validate' reports the error"
    assert entries["topk-sweep"].path.parent == builtin_profiles()
    assert entries["topk-sweep"].description


def test_the_profiles_of_an_installed_package_lie_inside_it(tmp_path, monkeypatch):
    assert builtin_profiles() == Path(__file__).resolve().parents[2] / "profiles"
    (tmp_path / "_profiles").mkdir()
    monkeypatch.setattr("benchctl.profile.files._PACKAGE", tmp_path)
    assert builtin_profiles() == tmp_path / "_profiles"


def test_a_profile_may_carry_another_name_than_its_file(here):
    write(here / "profiles/tiny.yaml", "name: other\n" + SMALL)
    assert load_profile("tiny").name == "other"


def test_a_preset_that_cannot_be_read_is_named(here):
    (here / "profiles/engines/odd.yaml").mkdir()
    write(here / "profiles/tiny.yaml", SMALL.replace("{kind: sim}", "odd"))
    with pytest.raises(ProfileError) as error:
        load_profile("tiny")
    assert str(error.value) == (
        "profiles/engines/odd.yaml: not readable: Is a directory; check the file and its permissions"
    )


def test_a_bare_kind_stands_for_an_engine_without_options(here, monkeypatch):
    monkeypatch.setattr("benchctl.profile.files.preset_files", dict)
    write(here / "profiles/tiny.yaml", SMALL.replace("{kind: sim}", "sim"))
    assert load_profile("tiny").engine.options["time_scale"] == 1.0
