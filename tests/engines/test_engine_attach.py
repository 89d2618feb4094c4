"""Servers that someone else runs: asked in their dialect, watched from outside, their key in no record."""

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support import cli, engine_settings
from support.engine_settings import asked
from support.nvml import FakeNvml
from support.servers.paced_engine import planned, profile
from support.servers.simulator import free_port, sim_server
from support.waiting import wait_until

from benchctl.engines.attach import AttachEngine
from benchctl.errors import EngineUnavailableError, ProfileError, UnsupportedError
from benchctl.measure import experiment as here
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.profile.load import load_profile
from benchctl.profile.model import Guidance
from benchctl.profile.planning import variant_settings
from benchctl.profile.sections import RequestOptions
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run

ENGINE = AttachEngine()
KEY = "not-to-be-written-anywhere-4711"
SMALL = {"workload.num_prompts": 2, "workload.samples_per_prompt": 2, "workload.output_len": 12, "blocks": 1}


settings_of = partial(engine_settings.settings_of, "attach", "qwen2.5-7b", url="http://127.0.0.1:1")


def body_of(**options):
    return json.loads(ENGINE.request_call(asked(), settings_of(**options)).body)


def benchctl(cwd: Path, **values: object) -> "subprocess.CompletedProcess[str]":
    settings = [word for name, value in {**SMALL, **values}.items() for word in ("--set", f"{name}={value}")]
    return cli.benchctl(
        "run", "--profile", "aa", "--engine", "attach", "--quiet", *settings, cwd=cwd, SERVER_KEY=KEY
    )


def runs_of(cwd: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(cwd.glob("results/aa/latest/runs/*/run.json"))]


SPELT = {
    "vllm": {"return_token_ids": True, "repetition_penalty": 1.0, "top_k": -1},
    "sglang": {"repetition_penalty": 1.0, "top_k": -1},
    "llamacpp": {"timings_per_token": True, "top_k": 0, "cache_prompt": False},
    "transformers": {},
}


def test_requests_are_spelt_as_the_server_of_each_dialect_understands_them():
    for dialect, expected in SPELT.items():
        body = body_of(dialect=dialect)
        assert body.items() >= {"max_tokens": 8, "stream": True, **expected}.items(), dialect
        assert "model" not in body
        assert body_of(dialect=dialect, served_model="theirs")["model"] == "theirs"
    assert body_of()["seed"] == 3
    assert "seed" not in body_of(send_seed=False)


def test_each_request_bypasses_the_prefix_cache_unless_the_profile_leaves_that_to_the_server():
    for dialect in ("vllm", "sglang"):
        salts = {body_of(dialect=dialect)["cache_salt"] for _ in range(2)}
        assert len(salts) == 2
        assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)
    for dialect in ("vllm", "sglang", "llamacpp"):
        assert not {"cache_salt", "cache_prompt"} & set(body_of(dialect=dialect, bypass_prefix_cache=False))
    for dialect in ("transformers", "openai"):
        assert not {"cache_salt", "cache_prompt"} & set(body_of(dialect=dialect))
    own = settings_of().model_copy(update={"request": RequestOptions(extra_body={"cache_salt": "mine"})})
    assert json.loads(ENGINE.request_call(asked(), own).body)["cache_salt"] == "mine"


def test_the_requests_of_a_load_share_a_salt_where_the_dialect_has_one_and_no_other_load_has_it():
    for dialect in ("vllm", "sglang"):
        loads = [ENGINE.salted(settings_of(dialect=dialect)) for _ in range(2)]
        salts = [
            {json.loads(ENGINE.request_call(asked(), load).body)["cache_salt"] for _ in range(3)} for load in loads
        ]
        assert [len(of_load) for of_load in salts] == [1, 1]
        assert salts[0] != salts[1]
    for dialect in ("llamacpp", "transformers", "openai"):
        plain = settings_of(dialect=dialect)
        assert ENGINE.salted(plain) == plain


