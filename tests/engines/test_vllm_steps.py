"""Steps of vLLM: the lines of the plugin in a process that stands in for a front end, and steps read from lines."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchctl.analysis.attribution.breakdown import break_down
from benchctl.engines import vllm
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.engines.vllm_steps import effective, read_description
from benchctl.errors import RecordError
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord

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


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(raw) + "\n" for raw in lines))


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


def test_what_cannot_be_written_or_understood_costs_one_warning_and_never_the_server(vllm_like, tmp_path):
    assert served(vllm_like, [STEP]).stderr == "", "nobody measures it"
    assert [path.name for path in tmp_path.iterdir()] == ["stand-in"]
    drafting = BUSY | {"spec_decoding_stats": {"num_drafts": 1}}
    odd = STEP | {"iteration": TOKENS | {"time_to_first_tokens_iter": 5}, "scheduler": drafting}
    for path, step, reason in (
        (Path("/dev/full"), STEP, "No space left"),
        (Path("/nowhere/steps"), STEP, "No such file"),
        (tmp_path / "steps", odd, "benchctl records no more steps"),
    ):
        done = served(vllm_like, [STEP, step, STEP], BENCHCTL_STEP_LOG=path)
        assert done.stderr.count("WARNING") == 1
        assert reason in done.stderr
    assert len(lines_of(tmp_path / "steps")) == 1


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


MS = 1_000_000


def line(end_ms: float, *, running: int = 1, output: int | None = 1, **said: Any) -> dict[str, Any]:
    """A step that ended at ``end_ms`` with ``running`` unfinished requests, recorded somewhat later."""
    details = {"num_ctx_requests": 0, "num_ctx_tokens": 0, "num_generation_requests": 1, "num_generation_tokens": 1}
    details |= {"elapsed_ms": 1.5} | {name: said.pop(name) for name in list(said) if name in details}
    made = {"ended_ns": round(end_ms * MS), "recorded_ns": round((end_ms + 40) * MS), "details": details}
    made["scheduler"] = {"num_running_reqs": running, "kv_cache_usage": 0.5}
    if output is not None:
        made["outputs"] = {"num_generation_tokens": output, "num_preempted_reqs": 0}
    return made | said


DRAFTS = {"num_draft_tokens": 5, "num_accepted_tokens": 2}


def outputs(tokens: int, *, finished: int = 0) -> dict[str, Any]:
    """Tokens that requests got, and those in the cache of the requests that ended."""
    return {"num_generation_tokens": tokens, "finished_tokens": finished}


def read(directory: Path, *lines: dict[str, Any]) -> list[StepRecord]:
    write_lines(directory / "steps.raw.jsonl", lines)
    return list(VllmEngine().read_steps(directory))


def spans_ms(steps: list[StepRecord]) -> list[tuple[float, float]]:
    return [(step.start_ns / MS, (step.start_ns + step.dur_ns) / MS) for step in steps]


def test_steps_of_a_busy_engine_follow_one_another_without_gap_however_late_they_are_recorded(tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"cache_config": {"num_gpu_blocks": 4097}}))
    steps = read(tmp_path, line(100), line(103, recorded_ns=900 * MS), line(107, recorded_ns=900 * MS))
    assert spans_ms(steps) == [(98.5, 100), (100, 103), (103, 107)]
    assert {(step.clock, step.kv_used_blocks) for step in steps} == {("host", 2048)}, "a share of what can be held"


def test_a_step_that_wakes_the_engine_starts_when_its_request_is_taken_up_and_never_before_the_last_ended(tmp_path):
    steps = read(tmp_path, line(100, running=0), line(200, scheduled_ns=190 * MS), line(203))
    assert spans_ms(steps)[1:] == [(190, 200), (200, 203)]
    steps = read(tmp_path, line(100, running=0), line(101, elapsed_ms=5.0), line(102, scheduled_ns=50 * MS))
    assert spans_ms(steps)[1:] == [(100, 101), (101, 102)]


def test_news_of_the_scheduler_and_idle_rounds_of_a_replica_are_no_steps(tmp_path):
    news = {"recorded_ns": 150 * MS, "ended_ns": 140 * MS, "scheduler": {"num_running_reqs": 0}}
    dummy = {"recorded_ns": 160 * MS, "details": {"is_dummy": True, "elapsed_ms": 1.0}}
    steps = read(tmp_path, line(100), news, dummy, line(200, scheduled_ns=195 * MS))
    assert [step.step for step in steps] == [0, 1]
    assert spans_ms(steps)[1] == (195, 200)


def test_the_phase_is_that_of_the_tokens_computed_and_a_part_of_a_prompt_gives_no_token(tmp_path):
    for prompt, decode, phase in ((5, 0, "prefill"), (0, 2, "decode"), (5, 2, "mixed")):
        tokens = {"num_ctx_tokens": prompt, "num_generation_tokens": decode}
        (step,) = read(tmp_path, line(100, **tokens, num_ctx_requests=2))
        assert (step.phase, step.num_seqs) == (phase, 3)
        assert (step.num_prefill_tokens, step.num_decode_tokens) == (prompt, decode)
    (step,) = read(tmp_path, line(100, output=None, num_ctx_requests=1, num_ctx_tokens=2048))
    assert (step.output_tokens, step.preempted) == (0, 0)


def test_drafts_and_their_acceptance_are_kept_and_unknown_without(tmp_path):
    spec = {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 5}
    spec["num_accepted_tokens_per_pos"] = [2, 1, 1, 1]
    with_drafts, without = read(tmp_path, line(100, output=7, spec_decoding=spec), line(103))
    assert (with_drafts.draft_tokens, with_drafts.accepted_tokens, with_drafts.output_tokens) == (8, 5, 7)
    assert (with_drafts.drafts, with_drafts.accepted_by_position) == (2, (2, 1, 1, 1))
    assert without.drafts is without.draft_tokens is without.accepted_tokens is without.accepted_by_position is None


def test_the_context_is_counted_from_tokens_computed_and_requests_that_ended(tmp_path):
    prompt = line(100, num_ctx_requests=2, num_ctx_tokens=30, num_generation_tokens=0, outputs=outputs(2))
    one_ends = line(103, num_generation_tokens=2, outputs=outputs(2, finished=11))
    hit = line(106, num_ctx_tokens=4, prefix_cache={"hits": 16}, outputs=outputs(2))
    drafts = line(109, num_generation_tokens=6, outputs=outputs(3), spec_decoding=DRAFTS)
    last = line(112, num_generation_tokens=2, running=0, outputs=outputs(2, finished=47))
    steps = read(tmp_path, prompt, one_ends, hit, drafts, last, prompt)
    assert [step.context_tokens for step in steps] == [30, 32, 42, 45, 47, 30]


def test_drafts_accepted_beyond_the_end_of_a_request_were_in_its_context(tmp_path):
    prompt = line(100, num_ctx_requests=2, num_ctx_tokens=30, num_generation_tokens=0, outputs=outputs(2))
    spec = {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 6}
    drafted = {"num_generation_requests": 2, "num_generation_tokens": 10, "spec_decoding": spec}
    # Of the five tokens that the first request sampled two are beyond its end; the other sampled three.
    one_ends = line(103, **drafted, outputs=outputs(6, finished=23))
    last = line(106, running=0, num_generation_tokens=1, outputs=outputs(1, finished=14))
    steps = read(tmp_path, prompt, one_ends, last, prompt)
    assert [step.context_tokens for step in steps] == [30, 38, 14, 30]


def test_the_context_is_unknown_where_tokens_are_lost_or_left_or_not_told_until_the_server_is_idle(tmp_path):
    begin = line(100, num_ctx_tokens=9, num_generation_tokens=0, outputs=outputs(1))
    preempting = line(103, outputs=outputs(1) | {"num_preempted_reqs": 1})
    last = line(106, running=0, outputs=outputs(1, finished=9))
    aborted = line(103, running=0, outputs=outputs(1))
    for lines, contexts in (
        ((begin, preempting, last, begin), [9, None, None, 9]),
        ((begin, aborted, begin), [None, None, 9]),
        ((line(100), line(103)), [None, None]),
        ((line(100, outputs=outputs(1), engine=1),), [None]),  # of a replica
    ):
        assert [step.context_tokens for step in read(tmp_path, *lines)] == contexts


def test_a_log_that_is_cut_off_gives_its_steps_and_then_the_place_of_the_damage(tmp_path):
    whole = json.dumps(line(100)) + "\n"
    (tmp_path / "steps.raw.jsonl").write_text(whole + whole[:40])
    steps = VllmEngine().read_steps(tmp_path)
    assert next(steps).output_tokens == 1
    with pytest.raises(RecordError, match=r"steps\.raw\.jsonl:2: the line is cut off"):
        next(steps)


def test_what_only_says_where_and_when_a_server_ran_is_no_configuration(tmp_path):
    path, of_replicas = tmp_path / "server.json", "disable_nccl_for_dp_synchronization"
    parallel = {"master_port": 29501, "data_parallel_master_ip": "127.0.0.1", "rank": 0, of_replicas: True}
    told = {
        "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
        "model_config": {"max_model_len": 4096, "seed": 0, "quantization": None},
        "cache_config": {"enable_prefix_caching": False, "num_gpu_blocks": 64},
        "compilation_config": {"mode": "NONE", "compilation_time": 12.5, "cache_dir": "/x"},
    }
    expected = {
        "max_model_len": 4096, "seed": 0, "enable_prefix_caching": False, "rank": 0, "compilation.mode": "NONE",
        "num_gpu_blocks": 64, "torch_version": "2.13.0",
    }  # fmt: skip
    # What keeps replicas in step is a setting only where there are several.
    for replicas, further in ((1, {}), (2, {of_replicas: True})):
        path.write_text(json.dumps(told | {"parallel_config": parallel | {"data_parallel_size": replicas}}))
        assert effective(path) == expected | {"data_parallel_size": replicas} | further


SECTIONS = {"lvm_apply_outer": 900, "lvm_forward": 700}


def engine_line(number, num_seqs=2):
    step = line(100 + number, num_generation_requests=num_seqs)
    return step | {"details": step["details"] | {"iteration_index": number}}


def guided_line(number, num_seqs=2, **said):
    did = {"guided_rows": 2, "candidates": 9, "value_prefill_tokens": 5, "value_extend_tokens": 2, "fused": True}
    return {"step": number, "num_seqs": num_seqs, "start_ns": 1, "end_ns": 2, "sections_ns": SECTIONS} | did | said


def read_both(directory, engine, guided):
    """The steps of one guided server, which two logs tell of."""
    write_lines(directory / "steps.raw.jsonl", engine)
    write_lines(directory / "steps.guided.jsonl", guided)
    return list(VllmLenvmEngine().read_steps(directory))


def test_a_guided_step_says_what_was_scored_and_reused_and_how_long_its_parts_took(tmp_path):
    (step,) = read_both(tmp_path, [engine_line(0)], [guided_line(0)])
    assert (step.guided_rows, step.candidates, step.fused) == (2, 9, True)
    assert (step.value_prefill_tokens, step.value_extend_tokens) == (5, 2)
    assert (step.sections_ns, step.num_seqs, step.output_tokens) == (SECTIONS, 2, 1)
    assert (step.value_replayed, step.value_recordings) == (None, None)
    told = {"value_reuse_tokens": 2, "value_extend_tokens": 0, "value_replayed": False, "value_recordings": 1}
    (step,) = read_both(tmp_path, [engine_line(0)], [guided_line(0, **told)])
    assert {name: getattr(step, name) for name in told} == told


def test_steps_without_a_row_to_guide_are_known_to_have_none(tmp_path):
    # What the worker wrote last may be of a step that was never told.
    steps = read_both(tmp_path, [engine_line(number) for number in range(4)], [guided_line(2), guided_line(4)])
    assert [step.guided_rows for step in steps] == [0, 0, 2, 0]
    assert [bool(step.sections_ns) for step in steps] == [False, False, True, False]
    (tmp_path / "steps.guided.jsonl").unlink()
    steps = VllmLenvmEngine().read_steps(tmp_path)
    assert [(step.guided_rows, step.candidates) for step in steps] == [(0, 0)] * 4


def test_times_of_the_device_stand_beside_a_step_of_the_host_and_never_among_its_parts(tmp_path):
    on_device = {"clock": "device", "sections_ns": {"lvm_forward": 5_000_000}, "host_sections_ns": SECTIONS}
    (step,) = read_both(tmp_path, [engine_line(0)], [guided_line(0, **on_device)])
    assert step.clock == "host"
    assert step.sections_ns == SECTIONS | {"device.lvm_forward": 5_000_000}
    found = break_down(columns_from([step]))
    assert found.clocks == ("host",)
    assert found.unplaced == ["device.lvm_forward"]
    assert {section.name for section in found.tree} >= {"lvm_forward", "lvm_apply_outer", "sampler_total"}
    assert sum(found.leaf_means_ns.values()) == step.dur_ns


def test_logs_that_do_not_tell_of_the_same_steps_are_refused(tmp_path):
    for engine, guided, message in (
        ([engine_line(0)], [guided_line(0, clock="wall")], r"steps\.guided\.jsonl"),
        ([engine_line(0, num_seqs=3)], [guided_line(0)], r"steps\.guided\.jsonl: step .* measure again"),
        ([engine_line(0), engine_line(2)], [guided_line(1)], r"steps\.guided\.jsonl: step .* measure again"),
    ):
        with pytest.raises(RecordError, match=message):
            read_both(tmp_path, engine, guided)
