"""vLLM itself, started and measured through the command line, with a model of random weights."""

import pytest
from support.servers.real_engines import assert_accounts_agree, needs, smoked
from support.steps import records_of

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, pytest.mark.nightly, needs("vllm")]


def test_long_prompts_are_computed_in_parts_where_the_profile_says_so(
    tmp_path,
):
    options = [
        "engine.options.enable_chunked_prefill=true",
        "engine.options.max_num_batched_tokens=128",  # prompts are longer
        "sampling.temperature=0",  # on a CPU only greedy requests survive it
        "engine.options.max_num_seqs=16",
    ]
    results = smoked("vllm", "vllm-cpu", tmp_path, *options)
    assert_accounts_agree(results, {"step-tokens", "counters", "prefix-cache"})
    for run in results.runs:
        measured = [step for step in records_of(run) if not step.is_warmup]
        assert any(not step.output_tokens for step in measured), "no prompt was computed in parts"
        assert run.record.effective_config["server.max_num_batched_tokens"] == 128
    baseline, cell = (run.record.effective_config for run in results.runs)
    assert {key for key in baseline.keys() | cell.keys() if baseline.get(key) != cell.get(key)} == {
        "sampling.top_k"
    }


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
