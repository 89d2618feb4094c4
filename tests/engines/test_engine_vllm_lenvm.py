"""The engine file of guided vLLM: command line, environment, dialect and refusals."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_engine_vllm import request

from benchctl.analysis.validity.launch import launch_settings, names_of
from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.errors import EngineUnavailableError, ProfileError, UnsupportedError
from benchctl.guided.params import parse_params
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.record import RunRecord

ENGINE = VllmLenvmEngine()
REPOSITORY = str(Path(__file__).parents[2])
TILT = Guidance(mode="exp", value_scale=2.0, gamma=0.9, value_entropy_threshold=0.5)


@pytest.fixture(name="pair")
def _pair(tmp_path: Path) -> Path:
    """Two directories that look like a base model and its value model."""
    for name in ("base", "value"):
        (tmp_path / "pair" / name).mkdir(parents=True)
        (tmp_path / "pair" / name / "config.json").write_text('{"max_position_embeddings": 128}')
    return tmp_path / "pair"


def settings_of(
    pair: Path, *, guidance: Guidance | None = None, top_k: int = 5, guided: bool = True, **options: Any
) -> VariantSettings:
    value_model = str(pair / "value") if guided else None
    server = VllmLenvmOptions(python=sys.executable, **{"value_model": value_model, **options})
    return VariantSettings(
        variant="v", model=str(pair / "base"), server=server, sampling=Sampling(top_k=top_k), guidance=guidance
    )


def started(monkeypatch: pytest.MonkeyPatch, settings: VariantSettings, directory: Path) -> Any:
    monkeypatch.setattr("benchctl.engines.environment.interpreter_for", lambda *_: Path(sys.executable))
    site = LaunchSite(port=8123, directory=directory)
    return list(ENGINE.argv(settings, site)), ENGINE.env(settings, site)


def test_a_server_with_a_value_model_gets_our_processor_and_is_told_what_to_load(pair, tmp_path, monkeypatch):
    settings = settings_of(pair, fused=False, value_memory_bytes=1000, overlap_schedule=False)
    argv, env = started(monkeypatch, settings, tmp_path)
    assert argv[argv.index("--logits-processors") + 1] == "benchctl_lenvm:LenvmLogitsProcessor"
    assert "--no-async-scheduling" in argv
    assert env["BENCHCTL_LENVM_MODEL"] == str(pair / "value")
    told = json.loads(env["BENCHCTL_LENVM_SETTINGS"])
    assert (told["fused"], told["memory_bytes"], told["graphs"]) == (False, 1000, True)
    assert env["BENCHCTL_LENVM_STEP_LOG"] == str(tmp_path / "steps.guided.jsonl")
    inside = Path(env["PYTHONPATH"].split(":")[0])
    assert (inside / "benchctl_lenvm.py").is_file()


def test_a_server_is_told_whose_clock_counts_and_that_weights_may_be_drawn(pair, tmp_path, monkeypatch):
    _, env = started(monkeypatch, settings_of(pair, guidance_clock="device", value_load_format="dummy"), tmp_path)
    assert env["BENCHCTL_LENVM_CLOCK"] == "device"
    assert json.loads(env["BENCHCTL_LENVM_SETTINGS"])["random_weights"] is True
    _, env = started(monkeypatch, settings_of(pair), tmp_path)
    assert env["BENCHCTL_LENVM_CLOCK"] == "host"
    assert json.loads(env["BENCHCTL_LENVM_SETTINGS"])["random_weights"] is False


def told_of(settings, tmp_path, monkeypatch):
    return json.loads(started(monkeypatch, settings, tmp_path)[1]["BENCHCTL_LENVM_SETTINGS"])


def test_every_switch_of_the_value_model_reaches_the_server(pair, tmp_path, monkeypatch):
    told = told_of(settings_of(pair, guidance=TILT), tmp_path, monkeypatch)
    assert (told["reuse"], told["graphs"], told["record"], told["kernels"]) == (True, True, 5, True)
    assert "skips_early" not in told, "the server decides step by step"
    off = {"value_reuse": False, "value_kernels": False, "value_graphs": False}
    told = told_of(settings_of(pair, guidance=TILT, value_skips_early=True, **off), tmp_path, monkeypatch)
    assert (told["reuse"], told["graphs"], told["kernels"]) == (False, False, False)
    assert told["skips_early"] is True


def test_two_passes_reuse_nothing_and_a_profile_cannot_claim_it(pair, tmp_path, monkeypatch):
    assert told_of(settings_of(pair, fused=False), tmp_path, monkeypatch)["reuse"] is False
    with pytest.raises(ValueError, match=r"value_reuse is true and fused false: .* set value_reuse to false"):
        settings_of(pair, fused=False, value_reuse=True)


def test_passes_are_recorded_for_the_candidates_that_a_variant_asks_for(pair, tmp_path, monkeypatch):
    def recorded(**said):
        return told_of(settings_of(pair, **said), tmp_path, monkeypatch)["record"]

    assert [recorded(guidance=TILT, top_k=top_k) for top_k in (2, 20, 1)] == [2, 20, 0]
    assert recorded(guidance=None) == 0, "a server that guides nobody records nothing"
    cold = settings_of(pair, guidance=TILT).model_copy(update={"sampling": Sampling(top_k=5, temperature=0)})
    assert told_of(cold, tmp_path, monkeypatch)["record"] == 0


def test_every_variable_of_guidance_stands_for_options_that_a_profile_may_declare(pair, tmp_path, monkeypatch):
    argv, env = started(monkeypatch, settings_of(pair), tmp_path)
    run = RunRecord(
        schema_version=3, index=0, run_id="000-b0-v", block=0, position=0, variant="v", argv=tuple(argv), env=env
    )
    found = launch_settings(run)
    of_guidance = {key: names_of(key) for key in found if "LENVM" in key}
    assert len(of_guidance) == 5
    assert all("server.value_model" in names for names in of_guidance.values()), of_guidance


def test_a_server_without_a_value_model_is_vllm_as_it_comes_but_for_the_runner_that_both_share(
    pair, tmp_path, monkeypatch
):
    argv, env = started(monkeypatch, settings_of(pair, guided=False), tmp_path)
    assert "--logits-processors" not in argv
    assert not [name for name in env if name.startswith("BENCHCTL_LENVM")]
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize("guided", [True, False])
def test_a_profile_may_choose_the_other_model_runner(pair, tmp_path, monkeypatch, guided):
    settings = settings_of(pair, guided=guided, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    _, env = started(monkeypatch, settings, tmp_path)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_the_settings_that_a_server_is_told_are_those_that_it_understands(pair, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="guidance runs where torch is, and torch is not installed here")
    from benchctl.guided.vllm.settings import settings_of as understood

    _, env = started(monkeypatch, settings_of(pair, lazy=True, value_dtype="float32"), tmp_path)
    told = understood(env)
    assert (told.lazy, told.dtype, told.fused) == (True, "float32", True)
    assert (told.reuse, told.record, told.kernels) == (True, 0, True)
    assert told.skips_early is None
    for skips in (True, False):
        switched = settings_of(pair, guidance=TILT, value_skips_early=skips)
        _, env = started(monkeypatch, switched, tmp_path)
        assert (understood(env).skips_early, understood(env).record) == (skips, 5)


def test_guidance_travels_beside_sampling_parameters_that_are_those_of_any_request(pair):
    call = ENGINE.request_call(request(), settings_of(pair, guidance=TILT, stride=3))
    body = json.loads(call.body)
    assert body["vllm_xargs"] == {
        "lenvm_mode": "exp", "lenvm_value_scale": 2.0, "lenvm_gamma": 0.9, "lenvm_value_entropy_threshold": 0.5,
        "lenvm_skip_noop": 0, "lenvm_stride": 3,
    }  # fmt: skip
    assert (body["top_k"], body["seed"], body["n"]) == (5, 77, 2)
    plain = json.loads(ENGINE.request_call(request(), settings_of(pair)).body)
    assert plain == {key: value for key, value in body.items() if key != "vllm_xargs"}


def test_whatever_a_profile_says_of_guidance_is_sent_in_words_that_the_server_knows(pair):
    said = Guidance(
        value_min=0.2, target_length=50.0, target_length_mode="remaining", value_constraint="le", target_value=0.5,
        value_entropy_threshold=0.1,
    )  # fmt: skip
    told = json.loads(ENGINE.request_call(request(), settings_of(pair, guidance=said)).body)["vllm_xargs"]
    own = {name.removeprefix("lenvm_"): value for name, value in told.items()}
    assert own == said.model_dump() | {"skip_noop": 0, "stride": 1}
    params = parse_params(own)
    assert params is not None
    assert (params.value_min, params.target_length, params.value_constraint) == (0.2, 50.0, "le")


@pytest.mark.parametrize("top_k", [-1, 65])
def test_more_candidates_than_a_value_model_scores_are_refused_before_anything_is_started(pair, top_k):
    settings = settings_of(pair, guidance=TILT, top_k=top_k)
    with pytest.raises(UnsupportedError, match=f"sampling.top_k is {top_k}"):
        ENGINE.check_requests([request()], settings)
    ENGINE.check_requests([request()], settings_of(pair, guidance=TILT, top_k=1))
    with pytest.raises(UnsupportedError, match="128 tokens"):
        ENGINE.check_requests([request(max_tokens=200)], settings_of(pair, guidance=TILT))


@pytest.mark.parametrize("words", [("--logits-processors", "mine:P"), ("--logits_processors=mine:P",)])
def test_a_second_logits_processor_is_refused_beside_a_value_model(pair, words):
    with pytest.raises(UnsupportedError, match="extra_args name --logits-processors"):
        ENGINE.check_requests([request()], settings_of(pair, extra_args=words))
    ENGINE.check_requests([request()], settings_of(pair, guided=False, extra_args=words))


def refusal(settings: VariantSettings) -> str | None:
    try:
        ENGINE.check_available(settings)
    except EngineUnavailableError as error:
        return str(error) if "make-tiny" in str(error) else None
    return None


def follow(message: str, settings: VariantSettings) -> VariantSettings:
    """Do what a message says: run its command, and name what it says to name."""
    instead = r"(?: \(then name (.+) in model and (.+) in the .*\))?"
    found = re.search(rf"benchctl (models make-tiny [^(]+?){instead}$", message)
    assert found, message
    made = subprocess.run(
        [sys.executable, "-m", "benchctl", *shlex.split(found[1])], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    if found[2] is None:
        return settings
    ((model,), (value_model,)) = shlex.split(found[2]), shlex.split(found[3])
    server = settings.server.model_copy(update={"value_model": value_model})
    return settings.model_copy(update={"model": model, "server": server})


@pytest.mark.parametrize("cell", [None, *({"value_model": f"qwen2.5-{size}"} for size in ("0.5b", "1.5b", "3b"))])
def test_the_command_that_a_missing_pair_is_answered_with_makes_what_the_profile_names(tmp_path, monkeypatch, cell):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    profile = load_profile("topk-sweep" if cell is None else "model-size-sweep", engine="vllm-lenvm")
    names = [factor for variant, factor in arms(profile) if variant == "guided"]
    of_cell = names[0] if cell is None else names[["0.5b", "1.5b", "3b"].index(cell["value_model"][8:])]
    settings = variant_settings(profile, "guided", of_cell)
    for _ in range(2):  # the value model, then the base model where another pair has it
        message = refusal(settings)
        if message is not None:
            settings = follow(message, settings)
    assert refusal(settings) is None


@pytest.mark.parametrize(
    "value_model", ["models/mine", "models/pair/value", "models/my pair/value", "mine", "models/pair/base/value"]
)
@pytest.mark.parametrize("has_base", [True, False])
def test_the_command_makes_a_value_model_of_any_name_and_spares_a_base_that_is_there(
    tmp_path, monkeypatch, value_model, has_base
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    base = Path(value_model).parent / "base"
    if has_base:
        base.mkdir(parents=True)
        (base / "config.json").write_text('{"max_position_embeddings": 128}')
    server = VllmLenvmOptions(python=sys.executable, value_model=value_model)
    settings = VariantSettings(variant="v", model=str(base), server=server, sampling=Sampling(), guidance=None)
    message = refusal(settings)
    assert message is not None
    assert refusal(follow(message, settings)) is None
    if has_base:
        assert (base / "config.json").read_text() == '{"max_position_embeddings": 128}'


def test_a_base_model_alone_is_made_where_the_profile_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    for model in ("models/alone", "models/pair/base"):
        server = VllmLenvmOptions(python=sys.executable)
        settings = VariantSettings(variant="v", model=model, server=server, sampling=Sampling(), guidance=None)
        message = refusal(settings)
        assert message is not None
        assert follow(message, settings) == settings
        assert refusal(settings) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tensor_parallel_size=2", "servers of one device"),
        ("speculative_config={method: ngram}", "exclude each other"),
    ],
)
def test_what_excludes_a_value_model_is_a_fault_of_the_profile(options, said):
    with pytest.raises(ProfileError, match=said):
        load_profile("topk-sweep", engine="vllm-lenvm", overrides=[f"engine.options.{options}"])


def test_one_thing_under_two_names_is_a_fault_of_the_profile():
    overrides = ["engine.options.async_scheduling=true", "variants.guided.server.overlap_schedule=false"]
    with pytest.raises(ProfileError, match="two names of one option"):
        load_profile("topk-sweep", engine="vllm-lenvm", overrides=overrides)


@pytest.mark.parametrize("name", ["topk-sweep", "model-size-sweep", "controls", "lenvm-50x16"])
def test_experiments_about_guidance_run_on_small_models_where_the_preset_says_so(name):
    profile = load_profile(name, engine="vllm-lenvm")
    settings = [variant_settings(profile, *arm) for arm in arms(profile)]
    assert {each.model for each in settings} == {"models/tiny-pair/base"}
    guided = {each.server.value_model for each in settings} - {None}
    sizes = {"", "-small", "-large"} if name == "model-size-sweep" else {""}
    assert guided == {f"models/tiny-pair{size}/value" for size in sizes}
