"""SGLang as an engine: command line, dialect, what it tells of itself, and how its failures read.

No real server takes part: the log lines are examples of its messages, and what it serves is played by a small one.
"""

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import msgspec
import pytest
from support.servers.handler_server import handled_by

from benchctl.engines.attach import AttachOptions
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.environment import installed_versions
from benchctl.engines.sglang import SglangEngine, SglangOptions
from benchctl.errors import EngineUnavailableError, ServerStartError, UnsupportedError
from benchctl.load.client import StreamClient
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Message, PreparedRequest

ENGINE = SglangEngine()
BIND_ERROR = (
    "[2026-01-01 00:00:00] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): "
    "address already in use"
)
INFO = {
    "version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "quantization": None, "context_length": 4096,
    "max_running_requests": 64, "tp_size": 1, "disable_radix_cache": True, "disable_overlap_schedule": False,
    "api_key": "very secret", "port": 31234, "random_seed": 5, "max_total_num_tokens": 99, "internal_states": [{}],
}  # fmt: skip


@pytest.fixture
def python(tmp_path, monkeypatch):
    """An interpreter whose environment has SGLang, as far as its metadata say."""
    package = tmp_path / "venv/lib/sglang-0.5.23.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    interpreter = tmp_path / "venv/bin/python"
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    installed_versions.cache_clear()
    return str(interpreter)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 100}')
    return str(directory)


def settings_of(model="m", *, sampling=None, guidance=None, **options) -> VariantSettings:
    return VariantSettings(
        variant="v",
        model=model,
        server=SglangOptions(**options),
        sampling=sampling or Sampling(),
        guidance=guidance,
    )


def asked(*, n=1, prompt_tokens=5, max_tokens=8) -> PreparedRequest:
    return PreparedRequest(
        request_id="r", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=prompt_tokens, max_tokens=max_tokens,
        ignore_eos=True, n=n, seed=3, source="test",
    )  # fmt: skip


@contextmanager
def telling(pages):
    """A server that answers each path with its page, and others with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_):
            """Nothing on the test's output."""

    with handled_by(Handler) as url:
        yield url


def told_by(pages, settings):
    async def ask(url):
        async with httpx.AsyncClient(base_url=url) as client:
            return await ENGINE.effective_config(client, settings, LaunchSite(port=1, directory=Path()))

    with telling(pages) as url:
        return asyncio.run(ask(url))


def test_what_the_profile_leaves_open_is_left_to_the_server(python, model, tmp_path):
    argv = ENGINE.argv(settings_of(model, python=python), LaunchSite(port=1234, directory=tmp_path))
    assert argv == (
        python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", model,
        "--host", "127.0.0.1", "--port", "1234", "--random-seed", "0", "--enable-metrics", "--enable-cache-report",
        "--tp-size", "1", "--dp-size", "1", "--disable-radix-cache",
    )  # fmt: skip


def test_options_that_are_given_reach_the_command_line(python, model, tmp_path):
    options = {
        "max_model_len": 90, "mem_fraction_static": 0.5, "tensor_parallel_size": 2, "data_parallel_size": 4,
        "max_num_seqs": 7, "max_num_batched_tokens": 512, "load_format": "dummy", "attention_backend": "triton",
        "sampling_backend": "pytorch", "device": "cuda", "dtype": "float16",
    }  # fmt: skip
    switches = {"enable_prefix_caching": True, "enforce_eager": True, "overlap_schedule": False}
    settings = settings_of(model, python=python, **options, **switches, extra_args=("--page-size", "1"))
    argv = ENGINE.argv(settings, LaunchSite(port=1, directory=tmp_path))
    words = " ".join(argv)
    for spelt in (
        "--context-length 90", "--mem-fraction-static 0.5", "--tp-size 2", "--dp-size 4",
        "--max-running-requests 7", "--chunked-prefill-size 512", "--load-format dummy",
        "--attention-backend triton", "--sampling-backend pytorch", "--device cuda", "--dtype float16",
        "--disable-cuda-graph", "--disable-overlap-schedule",
    ):  # fmt: skip
        assert spelt in words
    assert "--disable-radix-cache" not in argv
    assert argv[-2:] == ("--page-size", "1")


