"""Reading profiles: layers, the command line, names and paths, and the identity of an experiment."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml
from generate import option_keys
from hypothesis import given, settings, strategies as st
from support.results.builders import PROFILE_YAML

from benchctl.errors import ProfileError
from benchctl.profile.choices import Section
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.errors import profile_keys
from benchctl.profile.files import list_profiles
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.model import LengthRange, Profile, Workload
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
    """An empty current directory with a folder of profiles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles" / "engines").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_profile_has_its_own_name_or_that_of_its_file(here):
    write(here / "profiles/tiny.yaml", SMALL)
    assert load_profile("tiny").name == load_profile("profiles/tiny.yaml").name == "tiny"
    write(here / "profiles/tiny.yaml", "name: other\n" + SMALL)
    assert load_profile("tiny").name == "other"


def test_a_name_is_found_in_the_current_directory_before_the_built_in_profiles_and_may_extend_those(here):
    assert load_profile("topk-sweep").workload.dataset == "gsm8k"
    write(here / "profiles/topk-sweep.yaml", SMALL)
    assert load_profile("topk-sweep").workload.dataset == "generated"
    write(here / "profiles/topk-sweep.yaml", "extends: topk-sweep\nblocks: 12\n")
    assert (load_profile("topk-sweep").blocks, load_profile("topk-sweep").workload.dataset) == (12, "gsm8k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "topk-swep",
            r"no profile is called 'topk-swep'\. Did you mean 'topk-sweep'\? Known profiles: .*lenvm.*mine.*",
        ),
        ("other/x.yaml", r"other/x\.yaml: no such file\. Known profiles: .*"),
        ("/dev/zero", r"/dev/zero: not a regular file\. Known profiles: .*"),
        ("./x.yaml", r"x\.yaml:1: extends: /dev/zero: not a regular file; a path is relative.*"),
        (
            "a",
            "profiles/c.yaml:1: extends: goes round in a circle: profiles/b.yaml -> .*b.yaml; remove one",
        ),
        ("odd", "profiles/engines/odd.yaml: not readable: Is a directory; check the file and its permissions"),
    ],
    ids=["misspelt", "no file", "device", "extended device", "circle", "preset"],
)
def test_a_file_that_cannot_be_read_is_named_with_the_remedy(here, name, message):
    files = {"profiles/a": "extends: b", "profiles/b": "\nextends: c", "profiles/c": "extends: b"}
    files |= {
        "profiles/mine": SMALL,
        "profiles/odd": SMALL.replace("{kind: sim}", "odd"),
        "x": "extends: /dev/zero",
    }
    for path, text in files.items():
        write(here / f"{path}.yaml", text + "\n")
    (here / "profiles/engines/odd.yaml").mkdir()
    with pytest.raises(ProfileError, match=f"^{message}$"):
        load_profile(name)


def test_extends_merges_mappings_and_replaces_lists_along_a_chain_of_names_and_paths(here):
    write(here / "deep/one.yaml", SMALL + "description: below\nprimary_metrics: [wall_s, step_ms]\n")
    write(here / "deep/two.yml", "extends: one\nseed: 5\n")
    write(
        here / "above.yaml",
        """\
        extends: deep/two.yml
        workload: {num_prompts: 9}
        primary_metrics: [tpot_ms]
        variants:
          wide: {server: {block_size: 32}}
          narrow: {server: {max_num_seqs: 8}}
        """,
    )
    profile = load_profile("above.yaml")
    assert (profile.workload.dataset, profile.workload.num_prompts, profile.seed) == ("generated", 9, 5)
    assert profile.primary_metrics == ("tpot_ms",)
    assert profile.variants["wide"].server == {"max_num_seqs": 2048, "block_size": 32}
    assert list(profile.variants) == ["baseline", "wide", "narrow"]
    assert (profile.name, profile.description) == ("above", "")


def test_null_drops_an_inherited_variant_and_an_inherited_factor(here):
    write(here / "profiles/below.yaml", SMALL + "sweep: {server.block_size: [8, 16], max_num_seqs: [4]}\n")
    above = "extends: below\nvariants: {wide: null, other: {}}\nsweep: {max_num_seqs: null}\n"
    profile = load_profile(str(write(here / "above.yaml", above)))
    assert list(profile.variants) == ["baseline", "other"]
    assert profile.sweep == {"server.block_size": (8, 16)}


@pytest.mark.parametrize(
    ("below", "above", "options"),
    [
        ("{preset: slow, options: {block_size: 64}}", "{}", (2.0, 64)),
        ("slow", "{options: {block_size: 32}}", (2.0, 32)),
        ("slow", "{kind: sim, options: {block_size: 32}}", (1.0, 32)),
    ],
    ids=["over it", "extended", "replaced"],
)
def test_a_profile_adds_options_to_an_engine_preset_or_replaces_it(here, below, above, options):
    write(here / "profiles/engines/slow.yaml", "kind: sim\noptions: {time_scale: 2, block_size: 8}\n")
    write(here / "profiles/below.yaml", SMALL.replace("{kind: sim}", below))
    write(here / "profiles/above.yaml", f"extends: below\nengine: {above}\n")
    engine = load_profile("above").engine
    assert (engine.options["time_scale"], engine.options["block_size"]) == options


def test_the_engine_option_takes_a_preset_or_a_kind(here):
    write(here / "profiles/p.yaml", SMALL.replace("{kind: sim}", "{kind: sim, options: {block_size: 8}}"))
    options = load_profile("p", engine="sim-exact").engine.options
    assert (options["time_scale"], options["block_size"]) == (4.0, 16)
    write(here / "profiles/engines/sim.yaml", "kind: sim\noptions: {time_scale: 3}\n")
    assert load_profile("p", engine="sim").engine.options["time_scale"] == 3.0


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


def test_a_complete_profile_is_read_back_exactly_and_plain_yaml_for_other_readers():
    for entry in list_profiles():
        profile = load_profile(entry.name)
        text = dump_profile(profile)
        again = parse_profile(text, "profile.yaml")
        assert again == profile
        assert (dump_profile(again), profile_sha256(again)) == (text, profile_sha256(profile))
    assert yaml.safe_load(dump_profile(load_profile("topk-sweep")))["sweep"] == {"top_k": [1, 2, 3, 4, 5]}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), plain, min_size=1, max_size=4))
def test_whatever_is_dumped_is_read_back_with_the_same_types(document):
    errors = []
    tree = read_document(dump_document(document), "x", errors)
    assert (errors, repr(tree.values)) == ([], repr(document))


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
