"""``transformers serve`` as an engine: how it is started and asked, what it refuses, and its recorded steps."""

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest
from support import engine_settings
from support.engine_settings import interpreter_with, model_in
from support.guided.stub_transformers import stub_transformers

from benchctl.engines import transformers as transformers_failures
from benchctl.engines.engine import LaunchSite
from benchctl.engines.transformers import TransformersEngine
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.model import Guidance, Sampling

ENGINE = TransformersEngine()
LAUNCHER = Path(transformers_failures.__file__).parent / "inside" / "transformers" / "serve.py"


settings_of = partial(engine_settings.settings_of, "transformers")
asked = partial(engine_settings.asked, seed=77)


@pytest.fixture
def python(tmp_path) -> str:
    """An interpreter whose environment has the library and not what its server needs beside it."""
    return interpreter_with(tmp_path, "transformers", "5.23.0")


@pytest.fixture
def model(tmp_path) -> str:
    """A model whose texts end with one of two tokens."""
    directory = model_in(tmp_path / "model", eos_token_id=9)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    return directory


def sent(request, settings) -> tuple[dict, dict]:
    """The body of a call, and the generation config that it holds as a string."""
    body = json.loads(ENGINE.request_call(request, settings).body)
    return body, json.loads(body["generation_config"])


def test_a_server_is_started_by_the_launcher_and_its_own_words_follow_two_dashes(python, model, tmp_path):
    settings = settings_of(model, python=python, device="cpu", num_kv_blocks=9, extra_args=("--compile",))
    argv = ENGINE.argv(settings, LaunchSite(port=8123, directory=tmp_path, noise_seed=11))
    assert argv == (
        python, str(LAUNCHER), "--description", str(tmp_path / "server.json"),
        "--step-log", str(tmp_path / "steps.raw.jsonl"), "--no-prefix-caching",
        "--", "serve", model, "--host", "127.0.0.1", "--port", "8123", "--default-seed", "11", "--device", "cpu",
        "--continuous-batching", "--cb-num-blocks", "9", "--compile",
    )  # fmt: skip


def test_without_batching_there_are_no_steps_to_record(python, model, tmp_path):
    settings = settings_of(model, python=python, continuous_batching=False, enable_prefix_caching=True)
    argv = ENGINE.argv(settings, LaunchSite(port=8123, directory=tmp_path))
    assert not {"--step-log", "--continuous-batching", "--no-prefix-caching"} & set(argv)
    assert not ENGINE.has_steps(settings)
    assert not ENGINE.has_steps(settings_of(model, step_log=False))
    assert ENGINE.has_steps(settings_of(model))


def test_a_model_on_disk_is_served_offline_and_a_built_in_name_stands_for_its_repository(python, model, tmp_path):
    site = LaunchSite(port=8123, directory=tmp_path)
    assert ENGINE.env(settings_of(model), site)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in ENGINE.env(settings_of("Qwen/Qwen2.5-0.5B"), site)
    argv = ENGINE.argv(settings_of("qwen2.5-7b", python=python), site)
    assert argv[argv.index("serve") + 1] == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(EngineUnavailableError, match=r"is a directory without a config\.json"):
        ENGINE.argv(settings_of(tmp_path, python=python), site)
    missing = r"lacks .*accelerate.*fastapi.*pip install 'transformers\[serving\]' torch"
    with pytest.raises(EngineUnavailableError, match=missing):
        ENGINE.check_available(settings_of(model, python=python))


def test_all_of_a_sampling_is_said_and_no_field_that_the_server_refuses_and_greedy_sampling_draws_nothing(model):
    sampling = Sampling(temperature=0.5, top_p=0.9, min_p=0.01)
    body, config = sent(asked(), settings_of(model, sampling=sampling))
    assert body.keys() == {"generation_config", "max_tokens", "stream", "prompt"}
    assert config == {
        "do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.0,
        "eos_token_id": -1, "pad_token_id": 0,
    }  # fmt: skip
    for sampling in (Sampling(temperature=0, top_k=7), Sampling(top_k=1, temperature=2.0)):
        _, config = sent(asked(), settings_of(model, sampling=sampling))
        assert config == {
            "do_sample": False, "repetition_penalty": 1.0, "eos_token_id": -1, "pad_token_id": 0,
        }  # fmt: skip
    body, _ = sent(asked(), settings_of(model, continuous_batching=False))
    assert body["seed"] == 77, "only a server without batching takes one"


