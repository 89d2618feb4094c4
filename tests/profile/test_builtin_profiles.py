"""The profiles that benchctl carries, on engines that guide and others, and the commands that show them."""

import itertools

import pytest
from generate import meaning_of, option_keys
from support.cli import benchctl, printed

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
from benchctl.profile.engine_table import ENGINES, guiding_kinds
from benchctl.profile.errors import profile_keys
from benchctl.profile.files import GROUPS, OWN, builtin_profiles, grouped_profiles, preset_files
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.workload.prepare import prepare_requests

NAMES = (
    "aa", "ci-smoke", "controls", "flag", "two-builds", "lenvm-50x16", "model-size-sweep", "natural",
    "rate-limited", "topk-sweep",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["sim", "sim-exact"])
@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_profile_is_valid_and_declares_its_differences(name, engine):
    profile = load_profile(name, engine=engine)
    assert profile.description
    for arm in arms(profile):
        variant_settings(profile, *arm)


def test_the_built_in_profiles_are_these():
    guided = {"fused-vs-two-phase", "guided-idle", "guided-switches", "lenvm-model-sizes", "noop-skip"}
    assert {path.stem for path in builtin_profiles().glob("*.yaml")} >= {*NAMES, *guided, "rtx4090-replay"}
    assert set(preset_files()) == {
        "attach", "llamacpp-cpu", "sglang", "sglang-lenvm", "sim", "sim-exact", "transformers-cpu",
        "vllm", "vllm-cpu", "vllm-lenvm", "vllm-lenvm-gpu",
    }  # fmt: skip


def test_every_key_has_a_meaning():
    meanings = {key.path: meaning_of(key) for key in (*profile_keys(), *option_keys("sim"))}
    assert [path for path, meaning in meanings.items() if not meaning] == []
    assert {"workload.arrival.kind", "variants.<name>.guidance.mode", "engine.options.noise"} <= set(meanings)


def test_every_carried_profile_is_in_one_group_and_the_users_own_come_first(tmp_path, monkeypatch):
    members = [name for names in GROUPS.values() for name in names]
    assert len(members) == len(set(members))
    assert {path.stem for path in builtin_profiles().glob("*.yaml")} <= set(members)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: aa\n")
    (own, entries), *_ = grouped_profiles().items()
    assert (own, [entry.name for entry in entries]) == (OWN, ["mine"])


def test_show_prints_a_profile_that_can_be_read_back_and_validate_continues_after_an_invalid_one(tmp_path):
    options = ["--engine", "sim-exact", "--set", "seed=9", "--set", "blocks=3"]
    profile = parse_profile(printed("profiles", "show", "ci-smoke", *options), "stdout")
    assert profile == load_profile("ci-smoke", engine="sim-exact", overrides=["seed=9", "blocks=3"])
    (tmp_path / "faulty.yaml").write_text("extends: aa\nsead: 5\n")
    validated = benchctl("profiles", "validate", "./faulty.yaml", "nothing", "aa", cwd=tmp_path)
    assert (validated.returncode, validated.stdout) == (2, "ok aa: 16 runs in 8 blocks on sim\n")
    assert "faulty.yaml:2: sead: unknown key; did you mean 'seed'?\n" in validated.stderr
    assert "no profile is called 'nothing'. Known profiles: aa, " in validated.stderr


UNGUIDING = sorted(kind for kind in ENGINES.keys() - guiding_kinds() if ENGINES[kind].serves_requests)


def load(name, kind, *overrides):
    url = ("engine.options.url=http://127.0.0.1:1",) if kind == "attach" else ()
    return load_profile(name, engine=kind, overrides=(*overrides, *url))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", UNGUIDING)
def test_where_nothing_guides_a_sweep_measures_the_sampler_alone_and_an_a_a_experiment_is_the_same(kind):
    profile = load("topk-sweep", kind)
    assert (list(profile.variants), profile.workload.samples_as) == (["baseline", "sampled"], "requests")
    assert [variant_settings(profile, *arm).sampling.top_k for arm in arms(profile)] == [-1, 1, 2, 3, 4, 5]
    profile = load("aa", kind)
    (first, baseline), (second, again) = ((arm[0], variant_settings(profile, *arm)) for arm in arms(profile))
    assert (first, second, declared_settings(baseline, again, kind)) == ("baseline", "again", frozenset())


@pytest.mark.parametrize("kind", ["sim", "vllm", "sglang-lenvm", "attach"])
@pytest.mark.parametrize(
    ("name", "option"),
    [("fused-vs-two-phase", "fused"), ("noop-skip", "skip_noop"), ("guided-switches", "value_reuse")],
)
def test_options_that_another_engine_alone_has_are_refused_in_one_sentence_that_names_it(name, option, kind):
    remedy = f"{kind!r} lacks: vllm-lenvm; name one with --engine"
    with pytest.raises(
        ProfileError, match=f"^.*: this experiment needs an engine with .*{option}.*, which {remedy}$"
    ):
        load_profile(name, engine=kind)


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
        profiles = load(below, kind), load(above, kind)
        assert [(profile.blocks, profile.seed) for profile in profiles] == [(blocks, seed), (5, seed)], kind
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


STEPTIME_NAMES = ("steptime-w1", "steptime-w2", "steptime-w3", "steptime-w4", "steptime-w5", "steptime-v1")


def steps_of(profile, cwd, *options):
    """Steps of each run."""
    sets = [word for option in options for word in ("--set", option)]
    printed("simulate", "--profile", profile, *sets, "--quiet", cwd=cwd)
    logs = sorted(cwd.glob(f"results/{profile}/2*/runs/*/steps.jsonl"))
    return [[step for step in read_jsonl(log, StepRecord) if not step.is_warmup] for log in logs]


@pytest.mark.parametrize("name", STEPTIME_NAMES)
def test_no_prompt_begins_like_another_and_the_prefix_cache_is_off(name):
    profile = load_profile(name)
    requests = prepare_requests(profile).requests
    first_words = [request.prompt.split()[0] for request in requests if request.prompt]
    assert len(set(first_words)) == len(requests) == profile.workload.num_prompts
    assert all(request.ignore_eos for request in requests)
    assert variant_settings(profile, "baseline", {}).server.model_dump()["enable_prefix_caching"] is False
    assert not profile.workload.allow_prefix_cache_hits
    for engine in ("vllm", "sglang"):
        assert plan_runs(load_profile(name, engine=engine)).runs


def test_w1_has_steps_of_one_prompt_and_w2_steps_of_one_row(tmp_path):
    (prompts,) = steps_of("steptime-w1", tmp_path, "workload.num_prompts=6")
    steps = [(step.num_prefill_tokens, step.num_decode_tokens or 0) for step in prompts]
    assert steps == [(tokens, 0) for tokens in (128, 512, 1024, 2048, 4096, 8192)]
    (rows,) = steps_of("steptime-w2", tmp_path, "workload.num_prompts=2")
    decoding = [step for step in rows if step.phase == "decode"]
    assert {step.num_seqs for step in decoding} == {1}
    assert [step.context_tokens for step in decoding] == [*range(129, 640), *range(513, 1024)]
