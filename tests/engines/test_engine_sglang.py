"""SGLang as an engine: command line, dialect, what it tells of itself, and the steps that its plugin writes.

No real server takes part: a process stands in for its scheduler, and what it serves of itself is played.
"""

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import engine_settings
from support.engine_settings import asked, interpreter_with, model_in

from benchctl.engines import sglang
from benchctl.engines.engine import LaunchSite
from benchctl.engines.sglang import SglangEngine
from benchctl.errors import RecordError, UnsupportedError
from benchctl.profile.model import Guidance, Sampling

ENGINE = SglangEngine()
INFO = {
    "version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "quantization": None, "context_length": 4096,
    "max_running_requests": 64, "tp_size": 1, "disable_radix_cache": True, "disable_overlap_schedule": False,
    "api_key": "very secret", "port": 31234, "random_seed": 5, "max_total_num_tokens": 99, "internal_states": [{}],
}  # fmt: skip


settings_of = partial(engine_settings.settings_of, "sglang")


@pytest.fixture
def model(tmp_path):
    return model_in(tmp_path / "model", max_position_embeddings=100)


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
    options = ({}, {"step_log": False}, {"data_parallel_size": 2})
    assert [ENGINE.has_steps(settings_of(**each)) for each in options] == [True, False, False]
    assert env_of(model)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in env_of("Qwen/Qwen2.5-7B-Instruct")


def test_requests_that_the_server_would_refuse_are_refused_before_it_starts(model):
    for settings, limit in ((settings_of(model), 100), (settings_of(model, max_model_len=50), 50)):
        ENGINE.check_requests([asked(prompt_tokens=limit - 8)], settings)
        with pytest.raises(UnsupportedError, match=f"context of {limit} tokens .* needs {limit + 1}"):
            ENGINE.check_requests([asked(prompt_tokens=limit - 7)], settings)
    with pytest.raises(UnsupportedError, match="variant 'v': the server loads no value model"):
        ENGINE.check_requests([asked()], settings_of(guidance=Guidance()))


def test_what_counts_of_the_server_s_account_is_kept_and_secrets_are_not():
    def told_at(path, *extra_args):
        def page(request):
            return httpx.Response(200, json=INFO) if request.url.path == path else httpx.Response(404)

        async def ask():
            async with httpx.AsyncClient(base_url="http://s", transport=httpx.MockTransport(page)) as client:
                settings = settings_of(enforce_eager=True, extra_args=extra_args)
                return await ENGINE.effective_config(client, settings, LaunchSite(port=1, directory=Path()))

        return asyncio.run(ask())

    for path in ("/server_info", "/get_server_info"):
        assert told_at(path, "--page-size", "1") == {
            "version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64,
            "tensor_parallel_size": 1, "enable_prefix_caching": False, "overlap_schedule": True,
            "enforce_eager": True, "request_seed": "ignored", "extra_args": "--page-size 1",
        }  # fmt: skip
    assert told_at("/server_info", "--enable-deterministic-inference")["request_seed"] == "honoured"


SCHEDULER = Path(__file__).parent.parent / "support" / "servers" / "programs" / "sglang_scheduler.py"
INSIDE = Path(sglang.__file__).parent / "inside" / "sglang"
REQUESTS = {"a": [10, 3], "b": [20, 2]}
LOAD = [
    {"rows": ["a", "b"], "extend": 30, "prefixes": [0, 0]},
    {"rows": ["a", "b"]},
    {"rows": ["a"]},
]
"""Two prompts at once, and the decoding of both: five tokens in three steps."""


