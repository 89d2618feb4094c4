"""Waves of the warm-up: sent until two in a row take the same time per token, or to their bound."""

from types import SimpleNamespace

import pytest
from support.cli import printed
from support.servers.paced_engine import request

from benchctl.engines.engine import engine_for
from benchctl.engines.sglang import SglangEngine
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.vllm import VllmEngine
from benchctl.measure.waves import (
    do_agree,
    most_waves,
    steps_until_now,
    wave_by_client,
    wave_by_steps,
    wave_requests,
)
from benchctl.profile.load import load_profile
from benchctl.records.files import encode
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestRecord, WarmupWave
from benchctl.records.schema import StepRecord

PROFILE = """\
name: waves
blocks: 1
engine: {kind: sim, options: {slow_first_steps: 30, slow_first_factor: 4}}
model: qwen2.5-7b
workload:
  dataset: synthetic
  num_prompts: 12
  input_len: 40
  output_len: 20
  arrival: {kind: closed-loop, max_concurrency: 4}
  max_warmup_waves: 12
variants: {baseline: {}}
"""


def step(number, phase, dur_ns, *, num_seqs=4, prompts=None):
    return StepRecord(
        step=number,
        start_ns=number * 1000,
        dur_ns=dur_ns,
        clock="host",
        phase=phase,
        num_seqs=num_seqs,
        num_prefill_tokens=prompts,
    )


def run_of(tmp_path, *overrides):
    (tmp_path / "waves.yaml").write_text(PROFILE)
    options = [word for override in overrides for word in ("--set", override)]
    printed(
        "run", "--profile", tmp_path / "waves.yaml", "-o", tmp_path / "results", "--quiet", *options, cwd=tmp_path
    )
    (run,) = load_results(tmp_path / "results").runs
    return run


def test_waves_go_on_while_a_server_is_slow_and_end_when_two_agree(tmp_path):
    run = run_of(tmp_path)
    warmup = run.record.warmup
    assert (warmup.source, warmup.is_steady) == ("steps", True)
    assert 3 <= len(warmup.waves) < 12
    slow, *_, before, last = warmup.waves
    assert slow.decode_ns > 1.5 * last.decode_ns
    assert do_agree(before, last, 0.1)
    assert not {warning.code for warning in run.warnings} & {"warmup-unsteady", "warmup-failed"}
    assert len([each for each in run.requests if each.request_id.startswith("warmup-wave-")]) == 4 * len(
        warmup.waves
    )
    shown = printed("show", tmp_path / "results", "--all", cwd=tmp_path)
    assert f"{len(warmup.waves)} waves" in shown


def test_a_warm_up_that_its_bound_ended_is_warned_of_with_the_times_of_its_waves(tmp_path):
    run = run_of(tmp_path, "workload.max_warmup_waves=2")
    assert (len(run.record.warmup.waves), run.record.warmup.is_steady) == (2, False)
    (message,) = [warning.message for warning in run.warnings if warning.code == "warmup-unsteady"]
    assert message.startswith("2 waves of warm-up, and the last two still differ")
    assert run.record.state == "done"


def test_real_engines_are_warmed_up_by_waves_and_the_simulator_is_not():
    for engine, overrides, bound in (
        ("vllm", (), 8),
        ("attach", (), 0),
        (None, (), 0),
        ("vllm", ("workload.num_warmups=0",), 0),
        ("vllm", ("workload.max_warmup_waves=0",), 0),
        (None, ("workload.max_warmup_waves=3",), 3),
    ):
        options = ("engine.options.url=http://127.0.0.1:1",) if engine == "attach" else ()
        profile = load_profile("topk-sweep", engine=engine, overrides=(*overrides, *options))
        assert most_waves(profile, engine_for(profile.engine.kind)) == bound


def test_a_wave_has_the_sequences_of_the_largest_batch_and_words_of_its_own():
    requests = [request(i, max_tokens=40) for i in range(3)]
    waves = [wave_requests(requests, 5, number) for number in (1, 2)]
    prompts = [each.prompt.split()[0] for wave in waves for each in wave]
    assert len(set(prompts)) == 10
    assert {(each.max_tokens, each.n, each.ignore_eos) for wave in waves for each in wave} == {(16, 1, True)}


def test_times_are_over_the_tokens_of_decoding_steps_and_of_prompts():
    steps = [step(0, "prefill", 900, prompts=90), step(1, "mixed", 300, prompts=30), step(2, "decode", 80)]
    assert wave_by_steps([*steps, step(3, "decode", 20, num_seqs=1)]) == WarmupWave(decode_ns=20, prefill_ns=10)
    assert wave_by_steps([]) == WarmupWave()


def test_without_steps_times_are_those_of_the_chunks_of_the_client():
    choice = ChoiceRecord(index=0, chunk_ns=(1400, 1500, 1800))
    whole = RequestRecord(
        request_id="w",
        index=0,
        scheduled_ns=1000,
        sent_ns=1000,
        choices=(choice,),
        prompt_tokens=40,
        completion_tokens=3,
    )
    lost = RequestRecord(request_id="x", index=1, scheduled_ns=1000, sent_ns=1000)
    assert wave_by_client([whole, lost]) == WarmupWave(decode_ns=200, prefill_ns=10)


@pytest.mark.parametrize(
    ("times", "agrees"),
    [
        ((100, 109, 10, 11), True),
        ((100, 112, 10, 10), False),
        ((100, 100, 10, 12), False),
        ((None, 5, 10, 10), True),
    ],
)
def test_two_waves_agree_where_each_time_differs_by_the_tolerance_at_most(times, agrees):
    decode, other_decode, prefill, other_prefill = times
    one = WarmupWave(decode_ns=decode, prefill_ns=prefill)
    assert do_agree(one, WarmupWave(decode_ns=other_decode, prefill_ns=other_prefill), 0.1) is agrees


def test_a_line_of_the_step_log_that_is_not_written_to_its_end_does_no_harm(tmp_path):
    lines = [encode(step(number, "decode", 80)) for number in range(3)]
    run = SimpleNamespace(engine=SimEngine(), settings=None, directory=SimpleNamespace(path=tmp_path))
    assert steps_until_now(run) == []
    (tmp_path / "steps.raw.jsonl").write_bytes(b"\n".join(lines)[:-9])
    assert [each.step for each in steps_until_now(run)] == [0, 1]


def test_the_log_of_an_engine_says_which_shapes_it_met_first():
    log = """\
(EngineCore) WARNING 11-29 [jit_monitor.py:140] Triton kernel JIT compilation during inference: _topk. This causes a
(EngineCore pid=9) INFO 11-29 10:00:01 [backends.py:387] Compiling a graph for compile range (1, 2048) takes 20.50 s
(EngineCore pid=9) INFO 11-29 10:00:01 [backends.py:387] Compiling a graph for compile range (1, 2048) takes 20.50 s
W1129 torch._dynamo hit config.recompile_limit (8)
INFO: 127.0.0.1:52 - "POST /v1/completions HTTP/1.1" 200 OK
"""
    assert VllmEngine().first_uses(log) == (
        "Triton kernel JIT compilation during inference: _topk",
        "Compiling a graph for compile range (1, 2048)",
        "torch._dynamo hit config.recompile_limit",
    )
    assert SglangEngine().first_uses("Capture cuda graph bs [1, 2]") == ("Capture cuda graph bs [1, 2]",)