def test_sampling_is_said_in_full_so_that_the_model_s_own_wishes_do_not_act():
    sampling = Sampling(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.02)
    call = ENGINE.request_call(asked(n=2), settings_of("qwen2.5-7b", sampling=sampling))
    body = json.loads(call.body)
    assert call.path == "/v1/completions"
    assert (body["top_k"], body["top_p"], body["min_p"], body["temperature"]) == (-1, 0.9, 0.02, 0.7)
    assert (body["repetition_penalty"], body["seed"], body["n"], body["ignore_eos"]) == (1.0, 3, 2, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["return_token_ids"] is True


def test_a_streamed_chat_is_counted_by_its_running_usage_because_it_may_not_have_ids():
    request = msgspec.structs.replace(asked(), prompt=None, messages=(Message(role="user", content="Hi"),))
    call = ENGINE.request_call(request, settings_of())
    assert call.path == "/v1/chat/completions"
    assert "return_token_ids" not in json.loads(call.body)


def test_a_model_on_disk_is_served_without_the_hub(model, tmp_path):
    site = LaunchSite(port=1, directory=tmp_path)
    assert ENGINE.env(settings_of(model), site)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in ENGINE.env(settings_of("Qwen/Qwen2.5-7B-Instruct"), site)
    assert ENGINE.env(settings_of(model, env={"HF_HUB_OFFLINE": "0"}), site)["HF_HUB_OFFLINE"] == "0"


def test_the_plugin_reaches_the_server_and_what_the_profile_lists_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    site = LaunchSite(port=1, directory=tmp_path)
    env = ENGINE.env(settings_of(), site)
    assert env["BENCHCTL_STEP_LOG"] == str(site.step_log)
    assert Path(env["PYTHONPATH"], "benchctl_sglang_steps.py").is_file()
    assert "SGLANG_PLUGINS" not in env
    theirs = ENGINE.env(settings_of(env={"PYTHONPATH": "/theirs", "SGLANG_PLUGINS": "one,two"}), site)
    assert theirs["PYTHONPATH"] == f"{env['PYTHONPATH']}{os.pathsep}/theirs"
    assert theirs["SGLANG_PLUGINS"] == "benchctl-steps,one,two"


def test_without_a_step_log_nothing_of_ours_is_in_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    settings = settings_of(step_log=False)
    env = ENGINE.env(settings, LaunchSite(port=1, directory=tmp_path))
    assert not {"PYTHONPATH", "BENCHCTL_STEP_LOG"} & env.keys()
    assert not ENGINE.has_steps(settings)


def test_asking_whether_the_server_is_well_generates_nothing(tmp_path):
    env = ENGINE.env(settings_of(), LaunchSite(port=1, directory=tmp_path))
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_requests_that_the_server_would_refuse_are_refused_before_it_starts(model):
    for settings, limit in ((settings_of(model), 100), (settings_of(model, max_model_len=50), 50)):
        ENGINE.check_requests([asked(prompt_tokens=limit - 8)], settings)
        with pytest.raises(UnsupportedError, match=f"context of {limit} tokens .* needs {limit + 1}"):
            ENGINE.check_requests([asked(prompt_tokens=limit - 7)], settings)
    with pytest.raises(UnsupportedError, match="variant 'v': the server loads no value model"):
        ENGINE.check_requests([asked()], settings_of(guidance=Guidance()))


def test_an_environment_without_it_is_refused_with_what_brings_it(tmp_path, monkeypatch, model):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "none"))
    with pytest.raises(EngineUnavailableError, match=r"run 'benchctl engines install sglang'"):
        ENGINE.check_available(settings_of(model))


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_what_counts_of_the_server_s_account_is_kept_and_secrets_are_not(path):
    told = told_by({path: INFO}, settings_of(enforce_eager=True, extra_args=("--page-size", "1")))
    assert told == {
        "version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64,
        "tensor_parallel_size": 1, "enable_prefix_caching": False, "overlap_schedule": True, "enforce_eager": True,
        "request_seed": "ignored", "extra_args": "--page-size 1",
    }  # fmt: skip


def test_seeds_are_honoured_where_inference_is_deterministic():
    settings = settings_of(extra_args=("--enable-deterministic-inference",))
    assert told_by({"/server_info": INFO}, settings)["request_seed"] == "honoured"


@pytest.mark.parametrize(
    ("log_tail", "cause"),
    [
        (BIND_ERROR, "port-taken"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "out-of-memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB", "out-of-memory"),
        (
            "Scheduler hit an exception: Traceback\nRuntimeError: Cannot find any model weights with `/m`",
            "bad-model",
        ),
        ("sglang serve: error: unrecognized arguments: --no-such-flag", "bad-flag"),
        ("sglang serve: error: argument --dtype: invalid choice: 'nonsense' (choose from 'auto')", "bad-flag"),
        (
            (
                "ValueError: User-specified context_length (9999) is greater than the derived context_length "
                "(4096). To allow overriding this maximum, set the env var "
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
            ),
            "bad-flag",
        ),
        ("launch_server.py: error: argument --dtype: invalid choice: 'x'", "bad-flag"),
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'", "bad-model"),
        ("Initialization failed. warmup error: Traceback", "warm-up-failed"),
        ("Scheduler hit an exception: Traceback\nValueError: odd", "engine-died"),
    ],
)
def test_the_end_of_a_log_tells_the_cause(log_tail, cause):
    known = ENGINE.diagnose(f"[2026-01-01 00:00:00] something\n{log_tail}\n")
    assert known is not None
    assert known.cause == cause
    assert known.is_profile_error is cause.startswith("bad-")
    assert known.is_final is (cause == "port-taken")


def test_an_ordinary_log_tells_nothing():
    line = "[2026-01-01 00:00:00] Decode batch, #running-req: 4, #token: 900, token usage: 0.01, cuda graph: True"
    assert ENGINE.diagnose(line) is None


def test_a_server_that_cannot_have_its_port_and_lives_on_is_given_up_at_once(tmp_path):
    """SGLang says that the port is taken, and neither serves nor ends."""
    script = f"import sys, time; print({BIND_ERROR!r}, file=sys.stderr, flush=True); time.sleep(60)"
    launch = Launch(
        argv=(sys.executable, "-c", script),
        env={},
        port=choose_port(None),
        health_path=ENGINE.health_path(settings_of()),
        log=tmp_path / "server.log",
        timeouts=Timeouts(ready_s=30, stop_s=3),
        diagnose=ENGINE.diagnose,
    )

    async def wait(server):
        async with StreamClient(launch.base_url, launch.timeouts) as client, asyncio.timeout(15):
            await server.wait_ready(client.control)

    with ServerProcess(launch) as server, pytest.raises(ServerStartError) as caught:
        asyncio.run(wait(server))
    assert caught.value.cause == "port-taken"


def test_steps_of_one_replica_are_a_series_and_those_of_several_are_not():
    assert ENGINE.has_steps(settings_of())
    assert not ENGINE.has_steps(settings_of(data_parallel_size=2))
    attached = settings_of().model_copy(update={"server": AttachOptions(url="http://127.0.0.1:1")})
    assert not ENGINE.has_steps(attached)


def test_the_engine_goes_by_its_name():
    assert isinstance(engine_for("sglang"), SglangEngine)
