"""Servers that someone else runs: asked in their dialect, watched from outside, their key in no record."""

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from support import cli
from support.nvml import FakeNvml
from support.servers.paced_engine import planned, profile
from support.servers.simulator import free_port, sim_server

from benchctl.engines.attach import AttachEngine, AttachOptions
from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError, ProfileError, ServerStartError, UnsupportedError
from benchctl.load.client import StreamClient
from benchctl.measure import experiment as here
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.server import AttachedServer
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.profile.sections import RequestOptions, Timeouts
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import PreparedRequest

ENGINE = AttachEngine()
KEY = "not-to-be-written-anywhere-4711"
SMALL = {"workload.num_prompts": 2, "workload.samples_per_prompt": 2, "workload.output_len": 12, "blocks": 1}


def settings_of(*, guidance=None, **options) -> VariantSettings:
    options = {"url": "http://127.0.0.1:1"} | options
    return VariantSettings(
        variant="v", model="qwen2.5-7b", server=AttachOptions(**options), sampling=Sampling(), guidance=guidance
    )


def asked(n=1) -> PreparedRequest:
    return PreparedRequest(
        request_id="r", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=2, max_tokens=4, ignore_eos=True, n=n,
        seed=3, source="test",
    )  # fmt: skip


def body_of(**options):
    return json.loads(ENGINE.request_call(asked(), settings_of(**options)).body)


def command(*settings: str, **values: object) -> list[str]:
    words = [f"{name}={value}" for name, value in {**SMALL, **values}.items()]
    set_ = [word for setting in (*words, *settings) for word in ("--set", setting)]
    return [sys.executable, "-m", "benchctl", "run", "--profile", "aa", "--engine", "attach", "--quiet", *set_]


def environment(cwd: Path) -> dict[str, str]:
    return {**os.environ, "BENCHCTL_DATA_DIR": str(cwd / "no-data"), "COLUMNS": "200", "SERVER_KEY": KEY}


def benchctl(cwd: Path, *settings: str, **values: object) -> "subprocess.CompletedProcess[str]":
    return cli.benchctl(*command(*settings, **values)[3:], cwd=cwd, SERVER_KEY=KEY)


def runs_of(cwd: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(cwd.glob("results/aa/latest/runs/*/run.json"))]


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("vllm", {"return_token_ids": True, "repetition_penalty": 1.0, "top_k": -1}),
        ("sglang", {"repetition_penalty": 1.0, "top_k": -1}),
        ("llamacpp", {"timings_per_token": True, "top_k": 0}),
    ],
)
def test_requests_are_spelt_as_the_server_understands_them(dialect, expected):
    body = body_of(dialect=dialect)
    assert {name: body[name] for name in expected} == expected
    assert (body["max_tokens"], body["stream"]) == (4, True)


def test_each_request_bypasses_the_prefix_cache_in_the_way_of_its_dialect():
    for dialect in ("vllm", "sglang"):
        salts = [body_of(dialect=dialect)["cache_salt"] for _ in range(2)]
        assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)
        assert salts[0] != salts[1]
    assert body_of(dialect="llamacpp")["cache_prompt"] is False
    for dialect in ("transformers", "openai"):
        assert not {"cache_salt", "cache_prompt"} & set(body_of(dialect=dialect))


def test_how_a_server_of_others_caches_is_their_choice_where_the_profile_says_so():
    for dialect in ("vllm", "sglang", "llamacpp"):
        assert not {"cache_salt", "cache_prompt"} & set(body_of(dialect=dialect, bypass_prefix_cache=False))


def test_a_server_that_dies_of_seeds_gets_none():
    assert body_of()["seed"] == 3
    for dialect in ("vllm", "openai"):
        assert "seed" not in body_of(dialect=dialect, send_seed=False)


def test_a_salt_of_the_profile_stays():
    settings = settings_of().model_copy(update={"request": RequestOptions(extra_body={"cache_salt": "mine"})})
    assert json.loads(ENGINE.request_call(asked(), settings).body)["cache_salt"] == "mine"


PROMPTS_ARE_REPEATED = {
    "workload.dataset": "synthetic", "workload.input_len": 200, "workload.output_len": 8, "workload.num_prompts": 6,
    "workload.samples_per_prompt": 2, "workload.samples_as": "requests", "blocks": 2,
}  # fmt: skip