PROMPTS_ARE_REPEATED = {
    "workload.dataset": "synthetic", "workload.input_len": 200, "workload.output_len": 8, "workload.num_prompts": 6,
    "workload.samples_per_prompt": 2, "workload.samples_as": "requests",
}  # fmt: skip


def test_a_live_server_with_a_cache_is_measured_again_and_again_at_equal_work(tmp_path):
    with sim_server(tmp_path / "a", enable_prefix_caching=True, time_scale=20.0) as server:
        for bypass, state in (("true", "done"), ("false", "suspect")):
            settings = {"engine.options.url": server.client.base_url, "engine.options.bypass_prefix_cache": bypass}
            (tmp_path / bypass).mkdir()
            done = benchctl(tmp_path / bypass, **PROMPTS_ARE_REPEATED, **settings)
            runs = runs_of(tmp_path / bypass)
            assert [run["state"] for run in runs] == [state] * 2, done.stderr
            codes = {warning["code"] for run in runs for warning in run.get("warnings", [])}
            assert ("check-failed" in codes) is (state == "suspect")


def test_the_key_is_read_from_the_environment_when_a_request_is_made(monkeypatch):
    settings = settings_of(api_key_env="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", KEY)
    ENGINE.check_available(settings)
    assert ENGINE.request_call(asked(), settings).headers["Authorization"] == f"Bearer {KEY}"
    assert "Authorization" not in ENGINE.request_call(asked(), settings_of()).headers
    monkeypatch.setenv("SERVER_KEY", f"{KEY}\n")
    with pytest.raises(EngineUnavailableError, match="holds line breaks or other characters") as told:
        ENGINE.check_available(settings)
    assert KEY not in str(told.value)
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(EngineUnavailableError, match="api_key_env names SERVER_KEY, which is not set; export"):
        ENGINE.check_available(settings)


