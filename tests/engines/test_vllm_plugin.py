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
    ended = [
        {"num_prompt_tokens": 7, "num_generation_tokens": 3},
        {"num_prompt_tokens": 5, "num_generation_tokens": 1},
    ]
    odd = {"num_running_reqs": "three", "kv_cache_usage": float("inf"), "num_waiting_reqs": 2}
    steps = [
        STEP | {"scheduler": scheduler},
        STEP | {"iteration": TOKENS | {"finished_requests": ended}},
        STEP | {"scheduler": IDLE},
        STEP | {"iteration": TOKENS | {"finished_requests": [{}]}},  # another version's
        {"message": None, "scheduler": odd, "iteration": {"num_generation_tokens": 3}},
        {"message": None, "scheduler": None, "iteration": None},
    ]
    done = served(vllm_like, steps, BENCHCTL_STEP_LOG=tmp_path / "steps")
    assert done.stderr == ""
    line, second, _, fourth, last = lines_of(tmp_path / "steps")
    assert line["details"] == DETAILS
    assert line["scheduler"] == {key: value for key, value in BUSY.items() if key != "iteration_details"}
    assert (line["spec_decoding"], line["prefix_cache"]) == (speculation, {"hits": 0})
    assert line["outputs"] == TOKENS | {"num_first_tokens": 0}
    # A step ends when the engine says so, and says when it was taken up only if it wakes the engine.
    assert line["ended_ns"] == 100_250_000_000 != line["recorded_ns"]
    taken_up_ns = [each.get("scheduled_ns") for each in (line, second, fourth)]
    assert taken_up_ns == [99_500_000_000, None, 99_500_000_000]
    assert (second["outputs"], fourth["outputs"]) == (TOKENS | {"finished_tokens": 14}, TOKENS)
    # What another version does not say is left out.
    assert (last["scheduler"], last["outputs"]) == ({"num_waiting_reqs": 2}, {"num_generation_tokens": 3})
    assert not {"details", "ended_ns", "scheduled_ns"} & set(last)


def test_a_version_whose_messages_cannot_be_seen_is_recorded_with_one_warning(vllm_like, tmp_path):
    client = vllm_like / "vllm/v1/engine/core_client.py"
    client.write_text(CLIENT.replace("AsyncMPClient", "Other") + "AsyncMPClient = lambda messages: Other(messages)")
    done = served(vllm_like, [STEP, STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    assert ["ended_ns" in line for line in lines_of(tmp_path / "steps")] == [False, False]
    assert done.stderr.count("WARNING") == 1
    assert "cannot see when steps end" in done.stderr


def test_what_cannot_be_written_or_understood_costs_one_warning_and_never_the_server(vllm_like, tmp_path):
    assert served(vllm_like, [STEP]).stderr == "", "nobody measures it"
    assert [path.name for path in tmp_path.iterdir()] == ["stand-in"]
    for path, reason in (("/dev/full", "No space left"), ("/nowhere/steps", "No such file")):
        done = served(vllm_like, [STEP] * 3, BENCHCTL_STEP_LOG=Path(path))
        assert done.stderr.count("WARNING") == 1
        assert "benchctl records no more steps" in done.stderr
        assert reason in done.stderr
    drafting = BUSY | {"spec_decoding_stats": {"num_drafts": 1}}
    broken = STEP | {"iteration": TOKENS | {"time_to_first_tokens_iter": 5}, "scheduler": drafting}
    done = served(vllm_like, [STEP, broken, STEP], BENCHCTL_STEP_LOG=tmp_path / "steps")
    assert len(lines_of(tmp_path / "steps")) == 1
    assert done.stderr.count("WARNING") == 1


def test_the_server_describes_its_configuration_without_secrets(vllm_like, tmp_path):
    model = {"max_model_len": 4096, "hf_token": "hf_secret", "tokenizer": "t", "_private": 1, "odd": {}}
    config = {
        "model_config": model,
        "cache_config": {"enable_prefix_caching": False, "num_gpu_blocks": 64},
        "scheduler_config": {"stages": ["a", "b"], "max_num_seqs": 8},
    }
    served(vllm_like, [], config, BENCHCTL_SERVER_DESCRIPTION=tmp_path / "server.json")
    told = read_description(tmp_path / "server.json")
    assert told["model_config"].keys() == {"max_model_len", "tokenizer"}
    assert told["cache_config"] == config["cache_config"]
    assert told["scheduler_config"] == config["scheduler_config"]
    assert told["versions"]["python"].startswith("3.")
    nowhere = Path("/nowhere/server.json")
    done = served(vllm_like, [STEP], config, BENCHCTL_SERVER_DESCRIPTION=nowhere, BENCHCTL_STEP_LOG=tmp_path / "s")
    assert done.stderr.count("WARNING") == 1
    assert effective(nowhere) == {}