def test_a_text_that_may_end_does_so_where_the_model_says(model, tmp_path):
    for directory, ends in ((model, [2, 5]), (model_in(tmp_path / "o", text_config={"eos_token_id": 9}), [9])):
        _, config = sent(asked(ignore_eos=False, chat=True), settings_of(directory))
        assert config["eos_token_id"] == ends


def test_what_the_server_would_get_wrong_is_refused_with_a_remedy(model):
    ENGINE.check_requests([asked()], settings_of("Qwen/Qwen2.5-0.5B"))
    for request, name, options, words in (
        (asked(n=2), model, {}, "samples_as: requests"),
        (asked(prompt_tokens=121), model, {}, "context of 128 tokens .* a request needs 129"),
        (
            asked(prompt_tokens=90),
            model,
            {"num_kv_blocks": 3, "block_size": 32},
            "KV cache of 96 tokens .* 98; raise",
        ),
        (asked(), model, {"guidance": Guidance()}, "loads no value model"),
        (asked(ignore_eos=False), "Qwen/Qwen2.5-0.5B", {}, "needs the token that ends a text"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            ENGINE.check_requests([asked(), request], settings_of(name, **options))
    ENGINE.check_requests([asked(prompt_tokens=120)], settings_of(model, num_kv_blocks=4, block_size=32))


def launched(tmp_path, *words, step_log=None, replaced=MappingProxyType({})) -> subprocess.CompletedProcess:
    """The launcher over the stub of the library, in the directory of a run."""
    library = stub_transformers(tmp_path / "library", **replaced)
    ours = ("--step-log", str(step_log or tmp_path / "steps.raw.jsonl"))
    return subprocess.run(
        (sys.executable, str(LAUNCHER), *ours, "--", *words),
        env={"PYTHONPATH": str(library)}, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip


def test_steps_are_recorded_one_for_each_turn_of_the_loop(tmp_path):
    ended = launched(tmp_path, "serve", "x")
    assert ended.stdout.split("\n")[:3] == ["transformers serve x", "answers 3 4", "answers 2"]
    steps = list(ENGINE.read_steps(tmp_path))
    assert [(step.output_tokens, step.phase, step.context_tokens) for step in steps[:4]] == [
        (2, "prefill", 7), (2, "decode", 9), (2, "decode", 11), (1, "decode", 5),
    ]  # fmt: skip
    assert [(step.output_tokens, step.phase) for step in steps[4:]] == [(1, "prefill"), (1, "decode")]
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps[:2]] == [(7, 0), (0, 2)]
    assert all(step.is_greedy and 0 < step.sections_ns["schedule"] <= step.dur_ns for step in steps)
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


def test_a_server_whose_steps_cannot_be_recorded_serves_on_and_says_so_once(tmp_path):
    built_otherwise = {"continuous_api": "", "transformers": "def app(prog_name): print('answers 3 4')"}
    for options, said in (
        ({"step_log": tmp_path / "nowhere" / "steps.jsonl"}, "FileNotFoundError"),
        ({"step_log": "/dev/full"}, "steps are recorded no further after 0: OSError: [Errno 28]"),
        ({"replaced": built_otherwise}, "steps are not recorded with this version of transformers"),
    ):
        ended = launched(tmp_path, "serve", **options)
        assert ("answers 3 4" in ended.stdout, ended.stderr.count("benchctl: ")) == (True, 1)
        assert said in ended.stderr
    assert list(ENGINE.read_steps(tmp_path)) == []
