"""``transformers serve`` as an engine: how it is started and asked, what it refuses, and its recorded steps."""

import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.guided.stub_transformers import stub_transformers
from support.servers.real_engines import assert_compared, assert_ended, needs, tiny_model
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.engines import transformers as transformers_failures
from benchctl.engines.attach import AttachOptions
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.transformers import TransformersEngine, TransformersOptions
from benchctl.errors import EngineUnavailableError, RecordError, UnsupportedError
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.loaded import load_results
from benchctl.records.record import Message, PreparedRequest

ENGINE = TransformersEngine()
LAUNCHER = Path(transformers_failures.__file__).parent / "inside" / "transformers" / "serve.py"


@pytest.fixture
def python(tmp_path) -> str:
    """An interpreter whose environment has the library and not what its server needs beside it."""
    information = tmp_path / "packages" / "transformers-5.23.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.23.0\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={information.parent} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def model(tmp_path) -> str:
    """A directory that looks like a model with room for 128 tokens, whose texts end with one of two tokens."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 128, "eos_token_id": 9}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    return str(directory)


def settings_of(model, *, sampling=None, guidance=None, server=None, **options) -> VariantSettings:
    server = server or TransformersOptions(**options)
    return VariantSettings(
        variant="v", model=str(model), server=server, sampling=sampling or Sampling(), guidance=guidance
    )


def asked(*, prompt_tokens=5, max_tokens=8, n=1, ignore_eos=True, chat=False) -> PreparedRequest:
    text = {"messages": (Message(role="user", content="Hello"),)} if chat else {"prompt": "Hello"}
    return PreparedRequest(
        request_id="r0", index=0, arrival_ns=0, prompt_tokens=prompt_tokens, max_tokens=max_tokens, n=n,
        ignore_eos=ignore_eos, seed=77, source="generated:0", **text,
    )  # fmt: skip


def body_of(request, settings) -> dict:
    """The body of a call, with the generation config that it holds as a string read."""
    body = json.loads(ENGINE.request_call(request, settings).body)
    return body | {"generation_config": json.loads(body["generation_config"])}


def test_the_kind_transformers_is_measured_by_this_engine():
    assert isinstance(engine_for("transformers"), TransformersEngine)


def test_a_server_is_started_by_the_launcher_and_its_own_words_follow_two_dashes(python, model, tmp_path):
    settings = settings_of(model, python=python, device="cpu", num_kv_blocks=9, extra_args=("--compile",))
    argv = ENGINE.argv(settings, LaunchSite(port=8123, directory=tmp_path, noise_seed=11))
    dashes = argv.index("--")
    ours, theirs = argv[:dashes], argv[dashes + 1 :]
    assert ours[:2] == (python, str(LAUNCHER))
    assert ours[2:] == (
        "--description", str(tmp_path / "server.json"), "--step-log", str(tmp_path / "steps.raw.jsonl"),
        "--no-prefix-caching",
    )  # fmt: skip
    assert theirs == (
        "serve", model, "--host", "127.0.0.1", "--port", "8123", "--default-seed", "11", "--device", "cpu",
        "--continuous-batching", "--cb-num-blocks", "9", "--compile",
    )  # fmt: skip


def test_without_batching_there_are_no_steps_to_record(python, model, tmp_path):
    settings = settings_of(model, python=python, continuous_batching=False, enable_prefix_caching=True)
    argv = ENGINE.argv(settings, LaunchSite(port=8123, directory=tmp_path))
    assert not {"--step-log", "--continuous-batching", "--no-prefix-caching"} & set(argv)
    assert not ENGINE.has_steps(settings)
    assert not ENGINE.has_steps(settings_of(model, step_log=False))
    assert ENGINE.has_steps(settings_of(model))


def test_a_model_on_disk_is_served_offline_and_the_profile_has_the_last_word(model, tmp_path):
    site = LaunchSite(port=8123, directory=tmp_path)
    assert ENGINE.env(settings_of(model), site)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in ENGINE.env(settings_of("Qwen/Qwen2.5-0.5B"), site)
    assert ENGINE.env(settings_of(model, env={"HF_HUB_OFFLINE": "0"}), site)["HF_HUB_OFFLINE"] == "0"


def test_a_built_in_name_stands_for_its_repository_and_what_is_no_model_is_refused(python, tmp_path):
    site = LaunchSite(port=8123, directory=tmp_path)
    argv = ENGINE.argv(settings_of("qwen2.5-7b", python=python), site)
    assert argv[argv.index("serve") + 1] == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(EngineUnavailableError, match=r"is a directory without a config\.json"):
        ENGINE.argv(settings_of(tmp_path, python=python), site)


def test_an_environment_without_what_the_server_needs_is_refused_with_what_is_missing(python, model):
    with pytest.raises(
        EngineUnavailableError, match=r"lacks .*accelerate.*uvicorn.*pip install 'transformers\[serving\]' torch"
    ):
        ENGINE.check_available(settings_of(model, python=python))


def test_all_of_a_sampling_is_said_and_no_field_that_the_server_refuses(model):
    sampling = Sampling(temperature=0.5, top_p=0.9, min_p=0.01)
    body = body_of(asked(), settings_of(model, sampling=sampling))
    assert body.keys() == {"generation_config", "max_tokens", "stream", "prompt"}
    assert body["generation_config"] == {
        "do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.0,
        "eos_token_id": -1, "pad_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(temperature=0, top_k=7), Sampling(top_k=1, temperature=2.0)])
def test_greedy_sampling_draws_nothing_however_it_is_spelt(model, sampling):
    config = body_of(asked(), settings_of(model, sampling=sampling))["generation_config"]
    assert config.pop("do_sample") is False
    assert not {"temperature", "top_k", "top_p", "min_p"} & config.keys()


def test_a_text_that_may_end_does_so_where_the_model_says(model, tmp_path):
    settings = settings_of(model)
    natural = asked(ignore_eos=False, chat=True)
    assert body_of(natural, settings)["generation_config"]["eos_token_id"] == [2, 5]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    other = settings_of(tmp_path / "other")
    assert body_of(natural, other)["generation_config"]["eos_token_id"] == [9]


def test_only_a_server_without_batching_is_sent_a_seed_and_only_a_foreign_one_a_name(model):
    assert body_of(asked(), settings_of(model, continuous_batching=False))["seed"] == 77
    foreign = settings_of(model, server=AttachOptions(url="http://127.0.0.1:1", dialect="transformers"))
    assert body_of(asked(), foreign)["model"] == model
    assert "seed" not in body_of(asked(), foreign)


@pytest.mark.parametrize(
    ("request_", "options", "words"),
    [
        (asked(n=2), {}, "samples_as: requests"),
        (asked(prompt_tokens=121), {}, "context of 128 tokens .* a request needs 129"),
        (
            asked(prompt_tokens=90),
            {"num_kv_blocks": 3, "block_size": 32},
            "KV cache of 96 tokens .* 98; raise",
        ),
        (asked(), {"guidance": Guidance()}, "loads no value model"),
    ],
)
def test_what_the_server_would_get_wrong_is_refused_with_a_remedy(model, request_, options, words):
    with pytest.raises(UnsupportedError, match=words):
        ENGINE.check_requests([asked(), request_], settings_of(model, **options))


def test_requests_at_the_limit_raise_no_error(model):
    ENGINE.check_requests([asked(prompt_tokens=120)], settings_of(model, num_kv_blocks=4, block_size=32))


def test_a_model_that_is_not_on_disk_is_refused_only_where_a_text_must_end():
    settings = settings_of("Qwen/Qwen2.5-0.5B")
    ENGINE.check_requests([asked()], settings)
    with pytest.raises(UnsupportedError, match="needs the token that ends a text"):
        ENGINE.check_requests([asked(ignore_eos=False)], settings)


@pytest.mark.parametrize(
    ("tail", "cause", "is_profile_error", "is_final"),
    [
        (
            "ERROR:    [Errno 98] error while attempting to bind on address: address already in use",
            "port-taken",
            0,
            0,
        ),
        ("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no'", "bad-model", 1, 0),
        ("OSError: Error no file named model.safetensors, or pytorch_model.bin, found in", "bad-model", 1, 0),
        ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header", "bad-model", 1, 0),
        ("Run 'transformers serve --help' for full details.", "bad-flag", 1, 0),
        ("Try 'transformers serve --help' for help.\n\nError: Invalid value for '--port': 'abc'", "bad-flag", 1, 0),
        ("ModuleNotFoundError: No module named 'requests'", "missing-package", 1, 0),
        ("ValueError: this requires `sentencepiece`. You can install it with `pip", "missing-package", 1, 0),
        ("AssertionError: Torch not compiled with CUDA enabled", "bad-device", 1, 0),
        ("Error in generation loop: x\ntorch.OutOfMemoryError: CUDA out of memory.", "out-of-memory", 0, 1),
        ("Error in generation loop: x\nMemoryError: Memory footprint 2 is more than", "out-of-memory", 0, 1),
        ("RuntimeError: No requests can be scheduled and no requests can be offloaded.", "kv-cache-full", 0, 1),
        ("Error in generation loop: cannot reshape tensor", "generation-died", 0, 1),
    ],
)
def test_a_log_gives_its_failure_away(tail, cause, is_profile_error, is_final):
    found = ENGINE.diagnose(f"INFO: Waiting\n{tail}\nINFO: bye")
    assert found is not None
    assert (found.cause, found.is_profile_error, found.is_final) == (cause, is_profile_error, is_final)


def test_an_ordinary_log_gives_nothing_away():
    assert ENGINE.diagnose("INFO:     Uvicorn running on http://127.0.0.1:8262 (Press CTRL+C to quit)") is None


def launched(tmp_path, *words, step_log=None, **how) -> subprocess.CompletedProcess:
    """The launcher over the stub of the library, in the directory of a run."""
    library = stub_transformers(tmp_path / "library", **how.pop("replaced", {}))
    ours = ("--step-log", str(step_log or tmp_path / "steps.raw.jsonl"))
    return subprocess.run(
        (sys.executable, str(LAUNCHER), *ours, "--", *words),
        env={"PYTHONPATH": str(library)}, capture_output=True, text=True, check=True, timeout=30, **how,
    )  # fmt: skip


def test_steps_are_recorded_one_for_each_turn_of_the_loop(tmp_path):
    ended = launched(tmp_path, "serve", "x")
    assert ended.stdout.split("\n")[:3] == ["transformers serve x", "answers 3 4", "answers 2"]
    steps = list(ENGINE.read_steps(tmp_path))
    assert [step.step for step in steps] == list(range(6))
    assert [step.output_tokens for step in steps] == [2, 2, 2, 1, 1, 1]
    assert [step.phase for step in steps] == ["prefill", "decode", "decode", "decode", "prefill", "decode"]
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps[:2]] == [(7, 0), (0, 2)]
    assert [step.context_tokens for step in steps[:4]] == [7, 9, 11, 5]
    assert all(step.is_greedy and step.clock == "host" for step in steps)
    assert all(0 < step.sections_ns["schedule"] <= step.dur_ns for step in steps)
    assert all(a.start_ns + a.dur_ns <= b.start_ns for a, b in pairwise(steps))


def test_overlapped_batches_are_written_when_their_tokens_are_handed_out_and_every_token_once(tmp_path):
    ended = launched(tmp_path, "serve", "async")
    assert ended.stdout.split("\n")[1:3] == ["answers 3 4", "answers 2"]
    steps = list(ENGINE.read_steps(tmp_path))
    assert sum(step.output_tokens for step in steps) == 3 + 4 + 2
    assert [step.num_prefill_tokens for step in steps if step.num_prefill_tokens] == [7, 3]
    late = [step for step in steps if step.output_tokens < step.num_seqs]
    assert late, "the loop learns one step late that a request has ended"
    assert all(a.start_ns + a.dur_ns <= b.start_ns for a, b in pairwise(steps))


def test_a_server_whose_step_log_cannot_be_opened_serves_on_and_says_so_once(tmp_path):
    ended = launched(tmp_path, "serve", step_log=tmp_path / "nowhere" / "steps.jsonl")
    assert "answers 3 4" in ended.stdout
    assert ended.stderr.count("benchctl: ") == 1
    assert "FileNotFoundError" in ended.stderr


def test_a_server_on_a_full_disk_serves_on_and_says_so_once(tmp_path):
    ended = launched(tmp_path, "serve", step_log=Path("/dev/full"))
    assert "answers 2" in ended.stdout
    assert ended.stderr.count("benchctl: ") == 1
    assert "steps are recorded no further after 0: OSError: [Errno 28]" in ended.stderr


def test_a_file_that_may_not_grow_costs_the_rest_of_the_steps_and_nothing_else(tmp_path):
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))

    ended = launched(tmp_path, "serve", preexec_fn=limit_files)
    assert "answers 2" in ended.stdout
    assert ended.stderr.count("benchctl: steps are recorded no further") == 1
    assert "OSError: [Errno 27]" in ended.stderr
    steps = ENGINE.read_steps(tmp_path)
    assert next(steps).step == 0
    with pytest.raises(RecordError, match="cut off"):
        list(steps)


def test_a_version_of_the_library_that_is_built_otherwise_costs_the_steps_and_nothing_else(tmp_path):
    other = "def app(prog_name): print('serves')"
    ended = launched(tmp_path, "serve", replaced={"continuous_api": "", "transformers": other})
    assert ended.stdout == "serves\n"
    assert "benchctl: steps are not recorded with this version of transformers" in ended.stderr
    assert list(ENGINE.read_steps(tmp_path)) == []


PROFILE = """\
name: sampler
seed: 3
engine: transformers-cpu
model: {model}
workload:
  dataset: generated
  num_prompts: 6
  output_len: 10
  arrival: {{kind: closed-loop, max_concurrency: 3}}
  num_warmups: 1