@pytest.mark.parametrize(("bypass", "state"), [("true", "done"), ("false", "suspect")])
def test_a_live_server_with_a_cache_is_measured_again_and_again_at_equal_work(tmp_path, bypass, state):
    with sim_server(tmp_path / "a", enable_prefix_caching=True, time_scale=20.0) as server:
        settings = {"engine.options.url": server.client.base_url, "engine.options.bypass_prefix_cache": bypass}
        done = benchctl(tmp_path, **PROMPTS_ARE_REPEATED, **settings)
    runs = runs_of(tmp_path)
    assert [run["state"] for run in runs] == [state] * 4, done.stderr
    codes = {warning["code"] for run in runs for warning in run["warnings"]}
    assert ("check-failed" in codes) is (state == "suspect")


def test_that_one_of_two_live_servers_has_a_cache_is_noticed(tmp_path):
    with (
        sim_server(tmp_path / "caching", enable_prefix_caching=True, time_scale=20.0) as caching,
        sim_server(tmp_path / "plain", time_scale=20.0) as plain,
    ):
        settings = {
            "engine.options.url": caching.client.base_url,
            "variants.again.server.url": plain.client.base_url,
            "engine.options.bypass_prefix_cache": "false",
            "workload.allow_prefix_cache_hits": "true",
        }
        benchctl(tmp_path, **PROMPTS_ARE_REPEATED, **settings)
    assert {run["state"] for run in runs_of(tmp_path)} == {"done"}
    sides = [f"results/aa/latest:{variant}" for variant in ("baseline", "again")]
    told = cli.benchctl("compare", *sides, "--json", cwd=tmp_path)
    warnings = [each for each in json.loads(told.stdout)["warnings"] if each["code"] == "prefix-hits-differ"]
    assert len(warnings) == 1, told.stdout + told.stderr
    assert re.search(r"caches: [1-9][0-9]*%.* on side A, 0% on side B", warnings[0]["message"])


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "transformers"])
def test_a_request_names_the_model_only_where_the_profile_knows_the_name_there(dialect):
    assert "model" not in body_of(dialect=dialect)
    assert body_of(dialect=dialect, served_model="theirs")["model"] == "theirs"


def test_the_key_is_read_from_the_environment_when_a_request_is_made(monkeypatch):
    settings = settings_of(api_key_env="SERVER_KEY")
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(EngineUnavailableError, match="api_key_env names SERVER_KEY, which is not set; export"):
        ENGINE.check_available(settings)
    monkeypatch.setenv("SERVER_KEY", KEY)
    ENGINE.check_available(settings)
    assert ENGINE.request_call(asked(), settings).headers["Authorization"] == f"Bearer {KEY}"
    monkeypatch.setenv("SERVER_KEY", f"{KEY}\n")
    with pytest.raises(EngineUnavailableError, match="holds line breaks or other characters") as told:
        ENGINE.check_available(settings)
    assert KEY not in str(told.value)
    monkeypatch.setenv("SERVER_KEY", KEY)
    assert "Authorization" not in ENGINE.request_call(asked(), settings_of()).headers


