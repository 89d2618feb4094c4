"""Real engines measured through the command line with models of random weights, asked for fields, and killed.

SGLang has no packages for machines without a GPU; an environment that was put together by hand serves there too.
``scripts/kill_matrix`` kills all processes at all moments.
"""

import asyncio
import json
import shutil
import signal
from dataclasses import replace

import httpx
import pytest
from support.servers.killing import FRONT_END, MOMENTS, Blow, strike
from support.servers.real_engines import (
    TINY,
    answer_of,
    assert_accounts_agree,
    measured,
    needs,
    served,
    smoked,
    tiny_model,
    turn_of,
)
from support.steps import records_of

from benchctl.analysis.compare.judge import judge_named
from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.engines.engine import engine_for
from benchctl.engines.tiny_models.make import make_lora_pair
from benchctl.measure.sending import undescribed_fields
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES
from benchctl.workload.prepare import prepare_requests

pytestmark = [pytest.mark.real_engine, pytest.mark.slow]


def assert_only_top_k_differs(results):
    ours, theirs = (run.record.effective_config for run in results.runs)
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == {
        "sampling.top_k"
    }


SAMPLER = """
name: sampler
seed: 3
engine: transformers-cpu
workload:
  dataset: generated
  num_prompts: 6
  output_len: 10
  arrival: {kind: closed-loop, max_concurrency: 3}
  num_warmups: 1
variants:
  baseline: {}
  greedy: {sampling: {top_k: 1}}
allowed_differences: [sampling.top_k]
telemetry: {gpu_hz: 0}
"""


def assert_loads_agree(results, confirmed):
    """Each load of each run has whole accounts of its own; one may be left out for a client that was late."""
    loads = tuple(load for run in results.runs for load in run.loads)
    assert_accounts_agree(replace(results, runs=loads), {"requests", "step-tokens", "step-time", *confirmed})
    for load in (load for run in results.runs for load in run.record.loads):
        assert {warning.code for warning in load.warnings} & SUSPECT_CODES <= CLIENT_SUSPECT_CODES
    assert [load.number for load in results.runs[0].record.loads] == [1, 2, 3]


@needs("transformers")
def test_accounts_of_transformers_agree_to_the_token_in_each_of_several_loads(tmp_path):
    (tmp_path / "sampler.yaml").write_text(SAMPLER)
    model = f"model={tiny_model(tmp_path)}"
    settings = (model, "loads_per_server=3", "workload.max_warmup_waves=3")
    results = measured("sampler.yaml", "transformers", "transformers-cpu", tmp_path, *settings)
    assert_loads_agree(results, {"greedy-share"})
    assert_only_top_k_differs(results)
    for run in results.runs:
        for load in run.loads:
            assert sum(request.completion_tokens for request in load.requests if not request.is_warmup) == 60
        assert run.record.warmup.source == "steps"
        assert len(run.record.warmup.waves) in {2, 3}
        config = run.record.effective_config
        assert (config["server.cb.allow_block_sharing"], config["server.request_seed"]) == (False, "ignored")
        sections = {name for step in records_of(run) for name in step.sections_ns}
        assert sections == {"schedule", "model_forward", "sampler_total"}
    one, other = ([request.choices[0].text for request in run.requests] for run in results.runs)
    assert one != other


@pytest.mark.nightly
@needs("vllm")
def test_steps_of_several_loads_on_a_vllm_server_are_those_of_their_loads_and_none_comes_from_a_cache(tmp_path):
    results = smoked("vllm", "vllm-cpu", tmp_path, "loads_per_server=3", "sampling.temperature=0")
    assert_loads_agree(results, {"counters", "prefix-cache"})


HITS = """
engine: vllm-cpu
loads_per_server: 2
workload:
  dataset: synthetic
  num_prompts: 8
  input_len: 320
  output_len: 8
  prefix: {groups: 2, hit_rate: 0.8, block: 128}
  arrival: {kind: closed-loop, max_concurrency: 4}
  max_warmup_waves: 0
variants: {baseline: {server: {enable_prefix_caching: true}}}
telemetry: {gpu_hz: 0}
"""


