"""Lines of the plugin in a vLLM server, read as steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_steps import effective
from benchctl.errors import RecordError
from benchctl.records.schema import StepRecord

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


def read(directory: Path, *lines: dict[str, Any], description: dict[str, Any] | None = None) -> list[StepRecord]:
    (directory / "steps.raw.jsonl").write_text("".join(json.dumps(raw) + "\n" for raw in lines))
    if description is not None:
        (directory / "server.json").write_text(json.dumps(description))
    return list(VllmEngine().read_steps(directory))


def spans_ms(steps: list[StepRecord]) -> list[tuple[float, float]]:
    return [(step.start_ns / MS, (step.start_ns + step.dur_ns) / MS) for step in steps]


def test_steps_of_a_busy_engine_follow_one_another_without_gap_however_late_they_are_recorded(tmp_path):
    steps = read(tmp_path, line(100), line(103, recorded_ns=900 * MS), line(107, recorded_ns=900 * MS))
    assert spans_ms(steps) == [(98.5, 100), (100, 103), (103, 107)]
    assert [step.clock for step in steps] == ["host"] * 3


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


def test_blocks_in_use_are_a_share_of_those_that_requests_can_hold(tmp_path):
    (step,) = read(tmp_path, line(100), description={"cache_config": {"num_gpu_blocks": 4097}})
    assert step.kv_used_blocks == 2048


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