def test_what_servers_of_a_dialect_cannot_do_is_refused():
    ENGINE.check_requests([asked(n=2)], settings_of(dialect="vllm"))
    with pytest.raises(UnsupportedError, match=r"set workload\.samples_as: requests"):
        ENGINE.check_requests([asked(n=2)], settings_of(dialect="llamacpp"))
    with pytest.raises(UnsupportedError, match="loads no value model"):
        ENGINE.check_requests([asked()], settings_of(guidance=Guidance()))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host:1", "write an address that begins with http:// or https://"),
        ("http://me:word@host:1", "holds credentials, which would be recorded; name a variable in api_key_env"),
        ("http://host:1/?api_key=word", "holds a query, which requests cannot carry"),
        ("http://", "write a host and a port from 1 to 65535"),
        ("http://host:abc", "write a host and a port from 1 to 65535"),
        ("http://host:0", "write a host and a port from 1 to 65535"),
        ("http://host:99999", "write a host and a port from 1 to 65535"),
        ("http://[::1", "write a host and a port from 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_remedy(url, message):
    with pytest.raises(ProfileError, match=message):
        load_profile("aa", engine="attach", overrides=[f"engine.options.url={url}"])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://host:1/v1/chat/completions", "http://host:1"),
        ("https://host/prefix/v1/", "https://host/prefix"),
        ("HTTPS://host/prefix/", "https://host/prefix"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_is_taken_as_users_have_it(url, address):
    profile = load_profile("aa", engine="attach", overrides=[f"engine.options.url={url}"])
    assert variant_settings(profile, "baseline", {}).server.url == address


def test_a_server_behind_https_is_checked_against_the_certificates_of_this_machine():
    control = StreamClient("https://host:1", Timeouts()).control
    context = control._transport._pool._ssl_context
    assert context.cert_store_stats()["x509_ca"] > 0
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert str(control.base_url).rstrip("/") == "https://host:1"


def test_nothing_is_started_and_nothing_claimed(tmp_path):
    settings = settings_of(url="http://host:1/")
    assert not ENGINE.is_launched
    assert ENGINE.base_url(settings, 99) == "http://host:1"
    assert not ENGINE.has_steps(settings)
    assert list(ENGINE.read_steps(tmp_path)) == []
    assert ENGINE.diagnose("address already in use") is None
    assert isinstance(engine_for("attach"), AttachEngine)


@pytest.mark.parametrize(("gpus", "sampled"), [((1,), [1]), ((), [])])
def test_gpus_of_a_server_on_this_host_are_sampled_where_the_profile_names_them(
    tmp_path, monkeypatch, gpus, sampled
):
    nvml = FakeNvml()
    nvml.pids_of = {1: [os.getpid()]}
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=nvml))
    with sim_server(tmp_path / "server", time_scale=1.0) as server:
        options = {"url": str(server.client.base_url), "gpus": gpus}
        attached = profile(
            engine={"kind": "attach", "options": options}, model="qwen2.5-7b", telemetry={"gpu_hz": 20.0}
        )
        directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
        measure_run(RunContext(profile=attached, requests=(asked(),)), planned(), directory)
    loaded = load_run(directory)
    assert loaded.record.num_completed == 1
    assert sorted({sample.index for sample in loaded.gpu}) == sampled
    assert [gpu.index for gpu in loaded.record.node.gpus] == sampled
    codes = {warning.code for warning in loaded.record.warnings}
    assert "foreign-gpu-process" not in codes  # it is the server's own, before and after
    monkeypatch.setattr(here, "_inventory", lambda visible: loaded.record.node.gpus if visible == "1" else None)
    assert here.is_comparable_here(attached, loaded.record)


@pytest.mark.parametrize("url", ["http://example.org:8000", "https://192.0.2.1"])
def test_gpus_of_another_host_cannot_be_sampled(url):
    with pytest.raises(EngineUnavailableError, match=f"and {url} is not on it; leave gpus out, or measure on the"):
        ENGINE.check_available(settings_of(url=url, gpus=(0,)))
    ENGINE.check_available(settings_of(url=url))
    ENGINE.check_available(settings_of(url="http://localhost:8000", gpus=(0,)))