@pytest.mark.nightly
@needs("vllm")
def test_a_vllm_server_finds_the_planned_share_in_each_load_and_priming_belongs_to_no_metric(tmp_path):
    (tmp_path / "hits.yaml").write_text(HITS)
    model = f"model={tiny_model(tmp_path)}"
    experiment = experiment_of(measured("hits.yaml", "vllm", "vllm-cpu", tmp_path, model))
    (run,) = experiment.results.runs
    for load in run.loads:
        assert experiment.metrics(load)["prefix_hit_frac"] == 0.8
        steps = [step for step in records_of(load) if not step.is_warmup]
        assert sum(step.output_tokens for step in steps) == 8 * 8
        assert sum(step.num_prefill_tokens for step in steps) == 8 * (320 - 256)
    checks = {check.name: check.ok for check in experiment.checks(run)}
    assert checks["prefix-cache"] is checks["step-tokens"] is checks["counters"] is True


ON_A_CPU = [
    "engine.options.device=cpu",
    "engine.options.attention_backend=torch_native",
    "engine.options.mem_fraction_static=0.1",
    'engine.options.env.OMP_NUM_THREADS="1"',
]


@needs("sglang")
def test_accounts_of_sglang_agree_and_no_more_differs_than_was_declared(tmp_path):
    on_this_machine = [] if shutil.which("nvidia-smi") else ON_A_CPU
    results = smoked("sglang", "sglang", tmp_path, "engine.options.overlap_schedule=false", *on_this_machine)
    assert_accounts_agree(results, {"client-tokens", "step-tokens", "counters", "prefix-cache", "step-time"})
    assert_only_top_k_differs(results)
    config = results.runs[0].record.effective_config
    assert config["server.enable_prefix_caching"] is config["server.overlap_schedule"] is False


@pytest.mark.nightly
@needs("vllm")
def test_long_prompts_of_vllm_are_computed_in_parts_where_the_profile_says_so(tmp_path):
    options = [
        "engine.options.enable_chunked_prefill=true",
        "engine.options.max_num_batched_tokens=128",  # prompts are longer
        "sampling.temperature=0",  # on a CPU only greedy requests survive it
        "engine.options.max_num_seqs=16",
    ]
    results = smoked("vllm", "vllm-cpu", tmp_path, *options)
    assert_accounts_agree(results, {"step-tokens", "counters", "prefix-cache"})
    assert_only_top_k_differs(results)
    for run in results.runs:
        assert any(not (step.is_warmup or step.output_tokens) for step in records_of(run)), "no prompt was in parts"
        assert run.record.effective_config["server.max_num_batched_tokens"] == 128


@pytest.mark.nightly
@needs("vllm")
def test_seeded_prompts_longer_than_a_step_are_computed_whole_on_a_cpu_without_being_told(tmp_path):
    """In parts, vLLM 0.32 dies of the first of them."""
    options = [
        "engine.options.enable_chunked_prefill=null", "sampling.temperature=1", "workload.dataset=synthetic",
        "workload.input_len=3000", "workload.num_prompts=2", "workload.samples_per_prompt=1",
    ]  # fmt: skip
    for run in smoked("vllm", "vllm-cpu", tmp_path, *options).runs:
        assert run.record.state == "done"
        assert "--no-enable-chunked-prefill" in run.record.argv
        assert min(request.prompt_tokens for request in run.requests if not request.is_warmup) > 2048


ANSWERS = """
extends: structured-output
engine:
  options:
    enable_lora: true
    max_lora_rank: 8
    lora_modules: {adapter: MODELS/adapter}
    # No process beside the engine, which takes long to import all; and no threads that wait for each other.
    env: {VLLM_ENABLE_V1_MULTIPROCESSING: "0", OMP_NUM_THREADS: "1"}
    extra_args:
    - --distributed-executor-backend=uni
    # Random weights may fill an answer with white space, which is JSON between tokens, and never end the document.
    - --structured-outputs-config
    - '{"backend": "xgrammar", "disable_any_whitespace": true}'
model: MODELS/base
workload: {num_prompts: 2, output_len: 96}
variants:
  baseline: {request: {extra_body: {priority: 0, no_such_field: 1}}}
  adapter: {request: {model: adapter}}
  refused: {request: {structured_outputs: {json: {type: objekt}}}}
"""


