"""One profile for engines that guide and for those that cannot."""

import textwrap
from pathlib import Path

import pytest

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
from benchctl.profile.engine_table import ENGINES, guiding_kinds
from benchctl.profile.load import dump_profile, load_profile, parse_profile
from benchctl.profile.planning import arms, variant_settings

UNGUIDING = sorted(kind for kind in ENGINES.keys() - guiding_kinds() if ENGINES[kind].serves_requests)
URL = ("engine.options.url=http://127.0.0.1:1",)


def load(name, kind, *overrides):
    return load_profile(name, engine=kind, overrides=(*overrides, *(URL if kind == "attach" else ())))


def write(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", UNGUIDING)
def test_the_top_k_sweep_measures_the_sampler_alone_where_nothing_guides(kind):
    profile = load("topk-sweep", kind)
    assert list(profile.variants) == ["baseline", "sampled"]
    assert profile.sweep == {"top_k": (1, 2, 3, 4, 5)}
    assert profile.workload.samples_as == "requests"
    top_k = [variant_settings(profile, *arm).sampling.top_k for arm in arms(profile)]
    assert top_k == [-1, 1, 2, 3, 4, 5]


def test_an_experiment_of_requests_refuses_an_engine_that_serves_none():
    with pytest.raises(ProfileError, match="is 'gsm8k', and engine 'micro' serves no requests; set dataset: none"):
        load("topk-sweep", "micro")


def test_an_engine_that_serves_requests_refuses_a_profile_without_any():
    with pytest.raises(ProfileError, match="is none, and engine 'sim' serves requests; choose a dataset"):
        load_profile("topk-sweep", overrides=["workload.dataset=none"])


def test_the_simulator_still_guides():
    profile = load_profile("topk-sweep")
    assert list(profile.variants) == ["baseline", "guided"]
    assert profile.workload.samples_as == "one-request"


@pytest.mark.parametrize("kind", UNGUIDING)
def test_an_a_a_experiment_has_the_same_two_names_on_every_engine(kind):
    profile = load("aa", kind)
    assert list(profile.variants) == ["baseline", "again"]
    assert profile.sweep == {}
    baseline, again = (variant_settings(profile, *arm) for arm in arms(profile))
    assert declared_settings(baseline, again, kind) == frozenset()


@pytest.mark.parametrize("name", ["lenvm-50x16", "model-size-sweep"])
def test_an_experiment_about_guidance_refuses_engines_that_load_no_value_model(name):
    with pytest.raises(ProfileError, match="this experiment needs an engine that guides: sglang-lenvm, sim, vllm"):
        load(name, "vllm")


@pytest.mark.parametrize("kind", ["sim", "vllm", "sglang-lenvm", "attach"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fused-vs-two-phase", {"fused", "value_reuse"}),
        ("noop-skip", {"skip_noop"}),
        ("guided-switches", {"value_graphs", "value_kernels", "value_skips_early", "value_reuse"}),
    ],
)
def test_options_that_another_engine_alone_has_are_refused_in_one_sentence_that_names_it(name, options, kind):
    with pytest.raises(ProfileError) as error:
        load_profile(name, engine=kind)
    (sentence,) = str(error.value).splitlines()
    needs, _, remedy = sentence.partition(": this experiment needs an engine with ")[2].partition(", which ")
    assert options <= set(needs.split(", "))
    assert remedy == f"{kind!r} lacks: vllm-lenvm; name one with --engine"


def test_options_that_no_engine_has_together_are_told_one_by_one(tmp_path):
    name = write(tmp_path / "p.yaml", "extends: aa\nvariants: {again: {server: {fused: true, noise: none}}}\n")
    with pytest.raises(ProfileError, match=r"p\.yaml:2: variants\.again\.server\.fused: unknown key"):
        load(name, "sim")


def test_what_a_complete_profile_says_has_no_overlay_left():
    profile = load("topk-sweep", "vllm")
    text = dump_profile(profile)
    assert "for_unguided_engines" not in text
    assert parse_profile(text, "profile.yaml") == profile


def test_a_file_that_extends_goes_over_the_overlay_of_the_one_it_extends(tmp_path):
    write(tmp_path / "below.yaml", "extends: topk-sweep\nblocks: 3\nfor_unguided_engines: {blocks: 4, seed: 9}\n")
    above = write(tmp_path / "above.yaml", "extends: ./below.yaml\nblocks: 5\n")
    assert (load(above, "vllm").blocks, load(above, "vllm").seed) == (5, 9)
    assert (load(above, "sim").blocks, load(above, "sim").seed) == (5, 1)


def test_the_overlay_may_choose_another_engine_preset_no_more_than_the_rest(tmp_path):
    name = write(tmp_path / "p.yaml", "extends: topk-sweep\nfor_unguided_engines: {timeouts: {ready_s: 7}}\n")
    assert load(name, "llamacpp").timeouts.ready_s == 7
    assert load(name, "sim").timeouts.ready_s == 600


def test_an_overlay_that_is_not_a_mapping_is_reported_with_its_line(tmp_path):
    name = write(tmp_path / "p.yaml", "extends: topk-sweep\nfor_unguided_engines: 3\n")
    with pytest.raises(
        ProfileError, match=r"p\.yaml:2: for_unguided_engines: is 3; write the keys that replace others"
    ):
        load(name, "sim")


def test_a_misspelt_drop_is_found_where_guidance_is_possible(tmp_path):
    name = write(tmp_path / "p.yaml", "extends: topk-sweep\nvariants: {guidde: null}\n")
    with pytest.raises(ProfileError, match=r"variants\.guidde: expected a mapping, found nothing"):
        load(name, "sim")


def test_guidance_on_an_engine_that_cannot_is_refused_at_its_line(tmp_path):
    text = """\
    extends: topk-sweep
    variants:
      sampled:
        guidance: {mode: mul}
    """
    name = write(tmp_path / "p.yaml", text)
    with pytest.raises(ProfileError, match=r"p\.yaml:4: .*guidance: .* engine 'vllm' loads no value model"):
        load(name, "vllm")


def test_the_interpreter_of_an_engine_may_stand_beside_its_options():
    profile = load(
        "aa", "vllm", "engine.python=/opt/a/bin/python", "variants.again.server.python=/opt/b/bin/python"
    )
    interpreters = [variant_settings(profile, *arm).server.python for arm in arms(profile)]
    assert interpreters == ["/opt/a/bin/python", "/opt/b/bin/python"]
    declared = declared_settings(*(variant_settings(profile, *arm) for arm in arms(profile)), "vllm")
    assert {"server.python", "engine_version", "server.version", "argv.program"} <= declared


def test_the_simulator_has_no_interpreter_of_its_own():
    with pytest.raises(ProfileError, match="python: unknown key"):
        load("aa", "sim", "engine.python=/opt/a/bin/python")


def test_what_a_file_says_of_one_kind_of_engine_goes_over_it_there_and_nowhere_else(tmp_path):
    text = "extends: topk-sweep\nblocks: 3\nper_engine: {vllm: {blocks: 4, seed: 9}, sim: {seed: 8}}\n"
    name = write(tmp_path / "p.yaml", text)
    profiles = {kind: load(name, kind) for kind in ("vllm", "sim", "llamacpp")}
    assert {kind: (profile.blocks, profile.seed) for kind, profile in profiles.items()} == {
        "vllm": (4, 9),
        "sim": (3, 8),
        "llamacpp": (3, 1),
    }


def test_a_file_that_extends_goes_over_what_the_one_below_says_of_an_engine(tmp_path):
    write(tmp_path / "below.yaml", "extends: topk-sweep\nper_engine: {vllm: {blocks: 4, seed: 9}}\n")
    above = write(tmp_path / "above.yaml", "extends: ./below.yaml\nblocks: 5\n")
    assert (load(above, "vllm").blocks, load(above, "vllm").seed) == (5, 9)
    changed = load_profile(above, engine="vllm", overrides=["seed=7"])
    assert changed.seed == 7


def test_the_kind_that_a_preset_stands_for_decides_what_goes_over_a_file():
    guided = {
        engine: variant_settings(load_profile("topk-sweep", engine=engine), "guided", {"top_k": 2}).server
        for engine in ("vllm-lenvm-gpu", "vllm-lenvm", "sglang-lenvm", "sim")
    }
    assert {engine: server.overlap_schedule for engine, server in guided.items()} == {
        "vllm-lenvm-gpu": None,
        "vllm-lenvm": None,
        "sglang-lenvm": False,
        "sim": False,
    }


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("3", r"p\.yaml:2: per_engine: is 3; write kinds of engines"),
        ("{vlm: {blocks: 1}}", r"p\.yaml:2: per_engine\.vlm: is not a kind of engine; .* did you mean 'vllm'"),
        ("{vllm: 3}", r"per_engine\.vllm: is 3; write the keys to replace on vllm"),
        ("{vllm: {engine: sim}}", r"per_engine\.vllm: chooses another engine; write only its options"),
        ("{vllm: {engine: {kind: sim}}}", r"per_engine\.vllm: chooses another engine"),
    ],
)
def test_what_cannot_override_a_file_for_one_engine_is_reported_with_its_line(tmp_path, section, problem):
    name = write(tmp_path / "p.yaml", f"extends: topk-sweep\nper_engine: {section}\n")
    with pytest.raises(ProfileError, match=problem):
        load(name, "sim")