@pytest.mark.slow
def test_two_servers_are_compared_by_turns_and_the_key_is_in_no_file(tmp_path):
    with sim_server(tmp_path / "a", time_scale=20.0) as a, sim_server(tmp_path / "b", time_scale=20.0) as b:
        urls = {
            "engine.options.url": a.client.base_url,
            "variants.again.server.url": b.client.base_url,
            "engine.options.api_key_env": "SERVER_KEY",
            "blocks": 2,
        }
        done = benchctl(tmp_path, **urls)
        assert done.returncode == 0, done.stdout + done.stderr
        assert a.process.poll() is None
        assert b.process.poll() is None
        assert min(a.metric("vllm:generation_tokens_total"), b.metric("vllm:generation_tokens_total")) >= 2 * 4 * 12
    runs = runs_of(tmp_path)
    assert [run["state"] for run in runs] == ["done"] * 4
    for run in runs:
        assert not run.get("argv")
        assert "launch_ns" not in run["times"]
        expected = b if run["variant"] == "again" else a
        assert run["effective_config"]["server.url"] == str(expected.client.base_url).rstrip("/")
        assert run["effective_config"]["server.served_model"] == "qwen2.5-7b"
        assert "server-not-fresh" in [warning["code"] for warning in run["warnings"]]
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_two_equal_servers_of_others_are_called_equivalent(tmp_path):
    with sim_server(tmp_path / "a", time_scale=1.0) as a, sim_server(tmp_path / "b", time_scale=1.0) as b:
        urls = {"engine.options.url": a.client.base_url, "variants.again.server.url": b.client.base_url}
        done = benchctl(tmp_path, **urls, blocks=6)
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "results" / "aa" / "latest"
    compared = cli.benchctl("compare", f"{path}:baseline", f"{path}:again", "--threshold", "20%", cwd=tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert compared.stdout.startswith("equivalent: again against baseline: 2 of 2 comparisons inside")
    assert "step_ms is not recorded by this server; tpot_ms and wall_s decide" in compared.stdout


@pytest.mark.slow
def test_servers_that_differ_in_more_than_their_address_are_refused_with_the_words_that_allow_it(tmp_path):
    with (
        sim_server(tmp_path / "a", time_scale=50.0) as a,
        sim_server(tmp_path / "b", model="qwen2.5-1.5b", time_scale=50.0) as b,
    ):
        urls = {"engine.options.url": a.client.base_url, "variants.again.server.url": b.client.base_url}
        assert benchctl(tmp_path, **urls).returncode == 0
    path = tmp_path / "results" / "aa" / "latest"
    refused = cli.benchctl("compare", f"{path}:baseline", f"{path}:again", cwd=tmp_path)
    assert refused.returncode == 4
    assert 'server.served_model: "qwen2.5-7b" against "qwen2.5-1.5b"' in refused.stderr
    assert "server.url" not in refused.stderr
    words = next(line for line in refused.stderr.splitlines() if line.startswith("  --allow-difference")).split()
    allowed = cli.benchctl("compare", f"{path}:baseline", f"{path}:again", *words, cwd=tmp_path)
    assert allowed.returncode == 3, allowed.stdout + allowed.stderr


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_is_noticed_within_seconds(tmp_path):
    with sim_server(tmp_path / "a", time_scale=0.2) as server:
        values = {"engine.options.url": server.client.base_url, "workload.output_len": 400}
        log = tmp_path / "out.txt"
        with log.open("wb") as sink:
            running = subprocess.Popen(
                command(**values), cwd=tmp_path, env=environment(tmp_path), stdout=sink, stderr=subprocess.STDOUT
            )
        try:
            wait_for_load(tmp_path)
            os.kill(server.process.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while runs_of(tmp_path)[0]["state"] == "running":
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            assert running.wait(timeout=60) == 5, log.read_text()
        finally:
            running.kill()
            running.wait()
    first, second = runs_of(tmp_path)
    assert (first["state"], first["failure"]["cause"]) == ("failed", "server-died")
    assert (second["state"], second["failure"]["cause"]) == ("failed", "not-ready")


def wait_for_load(cwd: Path) -> None:
    """Until the load of the first run has begun: its samplers write just before the first request."""
    deadline = time.monotonic() + 120
    while not list(cwd.glob("results/aa/latest/runs/*/prometheus.jsonl")):
        assert time.monotonic() < deadline, "no run came to its load"
        time.sleep(0.05)
    time.sleep(0.5)


@pytest.mark.slow
def test_a_server_of_another_dialect_is_told_by_the_option_that_names_it(tmp_path):
    with sim_server(tmp_path / "a", time_scale=50.0) as server:
        dialect = {"engine.options.dialect": "transformers", "blocks": 1, "workload.num_prompts": 1}
        done = benchctl(tmp_path, **{"engine.options.url": server.client.base_url}, **dialect)
    assert done.returncode == 5
    assert "does not generate" in done.stderr
    assert "correct engine.options.dialect, or ask its owner" in done.stderr


@pytest.mark.slow
def test_an_address_where_nobody_answers_fails_at_once_with_the_remedy(tmp_path):
    start = time.monotonic()
    done = benchctl(tmp_path, **{"engine.options.url": f"http://127.0.0.1:{free_port()}"})
    assert done.returncode == 5
    assert time.monotonic() < start + 60, "it waited for timeouts.ready_s"
    assert (
        "/health does not answer (ConnectionRefusedError), after 5 s; start the server, or correct server.url"
        in (done.stdout + done.stderr).replace("\n", " ")
    )


def test_a_server_that_said_it_is_not_ready_and_is_gone_is_given_up_at_once():
    """A vLLM whose engine has died answers 503 for a moment before it leaves."""

    class Dying(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_words):
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Dying)
    url = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever)
    serving.start()

    async def wait() -> float:
        async with httpx.AsyncClient(base_url=url) as client:
            loop = asyncio.get_running_loop()
            loop.call_later(1.2, server.shutdown)
            loop.call_later(1.5, server.server_close)
            begun = time.monotonic()
            with pytest.raises(ServerStartError, match=r"does not answer \(Connect"):
                await AttachedServer(url, "/health", ready_s=40).wait_ready(client)
            return time.monotonic() - begun

    assert 5 < asyncio.run(wait()) < 15
    serving.join()
