"""SGLang as an engine: command line, dialect, what it tells of itself, and how its failures read.

No real server takes part: the log lines are examples of its messages, and what it serves is played by a small one.
"""

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from support import engine_settings
from support.engine_settings import asked, interpreter_with, model_in
from support.servers.handler_server import handled_by

from benchctl.engines.engine import LaunchSite
from benchctl.engines.sglang import SglangEngine
from benchctl.errors import ServerStartError, UnsupportedError
from benchctl.load.client import StreamClient
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import Guidance, Sampling
from benchctl.profile.sections import Timeouts

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


settings_of = partial(engine_settings.settings_of, "sglang")


@pytest.fixture
def model(tmp_path):
    return model_in(tmp_path / "model", max_position_embeddings=100)


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


def test_options_that_are_given_reach_the_command_line_and_what_is_left_open_is_left_to_the_server(model, tmp_path):
    python = interpreter_with(tmp_path, "sglang")

    def argv_of(**options):
        return ENGINE.argv(settings_of(model, python=python, **options), LaunchSite(port=1234, directory=tmp_path))

    assert argv_of() == (
        python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", model,
        "--host", "127.0.0.1", "--port", "1234", "--random-seed", "0", "--enable-metrics", "--enable-cache-report",
        "--tp-size", "1", "--dp-size", "1", "--disable-radix-cache",
    )  # fmt: skip
    argv = argv_of(
        max_model_len=90, mem_fraction_static=0.5, tensor_parallel_size=2, data_parallel_size=4, max_num_seqs=7,
        max_num_batched_tokens=512, load_format="dummy", attention_backend="triton", sampling_backend="pytorch",
        device="cuda", dtype="float16", enable_prefix_caching=True, enforce_eager=True, overlap_schedule=False,
        extra_args=("--page-size", "1"),
    )  # fmt: skip
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
    assert call.path == "/v1/completions"
    assert json.loads(call.body).items() >= {
        "top_k": -1, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7, "repetition_penalty": 1.0, "seed": 3, "n": 2,
        "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }.items()  # fmt: skip
    # A streamed chat is counted by its running usage, because it may not have ids.
    call = ENGINE.request_call(asked(chat=True), settings_of())
    assert call.path == "/v1/chat/completions"
    assert "return_token_ids" not in json.loads(call.body)


def test_the_plugin_reaches_the_server_what_the_profile_lists_stays_and_a_model_on_disk_needs_no_hub(
    model, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    site = LaunchSite(port=1, directory=tmp_path)

    def env_of(model="m", **options):
        return ENGINE.env(settings_of(model, **options), site)

    env = env_of()
    assert env["BENCHCTL_STEP_LOG"] == str(site.step_log)
    assert Path(env["PYTHONPATH"], "benchctl_sglang_steps.py").is_file()
    assert "SGLANG_PLUGINS" not in env
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    theirs = env_of(env={"PYTHONPATH": "/theirs", "SGLANG_PLUGINS": "one,two"})
    assert theirs["PYTHONPATH"] == f"{env['PYTHONPATH']}{os.pathsep}/theirs"
    assert theirs["SGLANG_PLUGINS"] == "benchctl-steps,one,two"
    assert not {"PYTHONPATH", "BENCHCTL_STEP_LOG"} & env_of(step_log=False).keys()
    for options, has_steps in (({}, True), ({"step_log": False}, False), ({"data_parallel_size": 2}, False)):
        assert ENGINE.has_steps(settings_of(**options)) is has_steps
    assert not ENGINE.has_steps(engine_settings.settings_of("attach", url="http://127.0.0.1:1"))
    assert env_of(model)["HF_HUB_OFFLINE"] == "1"
    assert env_of(model, env={"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in env_of("Qwen/Qwen2.5-7B-Instruct")


def test_requests_that_the_server_would_refuse_are_refused_before_it_starts(model):
    for settings, limit in ((settings_of(model), 100), (settings_of(model, max_model_len=50), 50)):
        ENGINE.check_requests([asked(prompt_tokens=limit - 8)], settings)
        with pytest.raises(UnsupportedError, match=f"context of {limit} tokens .* needs {limit + 1}"):
            ENGINE.check_requests([asked(prompt_tokens=limit - 7)], settings)
    with pytest.raises(UnsupportedError, match="variant 'v': the server loads no value model"):
        ENGINE.check_requests([asked()], settings_of(guidance=Guidance()))


def told_by(pages, **options):
    async def ask(url):
        async with httpx.AsyncClient(base_url=url) as client:
            return await ENGINE.effective_config(
                client, settings_of(**options), LaunchSite(port=1, directory=Path())
            )

    with telling(pages) as url:
        return asyncio.run(ask(url))


def test_what_counts_of_the_server_s_account_is_kept_and_secrets_are_not():
    for path in ("/server_info", "/get_server_info"):
        assert told_by({path: INFO}, enforce_eager=True, extra_args=("--page-size", "1")) == {
            "version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64,
            "tensor_parallel_size": 1, "enable_prefix_caching": False, "overlap_schedule": True,
            "enforce_eager": True, "request_seed": "ignored", "extra_args": "--page-size 1",
        }  # fmt: skip
    deterministic = told_by({"/server_info": INFO}, extra_args=("--enable-deterministic-inference",))
    assert deterministic["request_seed"] == "honoured"


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