def test_what_servers_of_a_dialect_or_on_another_host_cannot_do_is_refused():
    ENGINE.check_requests([asked(n=2)], settings_of(dialect="vllm"))
    for settings, message in (
        (settings_of(dialect="llamacpp"), r"set workload\.samples_as: requests"),
        (settings_of(guidance=Guidance()), "loads no value model"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            ENGINE.check_requests([asked(n=2)], settings)
    for url in ("http://example.org:8000", "https://192.0.2.1"):
        ENGINE.check_available(settings_of(url=url))
        with pytest.raises(EngineUnavailableError, match=f"and {url} is not on it; leave gpus out, or measure on"):
            ENGINE.check_available(settings_of(url=url, gpus=(0,)))
    ENGINE.check_available(settings_of(url="http://localhost:8000", gpus=(0,)))


URLS = {
    "ftp://host:1": "write an address that begins with http:// or https://",
    "http://me:word@host:1": "holds credentials, which would be recorded; name a variable in api_key_env",
    "http://host:1/?api_key=word": "holds a query, which requests cannot carry",
    "http://": "write a host and a port from 1 to 65535",
    "http://host:abc": "write a host and a port from 1 to 65535",
    "http://host:0": "write a host and a port from 1 to 65535",
    "http://host:99999": "write a host and a port from 1 to 65535",
    "http://[::1": "write a host and a port from 1 to 65535",
}
ADDRESSES = {
    "localhost:8000": "http://localhost:8000",
    "127.0.0.1": "http://127.0.0.1",
    "http://localhost:8000/v1": "http://localhost:8000",
    "http://host:1/v1/chat/completions": "http://host:1",
    "https://host/prefix/v1/": "https://host/prefix",
    "HTTPS://host/prefix/": "https://host/prefix",
    "http://[::1]:8000/": "http://[::1]:8000",
}


def test_an_address_is_taken_as_users_have_it_and_what_cannot_be_used_is_refused_with_the_remedy():
    for url, message in URLS.items():
        with pytest.raises(ProfileError, match=message):
            load_profile("aa", engine="attach", overrides=[f"engine.options.url={url}"])
    for url, address in ADDRESSES.items():
        profile = load_profile("aa", engine="attach", overrides=[f"engine.options.url={url}"])
        assert variant_settings(profile, "baseline", {}).server.url == address


def test_gpus_of_a_server_on_this_host_are_sampled_where_the_profile_names_them(tmp_path, monkeypatch):
    nvml = FakeNvml()
    nvml.pids_of = {1: [os.getpid()]}
    monkeypatch.setattr("benchctl.measure.run.open_gpu", partial(open_gpu, nvml=nvml))
    with sim_server(tmp_path / "server", time_scale=1.0) as server:
        for gpus in ([1], []):
            attached = profile(
                engine={"kind": "attach", "options": {"url": str(server.client.base_url), "gpus": gpus}},
                model="qwen2.5-7b", telemetry={"gpu_hz": 20.0},
            )  # fmt: skip
            directory = RunDirectory(tmp_path / f"runs-{len(gpus)}" / "000-b0-baseline")
            measure_run(RunContext(profile=attached, requests=RequestSets.single((asked(),))), planned(), directory)
            loaded = load_run(directory)
            sampled, inventory = {sample.index for sample in loaded.gpu}, loaded.record.node.gpus
            assert sorted(sampled) == [gpu.index for gpu in inventory] == gpus
            codes = {warning.code for warning in loaded.record.warnings}
            assert "foreign-gpu-process" not in codes  # it is the server's own, before and after
            monkeypatch.setattr(here, "_inventory", {"1": inventory}.get)
            assert here.is_comparable_here(attached, loaded.record)


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
        assert a.process.poll() is b.process.poll() is None
        assert min(a.metric("vllm:generation_tokens_total"), b.metric("vllm:generation_tokens_total")) >= 2 * 4 * 12
    runs = runs_of(tmp_path)
    assert [run["state"] for run in runs] == ["done"] * 4
    for run in runs:
        assert (run.get("argv") or [], "launch_ns" in run["times"]) == ([], False)
        expected = b if run["variant"] == "again" else a
        assert run["effective_config"]["server.url"] == str(expected.client.base_url).rstrip("/")
        assert run["effective_config"]["server.served_model"] == "qwen2.5-7b"
        assert not run.get("warnings"), "always so is no news"
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    sides = [f"results/aa/latest:{variant}" for variant in ("baseline", "again")]
    compared = cli.benchctl("compare", *sides, "--threshold", "90%", cwd=tmp_path)
    assert "step_ms is not recorded by this server; tpot_ms and wall_s decide" in compared.stdout, compared.stderr


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_is_noticed_within_seconds(tmp_path):
    with sim_server(tmp_path / "a", time_scale=0.2) as server:
        values = {"engine.options.url": server.client.base_url, "workload.output_len": 400}

        def kill():
            begun = "results/aa/latest/runs/*/prometheus.jsonl"
            wait_until("a load begins", lambda: list(tmp_path.glob(begun)), 120)
            time.sleep(0.5)
            server.process.kill()

        with ThreadPoolExecutor() as pool:
            killed = pool.submit(kill)
            done = benchctl(tmp_path, **values)
            killed.result()
    assert done.returncode == 5, done.stdout + done.stderr
    ends = [(run["state"], run["failure"]["cause"]) for run in runs_of(tmp_path)]
    assert ends == [("failed", "server-died"), ("failed", "not-ready")]


@pytest.mark.slow
def test_a_server_that_cannot_be_measured_is_told_with_the_option_that_names_it(tmp_path):
    with sim_server(tmp_path / "a", time_scale=50.0) as server:
        for settings, said in (
            (
                {"engine.options.url": server.client.base_url, "engine.options.dialect": "transformers"},
                r"does not generate.*correct engine\.options\.dialect, or ask its owner",
            ),
            (  # and does not wait for timeouts.ready_s
                {"engine.options.url": f"http://127.0.0.1:{free_port()}"},
                r"/health does not answer \(ConnectionRefusedError\), after 5 s; start the server, or correct",
            ),
        ):
            done = benchctl(tmp_path, **settings)
            assert done.returncode == 5
            assert re.search(said, (done.stdout + done.stderr).replace("\n", " "))
