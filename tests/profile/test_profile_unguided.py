"""One profile for engines that guide and for those that cannot."""

import itertools

import pytest

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
from benchctl.profile.engine_table import ENGINES, guiding_kinds
from benchctl.profile.load import dump_profile, load_profile
from benchctl.profile.planning import arms, variant_settings

UNGUIDING = sorted(kind for kind in ENGINES.keys() - guiding_kinds() if ENGINES[kind].serves_requests)
URL = ("engine.options.url=http://127.0.0.1:1",)


def load(name, kind, *overrides):
    return load_profile(name, engine=kind, overrides=(*overrides, *(URL if kind == "attach" else ())))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", UNGUIDING)
def test_the_top_k_sweep_measures_the_sampler_alone_where_nothing_guides(kind):
    profile = load("topk-sweep", kind)
    assert list(profile.variants) == ["baseline", "sampled"]
    assert profile.sweep == {"top_k": (1, 2, 3, 4, 5)}
    assert profile.workload.samples_as == "requests"
    assert [variant_settings(profile, *arm).sampling.top_k for arm in arms(profile)] == [-1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", UNGUIDING)
def test_an_a_a_experiment_has_the_same_two_names_on_every_engine(kind):
    profile = load("aa", kind)
    assert list(profile.variants) == ["baseline", "again"]
    assert profile.sweep == {}
    baseline, again = (variant_settings(profile, *arm) for arm in arms(profile))
    assert declared_settings(baseline, again, kind) == frozenset()


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


def test_what_a_complete_profile_says_has_no_overlay_left():
    assert "for_unguided_engines" not in dump_profile(load("topk-sweep", "vllm"))


def test_the_interpreter_of_an_engine_may_stand_beside_its_options():
    profile = load(
        "aa", "vllm", "engine.python=/opt/a/bin/python", "variants.again.server.python=/opt/b/bin/python"
    )
    interpreters = [variant_settings(profile, *arm).server.python for arm in arms(profile)]
    assert interpreters == ["/opt/a/bin/python", "/opt/b/bin/python"]
    declared = declared_settings(*(variant_settings(profile, *arm) for arm in arms(profile)), "vllm")
    assert {"server.python", "engine_version", "server.version", "argv.program"} <= declared
    with pytest.raises(ProfileError, match="python: unknown key"):
        load("aa", "sim", "engine.python=/opt/a/bin/python")


@pytest.mark.parametrize(
    ("section", "blocks_and_seeds"),
    [
        (
            "per_engine: {vllm: {blocks: 4, seed: 9}, sim: {seed: 8}}",
            {"vllm": (4, 9), "sim": (3, 8), "llamacpp": (3, 1)},
        ),
        ("for_unguided_engines: {blocks: 4, seed: 9}", {"vllm": (4, 9), "sim": (3, 1), "llamacpp": (4, 9)}),
    ],
    ids=["per engine", "unguided"],
)
def test_what_a_file_says_of_some_engines_goes_over_it_there_and_below_a_file_that_extends(
    tmp_path, section, blocks_and_seeds
):
    below = write(tmp_path / "below.yaml", f"extends: topk-sweep\nblocks: 3\n{section}\n")
    above = write(tmp_path / "above.yaml", "extends: ./below.yaml\nblocks: 5\n")
    for kind, (blocks, seed) in blocks_and_seeds.items():
        assert (load(below, kind).blocks, load(below, kind).seed) == (blocks, seed)
        assert (load(above, kind).blocks, load(above, kind).seed) == (5, seed)
    assert load_profile(above, engine="vllm", overrides=["seed=7"]).seed == 7


@pytest.mark.parametrize(
    ("engine", "overlaps"),
    [("vllm-lenvm-gpu", None), ("vllm-lenvm", None), ("sglang-lenvm", False), ("sim", False)],
)
def test_the_kind_that_a_preset_stands_for_decides_what_goes_over_a_file(engine, overlaps):
    profile = load_profile("topk-sweep", engine=engine)
    assert list(profile.variants) == ["baseline", "guided"]
    assert profile.workload.samples_as == "one-request"
    assert variant_settings(profile, "guided", {"top_k": 2}).server.overlap_schedule is overlaps


@pytest.mark.parametrize(
    ("text", "engine", "problem"),
    [
        ("per_engine: 3", "sim", r"p\.yaml:2: per_engine: is 3; write kinds of engines"),
        (
            "per_engine: {vlm: {blocks: 1}}",
            "sim",
            r"p\.yaml:2: per_engine\.vlm: is not a kind .* did you mean 'vllm'",
        ),
        ("per_engine: {vllm: 3}", "sim", r"per_engine\.vllm: is 3; write the keys to replace on vllm"),
        ("per_engine: {vllm: {engine: sim}}", "sim", r"vllm: chooses another engine; write only its options"),
        ("per_engine: {vllm: {engine: {kind: sim}}}", "sim", r"per_engine\.vllm: chooses another engine"),
        (
            "for_unguided_engines: 3",
            "sim",
            r"p\.yaml:2: for_unguided_engines: is 3; write the keys that replace others",
        ),
        ("variants: {guidde: null}", "sim", r"variants\.guidde: expected a mapping, found nothing"),
        (
            "variants:\n  sampled:\n    guidance: {mode: mul}",
            "vllm",
            r"p\.yaml:4: .*guidance: .* engine 'vllm' loads no value model",
        ),
        (
            "variants: {guided: {server: {fused: true, noise: none}}}",
            "sim",
            r"p\.yaml:2: variants\.guided\.server\.fused: unknown key",
        ),
        ("workload: {dataset: none}", "sim", "is none, and engine 'sim' serves requests; choose a dataset"),
        ("blocks: 3", "micro", "is 'gsm8k', and engine 'micro' serves no requests; set dataset: none"),
        ("extends: lenvm-50x16", "vllm", "this experiment needs an engine that guides: sglang-lenvm, sim, vllm"),
        (
            "extends: model-size-sweep",
            "vllm",
            "this experiment needs an engine that guides: sglang-lenvm, sim, vllm",
        ),
    ],
    ids=itertools.count(),
)
def test_what_does_not_fit_an_engine_is_reported_with_its_line(tmp_path, text, engine, problem):
    base = "" if text.startswith("extends") else "extends: topk-sweep\n"
    with pytest.raises(ProfileError, match=problem):
        load(write(tmp_path / "p.yaml", f"{base}{text}\n"), engine)
