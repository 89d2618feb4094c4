"""The plugin inside an SGLang scheduler, in a process that stands in for it, and what its lines mean as steps."""

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchctl.engines import sglang
from benchctl.engines.sglang import SglangEngine
from benchctl.errors import RecordError

SCHEDULER = Path(__file__).parent.parent / "support" / "servers" / "programs" / "sglang_scheduler.py"
INSIDE = Path(sglang.__file__).parent / "inside" / "sglang"
REQUESTS = {"a": [10, 3], "b": [20, 2]}
LOAD = [
    {"rows": ["a", "b"], "extend": 30, "prefixes": [0, 0]},
    {"rows": ["a", "b"]},
    {"rows": ["a"]},
]
"""Two prompts at once, and the decoding of both: five tokens in three steps."""


def scheduled(script: Any, log: Path | None = None, **how: Any) -> "subprocess.CompletedProcess[str]":
    """A scheduler that ran ``script`` with the plugin and served every request of it."""
    done = subprocess.run(
        [sys.executable, str(SCHEDULER)],
        input=json.dumps({"requests": REQUESTS, **script}),
        env={"PYTHONPATH": str(INSIDE), **({"BENCHCTL_STEP_LOG": str(log)} if log else {}), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **how,
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
        ({"turns": LOAD}, tmp_path / "limited", "records no more steps of this server"),
        ({"turns": odd}, tmp_path / "steps.raw.jsonl", "records no more steps of this server"),
        ({"turns": LOAD, "lacks": "retract_decode"}, tmp_path / "no", "cannot record the steps of this version"),
    ):
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (300, 300)) if log.name == "limited" else None
        done = scheduled(script, log, preexec_fn=limit)
        assert done.stderr.count("WARNING") == 1
        assert said in done.stderr
    assert len(list(SglangEngine().read_steps(tmp_path))) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("script", [{"turns": LOAD}, {"turns": LOAD, "schedules": False}])
def test_a_process_that_is_not_measured_or_does_not_schedule_is_left_alone(tmp_path, script):
    log = tmp_path / "steps" if "schedules" in script else None
    assert scheduled(script, log).stderr == ""
    assert list(tmp_path.iterdir()) == []