def scheduled(script: Any, log: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """A scheduler that ran ``script`` with the plugin and served every request of it."""
    done = subprocess.run(
        [sys.executable, str(SCHEDULER)],
        input=json.dumps({"requests": REQUESTS, **script}),
        env={"PYTHONPATH": str(INSIDE), **({"BENCHCTL_STEP_LOG": str(log)} if log else {}), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_plugins, got, _ = json.loads(done.stdout)
    assert num_plugins == 1
    assert got == {name: limit for name, (_, limit) in script.get("requests", REQUESTS).items()}
    return done


def steps_of(tmp_path: Path, script: Any) -> list[Any]:
    done = scheduled(script, tmp_path / "steps.raw.jsonl")
    assert done.stderr == ""
    return list(SglangEngine().read_steps(tmp_path))


def test_each_batch_is_one_step_with_its_rows_and_tokens_and_parts_and_follows_the_last_without_a_gap(tmp_path):
    done = scheduled({"turns": [None, *LOAD, None, None]}, tmp_path / "steps.raw.jsonl")
    assert done.stderr == ""
    *_, over_ns = json.loads(done.stdout)
    steps = list(SglangEngine().read_steps(tmp_path))
    assert [(s.phase, s.num_seqs, s.num_prefill_tokens, s.num_decode_tokens, s.output_tokens) for s in steps] == [
        ("prefill", 2, 30, 0, 2),
        ("decode", 2, 0, 2, 2),
        ("decode", 1, 0, 1, 1),
    ]
    assert [step.context_tokens for step in steps] == [30, 11 + 21, 12]
    assert [(step.step, step.preempted, step.is_greedy) for step in steps] == [(i, 0, False) for i in range(3)]
    ends = [step.start_ns + step.dur_ns for step in steps]
    assert [step.start_ns for step in steps[1:]] == ends[:-1]
    # What is done after tokens were sent belongs to the next step, and to none after the last: it sleeps 20 ms.
    assert min(*(step.dur_ns for step in steps[1:]), over_ns - ends[-1]) >= 20_000_000
    for step in steps:
        assert step.sections_ns.keys() == {"schedule", "model_forward", "sampler_total"}
        assert step.sections_ns["sampler_total"] >= 1_000_000  # it sleeps that long
        assert step.sections_ns["model_forward"] >= 2_000_000
        assert sum(step.sections_ns.values()) <= step.dur_ns
    # Another process that goes through the same batches does not record; a damaged line is named.
    assert scheduled({"turns": LOAD}, tmp_path / "steps.raw.jsonl").stderr == ""
    assert list(SglangEngine().read_steps(tmp_path)) == steps
    with (tmp_path / "steps.raw.jsonl").open("a") as file:
        file.write('{"began_ns": 1')
    read = SglangEngine().read_steps(tmp_path)
    assert [next(read) for _ in steps] == steps
    with pytest.raises(RecordError, match=r"steps\.raw\.jsonl:4"):
        next(read)


def test_a_step_after_a_pause_starts_when_its_batch_was_chosen(tmp_path):
    turns = [LOAD[0], None, None, {"rows": ["a", "b"]}, {"rows": ["a"]}]
    first, second, third = steps_of(tmp_path, {"turns": turns, "device": "cuda"})
    pause_ns = second.start_ns - (first.start_ns + first.dur_ns)
    assert pause_ns > 2_000_000  # two turns without work
    assert third.start_ns == second.start_ns + second.dur_ns
    assert second.sections_ns.keys() == {"schedule"}, "on a device only the scheduler's part is known"


def test_an_overlapping_scheduler_hands_each_batch_out_one_turn_late_and_loses_no_token(tmp_path):
    turns = [*LOAD[:2], {"rows": ["a", "b"]}]  # that b has ended is not known yet
    steps = steps_of(tmp_path, {"turns": turns, "overlap": True})
    assert [(step.num_seqs, step.output_tokens) for step in steps] == [(2, 2), (2, 2), (2, 1)]
    assert [step.sections_ns for step in steps] == [{}, {}, {}]
    ends = [step.start_ns + step.dur_ns for step in steps]
    assert [step.start_ns for step in steps[1:]] == ends[:-1]


def test_a_prompt_in_parts_gives_its_token_with_the_last_and_may_share_a_step_with_decoding(tmp_path):
    turns = [
        {"rows": ["a"], "extend": 10},
        {"rows": ["b"], "extend": 12, "is_part": True},
        {"rows": ["a", "b"], "extend": 9, "prefixes": [10, 12], "decoding": 1},
        {"rows": ["a", "b"], "greedy": True},
    ]
    _, part, mixed, last = steps_of(tmp_path, {"turns": turns})
    assert (part.num_prefill_tokens, part.output_tokens) == (12, 0)
    assert (mixed.phase, mixed.num_prefill_tokens, mixed.num_decode_tokens) == ("mixed", 8, 1)
    assert (mixed.context_tokens, mixed.output_tokens) == (31, 2)
    assert last.is_greedy


def test_requests_that_lose_their_place_are_counted_in_the_next_step(tmp_path):
    turns = [LOAD[0], {"rows": ["a"], "extend": 11, "retracted": ["a"]}, {"rows": ["a", "b"]}]
    assert [step.preempted for step in steps_of(tmp_path, {"turns": turns})] == [0, 1, 0]


def test_what_cannot_be_written_or_is_otherwise_costs_one_warning_and_never_the_server(tmp_path):
    odd = [LOAD[0], {"rows": ["a", "b"], "extend": "many"}, {"rows": ["a"]}]
    for script, log, said in (
        ({"turns": LOAD}, Path("/nowhere/steps"), "records no more steps of this server: FileNotFoundError"),
        ({"turns": odd}, tmp_path / "steps.raw.jsonl", "records no more steps of this server"),
        ({"turns": LOAD, "lacks": "retract_decode"}, tmp_path / "no", "cannot record the steps of this version"),
    ):
        done = scheduled(script, log)
        assert done.stderr.count("WARNING") == 1
        assert said in done.stderr
    assert len(list(SglangEngine().read_steps(tmp_path))) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("script", [{"turns": LOAD}, {"turns": LOAD, "schedules": False}])
def test_a_process_that_is_not_measured_or_does_not_schedule_is_left_alone(tmp_path, script):
    log = tmp_path / "steps" if "schedules" in script else None
    assert scheduled(script, log).stderr == ""
    assert list(tmp_path.iterdir()) == []
