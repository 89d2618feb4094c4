"""vLLM itself, started and measured through the command line, with a model of random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.servers.real_engines import needs, smoked
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.records.loaded import LoadedRun

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

IN_PARTS = [
    "engine.options.enable_chunked_prefill=true",
    "engine.options.max_num_batched_tokens=128",  # prompts are longer
    "sampling.temperature=0",  # on a CPU only greedy requests survive it
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A baseline and one cell of a sweep, each on a fresh server that computes long prompts in parts."""
    directory = tmp_path_factory.mktemp("vllm")
    return smoked("vllm", "vllm-cpu", directory, *IN_PARTS, "engine.options.max_num_seqs=16")


@pytest.mark.nightly
def test_seeded_prompts_longer_than_a_step_are_computed_whole_on_a_cpu_without_being_told(tmp_path):
    """In parts, vLLM 0.32 dies of the first of them."""
    options = [
        "engine.options.enable_chunked_prefill=null", "sampling.temperature=1", "workload.dataset=synthetic",
        "workload.input_len=3000", "workload.num_prompts=2", "workload.samples_per_prompt=1",
    ]  # fmt: skip
    results = smoked("vllm", "vllm-cpu", tmp_path, *options)
    for run in results.runs:
        assert run.record.state == "done"
        assert "--no-enable-chunked-prefill" in run.record.argv
        assert min(request.prompt_tokens for request in run.requests if not request.is_warmup) > 2048


def test_every_account_of_every_run_agrees(results):
    experiment = experiment_of(results)
    for run in results.runs:
        checks = experiment.checks(run)
        assert [str(check) for check in checks if check.ok is False] == []
        confirmed = {check.name for check in checks if check.ok}
        assert {"step-tokens", "counters", "prefix-cache"} <= confirmed, checks


def test_tokens_of_steps_are_those_of_usage_and_of_the_client(results):
    for run in results.runs:
        requests = [request for request in run.requests if not request.is_warmup]
        usage = sum(request.completion_tokens for request in requests)
        assert usage == 2 * 4 * 24
        assert usage == sum(sum(choice.chunk_tokens) for request in requests for choice in request.choices)
        assert usage == sum(step.output_tokens for step in measured_steps(run))
        prompts = sum(request.prompt_tokens for request in requests)
        assert prompts == sum(step.num_prefill_tokens for step in measured_steps(run))
        assert any(not step.output_tokens for step in measured_steps(run)), "no prompt was computed in parts"


def test_steps_lie_one_after_another_within_the_load(results):
    for run in results.runs:
        steps = measured_steps(run)
        ends = [step.start_ns + step.dur_ns for step in steps]
        assert all(step.dur_ns > 0 for step in steps)
        assert all(end <= step.start_ns for end, step in zip(ends, steps[1:], strict=False))
        assert run.record.times.first_send_ns < steps[0].start_ns
        assert ends[-1] <= run.record.times.last_token_ns


def test_the_server_says_how_it_is_configured_and_no_more_differs_than_was_declared(results):
    for run in results.runs:
        config = run.record.effective_config
        assert config["server.enable_prefix_caching"] is False
        assert config["server.enforce_eager"] is True
        assert config["server.max_num_batched_tokens"] == 128
        assert run.record.engine_version == config["server.version"]
    baseline, cell = (run.record.effective_config for run in results.runs)
    assert {key for key in baseline.keys() | cell.keys() if baseline.get(key) != cell.get(key)} == {
        "sampling.top_k"
    }


def test_no_secret_and_no_line_of_each_iteration_is_left_in_the_run(results):
    for run in results.runs:
        log = (Path(results.path) / "runs" / run.record.run_id / "server.log").read_text()
        assert "Iteration(" not in log
        assert "benchctl records no more" not in log
        described = json.loads((Path(results.path) / "runs" / run.record.run_id / "server.json").read_text())
        assert "hf_token" not in {key for key, value in described["model_config"].items() if value is not None}


def measured_steps(run: LoadedRun) -> list[Any]:
    return [step for step in records_of(run) if not step.is_warmup]
