"""The engine file of guided vLLM: command line, environment, dialect and refusals."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support import engine_settings
from support.cli import benchctl
from test_engine_vllm import request

from benchctl.analysis.validity.launch import launch_settings, names_of
from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.errors import EngineUnavailableError, ProfileError, UnsupportedError
from benchctl.guided.params import parse_params
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.record import RunRecord

ENGINE = VllmLenvmEngine()
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
    options = {"python": sys.executable, "value_model": value_model, **options}
    sampling = Sampling(top_k=top_k)
    return engine_settings.settings_of("vllm-lenvm", pair / "base", sampling=sampling, guidance=guidance, **options)


def started(monkeypatch: pytest.MonkeyPatch, settings: VariantSettings, directory: Path) -> Any:
    monkeypatch.setattr("benchctl.engines.environment.interpreter_for", lambda *_: Path(sys.executable))
    site = LaunchSite(port=8123, directory=directory)
    return list(ENGINE.argv(settings, site)), ENGINE.env(settings, site)


def test_a_server_with_a_value_model_gets_our_processor_and_is_told_what_to_load(pair, tmp_path, monkeypatch):
    settings = settings_of(pair, overlap_schedule=False, guidance_clock="device")
    argv, env = started(monkeypatch, settings, tmp_path)
    assert argv[argv.index("--logits-processors") + 1] == "benchctl_lenvm:LenvmLogitsProcessor"
    assert "--no-async-scheduling" in argv
    assert (env["BENCHCTL_LENVM_MODEL"], env["BENCHCTL_LENVM_CLOCK"]) == (str(pair / "value"), "device")
    assert env["BENCHCTL_LENVM_STEP_LOG"] == str(tmp_path / "steps.guided.jsonl")
    assert (Path(env["PYTHONPATH"].split(":")[0]) / "benchctl_lenvm.py").is_file()
    _, env = started(monkeypatch, settings_of(pair, step_log=False), tmp_path)
    assert not {"BENCHCTL_LENVM_STEP_LOG", "BENCHCTL_LENVM_CLOCK"} & env.keys()
    # Without a value model it is vLLM as it comes, but for the runner that both share.
    argv, env = started(monkeypatch, settings_of(pair, guided=False), tmp_path)
    assert "--logits-processors" not in argv
    assert not [name for name in env if name.startswith("BENCHCTL_LENVM")]
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    for guided in (True, False):
        other = settings_of(pair, guided=guided, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
        assert started(monkeypatch, other, tmp_path)[1]["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_every_switch_of_the_value_model_reaches_the_server(pair, tmp_path, monkeypatch):
    def told(**said):
        return json.loads(started(monkeypatch, settings_of(pair, **said), tmp_path)[1]["BENCHCTL_LENVM_SETTINGS"])

    usual = told(guidance=TILT)
    on = {"fused": True, "reuse": True, "graphs": True, "kernels": True, "record": 5, "random_weights": False}
    assert usual.items() >= on.items()
    assert "skips_early" not in usual, "the server decides step by step"
    switches = {"value_reuse": False, "value_kernels": False, "value_graphs": False, "value_skips_early": True}
    off = told(guidance=TILT, value_memory_bytes=1000, value_load_format="dummy", **switches)
    expected = {"reuse": False, "graphs": False, "kernels": False, "skips_early": True, "memory_bytes": 1000}
    assert off.items() >= {**expected, "random_weights": True}.items()
    two_passes = told(fused=False)  # reuse nothing, and a profile cannot claim it
    assert (two_passes["fused"], two_passes["reuse"], two_passes["record"]) == (False, False, 0)
    with pytest.raises(ValueError, match=r"value_reuse is true and fused false: .* set value_reuse to false"):
        settings_of(pair, fused=False, value_reuse=True)
    assert [told(guidance=TILT, top_k=top_k)["record"] for top_k in (2, 20, 1)] == [2, 20, 0]
    if importlib.util.find_spec("torch"):
        from benchctl.guided.vllm.settings import settings_of as understood

        _, env = started(monkeypatch, settings_of(pair, lazy=True, value_dtype="float32"), tmp_path)
        assert (understood(env).lazy, understood(env).dtype, understood(env).record) == (True, "float32", 0)
        assert understood(env).skips_early is None


def test_every_variable_of_guidance_stands_for_options_that_a_profile_may_declare(pair, tmp_path, monkeypatch):
    argv, env = started(monkeypatch, settings_of(pair), tmp_path)
    run = RunRecord(
        schema_version=3, index=0, run_id="000-b0-v", block=0, position=0, variant="v", argv=tuple(argv), env=env
    )
    found = launch_settings(run)
    of_guidance = {key: names_of(key) for key in found if "LENVM" in key}
    assert len(of_guidance) == 5
    assert all("server.value_model" in names for names in of_guidance.values()), of_guidance


def test_guidance_travels_in_words_that_the_server_knows_beside_the_parameters_of_any_request(pair):
    said = Guidance(
        value_min=0.2, target_length=50.0, target_length_mode="remaining", value_constraint="le", target_value=0.5,
        value_entropy_threshold=0.1,
    )  # fmt: skip
    body = json.loads(ENGINE.request_call(request(), settings_of(pair, guidance=said, stride=3)).body)
    own = {name.removeprefix("lenvm_"): value for name, value in body["vllm_xargs"].items()}
    assert own == said.model_dump() | {"skip_noop": 0, "stride": 3}
    params = parse_params(own)
    assert (params.value_min, params.target_length, params.value_constraint) == (0.2, 50.0, "le")
    assert (body["top_k"], body["seed"], body["n"]) == (5, 77, 2)
    plain = json.loads(ENGINE.request_call(request(), settings_of(pair)).body)
    assert plain == {key: value for key, value in body.items() if key != "vllm_xargs"}


def test_what_a_guided_server_cannot_do_is_refused_before_anything_is_started(pair):
    for options, changes, said in (
        ({"guidance": TILT, "top_k": -1}, {}, "sampling.top_k is -1"),
        ({"guidance": TILT, "top_k": 65}, {}, "sampling.top_k is 65"),
        ({"guidance": TILT}, {"max_tokens": 200}, "128 tokens"),
        ({"extra_args": ("--logits-processors", "mine:P")}, {}, "extra_args name --logits-processors"),
        ({"extra_args": ("--logits_processors=mine:P",)}, {}, "extra_args name --logits-processors"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            ENGINE.check_requests([request(**changes)], settings_of(pair, **options))
    ENGINE.check_requests([request()], settings_of(pair, guidance=TILT, top_k=1))
    ENGINE.check_requests(
        [request()], settings_of(pair, guided=False, extra_args=("--logits-processors", "mine:P"))
    )


def refusal(settings: VariantSettings) -> str | None:
    try:
        ENGINE.check_available(settings)
    except EngineUnavailableError as error:
        return str(error) if "make-tiny" in str(error) else None
    return None


def follow(message: str, settings: VariantSettings) -> VariantSettings:
    """Do what a message says: run its command, and name what it says to name."""
    instead = r"(?: \(then name (.+) in model and (.+) in the .*\))?"
    command, *names = re.search(rf"benchctl (models make-tiny [^(]+?){instead}$", message).groups()
    made = benchctl(*shlex.split(command))
    assert made.returncode == 0, made.stderr
    if names[0] is None:
        return settings
    ((model,), (value_model,)) = map(shlex.split, names)
    server = settings.server.model_copy(update={"value_model": value_model})
    return settings.model_copy(update={"model": model, "server": server})


@pytest.mark.parametrize("value_model", ["models/mine", "models/my pair/value", "mine", "models/pair/base/value"])
def test_the_command_makes_a_value_model_of_any_name_and_spares_a_base_that_is_there(
    tmp_path, monkeypatch, value_model
):
    monkeypatch.chdir(tmp_path)
    base = Path(value_model).parent / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text('{"max_position_embeddings": 128}')
    settings = engine_settings.settings_of("vllm-lenvm", base, python=sys.executable, value_model=value_model)
    message = refusal(settings)
    assert refusal(follow(message, settings)) is None
    assert (base / "config.json").read_text() == '{"max_position_embeddings": 128}'


def test_what_excludes_a_value_model_and_one_thing_under_two_names_are_faults_of_the_profile():
    for overrides, said in (
        (["engine.options.tensor_parallel_size=2"], "servers of one device"),
        (["engine.options.speculative_config={method: ngram}"], "exclude each other"),
        (
            ["engine.options.async_scheduling=true", "variants.guided.server.overlap_schedule=false"],
            "two names of one option",
        ),
    ):
        with pytest.raises(ProfileError, match=said):
            load_profile("topk-sweep", engine="vllm-lenvm", overrides=overrides)


def test_experiments_about_guidance_run_on_small_models_where_the_preset_says_so():
    for name in ("topk-sweep", "model-size-sweep", "controls", "lenvm-50x16"):
        profile = load_profile(name, engine="vllm-lenvm")
        settings = [variant_settings(profile, *arm) for arm in arms(profile)]
        assert {each.model for each in settings} == {"models/tiny-pair/base"}
        sizes = {"", "-small", "-large"} if name == "model-size-sweep" else {""}
        guided = {each.server.value_model for each in settings} - {None}
        assert guided == {f"models/tiny-pair{size}/value" for size in sizes}