variants:
  baseline: {{}}
  greedy: {{sampling: {{top_k: 1}}}}
allowed_differences: [sampling.top_k]
telemetry: {{gpu_hz: 0}}
"""


@pytest.mark.real_engine
@needs("transformers")
def test_real_servers_give_runs_whose_accounts_agree_to_the_token(tmp_path):
    profile = tmp_path / "sampler.yaml"
    profile.write_text(PROFILE.format(model=tiny_model(tmp_path)))
    words = ("run", "--profile", str(profile), "--blocks", "1", "--output-dir", str(tmp_path / "out"), "--quiet")
    ended = subprocess.run((sys.executable, "-m", "benchctl", *words), capture_output=True, text=True, check=False)
    path = tmp_path / "out" / "sampler" / "latest"
    assert_ended(ended, path)
    assert_compared(path)
    results = load_results(path)
    greedy, drawn = sorted(results.runs, key=lambda run: run.record.variant != "greedy")
    experiment = experiment_of(results)
    for run in (greedy, drawn):
        checks = {check.name: check for check in experiment.checks(run)}
        assert checks["step-tokens"].detail == "steps 60, usage 60"
        assert not [check for check in checks.values() if check.ok is False]
        assert checks["greedy-share"].ok
        assert run.record.effective_config["server.cb.allow_block_sharing"] is False
        assert run.record.effective_config["server.request_seed"] == "ignored"
        assert run.record.engine_version.startswith("5.")
        sections = {name for step in records_of(run) for name in step.sections_ns}
        assert sections == {"schedule", "model_forward", "sampler_total"}
    texts = {run.record.variant: [request.choices[0].text for request in run.requests] for run in results.runs}
    assert texts["greedy"] != texts["baseline"]
    ours, theirs = greedy.record.effective_config, drawn.record.effective_config
    assert [name for name in ours if ours[name] != theirs.get(name)] == ["sampling.top_k"]
