"""The plugin inside a vLLM server, in a process that stands in for the server's front end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchctl.engines import vllm
from benchctl.engines.vllm_steps import effective, read_description

FRONT_END = Path(__file__).parent.parent / "support" / "servers" / "programs" / "vllm_front_end.py"
INSIDE = Path(vllm.__file__).parent / "inside" / "vllm"

LOGGERS = """
from abc import ABC, abstractmethod

class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config, engine_index=0): ...
    @abstractmethod
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...
    @abstractmethod
    def log_engine_initialized(self): ...
    @abstractmethod
    def of_a_later_version(self): ...
"""
CLIENT = """
class AsyncMPClient:
    def __init__(self, messages):
        self.messages = list(messages)
    async def get_output_async(self):
        return self.messages.pop(0)
"""
DETAILS = {
    "iteration_index": 7, "num_ctx_requests": 1, "num_ctx_tokens": 5, "num_generation_requests": 2,
    "num_generation_tokens": 2, "elapsed_ms": 2.5, "is_dummy": False,
}  # fmt: skip
IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0}
BUSY = IDLE | {"num_running_reqs": 3, "kv_cache_usage": 0.25, "iteration_details": DETAILS}
TOKENS = {"num_generation_tokens": 3, "num_preempted_reqs": 1}
EVENTS = [["QUEUED", 99.0], ["SCHEDULED", 99.5], ["SCHEDULED", 99.7]]
STEP = {"message": {"timestamp": 100.25, "events": EVENTS}, "scheduler": BUSY, "iteration": TOKENS}


@pytest.fixture
def vllm_like(tmp_path: Path) -> Path:
    """The modules of vLLM that the plugin knows."""
    for name, source in (("metrics/loggers", LOGGERS), ("engine/core_client", CLIENT)):
        module = tmp_path / "stand-in" / "vllm" / "v1" / f"{name}.py"
        module.parent.mkdir(parents=True)
        module.write_text(source)
    return tmp_path / "stand-in"


def served(
    vllm_like: Path, steps: list[Any], config: Any = None, **env: Path
) -> "subprocess.CompletedProcess[str]":
    """A front end that recorded ``steps`` with one plugin and ended well."""
    path = os.pathsep.join([str(INSIDE), str(vllm_like)])
    done = subprocess.run(
        [sys.executable, str(FRONT_END), *([json.dumps(config)] if config else [])],
        input=json.dumps(steps),
        env={"PYTHONPATH": path, **{name: str(value) for name, value in env.items()}},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    return done


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_in_the_words_of_vllm(vllm_like, tmp_path):
    speculation = {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 5}
    speculation["num_accepted_tokens_per_pos"] = [2, 1, 1, 1]
    cache = {"requests": 1, "queries": 5, "hits": 0}
    scheduler = BUSY | {"spec_decoding_stats": speculation, "prefix_cache_stats": cache}
    done = served(vllm_like, [STEP | {"scheduler": scheduler}], BENCHCTL_STEP_LOG=tmp_path / "steps")
    (line,) = lines_of(tmp_path / "steps")
    assert line["details"] == DETAILS
    assert line["scheduler"] == {key: value for key, value in BUSY.items() if key != "iteration_details"}
    assert (line["spec_decoding"], line["prefix_cache"]) == (speculation, {"hits": 0})
    assert line["outputs"] == TOKENS | {"num_first_tokens": 0}
    assert done.stderr == ""


def test_requests_that_ended_leave_their_tokens_in_the_cache_behind(vllm_like, tmp_path):
    ended = [
        {"num_prompt_tokens": 7, "num_generation_tokens": 3},
        {"num_prompt_tokens": 5, "num_generation_tokens": 1},
    ]
    steps = [STEP | {"iteration": TOKENS | {"finished_requests": ended}}]
    served(
        vllm_like,
        [*steps, STEP | {"iteration": TOKENS | {"finished_requests": [{}]}}],
        BENCHCTL_STEP_LOG=tmp_path / "steps",
    )
    first, other_version = (line["outputs"] for line in lines_of(tmp_path / "steps"))
    assert first == TOKENS | {"finished_tokens": 14}
    assert other_version == TOKENS


def test_a_step_ends_when_the_engine_says_so_and_not_when_it_is_recorded(vllm_like, tmp_path):
    served(vllm_like, [STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    (line,) = lines_of(tmp_path / "steps")
    assert line["ended_ns"] == 100_250_000_000
    assert line["recorded_ns"] != line["ended_ns"]


def test_only_a_step_that_wakes_the_engine_says_when_its_first_request_was_taken_up(vllm_like, tmp_path):
    rest = STEP | {"scheduler": IDLE}
    served(vllm_like, [STEP, STEP, rest, STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    first_ns = [line.get("scheduled_ns") for line in lines_of(tmp_path / "steps")]
    assert first_ns == [99_500_000_000, None, None, 99_500_000_000]


def test_what_another_version_does_not_say_is_left_out(vllm_like, tmp_path):
    odd = {"num_running_reqs": "three", "kv_cache_usage": float("inf"), "num_waiting_reqs": 2}
    steps = [{"message": None, "scheduler": odd, "iteration": {"num_generation_tokens": 3}}]
    steps += [{"message": None, "scheduler": None, "iteration": None}]
    done = served(vllm_like, steps, BENCHCTL_STEP_LOG=tmp_path / "steps")
    (line,) = lines_of(tmp_path / "steps")
    assert line["scheduler"] == {"num_waiting_reqs": 2}
    assert line["outputs"] == {"num_generation_tokens": 3}
    assert not {"details", "ended_ns", "scheduled_ns"} & set(line)
    assert done.stderr == ""


def test_a_version_whose_messages_cannot_be_seen_is_recorded_with_one_warning(vllm_like, tmp_path):
    client = vllm_like / "vllm/v1/engine/core_client.py"
    client.write_text(CLIENT.replace("AsyncMPClient", "Other") + "AsyncMPClient = lambda messages: Other(messages)")
    done = served(vllm_like, [STEP, STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    assert ["ended_ns" in line for line in lines_of(tmp_path / "steps")] == [False, False]
    assert done.stderr.count("WARNING") == 1
    assert "cannot see when steps end" in done.stderr


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/full", "No space left"), ("/nowhere/steps", "No such file"), ("/", "directory")]
)
def test_a_log_that_cannot_be_written_costs_one_warning_and_never_the_server(vllm_like, path, reason):
    done = served(vllm_like, [STEP] * 3, BENCHCTL_STEP_LOG=Path(path))
    assert done.stderr.count("WARNING") == 1
    assert "benchctl records no more steps" in done.stderr
    assert reason in done.stderr


def test_statistics_of_an_unknown_kind_cost_one_warning_and_never_the_server(vllm_like, tmp_path):
    drafting = BUSY | {"spec_decoding_stats": {"num_drafts": 1}}
    broken = STEP | {"iteration": TOKENS | {"time_to_first_tokens_iter": 5}, "scheduler": drafting}
    done = served(vllm_like, [STEP, broken, STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    assert len(lines_of(tmp_path / "steps")) == 1
    assert done.stderr.count("WARNING") == 1


def test_a_server_that_nobody_measures_is_left_alone(vllm_like, tmp_path):
    assert served(vllm_like, [STEP]).stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["stand-in"]


def test_the_server_describes_its_configuration_without_secrets(vllm_like, tmp_path):
    config = {
        "model_config": {
            "max_model_len": 4096,
            "hf_token": "hf_secret",
            "tokenizer": "t",
            "_private": 1,
            "odd": {},
        },
        "cache_config": {"enable_prefix_caching": False, "num_gpu_blocks": 64},
        "scheduler_config": {"stages": ["a", "b"], "max_num_seqs": 8},
    }
    served(vllm_like, [], config, BENCHCTL_SERVER_DESCRIPTION=tmp_path / "server.json")
    told = read_description(tmp_path / "server.json")
    assert told["model_config"].keys() == {"max_model_len", "tokenizer"}
    assert told["cache_config"] == config["cache_config"]
    assert told["scheduler_config"] == config["scheduler_config"]
    assert told["versions"]["python"].startswith("3.")


def test_a_description_that_cannot_be_written_is_said_and_steps_are_recorded_no_more(vllm_like, tmp_path):
    files = {"BENCHCTL_SERVER_DESCRIPTION": Path("/nowhere/server.json"), "BENCHCTL_STEP_LOG": tmp_path / "steps"}
    done = served(vllm_like, [STEP], {"model_config": {"seed": 0}}, **files)
    assert done.stderr.count("WARNING") == 1
    assert effective(Path("/nowhere/server.json")) == {}