@needs("vllm")
def test_a_vllm_server_answers_as_the_fields_of_each_variant_say(tmp_path):
    make_lora_pair(tmp_path, TINY, rank=8)
    (tmp_path / "own.yaml").write_text(ANSWERS.replace("MODELS", str(tmp_path)))
    profile = load_profile(str(tmp_path / "own.yaml"))
    engine, requests = engine_for(profile.engine.kind), prepare_requests(profile).requests
    variants = {name: variant_settings(profile, name, {}) for name in profile.variants}
    with served(engine, variants["baseline"], tmp_path) as client:
        answers = {
            name: [answer_of(client, engine, settings, request) for request in requests]
            for name, settings in variants.items()
        }

        async def unknown_fields():
            async with httpx.AsyncClient(base_url=client.base_url, timeout=client.timeout) as control:
                return list(await undescribed_fields(control, variants["baseline"].request.extra_body))

        assert asyncio.run(unknown_fields()) == ["no_such_field"]
    refused = answers.pop("refused")
    assert {answer.status_code for answer in refused} == {400}
    assert all("objekt" in answer.text for answer in refused)
    texts = {name: [each.json()["choices"][0]["text"] for each in of_name] for name, of_name in answers.items()}
    is_valid = judge_named("json", runs_on=True).is_correct
    assert all(is_valid(text, "") for text in texts["json"])
    assert not any(is_valid(text, "") for text in texts["baseline"])
    document, _ = json.JSONDecoder().raw_decode(texts["json"][0].lstrip())
    assert document.keys() == {"answer", "score", "sure"}
    for text in texts["json-throughout"]:  # an array that cannot end is constrained to the last token
        rest = text.replace('"yes"', "").replace('"no"', "")
        assert set(rest) <= set('[, \t\n\r"yesno'), text
    assert all(text != plain for text, plain in zip(texts["adapter"], texts["baseline"], strict=True))


TOLD_WITHIN_S = 5.0
CAUSES = {"server-died", "engine-died", "engine-failed"}
"""Where the log of the front end says more than that it ended, the cause is the engine's."""


def fails_in_time(blow, tmp_path):
    """Strike, and hold what must come of it whoever is struck; returns the message."""
    outcome = strike(blow, tiny_model(tmp_path), tmp_path / "results")
    assert outcome.leftovers == ()
    if blow.moment == "stop" and outcome.state in {"done", "suspect"}:
        # All was measured, and benchctl was about to end the server itself; only the client may be in doubt.
        assert outcome.codes & SUSPECT_CODES <= CLIENT_SUSPECT_CODES
        return outcome.message
    assert (outcome.state, outcome.exit_code) == ("failed", 5)
    assert outcome.cause in CAUSES
    assert outcome.told_s < TOLD_WITHIN_S
    return outcome.message


@pytest.mark.nightly
@needs("transformers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_transformers_server_that_is_killed_fails_its_run_and_leaves_nothing(tmp_path, moment, number):
    with turn_of("transformers"):
        fails_in_time(Blow(engine="transformers-cpu", who=FRONT_END, number=number, moment=moment), tmp_path)


@needs("vllm")
@pytest.mark.parametrize(
    ("who", "number", "told"),
    [
        pytest.param("VLLM::EngineCore", signal.SIGKILL, "(VLLM::EngineCore)", marks=pytest.mark.nightly),
        pytest.param("VLLM::Worker", signal.SIGTERM, "(VLLM::Worker)", marks=pytest.mark.nightly),
        pytest.param(FRONT_END, signal.SIGKILL, "the server was ended by SIGKILL", marks=pytest.mark.nightly),
    ],
)
def test_a_vllm_of_which_one_process_is_killed_under_load_fails_its_run_and_leaves_nothing(
    tmp_path, who, number, told
):
    with turn_of("vllm"):
        message = fails_in_time(Blow(engine="vllm-cpu", who=who, number=number, moment="load"), tmp_path)
    # vLLM's front end may notice first, and end itself before we have seen which process is gone.
    assert told in message or (who != FRONT_END and "a process of the engine ended in mid-work" in message)
